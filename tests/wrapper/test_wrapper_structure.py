"""How a wrapped model looks from outside, and what policies make of it."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import (
    OURS,
    TORCH,
    WIDTH,
    Block,
    Lesson,
    Net,
    Package,
    assert_trains_alike,
    by_hand,
    by_policy,
    flat,
)

both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def told(question: Callable[[], Any]) -> Any:
    """The answer, or the type of the exception."""
    try:
        return question()
    except Exception as error:
        return type(error)


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in model.named_parameters()}


def looks(package: Package, wrap: Callable[..., Any], **options: Any) -> dict[str, Any]:
    """What may be asked of a model before, between and inside steps."""
    torch.manual_seed(0)
    net = Net()
    net.note = "kept"
    block = net.blocks[1]
    model = wrap(package, net, **options)
    fsdp, found = package.FSDP, {}
    found["repr"] = repr(model)
    found["module"] = [model.module is net, model.note, isinstance(model.scale, Tensor)]
    found["missing attribute"] = told(lambda: model.nothing)
    found["names"] = [n for n, _ in model.named_parameters()]
    found["names of the module"] = [n for n, _ in net.named_parameters()]
    found["names with a prefix"] = [n for n, _ in model.named_parameters(prefix="it")]
    found["own names"] = [n for n, _ in model.named_parameters(recurse=False)]
    found["buffers"] = [n for n, _ in model.named_buffers()]
    found["modules"] = [n for n, _ in model.named_modules()]
    with fsdp.summon_full_params(model):
        found["summoned"] = shapes_of(model)
        found["summoned in the module"] = shapes_of(net)
        found["summoned in a block"] = shapes_of(block)
        found["buffers in it"] = [n for n, _ in model.named_buffers()]
    with fsdp.summon_full_params(model, recurse=False):
        found["summoned alone"] = [n for n, _ in model.named_parameters()]
    found["names after"] = [n for n, _ in model.named_parameters()]
    named = {module: name for name, module in model.named_modules()}
    for root_only in (False, True):
        found[f"wrappers, {root_only}"] = [named[m] for m in fsdp.fsdp_modules(model, root_only)]
    model(torch.randn(4, WIDTH)).sum().backward()
    found["roots"] = [module.check_is_root() for module in fsdp.fsdp_modules(model)]
    found["wrappers in the module"] = len(fsdp.fsdp_modules(net))
    found["roots in the module"] = len(fsdp.fsdp_modules(net, root_only=True))
    found["parameters are leaves"] = all(p.is_leaf for p in model.parameters())
    return found


@pytest.mark.parametrize("wrapping", [flat, by_policy, by_hand])
@both_forms
@on_ranks(2)
def test_a_wrapped_model_looks_as_it_does_in_torch(
    rank: Rank, wrapping: Callable[..., Any], use_orig_params: bool
) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        ours, torchs = (looks(package, wrapping, **options) for package in (OURS, TORCH))
        for question, answer in torchs.items():
            assert ours[question] == answer, (question, strategy)


@on_ranks(2)
def test_the_parts_of_a_wrapped_sequence_are_reached_by_index(rank: Rank) -> None:
    first, last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)
    model = OURS(nn.Sequential(first, last))
    assert model[0] is first
    assert model[-1] is last
    assert list(model[:1]) == [first]
    assert told(lambda: OURS(Net())[0]) is told(lambda: TORCH(Net())[0])


@on_ranks(2)
def test_a_container_that_nobody_calls_is_warned_of(rank: Rank) -> None:
    for container in (
        nn.ModuleList([nn.Linear(WIDTH, 3)]),
        nn.ModuleDict({"only": nn.Linear(WIDTH, 3)}),
    ):
        with pytest.warns(
            UserWarning, match=f"do not implement forward, such as a {type(container).__name__}"
        ):
            OURS(container)


# Policies.


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x)))


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def is_head(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) and module.out_features == 3


def overriding(package: Package, module: nn.Module) -> Any:
    if is_block(module):
        strategy = package.api.ShardingStrategy.SHARD_GRAD_OP
        return {"sharding_strategy": strategy, "backward_prefetch": None}
    return is_head(module)


def policy_of(kind: str, package: Package) -> Any:
    wrap, partial = package.wrap, functools.partial
    by_function = [
        partial(wrap.lambda_auto_wrap_policy, lambda_fn=function)
        for function in (is_block, is_head)
    ]
    return {
        "always": wrap.always_wrap_policy,
        "size": partial(wrap.size_based_auto_wrap_policy, min_num_params=50),
        "function": by_function[0],
        "either": partial(wrap._or_policy, policies=by_function),
        "transformer": partial(wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}),
        "classes": wrap.ModuleWrapPolicy([Block, nn.Linear]),
        "custom": wrap.CustomPolicy(functools.partial(overriding, package)),
    }[kind]


KINDS = ["always", "size", "function", "either", "transformer", "classes", "custom"]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_a_policy_wraps_what_it_does_in_torch(rank: Rank, kind: str) -> None:
    wrapped: dict[Package, list[tuple[str, str]]] = {}

    def shard(package: Package, model: nn.Module) -> Any:
        policy = policy_of(kind, package)
        result = package(model, auto_wrap_policy=policy, use_orig_params=True)
        wrapped[package] = [
            (name, module.sharding_strategy.name)
            for name, module in result.named_modules()
            if isinstance(module, package.FSDP)
        ]
        return result

    assert_trains_alike(Plain, shard, Lesson(num_steps=1))
    assert len(wrapped[OURS]) > 1
    assert wrapped[OURS] == wrapped[TORCH]


@on_ranks(2)
def test_modules_are_wrapped_as_they_are_made(rank: Rank) -> None:
    def shard(package: Package, _: nn.Module) -> Any:
        torch.manual_seed(0)
        cpu = torch.device("cpu")
        with package.wrap.enable_wrap(
            wrapper_cls=package.FSDP, use_orig_params=True, device_id=cpu
        ):
            model = Plain()
            model.first = package.wrap.wrap(model.first)
            strategy = package.api.ShardingStrategy.SHARD_GRAD_OP
            model.second = package.wrap.wrap(model.second, sharding_strategy=strategy)
            return package.wrap.wrap(model)

    learner = assert_trains_alike(Plain, shard)
    assert len(OURS.FSDP.fsdp_modules(learner.model)) == 3


@on_ranks(2)
def test_wrappers_inside_may_differ_from_those_around_them(rank: Rank) -> None:
    def shard(options: list[dict[str, Any]], package: Package, model: Plain) -> Any:
        model.first = package(model.first, **options[0])
        model.second = package(model.second, **options[1])
        return package(model)

    strategies = [{"sharding_strategy": "NO_SHARD"}, {"sharding_strategy": "SHARD_GRAD_OP"}]
    assert_trains_alike(Plain, functools.partial(shard, strategies))
    assert_trains_alike(Plain, functools.partial(shard, [{"cpu_offload": True}, {}]))
    forms = [{"use_orig_params": True}, {"use_orig_params": False}]
    assert_trains_alike(Plain, functools.partial(shard, forms), torch_shard=None)  # torch refuses

"""Wrapped models of every kind: optimizers, dtypes, ties, ignored parts, meta, norms, buffers."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import clean_name
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import (
    EQUAL,
    OURS,
    ROUNDED,
    TORCH,
    WIDTH,
    Block,
    Closeness,
    Lesson,
    Net,
    Package,
    ShardUnit,
    assert_api_trains_alike,
    assert_trains_alike,
    by_hand,
    by_policy,
    each_backward,
    flat,
    loss_of,
    shard_blocks,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
NEAR_ADAM = Closeness(1e-4, 1e-5)


def api_of(use_orig_params: bool) -> str:
    return "orig" if use_orig_params else "flat"


# Optimizers


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


def fused_adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.02, eps=1e-3, fused=True)


def foreach_nesterov(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True, foreach=True)


def in_groups(model: nn.Module) -> Optimizer:
    """Biases are not decayed, and the head learns faster; one parameter is in no group."""
    named = {clean_name(name): param for name, param in model.named_parameters()}
    named.pop("scale")
    biases = [param for name, param in named.items() if name.endswith("bias")]
    head = [named["head.weight"]]
    others = [p for n, p in named.items() if not n.endswith("bias") and n != "head.weight"]
    return AdamW(
        [
            {"params": biases, "weight_decay": 0.0},
            {"params": head, "lr": 0.05},
            {"params": others, "weight_decay": 0.2},
        ],
        lr=0.02,
        eps=1e-3,
    )


@pytest.mark.parametrize("optimizer", [adamw, fused_adam, foreach_nesterov])
@both_forms
@on_ranks(2)
def test_an_optimizer_built_after_wrapping_trains(
    rank: Rank, optimizer: Callable[[nn.Module], Optimizer], use_orig_params: bool
) -> None:
    # Every optimizer meets both values, and so does each form.
    set_to_none = (optimizer is fused_adam) == use_orig_params
    lesson = Lesson(optimizer=optimizer, set_to_none=set_to_none)
    near = {"near": NEAR_ADAM, "near_torch": NEAR_ADAM}
    assert_api_trains_alike(api_of(use_orig_params), Net, shard_blocks, lesson, **near)


def added_later(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    built = SGD([first], lr=0.05, momentum=0.9)
    built.add_param_group({"params": others, "lr": 0.01})
    return built


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", [in_groups, added_later])
@on_ranks(2, 4)
def test_groups_of_original_parameters_train_each_in_its_way(
    rank: Rank, optimizer: Callable[[nn.Module], Optimizer]
) -> None:
    near = {"near": NEAR_ADAM, "near_torch": NEAR_ADAM}
    assert_api_trains_alike("orig", Net, shard_blocks, Lesson(optimizer=optimizer), **near)


@both_forms
@on_ranks(2)
def test_an_optimizer_built_before_wrapping_trains(rank: Rank, use_orig_params: bool) -> None:
    older: dict[nn.Module, Optimizer] = {}

    def shard(package: Package, model: Net) -> Any:
        optimizer = AdamW(model.parameters(), lr=0.02, eps=1e-3)
        wrapped = by_policy(package, model, use_orig_params=use_orig_params)
        older[wrapped] = optimizer
        return wrapped

    def optimizer(model: nn.Module) -> Optimizer:
        return older.get(model) or AdamW(model.parameters(), lr=0.02, eps=1e-3)

    lesson = Lesson(optimizer=optimizer)
    assert_trains_alike(Net, shard, lesson, torch_shard=None, near=NEAR_ADAM)


# Gradients and dtypes


@both_forms
@on_ranks(2)
def test_a_unit_in_which_all_is_frozen_takes_no_gradient(rank: Rank, use_orig_params: bool) -> None:
    model = Net()
    model.blocks[0].requires_grad_(False)
    model = by_policy(OURS, model, use_orig_params=use_orig_params)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert all(p.grad is None for p in model.module.blocks[0].parameters())
    assert any(p.grad is not None for p in model.module.blocks[1].parameters())


def zeroed_before_the_last(
    set_to_none: bool, is_first_reduced: bool, model: Any, batches: list[Any], scale: float
) -> Tensor:
    """Discard all but the last batch, reduced or not; the unsharded model sees only the last."""
    if hasattr(model, "no_sync"):
        if is_first_reduced:
            each_backward(model, batches[:1], scale)
        for _ in range(2):
            with model.no_sync():
                each_backward(model, batches[:-1], scale)
            assert all(param.grad is not None for param in model.parameters())
            SGD(model.parameters()).zero_grad(set_to_none=set_to_none)
    return each_backward(model, batches[-1:], scale)


@both_forms
@on_ranks(2)
def test_zeroed_gradients_are_gone_also_those_that_were_not_reduced(
    rank: Rank, use_orig_params: bool
) -> None:
    for is_first_reduced in (False, True):
        set_to_none = is_first_reduced == use_orig_params
        step = functools.partial(zeroed_before_the_last, set_to_none, is_first_reduced)
        lesson = Lesson(step=step, num_micro_batches=3)
        # Torch's wrapper keeps the reduced ones where zero_grad does not find them.
        assert_api_trains_alike(
            api_of(use_orig_params), Net, shard_blocks, lesson, torch_too=not is_first_reduced
        )


@both_forms
@on_ranks(2)
def test_another_dtype_after_wrapping_is_trained_in(rank: Rank, use_orig_params: bool) -> None:
    def in_double(generator: torch.Generator) -> Tensor:
        return torch.randn(4, WIDTH, generator=generator, dtype=torch.float64)

    def shard(package: Package, model: Net) -> Any:
        wrapped = by_policy(package, model.float(), use_orig_params=use_orig_params)
        wrapped(torch.randn(4, WIDTH)).sum().backward()
        wrapped.zero_grad()
        wrapped.double()
        assert {param.dtype for param in wrapped.parameters()} == {torch.float64}
        return wrapped

    lesson = Lesson(in_double)
    assert_trains_alike(lambda: Net().double(), shard, lesson, torch_shard=None)


def turned(module: nn.Module) -> None:
    """Changes the parameters of every module, by their shape."""
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(-0.5).add_(0.01 * param.shape[0])


@both_forms
@on_ranks(2)
def test_apply_changes_whole_parameters_before_and_between_steps(
    rank: Rank, use_orig_params: bool
) -> None:
    def shard(package: Package, _: nn.Module) -> Any:
        torch.manual_seed(0)
        wrapped = by_hand(package, Net(), use_orig_params=use_orig_params)
        assert wrapped.apply(turned) is wrapped
        return wrapped

    learner = assert_trains_alike(lambda: Net().apply(turned), shard)
    before = learner.full_parameters()
    learner.model.apply(turned)
    for name, value in learner.full_parameters().items():
        expected = before[name] * -0.5 + 0.01 * value.shape[0]
        torch.testing.assert_close(value, expected, msg=name)


# Ignored parts


def with_ignored_averaged(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Gradients of ignored parameters are the user's to reduce, as is done here."""
    loss = each_backward(model, batches, scale)
    if scale == 1:
        with_gradient = [p for p in model.parameters() if getattr(p, "is_ignored", False)]
        assert with_gradient
        for param in with_gradient:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return loss


def ignoring(kind: str, model: Net) -> dict[str, Any]:
    """The option that ignores the first block, and the head's bias where parameters are named."""
    block: Any = model.blocks[0]
    ignored = [*block.parameters(), model.head.bias] if kind == "parameters" else block.parameters()
    for param in ignored:
        param.is_ignored = True
    return {
        "ignored_modules": {"ignored_modules": [block]},
        "modules_as_states": {"ignored_states": [block]},
        "parameters": {"ignored_states": [*block.parameters(), model.head.bias]},
    }[kind]


@pytest.mark.parametrize("kind", ["ignored_modules", "modules_as_states", "parameters"])
@both_forms
@on_ranks(2)
def test_what_is_ignored_is_whole_and_reduced_by_nobody(
    rank: Rank, kind: str, use_orig_params: bool
) -> None:
    def shard(wrap: Callable[..., Any], package: Package, model: Net) -> Any:
        block, shapes = model.blocks[0], [p.shape for p in model.blocks[0].parameters()]
        params = list(block.parameters())
        wrapped = wrap(package, model, use_orig_params=use_orig_params, **ignoring(kind, model))
        assert not any(isinstance(module, package.FSDP) for module in block.modules())
        assert all(a is b for a, b in zip(block.parameters(), params, strict=True))
        assert [p.shape for p in block.parameters()] == shapes
        return wrapped

    wrap = by_policy if use_orig_params else flat
    assert_trains_alike(Net, functools.partial(shard, wrap), Lesson(step=with_ignored_averaged))


@on_ranks(2)
def test_the_gradient_of_what_is_ignored_is_this_ranks_own(rank: Rank) -> None:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    model = flat(OURS, model, ignored_modules=[model.head])
    batch = Lesson().batches(0, rank.rank)[0]
    for each in (model, reference):
        loss_of(each(batch)).backward()
    torch.testing.assert_close(model.module.head.weight.grad, reference.head.weight.grad)


# On meta


def filled(module: nn.Module) -> None:
    """Values that depend on a tensor's name and shape only."""
    for name, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        values = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        with torch.no_grad():
            tensor.copy_(torch.sin(values + len(name)) / 2)


def made_and_filled(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    filled(module)


class SelfFilled(nn.Module):
    """Fills each of its modules by `reset_parameters`."""

    class Linear(nn.Linear):
        def reset_parameters(self) -> None:
            filled(self)

    def __init__(self) -> None:
        super().__init__()
        self.first = SelfFilled.Linear(WIDTH, 5)
        self.last = SelfFilled.Linear(5, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("shift", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale + self.shift


@both_forms
@on_ranks(2)
def test_a_model_on_meta_is_filled_by_param_init_fn(rank: Rank, use_orig_params: bool) -> None:
    def build() -> nn.Module:
        return Net().apply(filled)

    def on_meta(wrap: Callable[..., Any], package: Package, _: Net) -> Any:
        with torch.device("meta"):
            model = Net()
        return wrap(package, model, use_orig_params=use_orig_params, param_init_fn=made_and_filled)

    wrap = by_hand if use_orig_params else by_policy
    assert_trains_alike(build, functools.partial(on_meta, wrap))


@both_forms
@on_ranks(2)
def test_a_model_on_meta_fills_itself_by_reset_parameters(
    rank: Rank, use_orig_params: bool
) -> None:
    def on_meta(policy: Any, package: Package, _: nn.Module) -> Any:
        with torch.device("meta"):
            model = SelfFilled()
        return package(model, use_orig_params=use_orig_params, auto_wrap_policy=policy)

    for policy in (None, {SelfFilled.Linear}):
        assert_trains_alike(SelfFilled, functools.partial(on_meta, policy))


@both_forms
@on_ranks(2)
def test_only_the_part_on_meta_is_filled(rank: Rank, use_orig_params: bool) -> None:
    def build() -> Net:
        model = Net()
        model.blocks[1].apply(filled)
        return model

    def partly_on_meta(package: Package, model: Net) -> Any:
        with torch.device("meta"):
            model.blocks[1] = Block()
        return by_policy(
            package, model, use_orig_params=use_orig_params, param_init_fn=made_and_filled
        )

    assert_trains_alike(build, partly_on_meta)


# Ranks that start with different values


def out_of_step(model: Net) -> Net:
    """The same on rank 0, other values on every other."""
    if dist.get_rank():
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


@pytest.mark.sampled(2)
@both_forms
@on_ranks(2, 4)
def test_ranks_that_start_apart_are_synced_from_the_first(
    rank: Rank, use_orig_params: bool
) -> None:
    wraps = (flat, by_policy, by_hand)
    places: list[dict[str, Any]] = [{"sharding_strategy": name} for name in STRATEGIES]
    if rank.size == 4:
        mesh = rank.mesh((2, 2), ("replicate", "shard"))
        groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
        wraps = (flat, by_policy)
        places = [
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh},
            {"sharding_strategy": "_HYBRID_SHARD_ZERO2", "process_group": groups},
        ]
    for wrap, place in zip(wraps, places, strict=True):
        wrap = functools.partial(wrap, use_orig_params=use_orig_params, **place)
        learner = assert_trains_alike(
            Net,
            lambda p, m, w=wrap: w(p, out_of_step(m), sync_module_states=True),
            torch_shard=wrap,  # torch broadcasts on accelerators only
        )
        torch.testing.assert_close(learner.buffers()["shift"], torch.linspace(-0.3, 0.3, 3))


@on_ranks(2)
def test_a_model_on_meta_but_on_the_first_rank_is_synced_from_it(rank: Rank) -> None:
    def shard(package: Package, model: Net) -> Any:
        if rank.rank:
            with torch.device("meta"):
                model = Net()
        return by_policy(
            package,
            model,
            sync_module_states=True,
            param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False) if rank.rank else None,
        )

    assert_trains_alike(Net, shard, torch_shard=by_policy)


# Modules that a precision leaves alone, and buffers


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        self.dtypes.add(self.norm.weight.dtype)
        return torch.tanh(x)


def normed() -> nn.Sequential:
    return nn.Sequential(Normed(), Normed(), nn.Linear(WIDTH, 3))


def names_of_wrappers(package: Package, model: nn.Module) -> list[str]:
    return [clean_name(f"{n}.") for n, m in model.named_modules() if isinstance(m, package.FSDP)]


@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy:UserWarning")
@both_forms
@on_ranks(2)
def test_a_policy_leaves_batch_norm_in_full_precision(rank: Rank, use_orig_params: bool) -> None:
    for precision in (
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "_module_classes_to_ignore": [nn.BatchNorm1d, nn.Linear]},
    ):
        models: dict[Package, Any] = {}

        def shard(
            package: Package, model: Any, p: dict[str, Any] = precision, m: Any = models
        ) -> Any:
            m[package] = package(
                model, auto_wrap_policy={Normed}, mixed_precision=p, use_orig_params=use_orig_params
            )
            return m[package]

        assert_trains_alike(normed, shard, near=ROUNDED, near_torch=Closeness(1e-2, 1e-3))
        ours, torchs = models[OURS], models[TORCH]
        assert names_of_wrappers(OURS, ours) == names_of_wrappers(TORCH, torchs)
        assert [m.dtypes for m in ours.modules() if isinstance(m, Normed)] == [
            m.dtypes for m in torchs.modules() if isinstance(m, Normed)
        ]


class Counting(nn.Module):
    """Buffers that forward changes: one by value, one by assignment, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.count += 1
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        self.last = x.detach()[0].clone()
        return torch.tanh(x)


@both_forms
@on_ranks(2)
def test_buffers_are_each_ranks_own_and_follow_forward(rank: Rank, use_orig_params: bool) -> None:
    low = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.float16}
    for precision, policy in ((None, None), (low, {Counting})):
        options = {"mixed_precision": precision, "auto_wrap_policy": policy}
        learner = assert_trains_alike(
            lambda: nn.Sequential(Counting(), Counting()),
            lambda p, m, o=options: p(m, use_orig_params=use_orig_params, **o),
            near=ROUNDED if precision else EQUAL,
            near_torch=Closeness(1e-3, 1e-4),
        )
        assert learner.buffers()["0.count"].item() == 2


# Modules that keep their parameters in ways of their own.


class Recurrent(nn.Module):
    """Keeps a list of its weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.cells(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(output[:, -1])


class Attending(nn.Module):
    """Reads the weights of a module inside it without running that module."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1).expand(-1, 3, -1))


class Listed(nn.Module):
    """Parameters in a list and a dict, transposed, of no dim, of no element, and computed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(3, WIDTH).t())})
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.some:
            x = torch.tanh(x * param)
        return self.normed(x @ self.named["last"]) * self.factor + self.empty.sum()


class Reused(nn.Module):
    """One block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.between = Block()
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.between(self.first(x)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [Recurrent, Attending, Listed, Reused])
@both_forms
@on_ranks(2)
def test_modules_with_ways_of_their_own_train(
    rank: Rank, build: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    classes = {nn.LSTM, nn.TransformerEncoderLayer, Block}
    # Torch's wrapper refuses parameters of no dim, and gathers a module that is in two places for
    # one of them only.
    torch_too = build in (Recurrent, Attending)
    for strategy, policy in zip(STRATEGIES, (classes, None, classes), strict=True):
        options = {"sharding_strategy": strategy, "auto_wrap_policy": policy}
        assert_trains_alike(
            build,
            lambda p, m, o=options: p(m, use_orig_params=use_orig_params, **o),
            torch_shard="same" if torch_too else None,
        )


# Recomputation and compilation


class Recomputed(nn.Module):
    """Blocks run under `torch.utils.checkpoint`."""

    reentrant = False

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class RecomputedInTheOldWay(Recomputed):
    reentrant = True


def with_gradient(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", [Recomputed, RecomputedInTheOldWay])
@both_forms
@on_ranks(2)
def test_wrapped_blocks_are_recomputed(
    rank: Rank, build: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    lesson = Lesson(with_gradient)
    assert_api_trains_alike(api_of(use_orig_params), build, shard_blocks, lesson)


def wrapped_inside(shard_unit: ShardUnit, model: Net) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = shard_unit(checkpoint_wrapper(block))
    return shard_unit(model)


def wrapped_outside(shard_unit: ShardUnit, model: Net) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(shard_unit(block))
    return shard_unit(model)


def applied_afterwards(shard_unit: ShardUnit, model: Net) -> Any:
    wrapped = shard_blocks(shard_unit, model)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Block))
    return wrapped


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrap", [wrapped_inside, wrapped_outside, applied_afterwards])
@both_forms
@on_ranks(2)
def test_checkpoint_wrappers_lie_inside_or_outside(
    rank: Rank, wrap: Callable[..., Any], use_orig_params: bool
) -> None:
    assert_api_trains_alike(api_of(use_orig_params), Net, wrap)


def compiled_as_a_whole(package: Package, model: Net, **options: Any) -> Any:
    return torch.compile(by_policy(package, model, **options), backend="aot_eager")


def compiled_inside(package: Package, model: Net, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = package(torch.compile(block, backend="aot_eager"), **options)
    return package(model, **options)


def compiled_in_place(package: Package, model: Net, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return by_policy(package, model, **options)


# Dynamo asks every tensor that it is given for `.grad`, also those that have none.
@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrap", [compiled_as_a_whole, compiled_inside, compiled_in_place])
@on_ranks(2)
def test_compiled_models_train(rank: Rank, wrap: Callable[..., Any]) -> None:
    torch.compiler.reset()
    assert_trains_alike(
        Net,
        lambda package, model: wrap(package, model, use_orig_params=True),
        torch_shard=lambda package, model: by_policy(package, model, use_orig_params=True),
    )
    torch.compiler.reset()


# Memory


@both_forms
@on_ranks(2)
def test_what_is_not_sharded_computes_where_it_is_kept(rank: Rank, use_orig_params: bool) -> None:
    seen: list[tuple[int, torch.Size]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.weight.data_ptr(), self.weight.shape))
            return super().forward(x)

    torch.manual_seed(0)
    model = OURS(
        Watched(WIDTH, WIDTH), sharding_strategy="NO_SHARD", use_orig_params=use_orig_params
    )
    model(torch.ones(1, WIDTH)).sum().backward()
    shard_buffers = hooks_of(model).units[0].shard_buffers.lanes
    assert len(shard_buffers) == 1
    begin = shard_buffers[0].data_ptr()
    end = begin + shard_buffers[0].numel() * shard_buffers[0].element_size()
    assert [(begin <= pointer < end, shape) for pointer, shape in seen] == [(True, (WIDTH, WIDTH))]
    if use_orig_params:
        assert model.module.weight.shape == (WIDTH, WIDTH)
        assert model.module.weight.grad.shape == (WIDTH, WIDTH)

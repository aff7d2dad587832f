"""Ways to run, to optimize and to edit a wrapped model, each held to the unsharded one."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from fullshard.runtime.names import clean_name
from fullshard.testing import Rank, on_ranks
from tests.wrapped import (
    OURS,
    ROUNDED,
    WIDTH,
    Block,
    Closeness,
    Door,
    Lesson,
    Net,
    assert_trains_alike,
    by_hand,
    by_policy,
    each_backward,
    flat,
    loss_of,
    make_batch,
    start,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
NEAR_ADAM = Closeness(1e-4, 1e-5)


def in_all_ways(
    build: Callable[[], nn.Module],
    use_orig_params: bool,
    lesson: Lesson | None = None,
    wrap: Callable[..., Any] = by_policy,
    **options: Any,
) -> None:
    """Compare a lesson under every strategy: with torch's class under the first of them."""
    for strategy in STRATEGIES:
        assert_trains_alike(
            build,
            lambda d, m, s=strategy: wrap(
                d, m, sharding_strategy=s, use_orig_params=use_orig_params
            ),
            lesson,
            **options,
        )
        options["torch_shard"] = None


# Optimizers.


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
    for set_to_none in (False, True):
        lesson = Lesson(optimizer=optimizer, set_to_none=set_to_none)
        in_all_ways(Net, use_orig_params, lesson, near=NEAR_ADAM, near_torch=NEAR_ADAM)


@on_ranks(2, 4)
def test_groups_of_original_parameters_train_each_in_its_way(rank: Rank) -> None:
    lesson = Lesson(optimizer=in_groups)
    in_all_ways(Net, True, lesson, near=NEAR_ADAM, near_torch=NEAR_ADAM)


@on_ranks(2)
def test_a_parameter_group_is_added_later(rank: Rank) -> None:
    def optimizer(model: nn.Module) -> Optimizer:
        first, *others = model.parameters()
        built = SGD([first], lr=0.05, momentum=0.9)
        built.add_param_group({"params": others, "lr": 0.01})
        return built

    in_all_ways(Net, True, Lesson(optimizer=optimizer))


# Editing.


@contextlib.contextmanager
def summoned(model: Any) -> Any:
    if hasattr(type(model), "summon_full_params"):
        with type(model).summon_full_params(model):
            yield
    else:
        yield


def clamped_first(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Parameters are edited, themselves and by `data`, before every step."""
    with summoned(model), torch.no_grad():
        for index, param in enumerate(model.parameters()):
            edited = param if index % 2 else param.data
            edited.clamp_(-0.2, 0.2)
    return each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_parameters_edited_while_summoned_are_trained_on(rank: Rank, use_orig_params: bool) -> None:
    in_all_ways(Net, use_orig_params, Lesson(step=clamped_first))


@both_forms
@on_ranks(2)
def test_parameters_edited_without_writeback_are_forgotten(
    rank: Rank, use_orig_params: bool
) -> None:
    for strategy in STRATEGIES[:2]:  # without shards there is no copy to edit
        learner = start(
            Net,
            lambda d, m, s=strategy: by_policy(
                d, m, sharding_strategy=s, use_orig_params=use_orig_params
            ),
            OURS,
            Lesson(),
        )
        before = learner.full_parameters()
        with OURS.FSDP.summon_full_params(learner.model, writeback=False), torch.no_grad():
            for param in learner.model.parameters():
                param.zero_()
        after = learner.full_parameters()
        assert all(torch.equal(after[name], value) for name, value in before.items())


def turned(module: nn.Module) -> None:
    """Of every module with parameters, and by their shape."""
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(-0.5).add_(0.01 * param.shape[0])


@both_forms
@on_ranks(2)
def test_apply_changes_whole_parameters_before_and_between_steps(
    rank: Rank, use_orig_params: bool
) -> None:
    def turned_net() -> nn.Module:
        return Net().apply(turned)

    def shard(strategy: str, wrap: Callable[..., Any], door: Door, _: nn.Module) -> Any:
        torch.manual_seed(0)
        wrapped = wrap(door, Net(), sharding_strategy=strategy, use_orig_params=use_orig_params)
        assert wrapped.apply(turned) is wrapped
        return wrapped

    for strategy in STRATEGIES:
        for wrap in (flat, by_hand):
            learner = assert_trains_alike(turned_net, functools.partial(shard, strategy, wrap))
            before = {name: value.clone() for name, value in learner.full_parameters().items()}
            learner.model.apply(turned)
            for name, value in learner.full_parameters().items():
                expected = before[name] * -0.5 + 0.01 * value.shape[0]
                torch.testing.assert_close(value, expected, msg=name)


# Accumulation.


def last_synced(model: Any, batches: list[Any], scale: float) -> Tensor:
    """All micro batches but the last are not reduced."""
    with model.no_sync() if hasattr(model, "no_sync") else contextlib.nullcontext():
        loss = each_backward(model, batches[:-1], scale)
    return loss + each_backward(model, batches[-1:], scale)


def synced_in_turns(model: Any, batches: list[Any], scale: float) -> Tensor:
    total = torch.zeros(())
    for index, batch in enumerate(batches):
        quiet = index % 2 == 0 and hasattr(model, "no_sync")
        with model.no_sync() if quiet else contextlib.nullcontext():
            total += each_backward(model, [batch], scale)
    return total


@pytest.mark.parametrize("step", [each_backward, last_synced, synced_in_turns])
@both_forms
@on_ranks(2)
def test_micro_batches_add_up(
    rank: Rank, step: Callable[..., Tensor], use_orig_params: bool
) -> None:
    lesson = Lesson(step=step, num_micro_batches=4)
    in_all_ways(Net, use_orig_params, lesson)


@pytest.mark.parametrize("step", [each_backward, last_synced])
@both_forms
@on_ranks(4)
def test_micro_batches_add_up_over_replicas(
    rank: Rank, step: Callable[..., Tensor], use_orig_params: bool
) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    for strategy in ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"):
        assert_trains_alike(
            Net,
            lambda d, m, s=strategy: by_policy(
                d, m, sharding_strategy=s, device_mesh=mesh, use_orig_params=use_orig_params
            ),
            Lesson(step=step, num_micro_batches=3),
        )


@pytest.mark.parametrize("step", [each_backward, last_synced, synced_in_turns])
@both_forms
@on_ranks(2)
def test_micro_batches_add_up_in_host_memory_and_in_low_precision(
    rank: Rank, step: Callable[..., Tensor], use_orig_params: bool
) -> None:
    lesson = Lesson(step=step, num_micro_batches=4)
    options: dict[str, Any] = {"use_orig_params": use_orig_params}
    assert_trains_alike(Net, lambda d, m: by_policy(d, m, cpu_offload=True, **options), lesson)
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    assert_trains_alike(
        Net,
        lambda d, m: by_policy(d, m, mixed_precision=precision, **options),
        lesson,
        near=ROUNDED,
        near_torch=ROUNDED,  # which adds gradients up in bf16 until they are reduced
    )


def zeroed_before_the_last(
    set_to_none: bool, is_first_reduced: bool, model: Any, batches: list[Any], scale: float
) -> Tensor:
    """All but the last batch is given up, reduced or not; without sharding only that is seen."""
    if hasattr(model, "no_sync"):
        if is_first_reduced:
            each_backward(model, batches[:1], scale)
        for _ in range(2):
            with model.no_sync():
                each_backward(model, batches[:-1], scale)
            assert all(param.grad is not None for param in model.parameters())
            SGD(model.parameters()).zero_grad(set_to_none=set_to_none)
    return each_backward(model, batches[-1:], scale)


@pytest.mark.parametrize("set_to_none", [False, True])
@both_forms
@on_ranks(2)
def test_zeroed_gradients_are_gone_also_those_that_were_not_reduced(
    rank: Rank, set_to_none: bool, use_orig_params: bool
) -> None:
    for is_first_reduced in (False, True):
        step = functools.partial(zeroed_before_the_last, set_to_none, is_first_reduced)
        lesson = Lesson(step=step, num_micro_batches=3)
        # Torch's class keeps the reduced ones where zero_grad does not find them.
        in_all_ways(Net, use_orig_params, lesson, torch_shard=None if is_first_reduced else "same")


# Odd models.


class Odd(nn.Module):
    """Units of one element, of three, and of none but their buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.one = Scaled(1)
        self.three = Scaled(3)
        self.none = Scaled(0)
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.three(self.none(self.linear(self.one(x))))


class Scaled(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        if size:
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.scale) if hasattr(self, "scale") else torch.tanh(x)


@pytest.mark.parametrize(
    "policy", [{Scaled}, {Scaled, nn.Linear}, None], ids=["scaled", "scaled_and_linear", "root"]
)
@both_forms
@on_ranks(2, 4)
def test_units_of_few_elements_leave_ranks_with_nothing(
    rank: Rank, policy: Any, use_orig_params: bool
) -> None:
    in_all_ways(Odd, use_orig_params, wrap=lambda d, m, **o: d(m, auto_wrap_policy=policy, **o))


@both_forms
@on_ranks(4)
def test_a_model_smaller_than_the_world_trains(rank: Rank, use_orig_params: bool) -> None:
    in_all_ways(lambda: nn.Linear(1, 1), use_orig_params, Lesson(column), wrap=flat)


def column(generator: torch.Generator) -> Tensor:
    return torch.randn(4, 1, generator=generator)


class Branching(nn.Module):
    """Runs a unit twice, one only if told to, and one never; a parameter is never used."""

    takes_detour = True

    def __init__(self) -> None:
        super().__init__()
        self.twice = Block()
        self.sometimes = Block()
        self.never = Block()
        self.own = nn.Parameter(torch.ones(WIDTH))
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        if self.takes_detour:
            x = self.sometimes(x)
        return x * self.own


def told(model: Any, *, takes_detour: bool) -> None:
    getattr(model, "module", model).takes_detour = takes_detour


def with_and_without(model: Any, batches: list[Any], scale: float) -> Tensor:
    told(model, takes_detour=True)
    loss = each_backward(model, batches, scale)
    told(model, takes_detour=False)
    return loss + each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_units_run_twice_sometimes_or_never(rank: Rank, use_orig_params: bool) -> None:
    for wrap in (flat, by_policy):
        in_all_ways(Branching, use_orig_params, Lesson(step=with_and_without), wrap=wrap)


class Resting(nn.Module):
    """Two units, of which the second runs only if told to."""

    takes_detour = True

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.second = Block()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) if self.takes_detour else x


def every_other_step(model: Any, batches: list[Any], scale: float) -> Tensor:
    told(model, takes_detour=bool(torch.initial_seed() // 1000 % 2))
    return each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_a_unit_that_rests_a_step_is_not_touched_by_it(rank: Rank, use_orig_params: bool) -> None:
    lesson = Lesson(step=every_other_step, optimizer=adamw, num_steps=4)
    in_all_ways(Resting, use_orig_params, lesson, near=NEAR_ADAM, near_torch=NEAR_ADAM)


class Routed(nn.Module):
    """Sends a whole batch to one of two experts: the batch says which."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, dtype=dtype)]
        )
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        expert: Any = self.experts[int(x[0, 0] > 0)]
        return self.head(torch.tanh(expert(x.to(expert.weight.dtype))).float())


def to_one_expert(generator: torch.Generator) -> Tensor:
    """Every rank to another one."""
    batch = make_batch(generator)
    batch[0, 0] = 1.0 if generator.initial_seed() % 20 < 10 else -1.0
    return batch


@both_forms
@on_ranks(2)
def test_ranks_may_use_different_parameters_of_a_unit(rank: Rank, use_orig_params: bool) -> None:
    for dtype in (torch.float32, torch.float64):
        in_all_ways(
            functools.partial(Routed, dtype),
            use_orig_params,
            Lesson(to_one_expert),
            wrap=flat,
            torch_shard="same" if dtype == torch.float32 else None,
        )


def looked_at_first(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Forwards without a backward: with and without gradients, and one whose graph is dropped."""
    with torch.no_grad():
        seen = [model(batch) for batch in batches]
    again = [model(batch) for batch in batches]
    assert all(torch.equal(a, b) for a, b in zip(seen, again, strict=True))
    del again
    with torch.inference_mode():
        model(batches[0])
    return each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_a_forward_without_backward_leaves_training_as_it_was(
    rank: Rank, use_orig_params: bool
) -> None:
    in_all_ways(Net, use_orig_params, Lesson(step=looked_at_first))


def two_forwards(model: Any, batches: list[Any], scale: float) -> Tensor:
    losses = [loss_of(model(batch)) for batch in batches]
    total = torch.stack(losses).sum()
    (total * scale).backward()
    return total.detach()


@both_forms
@on_ranks(2)
def test_two_forwards_share_a_backward(rank: Rank, use_orig_params: bool) -> None:
    lesson = Lesson(step=two_forwards, num_micro_batches=2)
    in_all_ways(Net, use_orig_params, lesson)


def two_backwards(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Of one forward, through the same graph."""
    output = model(batches[0])
    first, second = loss_of(output[:2]), loss_of(output[2:])
    (first * scale).backward(retain_graph=True)
    (second * scale).backward()
    return (first + second).detach()


def with_a_penalty(model: Any, batches: list[Any], scale: float) -> Tensor:
    """On the gradient of the inputs, which is differentiated again."""
    batch = batches[0].requires_grad_()
    output = model(batch)
    (grad,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    loss = loss_of(output) + grad.square().mean()
    (loss * scale).backward()
    return loss.detach()


def part_of_it_first(model: Any, batches: list[Any], scale: float) -> Tensor:
    """A wrapped part runs and learns on its own, before the whole does."""
    loss = loss_of(model.blocks[1](batches[0]))
    (loss * scale).backward()
    return loss.detach() + each_backward(model, batches, scale)


@pytest.mark.parametrize("step", [two_backwards, with_a_penalty, part_of_it_first])
@both_forms
@on_ranks(2)
def test_graphs_that_torchs_class_cannot_run_are_run(
    rank: Rank, step: Callable[..., Tensor], use_orig_params: bool
) -> None:
    in_all_ways(Net, use_orig_params, Lesson(step=step), torch_shard=None)


class PlannedError(Exception):
    """Raised by the tests' models."""


def failing_first(model: Any, batches: list[Any], scale: float) -> Tensor:
    """A forward that fails half way, and another one that does not."""

    def fail(*_: Any) -> None:
        raise PlannedError

    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(PlannedError):
        model(batches[0])
    handle.remove()
    return each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_a_step_after_one_that_failed_is_correct(rank: Rank, use_orig_params: bool) -> None:
    in_all_ways(Net, use_orig_params, Lesson(step=failing_first), torch_shard=None)


def frozen_in_turns(model: Any, batches: list[Any], scale: float) -> Tensor:
    is_trained = bool(torch.initial_seed() // 1000 % 2)
    for param in model.blocks[1].parameters():
        param.requires_grad_(is_trained)
    return each_backward(model, batches, scale)


@both_forms
@on_ranks(2)
def test_a_unit_is_frozen_and_thawed_between_steps(rank: Rank, use_orig_params: bool) -> None:
    lesson = Lesson(step=frozen_in_turns, num_steps=4)
    in_all_ways(Net, use_orig_params, lesson)


class Pair(nn.Module):
    """Two models that are trained through each other, with nothing wrapped around them."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = Net()
        self.judge = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.maker(x)
        return self.judge(made.detach()), self.judge(made)


def each_a_root(door: Door, model: Pair, **options: Any) -> Any:
    model.maker = by_policy(door, model.maker, **options)
    model.judge = door(model.judge, **options)
    return model


@both_forms
@on_ranks(2)
def test_two_roots_train_through_each_other(rank: Rank, use_orig_params: bool) -> None:
    in_all_ways(Pair, use_orig_params, wrap=each_a_root)


class Keywords(nn.Module):
    """Takes and returns what is not a tensor, and an input that takes a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor, *, also: dict[str, Any]) -> dict[str, Any]:
        return {"out": [self.head(self.block(x) + also["more"])], "note": also["note"]}


def through_a_dict(model: Any, batches: list[Any], scale: float) -> Tensor:
    leaf = batches[0].clone().requires_grad_()
    output = model(leaf * 2, also={"more": leaf, "note": "kept"})
    assert output["note"] == "kept"
    loss = loss_of(output["out"][0])
    (loss * scale).backward()
    assert leaf.grad is not None
    return loss.detach() + leaf.grad.norm() / scale


@both_forms
@on_ranks(2)
def test_inputs_and_outputs_may_be_nested_and_take_gradients(
    rank: Rank, use_orig_params: bool
) -> None:
    in_all_ways(Keywords, use_orig_params, Lesson(step=through_a_dict))


# Recomputation.


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


@pytest.mark.parametrize("build", [Recomputed, RecomputedInTheOldWay])
@both_forms
@on_ranks(2)
def test_wrapped_blocks_are_recomputed(
    rank: Rank, build: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    in_all_ways(build, use_orig_params, Lesson(with_gradient))


def wrapped_inside(door: Door, model: Net, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = door(checkpoint_wrapper(block), **options)
    return door(model, **options)


def wrapped_outside(door: Door, model: Net, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(door(block, **options))
    return door(model, **options)


def applied_afterwards(door: Door, model: Net, **options: Any) -> Any:
    wrapped = by_policy(door, model, **options)
    apply_activation_checkpointing(wrapped, check_fn=lambda m: isinstance(m, Block))
    return wrapped


@pytest.mark.parametrize("wrap", [wrapped_inside, wrapped_outside, applied_afterwards])
@both_forms
@on_ranks(2)
def test_checkpoint_wrappers_lie_inside_or_outside(
    rank: Rank, wrap: Callable[..., Any], use_orig_params: bool
) -> None:
    in_all_ways(Net, use_orig_params, wrap=wrap)


# Compilation.


def compiled_as_a_whole(door: Door, model: Net, **options: Any) -> Any:
    return torch.compile(by_policy(door, model, **options), backend="aot_eager")


def compiled_inside(door: Door, model: Net, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = door(torch.compile(block, backend="aot_eager"), **options)
    return door(model, **options)


def compiled_in_place(door: Door, model: Net, **options: Any) -> Any:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    return by_policy(door, model, **options)


# Dynamo asks every tensor that it is given for `.grad`, also those that have none.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("wrap", [compiled_as_a_whole, compiled_inside, compiled_in_place])
@on_ranks(2)
def test_compiled_models_train(rank: Rank, wrap: Callable[..., Any]) -> None:
    torch.compiler.reset()
    assert_trains_alike(
        Net,
        lambda d, m: wrap(d, m, use_orig_params=True),
        torch_shard=lambda d, m: by_policy(d, m, use_orig_params=True),
    )
    torch.compiler.reset()

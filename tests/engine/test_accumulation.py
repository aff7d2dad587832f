"""Gradient accumulation in every form, and the settings that steer reduction and gathering."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import (
    ConfigError,
    MixedPrecisionPolicy,
    fully_shard,
    share_comm_ctx,
)
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.support.counted import CountedGather, CountedReduce
from tests.support.wrapped import (
    EQUAL,
    OURS,
    ROUNDED,
    Branches,
    Lesson,
    Package,
    assert_same_step,
    assert_trains_alike,
    batch_of,
    each_backward,
    full,
    layers,
    make_batch,
    shard_parts,
    unit_sharder,
)

MICRO_BATCHES = 3


def shard(model: nn.Sequential, mesh: Any, **options: Any) -> None:
    for part in (model[0], model[2], model):
        fully_shard(part, mesh=mesh, **options)


# By form: settings of modules that become true before the last micro batch, or before that number.
FORMS: dict[str, dict[str, dict[str, int]]] = {
    "without sync": {"": {"requires_gradient_sync": 2}},
    "without sync, kept unsharded": {
        "": {"requires_gradient_sync": 2, "reshard_after_backward": 2}
    },
    "kept unsharded": {"": {"reshard_after_backward": 2}},
    "told of the last": {"": {"is_last_backward": 2}},
    "told all at once": {
        "": {"is_last_backward": 2, "requires_gradient_sync": 2, "reshard_after_backward": 2}
    },
    "some units without sync": {"2": {"requires_gradient_sync": 2}},
}
REPLICATED_FORMS: dict[str, dict[str, dict[str, int]]] = {
    "without sync": FORMS["without sync"],
    "without all-reduce": {"": {"requires_all_reduce": 2}},
    "without all-reduce, told of the last": {"": {"requires_all_reduce": 2, "is_last_backward": 2}},
    "without sync, then without all-reduce": {
        "": {"requires_gradient_sync": 1, "requires_all_reduce": 2}
    },
}
POLICIES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bf16_reduced_in_fp32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
}


def assert_accumulates(
    form: dict[str, dict[str, int]], kind: str, mesh: Any, max_buffers: int = 1
) -> None:
    """Compare with the unsharded model, which sums micro batches, and with torch."""

    def shard_all(package: Package, model: nn.Sequential) -> nn.Sequential:
        sharder = unit_sharder(package, "fully_shard", mesh=mesh, mixed_precision=POLICIES[kind])
        model = shard_parts(sharder, model, "0", "2")
        if package is OURS:
            model.set_reduce_scatter_max_input_buffers(max_buffers)
        return model

    def step(model: Any, batches: list[Any], scale: float) -> torch.Tensor:
        total = torch.zeros(())
        for micro_batch, batch in enumerate(batches):
            for name, settings in form.items() if hasattr(model, "reshard") else ():
                for setting, first in settings.items():
                    getattr(model.get_submodule(name), f"set_{setting}")(micro_batch >= first)
            total += each_backward(model, [batch], scale)
        return total

    lesson = Lesson(step=step, num_micro_batches=MICRO_BATCHES)
    near = ROUNDED if POLICIES[kind] else EQUAL
    assert_trains_alike(layers, shard_all, lesson, near=near)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form, kind", list(zip(FORMS, itertools.cycle(POLICIES), strict=False)))
@on_ranks(2)
def test_accumulation_trains_alike(rank: Rank, form: str, kind: str) -> None:
    assert_accumulates(FORMS[form], kind, rank.mesh())


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "form, max_buffers", list(zip(REPLICATED_FORMS, itertools.cycle([1, 3]), strict=False))
)
@on_ranks(4)
def test_accumulation_over_shards_and_replicas_trains_alike(
    rank: Rank, form: str, max_buffers: int
) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    kind = "float32" if max_buffers == 1 else "bf16_reduced_in_fp32"
    assert_accumulates(REPLICATED_FORMS[form], kind, mesh, max_buffers)


@on_ranks(4)
def test_without_all_reduce_no_gradient_is_handed_over_until_replicas_agree(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = layers()
    shard(model, mesh)
    model.set_requires_all_reduce(False)
    model(batch_of(0, rank.rank)).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_all_reduce(True)
    model(batch_of(1, rank.rank)).sum().backward()
    for param in model.parameters():
        values = [torch.empty_like(param.grad.to_local()) for _ in range(2)]
        dist.all_gather(values, param.grad.to_local(), group=mesh.get_group("replicate"))
        assert torch.equal(*values)


@pytest.mark.parametrize("setting", ["requires_gradient_sync", "requires_all_reduce"])
@on_ranks(4)
def test_gradients_that_were_not_reduced_are_zeroed_with_the_model(
    rank: Rank, setting: str
) -> None:
    """A step is repeated after an exception between its micro batches."""
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = layers()
    shard(model, mesh)

    def backward(micro_batch: int, *, is_last: bool) -> None:
        with model.settings(**{setting: is_last}):
            model(batch_of(micro_batch, rank.rank)).square().mean().backward()

    def step() -> list[torch.Tensor]:
        backward(0, is_last=False)
        assert all(param.grad is None for param in model.parameters()), "as in torch"
        backward(1, is_last=True)
        return [full(param.grad) for param in model.parameters()]

    expected = step()
    for set_to_none in (True, False):
        model.zero_grad()
        backward(0, is_last=False)
        model.zero_grad(set_to_none)
        for grad, wanted in zip(step(), expected, strict=True):
            assert torch.equal(grad, wanted)


@pytest.mark.parametrize("is_wrapped", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
@on_ranks(2)
def test_gradients_are_zeroed_with_the_model_while_it_is_gathered(
    rank: Rank, set_to_none: bool, is_wrapped: bool
) -> None:
    mesh = rank.mesh()
    if is_wrapped:
        model = OURS(layers(), device_mesh=mesh, use_orig_params=True)
    else:
        model = fully_shard(layers(), mesh=mesh, reshard_after_forward=False)
    grads = []
    for _ in range(2):
        loss = model(batch_of(0, rank.rank)).square().mean()
        model.zero_grad(set_to_none)
        loss.backward()
        params = model.parameters()  # some of a wrapper's are on other ranks alone
        grads.append([full(param.grad) for param in params if param.grad is not None])
    assert grads[0]
    for grad, expected in zip(*grads, strict=True):
        assert torch.equal(grad, expected)


@on_ranks(2)
def test_gradients_that_were_not_reduced_stay_when_the_optimizer_zeroes_as_in_torch(
    rank: Rank,
) -> None:
    grads = []
    for apply in (fully_shard, torch_fully_shard):
        torch.manual_seed(0)
        model: Any = apply(layers(), mesh=rank.mesh())
        optimizer = torch.optim.SGD(model.parameters())
        model.set_requires_gradient_sync(False)
        model(batch_of(0, rank.rank)).square().mean().backward()
        optimizer.zero_grad()
        model.set_requires_gradient_sync(True)
        model(batch_of(1, rank.rank)).square().mean().backward()
        grads.append([full(param.grad) for param in model.parameters()])
    for grad, of_torch in zip(*grads, strict=True):
        torch.testing.assert_close(grad, of_torch)


# Branches that the micro batches of a step use.
USES = [("left", "right"), ("right", "left right"), ("left right", "left"), ("right",), ("left",)]


def assert_branches_accumulate(
    rank: Rank, mesh: Any, apart: bool, before: Callable[..., None], **options: Any
) -> None:
    """Micro batches that use different parameters, and steps in which some have no gradient."""
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    if apart:
        fully_shard(model.left, mesh=mesh, **options)
        fully_shard(model.right, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    for step, uses in enumerate(USES * 2):
        model.zero_grad()
        reference.zero_grad()
        for micro_batch, use in enumerate(uses):
            before(model, micro_batch == len(uses) - 1)
            model(batch_of(2 * step + micro_batch, rank.rank), use).float().mean().backward()
            for other in range(rank.size):
                x = batch_of(2 * step + micro_batch, other)
                (reference(x, use).mean() / rank.size).backward()
        tolerance = {"rtol": 5e-2, "atol": 5e-2} if options else {}
        for name, param in reference.named_parameters():
            grad = model.get_parameter(name).grad
            assert (grad is None) == (param.grad is None), (name, uses)
            if grad is not None:
                torch.testing.assert_close(full(grad), param.grad, **tolerance)


@pytest.mark.parametrize(
    "kind, apart", [("float32", False), ("float32", True), ("bf16_reduced_in_fp32", True)]
)
@on_ranks(2)
def test_micro_batches_that_use_different_parameters_accumulate(
    rank: Rank, apart: bool, kind: str
) -> None:
    options = {"mp_policy": MixedPrecisionPolicy(**POLICIES[kind])} if POLICIES[kind] else {}
    assert_branches_accumulate(
        rank, rank.mesh(), apart, lambda m, s: m.set_requires_gradient_sync(s), **options
    )


@pytest.mark.parametrize("apart, is_told", [(False, True), (True, False), (True, True)])
@on_ranks(4)
def test_micro_batches_that_use_different_parameters_accumulate_before_an_all_reduce(
    rank: Rank, apart: bool, is_told: bool
) -> None:
    def before(model: Any, is_last: bool) -> None:
        model.set_requires_all_reduce(is_last)
        if is_told:
            model.set_is_last_backward(is_last)

    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    assert_branches_accumulate(rank, mesh, apart, before)


# Scoped forms


def settings_of(model: nn.Module) -> list[Any]:
    return [hooks_of(part).units[0].settings for part in (model[0], model[2], model)]


@on_ranks(2)
def test_scopes_restore_what_they_found_also_after_an_error(rank: Rank) -> None:
    model = layers()
    shard(model, rank.mesh())
    model[0].set_requires_gradient_sync(False)
    model.set_reshard_after_backward(False, recurse=False)
    before = settings_of(model)

    def fail_in_no_sync() -> None:
        with model.no_sync():
            assert [s.requires_gradient_sync for s in settings_of(model)] == [False] * 3
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail_in_no_sync()
    assert settings_of(model) == before

    def fail_in_settings() -> None:
        with model.settings(
            reshard_after_forward=False,
            reshard_after_backward=True,
            requires_all_reduce=False,
            gradient_divide_factor=3.0,
            unshard_in_backward=False,
            is_last_backward=False,
        ):
            assert [s.gradient_divide_factor for s in settings_of(model)] == [3.0] * 3
            assert not hooks_of(model).scheduler.is_last_backward
            raise KeyError("planted")

    with pytest.raises(KeyError, match="planted"):
        fail_in_settings()
    assert settings_of(model) == before
    assert hooks_of(model).scheduler.is_last_backward


@on_ranks(2)
def test_a_scope_of_one_module_leaves_the_others_alone(rank: Rank) -> None:
    model = layers()
    shard(model, rank.mesh())
    with model.no_sync(recurse=False):
        assert [s.requires_gradient_sync for s in settings_of(model)] == [True, True, False]
    with model[0].no_sync(), model.settings(reshard_after_backward=False):
        assert [s.requires_gradient_sync for s in settings_of(model)] == [False, True, True]
        assert [s.reshard_after_backward for s in settings_of(model)] == [False] * 3
    assert [s.requires_gradient_sync for s in settings_of(model)] == [True] * 3
    with (
        pytest.raises(ConfigError, match="there are no settings \\['requires_sync'\\]"),
        model.settings(requires_sync=False),
    ):
        raise AssertionError("an unknown setting was accepted")


# Communication of accumulation


def counted(model: nn.Sequential) -> tuple[CountedGather, CountedReduce]:
    gather, reduce = CountedGather(), CountedReduce()
    for part in (model[0], model[2], model):
        part.set_custom_all_gather(gather)
        part.set_custom_reduce_scatter(reduce)
    return gather, reduce


@on_ranks(1, 2)
def test_custom_collectives_carry_everything_in_memory_that_they_allocate(rank: Rank) -> None:
    counters: list[tuple[CountedGather, CountedReduce]] = []

    def ours(model: Any) -> None:
        shard(model, rank.mesh())
        counters.append(counted(model))

    assert_same_training(layers, ours, Training(make_batch, steps=2))
    gather, reduce = counters[0]
    if rank.size > 1:
        # Three units: the first two are gathered for forward and (but for the last) for backward.
        assert len(reduce.numels) == 2 * 3
        assert len(gather.numels) >= 2 * 3
        assert set(reduce.ops) == {dist.ReduceOp.SUM}
    assert gather.num_allocated == len(gather.numels)
    assert reduce.num_allocated >= len(reduce.numels)


@on_ranks(2)
def test_custom_collectives_carry_the_dtypes_of_the_policy(rank: Rank) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    class Gather(CountedGather):
        def __call__(self, output_tensor, input_tensor, group, async_op=False):
            seen.append(("gather", input_tensor.dtype))
            return super().__call__(output_tensor, input_tensor, group, async_op)

    class Reduce(CountedReduce):
        def __call__(self, output_tensor, input_tensor, group, op, async_op=False):
            seen.append(("reduce", input_tensor.dtype))
            return super().__call__(output_tensor, input_tensor, group, op, async_op)

    model = nn.Linear(6, 4)
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    model.set_custom_all_gather(Gather())
    model.set_custom_reduce_scatter(Reduce())
    model(batch_of(0, rank.rank)).sum().backward()
    assert seen == [("gather", torch.bfloat16), ("reduce", torch.float32)]
    expected = torch.stack([batch_of(0, r).bfloat16().sum(0).float() for r in range(2)]).mean(0)
    torch.testing.assert_close(full(model.weight.grad), expected.expand(4, 6), rtol=2e-2, atol=2e-2)


@on_ranks(2)
def test_no_sync_sends_nothing_in_backward_if_units_stay_unsharded(rank: Rank) -> None:
    model = layers()
    shard(model, rank.mesh(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    gather, reduce = counted(model)
    with model.no_sync():
        model(batch_of(0, rank.rank)).sum().backward()
        num_gathered = len(gather.numels)
        assert num_gathered == 3
        model(batch_of(1, rank.rank)).sum().backward()
        assert all(param.grad is None for param in model.parameters())
    assert len(gather.numels) == num_gathered
    assert reduce.numels == []
    model(batch_of(2, rank.rank)).sum().backward()
    assert len(gather.numels) == num_gathered
    assert len(reduce.numels) == 3


@on_ranks(2)
def test_memory_of_the_process_group_does_not_go_with_custom_collectives(rank: Rank) -> None:
    model = layers()
    shard(model, rank.mesh())
    model.set_custom_all_gather(CountedGather())
    with pytest.raises(AssertionError, match="custom collectives"):
        model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.parametrize("recurse", [True, False])
@on_ranks(2)
def test_reduces_over_a_group_of_their_own_train_alike(rank: Rank, recurse: bool) -> None:
    mesh = rank.mesh()

    def ours(model: Any) -> None:
        shard(model, mesh)
        model.set_separate_reduce_scatter_group(recurse=recurse)
        units = [hooks_of(part).units[0] for part in (model[0], model)]
        separate = [unit.comm.reduce_axis.group is not mesh.get_group() for unit in units]
        assert separate == [recurse, True]

    trained = assert_same_training(layers, ours, Training(make_batch, steps=2))
    model = trained.sharded
    model.set_separate_reduce_scatter_group(False)
    assert hooks_of(model).units[0].comm.reduce_axis.group is mesh.get_group()
    model(batch_of(0, rank.rank)).sum().backward()
    assert model[0].weight.grad is not None


def allocate_from_the_process_group(model: Any) -> None:
    for part in (model[0], model[2], model):
        part.set_allocate_memory_from_process_group_for_comm(True)
    model[0].set_allocate_memory_from_process_group_for_comm(False)


SETTINGS: dict[str, Callable[[Any], None]] = {
    "memory of the process group": allocate_from_the_process_group,
    "2 reduces": lambda model: model.set_reduce_scatter_max_input_buffers(2),
    "5 reduces": lambda model: model.set_reduce_scatter_max_input_buffers(5),
    "no event after the optimizer": lambda model: model.set_post_optim_event(None),
}


@pytest.mark.parametrize("setting", SETTINGS)
@on_ranks(2)
def test_a_setting_of_communication_changes_no_result(rank: Rank, setting: str) -> None:
    def ours(model: Any) -> None:
        shard(model, rank.mesh())
        SETTINGS[setting](model)

    assert_same_training(layers, ours, Training(make_batch))


# How a sum becomes a mean


@pytest.mark.parametrize("reduce_dtype", [None, torch.float16])
@on_ranks(2)
def test_a_divide_factor_takes_the_place_of_the_number_of_ranks(
    rank: Rank, reduce_dtype: torch.dtype | None
) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
    for name, factor in (("gradient", 1.0), ("gradient", 3.0), ("reduce_scatter", 8.0)):
        model = nn.Sequential(nn.Linear(6, 4, bias=False), nn.Linear(4, 2, bias=False))
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(0.5)
        fully_shard(model[0], mesh=rank.mesh(), mp_policy=policy)
        fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
        getattr(model[0], f"set_{name}_divide_factor")(factor)
        model(torch.full((1, 6), float(rank.rank + 1))).sum().backward()
        # Over ranks, the inputs sum up to 3; the root still takes the mean.
        torch.testing.assert_close(full(model[0].weight.grad), torch.full((4, 6), 3.0) / factor)
        torch.testing.assert_close(full(model[1].weight.grad), torch.full((2, 4), 3.0 * 3.0) / 2)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("factor", [None, 3.0])
@on_ranks(4)
def test_divide_factors_and_forced_sums_train_as_in_torch(
    rank: Rank, force: bool, factor: float | None
) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))

    def settle(model: Any, force: bool) -> None:
        for part in (model[0], model[2], model):
            part.set_force_sum_reduction_for_comms(force)
            if factor is not None:
                part.set_gradient_divide_factor(factor)

    def ours(model: Any) -> None:
        shard(model, mesh)
        settle(model, force)

    def torchs(model: Any) -> None:
        shard_parts(partial(torch_fully_shard, mesh=mesh), model, "0", "2")
        # With a factor, torch asks for a multiplied sum that gloo does not have.
        settle(model, force or factor is not None)

    assert_same_training(layers, ours, Training(make_batch), oracle=torchs)


@on_ranks(2)
def test_a_hook_on_reduced_gradients_changes_what_is_handed_over(rank: Rank) -> None:
    torch.manual_seed(0)
    model = layers()
    reference = copy.deepcopy(model)
    shard(model, rank.mesh())
    seen: list[torch.Size] = []

    def double(reduced: torch.Tensor) -> None:
        seen.append(reduced.size())
        reduced.mul_(2)

    model[2].set_all_reduce_hook(double)
    model(batch_of(0, rank.rank)).sum().backward()
    for other in range(rank.size):
        (reference(batch_of(0, other)).sum() / rank.size).backward()
    assert len(seen) == 1
    assert seen[0].numel() >= 3 * 9 + 3  # the larger shard of 5 rows of weight and bias
    for name, param in reference.named_parameters():
        factor = 2 if name.startswith("2.") else 1
        torch.testing.assert_close(full(model.get_parameter(name).grad), factor * param.grad)


@on_ranks(4)
def test_a_hook_comes_after_the_replicas_were_reduced(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = layers()
    shard(model, mesh)
    alike: list[bool] = []

    def compare(reduced: torch.Tensor) -> None:
        values = [torch.empty_like(reduced) for _ in range(2)]
        dist.all_gather(values, reduced, group=mesh.get_group("replicate"))
        alike.append(torch.equal(*values))

    model[0].set_all_reduce_hook(compare)
    model.set_requires_all_reduce(False)
    model(batch_of(0, rank.rank)).sum().backward()
    assert alike == []
    model.set_requires_all_reduce(True)
    model(batch_of(1, rank.rank)).sum().backward()
    assert alike == [True]
    with pytest.raises(ConfigError, match="stream cannot be set"):
        model.set_all_reduce_hook(compare, stream=object())


# The rest


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_two_roots_that_share_their_streams_train_as_unsharded(rank: Rank, when: str) -> None:
    torch.manual_seed(0)
    chunks = [layers(), nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 3), nn.Tanh())]
    references = copy.deepcopy(chunks)
    for chunk in chunks:
        shard(chunk, rank.mesh())
    if when == "before":
        share_comm_ctx(chunks)
    both, both_references = nn.Sequential(*chunks), nn.Sequential(*references)
    for step in range(3):
        if step == 1 and when == "after":
            share_comm_ctx(chunks)
        assert_same_step(rank, both, both_references, partial(batch_of, step))
    assert hooks_of(chunks[0]).scheduler is not hooks_of(chunks[1]).scheduler
    assert hooks_of(chunks[0]).scheduler.comm_ctx is hooks_of(chunks[1]).scheduler.comm_ctx


@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_an_embedding_need_not_be_gathered_for_backward(rank: Rank, frozen: bool) -> None:
    counters: list[CountedGather] = []

    def build_embedded() -> nn.Module:
        model = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
        model[0].weight.requires_grad_(not frozen)
        return model

    def ours(model: Any) -> None:
        for part in (model[0], model[1], model):
            fully_shard(part, mesh=rank.mesh())
        model[0].set_unshard_in_backward(False)
        counters.append(CountedGather())
        model[0].set_custom_all_gather(counters[0])

    def tokens(generator: torch.Generator) -> torch.Tensor:
        return torch.randint(11, (3, 4), generator=generator)

    assert_same_training(build_embedded, ours, Training(tokens))
    assert len(counters[0].numels) == 3, "one gather a step, for forward"

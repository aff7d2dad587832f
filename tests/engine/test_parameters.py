"""Parameters of every kind: ignored, frozen, unused, tiny, oddly laid out, hooked."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor

from fullshard import FSDPModule, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.support.counted import CountedReduce
from tests.support.wrapped import (
    APIS,
    Branches,
    ShardUnit,
    assert_api_trains_alike,
    batch_of,
    layers,
    make_batch,
    shard_parts,
)

# Ignored parameters


@on_ranks(2)
def test_an_ignored_parameter_is_left_alone(rank: Rank) -> None:
    torch.manual_seed(0)
    model = layers()
    local = copy.deepcopy(model)
    ignored = model[2].weight
    fully_shard(model, mesh=rank.mesh(), ignored_params={ignored})
    assert model[2].weight is ignored
    for step in range(2):
        model.zero_grad()
        local.zero_grad()
        for each in (model, local):
            each(batch_of(step, rank.rank)).square().mean().backward()
        assert model[2].weight is ignored
        assert type(ignored) is nn.Parameter
        assert type(ignored.grad) is torch.Tensor
        # Not reduced: the gradient is that of this rank's batch alone.
        torch.testing.assert_close(ignored.grad, local[2].weight.grad)
        assert not torch.allclose(full_tensor(model[2].bias.grad), local[2].bias.grad)
    held = [member.name for member in hooks_of(model).units[0].params]
    assert held == ["0.weight", "0.bias", "2.bias", "4.weight", "4.bias"]


@on_ranks(2)
def test_parameters_beside_an_ignored_one_train_as_in_torch(rank: Rank) -> None:
    mesh = rank.mesh()

    def ours(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh, ignored_params={model[0].bias, model[2].weight})

    def torchs(model: nn.Module) -> None:
        torch_fully_shard(model, mesh=mesh, ignored_params={model[0].bias, model[2].weight})

    assert_same_training(layers, ours, Training(make_batch), oracle=torchs)


@on_ranks(2)
def test_a_module_whose_parameters_are_all_ignored_still_runs(rank: Rank) -> None:
    model = layers()
    ignored = list(model[2].parameters())
    fully_shard(model[2], mesh=rank.mesh(), ignored_params=set(ignored))
    fully_shard(model, mesh=rank.mesh(), ignored_params=set(ignored))
    model(batch_of(0, rank.rank)).sum().backward()
    assert list(model[2].parameters()) == ignored
    assert all(type(param.grad) is torch.Tensor for param in ignored)
    assert isinstance(model[0].weight.grad, DTensor)


# Frozen parameters


@on_ranks(2)
def test_a_frozen_parameter_takes_no_gradient_memory_and_no_part_in_a_reduce(rank: Rank) -> None:
    model = layers()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    fully_shard(model, mesh=rank.mesh())
    counted = CountedReduce()
    model.set_custom_reduce_scatter(counted)
    model(batch_of(0, rank.rank)).sum().backward()
    assert model[0].weight.grad is None
    assert model[2].bias.grad is None
    # 0.bias: 5 of 9, 2.weight: 3 of 5 rows of 9, 4.weight: 1 of 2 rows of 5, 4.bias: 1 of 2.
    trained = 5 + 27 + 5 + 1
    assert sum(counted.numels) - trained in range(4), counted.numels  # up to 16 bytes of padding
    layout = hooks_of(model).units[0].layout
    frozen = {
        layout.params[slot.param_index].name
        for lane in layout.lanes
        if not lane.is_trainable
        for bucket in lane.buckets
        for slot in bucket.slots
    }
    assert frozen == {"0.weight", "2.bias"}


@on_ranks(2)
def test_a_frozen_unit_is_never_reduced(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        model[2].requires_grad_(False)
        fully_shard(model[2], mesh=rank.mesh())
        model[2].set_custom_reduce_scatter(counted)
        fully_shard(model, mesh=rank.mesh())

    def build_frozen() -> nn.Module:
        model = layers()
        model[2].requires_grad_(False)
        return model

    counted = CountedReduce()
    assert_same_training(build_frozen, shard, Training(make_batch))
    assert counted.numels == []


# Unused parameters


@on_ranks(2)
def test_ranks_that_use_different_parameters_reduce_zeros_if_asked(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Branches()
    reference = copy.deepcopy(model)
    theirs = copy.deepcopy(model)
    fully_shard(model, mesh=rank.mesh())
    model.set_reduce_scatter_unused_params(True)
    torch_fully_shard(theirs, mesh=rank.mesh())
    theirs.set_reduce_scatter_unused_params(True)
    for step in range(2):
        uses = ("left", "right") if step == 0 else ("left", "left")
        for each in (model, theirs, reference):
            each.zero_grad()
        for each in (model, theirs):
            each(batch_of(step, rank.rank), uses[rank.rank]).mean().backward()
        for other in range(rank.size):
            (reference(batch_of(step, other), uses[other]).mean() / rank.size).backward()
        for name, param in reference.named_parameters():
            grad = model.get_parameter(name).grad
            expected = torch.zeros(param.shape) if param.grad is None else param.grad
            torch.testing.assert_close(full_tensor(grad), expected)
            assert torch.equal(grad.to_local(), theirs.get_parameter(name).grad.to_local())


@on_ranks(2)
def test_zeros_for_unused_parameters_leave_frozen_ones_alone(rank: Rank) -> None:
    model = Branches()
    model.right.bias.requires_grad_(False)
    fully_shard(model, mesh=rank.mesh())
    model.set_reduce_scatter_unused_params(True)
    model(batch_of(0, rank.rank), "left").mean().backward()
    assert model.right.bias.grad is None
    assert not full_tensor(model.right.weight.grad).any()
    model.set_reduce_scatter_unused_params(False)
    model.zero_grad()
    model(batch_of(0, rank.rank), "left").mean().backward()
    assert model.right.weight.grad is None


# Shapes and strides


class Scaled(nn.Module):
    """Has that many elements, or no parameter at all."""

    def __init__(self, size: int) -> None:
        super().__init__()
        if size:
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * self.scale) if hasattr(self, "scale") else torch.tanh(x)


class Nothing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.empty])


class Odd(nn.Module):
    """A scalar, no rows, no columns, one row, three rows, and parts with few elements or none."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.no_rows = nn.Parameter(torch.empty(0, 6))
        self.no_columns = nn.Parameter(torch.empty(6, 0))
        self.one_row = nn.Parameter(torch.randn(1, 6))
        self.three_rows = nn.Parameter(torch.randn(3, 6))
        self.weight = nn.Parameter(torch.randn(8, 6))
        self.one, self.three, self.none = Scaled(1), Scaled(3), Scaled(0)
        self.nothing = Nothing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.none(self.nothing(self.one(x)))
        rows = torch.cat([self.weight, self.no_rows, self.three_rows, self.one_row])
        wide = torch.cat([x, x @ self.no_columns], dim=1)
        return self.three((wide @ rows.T * self.gain).view(-1, 4, 3))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("parts", [(), ("one", "three", "none", "nothing")], ids=["one", "five"])
@pytest.mark.parametrize("api", APIS)
@on_ranks(1, 2, 4)
def test_scalars_empty_parameters_and_few_rows_train_as_unsharded(
    rank: Rank, api: str, parts: tuple[str, ...]
) -> None:
    def shard(shard_unit: ShardUnit, model: Odd) -> Any:
        return shard_parts(shard_unit, model, *parts)

    learner = assert_api_trains_alike(api, Odd, shard, torch_too=False)
    shapes = {name: value.shape for name, value in learner.full_parameters().items()}
    assert shapes == {name: value.shape for name, value in Odd().named_parameters()}
    if api == "fully_shard":
        assert learner.model.gain.to_local().shape == ()
        assert learner.model.one_row.to_local().shape == ((1 if rank.rank == 0 else 0), 6)


@on_ranks(4)
def test_shards_have_the_local_shapes_that_torch_gives_them(rank: Rank) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for rows in range(7):
                self.register_parameter(f"rows{rows}", nn.Parameter(torch.randn(rows, 3)))

    ours, theirs = Plain(), Plain()
    fully_shard(ours, mesh=rank.mesh())
    torch_fully_shard(theirs, mesh=rank.mesh())
    for name, param in ours.named_parameters():
        other = theirs.get_parameter(name)
        assert param.to_local().shape == other.to_local().shape, name
        assert param.placements == other.placements, name
        assert param.device_mesh == other.device_mesh, name


@on_ranks(2)
def test_parameters_that_are_not_contiguous_train_as_unsharded(rank: Rank) -> None:
    class Strided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter(torch.randn(6, 8).t())
            self.every_other = nn.Parameter(torch.randn(10, 8)[::2])
            conv = nn.Conv2d(1, 4, 2).to(memory_format=torch.channels_last)
            self.kernel = nn.Parameter(conv.weight.detach())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(x @ self.turned.T) @ self.every_other.T
            image = x.view(1, 1, *x.shape)
            return torch.nn.functional.conv2d(image, self.kernel)

    assert not any(param.is_contiguous() for param in list(Strided().parameters())[:2])
    trained = assert_same_training(
        Strided, lambda m: fully_shard(m, mesh=rank.mesh()), Training(make_batch)
    )
    for param in trained.sharded.parameters():
        assert param.to_local().is_contiguous()


# Attributes and hooks


@on_ranks(2)
def test_attributes_of_a_parameter_are_kept_by_its_shard(rank: Rank) -> None:
    model = layers()
    model[0].weight.is_special = "yes"
    model[0].weight.group = ["kept", "by", "reference"]
    marks = model[0].weight.group
    fully_shard(model, mesh=rank.mesh())
    assert model[0].weight.is_special == "yes"
    assert model[0].weight.group is marks
    model(batch_of(0, rank.rank)).sum().backward()
    assert model[0].weight.is_special == "yes"
    assert not hasattr(model[2].weight, "is_special")


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_gradient_hook_sees_the_reduced_shard_once_and_may_change_it(
    rank: Rank, when: str
) -> None:
    torch.manual_seed(0)
    model = layers()
    reference = copy.deepcopy(model)
    seen: list[torch.Tensor] = []

    def double(grad: torch.Tensor) -> torch.Tensor:
        seen.append(grad)
        return grad * 2

    def hook_it() -> Any:
        return model[0].weight.register_hook(double)

    handle = hook_it() if when == "before" else None
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    handle = handle or hook_it()
    for other in range(rank.size):
        (reference(batch_of(0, other)).sum() / rank.size).backward()
    model(batch_of(0, rank.rank)).sum().backward()
    expected = reference[0].weight.grad
    assert len(seen) == 1
    assert isinstance(seen[0], DTensor)
    torch.testing.assert_close(full_tensor(seen[0]), expected)
    torch.testing.assert_close(full_tensor(model[0].weight.grad), 2 * expected)
    torch.testing.assert_close(full_tensor(model[2].weight.grad), reference[2].weight.grad)
    handle.remove()
    model.zero_grad()
    model(batch_of(0, rank.rank)).sum().backward()
    assert len(seen) == 1
    torch.testing.assert_close(full_tensor(model[0].weight.grad), expected)


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_a_post_accumulate_hook_runs_once_the_shard_has_its_gradient(rank: Rank, when: str) -> None:
    torch.manual_seed(0)
    model = layers()
    seen: dict[str, list[torch.Tensor]] = {name: [] for name, _ in model.named_parameters()}

    def hook_all() -> list[Any]:
        return [
            param.register_post_accumulate_grad_hook(
                lambda p, n=name: seen[n].append((p, p.grad.to_local().clone()))
            )
            for name, param in model.named_parameters()
        ]

    handles = hook_all() if when == "before" else None
    fully_shard(model[2], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    handles = handles or hook_all()
    for num_backwards in (1, 2):  # the second one accumulates
        model(batch_of(0, rank.rank)).sum().backward()
        for name, calls in seen.items():
            assert len(calls) == num_backwards, name
            param, grad = calls[-1]
            assert param is model.get_parameter(name)
            assert torch.equal(grad, param.grad.to_local())
    for handle in handles:
        handle.remove()
    model(batch_of(0, rank.rank)).sum().backward()
    assert all(len(calls) == 2 for calls in seen.values())


@on_ranks(2)
def test_a_hook_does_not_run_for_a_gradient_that_is_not_reduced_yet(rank: Rank) -> None:
    model = layers()
    fully_shard(model, mesh=rank.mesh())
    seen: list[torch.Tensor] = []
    model[0].weight.register_post_accumulate_grad_hook(seen.append)
    with model.no_sync():
        model(batch_of(0, rank.rank)).sum().backward()
    assert seen == []
    model(batch_of(0, rank.rank)).sum().backward()
    assert len(seen) == 1


# Names, classes, containers


@on_ranks(2)
def test_parameters_keep_their_names_and_their_order(rank: Rank) -> None:
    def names(model: nn.Module) -> list[str]:
        return [name for name, _ in model.named_parameters()]

    model = Odd()
    outer = nn.ModuleDict({"b": layers(), "a": model, "c": nn.Linear(2, 2)})
    before = names(outer)
    fully_shard(outer["b"][2], mesh=rank.mesh())
    fully_shard(outer["b"], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    assert names(outer) == before
    model(batch_of(0, rank.rank)).sum().backward()
    outer["b"](batch_of(0, rank.rank)).sum().backward()
    assert names(outer) == before
    with torch.no_grad():
        model(batch_of(0, rank.rank))
    assert names(outer) == before


@on_ranks(2)
def test_a_sharded_module_is_of_its_class_and_an_fsdp_module(rank: Rank) -> None:
    model = layers()
    result = fully_shard(model[0], mesh=rank.mesh())
    assert result is model[0]
    assert fully_shard(model, mesh=rank.mesh()) is model
    for module, original in ((model[0], nn.Linear), (model, nn.Sequential)):
        assert type(module).__name__ == "FSDP" + original.__name__
        assert type(module).__module__ == original.__module__
        assert isinstance(module, original)
        assert isinstance(module, FSDPModule)
    assert not isinstance(model[2], FSDPModule)
    other = nn.Linear(2, 2)
    fully_shard(other, mesh=rank.mesh())
    assert type(other) is type(model[0])


@on_ranks(2)
def test_a_slice_of_a_sharded_container_is_a_plain_container(rank: Rank) -> None:
    torch.manual_seed(0)
    model = layers()
    reference = copy.deepcopy(model)
    for part in (model[0], model[2], model[4], model):
        fully_shard(part, mesh=rank.mesh())
    part = model[:3]
    assert type(part) is nn.Sequential
    assert part[0] is model[0]
    x = batch_of(0, rank.rank)
    torch.testing.assert_close(part(x), reference[:3](x))


@pytest.mark.parametrize("has_trained", [False, True])
@on_ranks(2)
def test_an_evaluation_leaves_shards_behind(rank: Rank, has_trained: bool) -> None:
    model = layers()
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    shards = list(model.parameters())
    if has_trained:
        model(batch_of(0, rank.rank)).sum().backward()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            model(batch_of(1, rank.rank))
        found = list(model.parameters())
        assert all(a is b for a, b in zip(found, shards, strict=True))
    model(batch_of(0, rank.rank)).sum().backward()
    assert all(isinstance(param.grad, DTensor) for param in model.parameters())

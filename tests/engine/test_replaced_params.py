"""Optimizers built before sharding, and the state that is loaded into them or taken from them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.optim import SGD, Adam, Optimizer

from fullshard import ShardPlacementResult, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "adam": lambda parameters: Adam(parameters, lr=0.01),
    "sgd": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9),
}


class Net(nn.Module):
    """Uneven over 2 ranks, with a parameter of one row and one of no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.gain = nn.Parameter(torch.ones(1))
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.outer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) * self.gain) * self.scale


def built(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def built_without_scalar() -> nn.Module:
    """DCP leaves the moments of 0-dim parameters plain, which no DTensor can be updated with."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def step_whole(model: nn.Module, optimizer: Optimizer, num_ranks: int, step: int) -> None:
    for rank in range(num_ranks):
        (model(batch(step, rank)).square().mean() / num_ranks).backward()
    optimizer.step()
    optimizer.zero_grad()


def step_sharded(model: nn.Module, optimizer: Optimizer, rank: Rank, step: int) -> None:
    model(batch(step, rank.rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def full(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: full(entry) for key, entry in value.items()}
    return full_tensor(value) if isinstance(value, DTensor) else value


def assert_same_weights(model: nn.Module, reference: nn.Module) -> None:
    for (name, found), expected in zip(
        model.named_parameters(), reference.parameters(), strict=True
    ):
        torch.testing.assert_close(full(found.detach()), expected.detach(), msg=name)


@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_full_state_loaded_between_sharding_and_the_first_forward_is_sharded(
    rank: Rank, kind: str
) -> None:
    reference = built()
    reference_optimizer = OPTIMIZERS[kind](reference.parameters())
    step_whole(reference, reference_optimizer, rank.size, 0)
    model = built()
    model.load_state_dict(reference.state_dict())
    optimizer = OPTIMIZERS[kind](model.parameters())
    fully_shard(model.inner, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    optimizer.load_state_dict(copy.deepcopy(reference_optimizer.state_dict()))
    for step in (1, 2):
        step_whole(reference, reference_optimizer, rank.size, step)
        step_sharded(model, optimizer, rank, step)
    assert_same_weights(model, reference)
    state = optimizer.state[model.inner.weight]
    moment = state.get("exp_avg", state.get("momentum_buffer"))
    assert moment.to_local().shape == model.inner.weight.to_local().shape


@on_ranks(4)
def test_state_from_before_sharding_follows_a_parameter_onto_a_mesh_of_its_own(rank: Rank) -> None:
    own = rank.mesh((2, 2), ("replicate", "shard"))

    def place(parameter: nn.Parameter) -> Shard | ShardPlacementResult:
        if parameter.shape == (5, 4):
            return ShardPlacementResult(Shard(0), own)
        return Shard(0)

    reference, model = built_without_scalar(), built_without_scalar()
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    step_whole(reference, reference_optimizer, rank.size, 0)
    step_whole(model, optimizer, rank.size, 0)
    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=place)
    assert model[0].weight.device_mesh.ndim == 2
    for step in (1, 2):
        step_whole(reference, reference_optimizer, rank.size, step)
        step_sharded(model, optimizer, rank, step)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("forward_first", [False, True], ids=["at once", "after a forward"])
@on_ranks(2)
def test_dcp_gets_state_from_an_optimizer_built_before_sharding(
    rank: Rank, forward_first: bool
) -> None:
    model = built()
    optimizer = OPTIMIZERS["adam"](model.parameters())
    fully_shard(model.inner, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    if forward_first:
        with torch.no_grad():
            model(batch(0, rank.rank))
        model.reshard()
    state = get_optimizer_state_dict(model, optimizer)
    assert set(state["state"]) == {name for name, _ in model.named_parameters()}
    for name, parameter in model.named_parameters():
        moment = state["state"][name]["exp_avg"]
        assert moment.placements == parameter.placements
        assert moment.to_local().shape == parameter.to_local().shape
        assert not full(moment).any()
    reference = built()
    reference_optimizer = OPTIMIZERS["adam"](reference.parameters())
    get_optimizer_state_dict(reference, reference_optimizer)  # it too makes a step of size 0
    step_whole(reference, reference_optimizer, rank.size, 0)
    step_sharded(model, optimizer, rank, 0)
    assert_same_weights(model, reference)


@pytest.mark.parametrize("forward_first", [False, True], ids=["at once", "after a forward"])
@on_ranks(2)
def test_dcp_sets_full_state_on_an_optimizer_built_before_sharding(
    rank: Rank, forward_first: bool
) -> None:
    reference = built_without_scalar()
    reference_optimizer = OPTIMIZERS["adam"](reference.parameters())
    step_whole(reference, reference_optimizer, rank.size, 0)
    saved = copy.deepcopy(get_optimizer_state_dict(reference, reference_optimizer))
    model = built_without_scalar()
    model.load_state_dict(reference.state_dict())
    optimizer = OPTIMIZERS["adam"](model.parameters())
    fully_shard(model, mesh=rank.mesh())
    if forward_first:
        with torch.no_grad():
            model(batch(0, rank.rank))
        model.reshard()
    options = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, saved, options=options)
    for step in (1, 2):
        step_whole(reference, reference_optimizer, rank.size, step)
        step_sharded(model, optimizer, rank, step)
    assert_same_weights(model, reference)


@on_ranks(2)
def test_gradients_set_on_originals_are_taken_over_by_the_first_step(rank: Rank) -> None:
    reference, model = built(), built()
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for each in (reference, model):
        each(batch(0, 0)).square().mean().backward()
    fully_shard(model, mesh=rank.mesh())
    reference_optimizer.step()
    optimizer.step()
    assert_same_weights(model, reference)


@pytest.mark.parametrize("older", ["source", "target"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_sharded_state_goes_between_optimizers_built_before_and_after_sharding(
    rank: Rank, kind: str, older: str
) -> None:
    models, optimizers = [], []
    for which in ("source", "target"):
        model = built(seed=len(models))
        optimizer = OPTIMIZERS[kind](model.parameters())
        fully_shard(model, mesh=rank.mesh())
        models.append(model)
        optimizers.append(optimizer if which == older else OPTIMIZERS[kind](model.parameters()))
    source, target = models
    step_sharded(source, optimizers[0], rank, 0)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    for model, optimizer in zip(models, optimizers, strict=True):
        step_sharded(model, optimizer, rank, 1)
    for found, expected in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(found.to_local(), expected.to_local())


@on_ranks(4)
def test_state_of_tensor_parallel_parameters_from_before_sharding_is_sharded(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    plans = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    widths = (4, 6, 2)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(widths[0], widths[1], bias=False), nn.Linear(widths[1], widths[2], bias=False)
        )

    reference, model = make(), make()
    parallelize_module(model, mesh["tp"], plans)
    reference_optimizer = OPTIMIZERS["sgd"](reference.parameters())
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    for each, its_optimizer in ((reference, reference_optimizer), (model, optimizer)):
        step_whole(each, its_optimizer, 2, 0)
    fully_shard(model, mesh=mesh["dp"])
    for step in (1, 2):
        step_whole(reference, reference_optimizer, 2, step)
        model(batch(step, mesh["dp"].get_local_rank())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert_same_weights(model, reference)


@on_ranks(2)
def test_steps_of_assigned_parameters_are_counted(rank: Rank) -> None:
    # Ranks compare how many steps their optimizers have done.
    model: Any = fully_shard(nn.Linear(4, 4), mesh=rank.mesh())
    for num_steps in (1, 2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert hooks_of(model).scheduler.turnstile.num_steps == num_steps
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)

"""Model and optimizer state dicts: shards going out, shards and full values coming in, DCP."""

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD, Adam, Optimizer

from fullshard import fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.testing import Rank, on_ranks, pool

DOORS = {"ours": fully_shard, "torch": torch_fully_shard}


class Net(nn.Module):
    """Uneven over 2 and over 4 ranks; one parameter has fewer rows than 2 ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 7)
        self.norm = nn.LayerNorm(7)
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.outer = nn.Linear(7, 4, bias=False)
        self.register_buffer("offset", torch.linspace(0.0, 1.0, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x)) * self.gain) + self.offset


class ScalarNet(Net):
    """With a parameter of no dims, which torch's door refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


class TiedNet(nn.Module):
    """The first and the last layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.middle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 6, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


def built(kind: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def sharded(
    mesh: Any, door: Callable[..., Any] = fully_shard, seed: int = 0, **options: Any
) -> Any:
    model = built(Net, seed)
    door(model.inner, mesh=mesh, **options)
    door(model, mesh=mesh, **options)
    return model


def batch(step: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(3, 6, generator=generator)


def train(
    model: nn.Module, optimizer: Optimizer, rank: Rank, steps: Iterable[int] = (0, 1)
) -> None:
    for step in steps:
        model(batch(step, rank.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_whole(
    model: nn.Module, optimizer: Optimizer, num_ranks: int, steps: Iterable[int] = (0, 1)
) -> None:
    """What `train` on all ranks does, on one model that is not sharded."""
    for step in steps:
        for rank in range(num_ranks):
            (model(batch(step, rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1, momentum=0.9)


def adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def full(state: dict[str, Any]) -> dict[str, Any]:
    return {
        key: full(value)
        if isinstance(value, dict)
        else (full_tensor(value) if isinstance(value, DTensor) else value)
        for key, value in state.items()
    }


def placements(state: dict[str, Any]) -> dict[str, Any]:
    return {k: v.placements if isinstance(v, DTensor) else None for k, v in state.items()}


def snapshot(state: dict[str, Any]) -> dict[str, Any]:
    return copy.deepcopy(full(state))


def assert_same(actual: Any, expected: Any, what: str = "state") -> None:
    """The same keys, in the same order, and close values."""
    if isinstance(expected, dict):
        assert list(actual) == list(expected), what
        for key, value in expected.items():
            assert_same(actual[key], value, f"{what}[{key!r}]")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), what
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{what}[{index}]")
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, DTensor) == isinstance(expected, DTensor), what
        if isinstance(expected, DTensor):
            assert actual.placements == expected.placements, what
            actual, expected = actual.to_local(), expected.to_local()
        torch.testing.assert_close(actual, expected, msg=lambda m: f"{what}: {m}")
    else:
        assert actual == expected, what


def assert_differs(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert all(not torch.equal(actual[key], expected[key]) for key in actual if key != "offset")


def assert_trains_on(
    model: nn.Module, weights: dict[str, torch.Tensor], rank: Rank, kind: type[nn.Module] = Net
) -> None:
    """From here on, `model` must train as an unsharded model with these weights does."""
    reference = kind()
    reference.load_state_dict(weights)
    reference_optimizer = sgd(reference)
    optimizer = sgd(model)
    train_whole(reference, reference_optimizer, rank.size, (7, 8))
    train(model, optimizer, rank, (7, 8))
    assert_same(full(model.state_dict()), dict(reference.state_dict()))


# What a state dict holds


@on_ranks(2)
def test_a_state_dict_has_the_keys_values_and_placements_of_torchs(rank: Rank) -> None:
    ours = sharded(rank.mesh())
    theirs = sharded(rank.mesh(), torch_fully_shard)
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
    train(ours, sgd(ours), rank)
    train(theirs, sgd(theirs), rank)
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))


@on_ranks(4)
def test_on_a_2d_mesh_a_state_dict_has_the_placements_of_torchs(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    ours = sharded(mesh)
    theirs = sharded(mesh, torch_fully_shard)
    train(ours, sgd(ours), rank)
    train(theirs, sgd(theirs), rank)
    assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
    assert ours.state_dict()["inner.weight"].placements == (Replicate(), Shard(0))


@on_ranks(2)
def test_a_submodules_state_dict_and_its_prefix_are_those_of_torch(rank: Rank) -> None:
    ours = sharded(rank.mesh())
    theirs = sharded(rank.mesh(), torch_fully_shard)
    assert_same(
        dict(ours.inner.state_dict(prefix="a.b.")), dict(theirs.inner.state_dict(prefix="a.b."))
    )
    assert_same(dict(ours.norm.state_dict()), dict(theirs.norm.state_dict()))


@on_ranks(2)
def test_values_in_a_state_dict_take_no_gradient_and_with_keep_vars_are_the_parameters(
    rank: Rank,
) -> None:
    model = sharded(rank.mesh())
    assert not any(value.requires_grad for value in model.state_dict().values())
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


@on_ranks(2)
def test_a_state_dict_taken_while_unsharded_holds_shards(rank: Rank) -> None:
    model = sharded(rank.mesh(), reshard_after_forward=False)
    before = model.state_dict()
    loss = model(batch(0, rank.rank)).square().mean()
    assert not isinstance(model.inner.weight, DTensor)
    taken = model.state_dict()
    assert_same(dict(taken), dict(before))
    loss.backward()
    reference = built()
    for other in range(rank.size):
        (reference(batch(0, other)).square().mean() / rank.size).backward()
    for name, parameter in reference.named_parameters():
        torch.testing.assert_close(full_tensor(model.get_parameter(name).grad), parameter.grad)


@on_ranks(2)
def test_a_state_dict_of_an_unsharded_submodule_holds_shards(rank: Rank) -> None:
    model = sharded(rank.mesh())
    model.unshard()
    assert not isinstance(model.norm.weight, DTensor)
    assert isinstance(model.norm.state_dict()["weight"], DTensor)


@on_ranks(2)
def test_a_state_dict_held_before_training_sees_the_trained_values(rank: Rank) -> None:
    for door in DOORS.values():
        model = sharded(rank.mesh(), door)
        held = model.state_dict()
        before = snapshot(held)
        train(model, sgd(model), rank)
        assert_differs(full(held), before)
        assert_same(dict(held), dict(model.state_dict()))


@on_ranks(2)
def test_a_state_dict_held_while_parameters_are_frozen_sees_the_trained_values(
    rank: Rank,
) -> None:
    for door in DOORS.values():
        model = sharded(rank.mesh(), door)
        held = model.state_dict()
        model.norm.weight.requires_grad_(False)
        train(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.1), rank)
        assert_same(dict(held), dict(model.state_dict()))


@on_ranks(2)
def test_a_state_dict_taken_after_freezing_sees_the_trained_values(rank: Rank) -> None:
    for door in DOORS.values():
        model = sharded(rank.mesh(), door)
        model.norm.weight.requires_grad_(False)
        held = model.state_dict()
        train(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.1), rank)
        assert_same(dict(held), dict(model.state_dict()))


@on_ranks(2)
def test_a_state_dict_taken_after_an_assigning_load_sees_the_trained_values(rank: Rank) -> None:
    for door in DOORS.values():
        model = sharded(rank.mesh(), door)
        model.load_state_dict(sharded(rank.mesh(), seed=1).state_dict(), assign=True)
        held = model.state_dict()
        train(model, sgd(model), rank)
        assert_same(dict(held), dict(model.state_dict()))


@on_ranks(2)
def test_a_state_dict_held_across_a_conversion_that_changes_nothing_sees_the_trained_values(
    rank: Rank,
) -> None:
    for door in DOORS.values():
        model = sharded(rank.mesh(), door)
        held = model.state_dict()
        model.float()
        model.cpu()
        train(model, sgd(model), rank)
        assert_same(dict(held), dict(model.state_dict()))


@pytest.mark.parametrize("swap", [False, True])
@on_ranks(2)
def test_a_state_dict_held_across_a_load_sees_the_trained_values(rank: Rank, swap: bool) -> None:
    other = sharded(rank.mesh(), seed=1).state_dict()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for door in DOORS.values():
            model = sharded(rank.mesh(), door)
            held = model.state_dict()
            model.load_state_dict(other)
            train(model, sgd(model), rank)
            assert_same(dict(held), dict(model.state_dict()))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


@on_ranks(2)
def test_a_held_state_dict_of_tied_parameters_sees_the_trained_values(rank: Rank) -> None:
    model = built(TiedNet)
    for layer in (model.first, model.last):
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    held = model.state_dict()
    train(model, sgd(model), rank)
    assert_same(dict(held), dict(model.state_dict()))


@on_ranks(2)
def test_values_written_into_a_state_dict_are_used_by_the_next_forward(rank: Rank) -> None:
    model = sharded(rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    with torch.no_grad():
        model(x)
    state = model.state_dict()
    other = built(seed=1)
    with torch.no_grad():
        for name, value in other.state_dict().items():
            if isinstance(state[name], DTensor):
                piece = torch.chunk(value, rank.size)[rank.rank : rank.rank + 1]
                # As DCP does: through the local tensor, unseen by the parameter.
                state[name].to_local().copy_(piece[0] if piece else value[:0])
        torch.testing.assert_close(model(x), other(x))


@on_ranks(2)
def test_a_state_dict_can_be_copied_and_pickled(rank: Rank, tmp_path: Path) -> None:
    model = sharded(rank.mesh())
    state = model.state_dict()
    copied = copy.deepcopy(state)
    path = tmp_path / f"rank{rank.rank}.pt"
    torch.save(state, path)
    pickled = torch.load(path, weights_only=False)
    before = snapshot(state)
    train(model, sgd(model), rank)
    assert_differs(full(state), before)
    assert_same(full(copied), before)
    assert_same(full(pickled), before)


@on_ranks(2)
def test_one_pickled_shard_takes_no_more_room_than_itself(rank: Rank, tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1))
    fully_shard(model, mesh=rank.mesh())
    path = tmp_path / f"rank{rank.rank}.pt"
    torch.save(model.state_dict()["1.bias"].to_local(), path)
    assert path.stat().st_size < 8192


# Loading shards


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("when", ["before the first forward", "while unsharded", "after a step"])
@on_ranks(2)
def test_a_sharded_state_dict_is_loaded_and_training_goes_on(
    rank: Rank, assign: bool, when: str
) -> None:
    model = sharded(rank.mesh(), reshard_after_forward=False)
    if when == "while unsharded":
        model(batch(0, rank.rank))
    elif when == "after a step":
        train(model, sgd(model), rank)
    weights = built(seed=1).state_dict()
    # A copy of the other model's shards: with assign they become this model's own.
    result = model.load_state_dict(sharded(rank.mesh(), seed=1).state_dict(), assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_same(full(model.state_dict()), dict(weights))
    assert_trains_on(model, weights, rank)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_state_dict_of_torchs_door_is_loaded(rank: Rank, assign: bool) -> None:
    theirs = sharded(rank.mesh(), torch_fully_shard, seed=1)
    train(theirs, sgd(theirs), rank)
    ours = sharded(rank.mesh())
    ours.load_state_dict(theirs.state_dict(), assign=assign)
    assert_trains_on(ours, snapshot(theirs.state_dict()), rank)


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_torchs_door_loads_our_state_dict(rank: Rank, assign: bool) -> None:
    ours = sharded(rank.mesh(), seed=1)
    train(ours, sgd(ours), rank)
    theirs = sharded(rank.mesh(), torch_fully_shard)
    theirs.load_state_dict(ours.state_dict(), assign=assign)
    assert_trains_on(theirs, snapshot(ours.state_dict()), rank)


@on_ranks(2)
def test_an_optimizer_built_before_a_load_goes_on_working(rank: Rank) -> None:
    model, reference = sharded(rank.mesh()), built()
    optimizer, reference_optimizer = adam(model), adam(reference)
    train(model, optimizer, rank)
    train_whole(reference, reference_optimizer, rank.size)
    parameters = list(model.parameters())
    model.load_state_dict(sharded(rank.mesh(), seed=1).state_dict())
    reference.load_state_dict(built(seed=1).state_dict())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    train(model, optimizer, rank, (3, 4))
    train_whole(reference, reference_optimizer, rank.size, (3, 4))
    assert_same(full(model.state_dict()), dict(reference.state_dict()))


@on_ranks(2)
def test_parameters_keep_requires_grad_when_a_state_dict_is_assigned(rank: Rank) -> None:
    model = sharded(rank.mesh())
    model.norm.requires_grad_(False)
    model.load_state_dict(sharded(rank.mesh(), seed=1).state_dict(), assign=True)
    assert {n for n, p in model.named_parameters() if not p.requires_grad} == {
        "norm.weight",
        "norm.bias",
    }
    before = snapshot(model.state_dict())
    train(model, SGD(model.parameters(), lr=0.1), rank)
    after = full(model.state_dict())
    assert torch.equal(after["norm.weight"], before["norm.weight"])
    assert not torch.equal(after["inner.weight"], before["inner.weight"])


@pytest.mark.parametrize("whole", [False, True], ids=["shards", "full values"])
@on_ranks(2)
def test_missing_unexpected_and_misshapen_keys_are_refused_by_name(rank: Rank, whole: bool) -> None:
    model = sharded(rank.mesh())
    state = built(seed=1).state_dict() if whole else sharded(rank.mesh(), seed=1).state_dict()
    with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"norm.bias"'):
        model.load_state_dict({k: v for k, v in state.items() if k != "norm.bias"})
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"norm.extra"'):
        model.load_state_dict({**state, "norm.extra": state["norm.bias"]})
    with pytest.raises(RuntimeError, match=r"size mismatch for outer.weight"):
        model.load_state_dict({**state, "outer.weight": torch.zeros(4, 8)})
    result = model.load_state_dict({"norm.bias": state["norm.bias"], "x": 1}, strict=False)
    assert result.unexpected_keys == ["x"]
    assert set(result.missing_keys) == set(state) - {"norm.bias"}
    weights = dict(built().state_dict())
    expected = {**weights, **full(state)}  # what did not fail above has been loaded
    assert_same(full(model.state_dict()), {key: expected[key] for key in weights})


# Loading full values into shards


def by_columns(parameter: nn.Parameter) -> Shard | None:
    return Shard(1) if parameter.ndim == 2 else None


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("columns", [False, True], ids=["rows", "columns"])
@on_ranks(2)
def test_a_full_state_dict_is_loaded_straight_into_shards(
    rank: Rank, assign: bool, columns: bool
) -> None:
    model = built(ScalarNet)
    fully_shard(model, mesh=rank.mesh(), shard_placement_fn=by_columns if columns else None)
    placed = placements(model.state_dict())
    assert placed["scale"] == (Replicate(),)
    assert placed["outer.weight"] == (Shard(1 if columns else 0),)
    weights = built(ScalarNet, seed=1).state_dict()
    weights["scale"].fill_(2.0)
    originals = {key: value.clone() for key, value in weights.items()}
    model.load_state_dict(weights, assign=assign)
    assert placements(model.state_dict()) == placed
    assert_same(full(model.state_dict()), dict(originals))
    assert_trains_on(model, originals, rank, ScalarNet)
    if not assign:
        assert_same(dict(weights), originals)  # what was given is not written to


@on_ranks(2)
def test_a_full_state_dict_is_loaded_after_a_forward_that_left_the_model_unsharded(
    rank: Rank,
) -> None:
    model = sharded(rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    other = built(seed=1)
    with torch.no_grad():
        model(x)
        model.load_state_dict(other.state_dict())
        torch.testing.assert_close(model(x), other(x))


@on_ranks(4)
def test_a_full_state_dict_is_loaded_on_a_2d_mesh(rank: Rank) -> None:
    model = sharded(rank.mesh((2, 2), ("replicate", "shard")))
    weights = built(seed=1).state_dict()
    model.load_state_dict(weights)
    assert_same(full(model.state_dict()), dict(weights))
    assert_trains_on(model, weights, rank)


@on_ranks(2)
def test_a_full_state_dict_of_another_dtype_is_cast_unless_it_is_assigned(rank: Rank) -> None:
    weights = built(seed=1).double().state_dict()
    model = sharded(rank.mesh())
    model.load_state_dict(weights)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert_trains_on(model, {k: v.float() for k, v in weights.items()}, rank)

    model = sharded(rank.mesh())
    model.load_state_dict(weights, assign=True)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert {p.to_local().dtype for p in model.parameters()} == {torch.float64}
    assert model(batch(0, rank.rank).double()).dtype == torch.float64
    assert_same(full(model.state_dict()), dict(weights))


@on_ranks(2)
def test_full_values_and_shards_may_be_mixed_in_one_state_dict(rank: Rank) -> None:
    model = sharded(rank.mesh())
    weights = built(seed=1).state_dict()
    state = sharded(rank.mesh(), seed=1).state_dict()
    state["inner.weight"] = weights["inner.weight"]
    model.load_state_dict(state)
    assert_same(full(model.state_dict()), dict(weights))


# Tied parameters


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("whole", [False, True], ids=["shards", "full values"])
@pytest.mark.parametrize("nested", [False, True], ids=["one unit", "several units"])
@on_ranks(2)
def test_tied_parameters_stay_tied_through_save_and_load(
    rank: Rank, assign: bool, whole: bool, nested: bool
) -> None:
    def shard(model: Any) -> Any:
        if nested:
            fully_shard(model.first, mesh=rank.mesh())
            fully_shard(model.last, mesh=rank.mesh())
        return fully_shard(model, mesh=rank.mesh())

    model = shard(built(TiedNet))
    train(model, sgd(model), rank)
    reference = built(TiedNet, seed=1)
    weights = snapshot(reference.state_dict())
    state = weights if whole else shard(built(TiedNet, seed=1)).state_dict()
    assert list(state) == list(model.state_dict())
    model.load_state_dict(state, assign=assign)
    optimizer_steps = (7, 8)
    # The optimizer is made after a forward, when tied places hold one object again.
    with torch.no_grad():
        model(batch(0, rank.rank))
    model.reshard()
    assert model.last.weight is model.first.weight
    train(model, sgd(model), rank, optimizer_steps)
    train_whole(reference, sgd(reference), rank.size, optimizer_steps)
    assert_same(full(model.state_dict()), dict(reference.state_dict()))


# DCP: get and set


OPTIONS = {
    "sharded": {},
    "sharded on the host": {"cpu_offload": True},
    "full": {"full_state_dict": True},
    "full on the host": {"full_state_dict": True, "cpu_offload": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@on_ranks(2)
def test_dcp_gets_the_same_state_from_our_door_as_from_torchs(
    rank: Rank, options: dict[str, bool]
) -> None:
    states = {}
    for name, door in DOORS.items():
        model = sharded(rank.mesh(), door)
        optimizer = adam(model)
        train(model, optimizer, rank)
        chosen = StateDictOptions(**options)
        states[name] = (
            get_model_state_dict(model, options=chosen),
            get_optimizer_state_dict(model, optimizer, options=chosen),
        )
    assert_same(dict(states["ours"][0]), dict(states["torch"][0]))
    assert_same(dict(states["ours"][1]), dict(states["torch"][1]))
    is_empty = bool(options.get("full_state_dict") and options.get("cpu_offload") and rank.rank)
    assert bool(states["ours"][0]) != is_empty


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("source", DOORS)
@pytest.mark.parametrize("target", DOORS)
@on_ranks(2)
def test_dcp_carries_model_and_optimizer_between_the_doors(
    rank: Rank, source: str, target: str, options: dict[str, bool]
) -> None:
    old = sharded(rank.mesh(), DOORS[source], seed=1)
    old_optimizer = adam(old)
    train(old, old_optimizer, rank)
    new = sharded(rank.mesh(), DOORS[target])
    new_optimizer = adam(new)
    chosen = StateDictOptions(**options)
    from_rank0 = bool(options.get("full_state_dict") and options.get("cpu_offload"))
    # Copies: a state dict shares its tensors with whom it was taken from.
    weights = copy.deepcopy(get_model_state_dict(old, options=chosen))
    moments = copy.deepcopy(get_optimizer_state_dict(old, old_optimizer, options=chosen))
    setting = StateDictOptions(**options, broadcast_from_rank0=from_rank0)
    set_model_state_dict(new, weights, options=setting)
    set_optimizer_state_dict(new, new_optimizer, moments, options=setting)
    assert_same(full(new.state_dict()), full(old.state_dict()))
    train(old, old_optimizer, rank, (3, 4))
    train(new, new_optimizer, rank, (3, 4))
    assert_same(full(new.state_dict()), full(old.state_dict()))


@on_ranks(4)
def test_dcp_broadcasts_from_rank_0_onto_a_2d_mesh(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    reference = built(seed=1)
    reference_optimizer = adam(reference)
    train_whole(reference, reference_optimizer, rank.size)
    weights, moments = copy.deepcopy(get_state_dict(reference, reference_optimizer))
    model = sharded(mesh)
    optimizer = adam(model)
    is_first = rank.rank == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if is_first else {}, options=options)
    set_optimizer_state_dict(model, optimizer, moments if is_first else {}, options=options)
    train(model, optimizer, rank, (3, 4))
    train_whole(reference, reference_optimizer, rank.size, (3, 4))
    assert_same(full(model.state_dict()), dict(reference.state_dict()))


@on_ranks(2)
def test_dcp_sets_state_on_a_model_that_an_evaluation_left_unsharded(rank: Rank) -> None:
    reference = built(seed=1)
    reference_optimizer = adam(reference)
    train_whole(reference, reference_optimizer, rank.size)
    weights, _ = get_state_dict(reference, reference_optimizer)
    model = sharded(rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    with torch.no_grad():
        model(x)
        assert not isinstance(model.inner.weight, DTensor)
        set_model_state_dict(model, weights, options=StateDictOptions(full_state_dict=True))
        torch.testing.assert_close(model(x), reference(x))


@on_ranks(2)
def test_dcp_leaves_frozen_parameters_out_when_asked(rank: Rank) -> None:
    model = sharded(rank.mesh())
    model.norm.requires_grad_(False)
    train(model, SGD((p for p in model.parameters() if p.requires_grad), lr=0.1), rank)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(state) == {"inner.weight", "inner.bias", "gain", "outer.weight", "offset"}


@on_ranks(2)
def test_dcp_state_of_tied_parameters_goes_full_circle(rank: Rank) -> None:
    def make(seed: int) -> tuple[Any, Optimizer]:
        model = built(TiedNet, seed)
        fully_shard(model.middle, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())
        return model, adam(model)

    old, old_optimizer = make(1)
    train(old, old_optimizer, rank)
    weights, moments = copy.deepcopy(get_state_dict(old, old_optimizer))
    new, new_optimizer = make(0)
    set_state_dict(new, new_optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(old, old_optimizer, rank, (3, 4))
    train(new, new_optimizer, rank, (3, 4))
    assert_same(full(new.state_dict()), full(old.state_dict()))


# DCP: on disk


def save_checkpoint(rank: Rank, folder: str, shape: tuple[int, ...]) -> tuple[Any, Any]:
    model = sharded(mesh_of(rank, shape), seed=1)
    optimizer = adam(model)
    train(model, optimizer, rank)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    return snapshot(model.state_dict()), snapshot(dict(moments["state"]))


def load_checkpoint(rank: Rank, folder: str, shape: tuple[int, ...]) -> tuple[Any, Any, Any]:
    model = sharded(mesh_of(rank, shape))
    optimizer = adam(model)
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
    loaded = snapshot(model.state_dict())
    moments = snapshot(dict(get_optimizer_state_dict(model, optimizer)["state"]))
    train(model, optimizer, rank, (3, 4))
    return loaded, moments, snapshot(model.state_dict())


def mesh_of(rank: Rank, shape: tuple[int, ...]) -> Any:
    return rank.mesh(shape, ("replicate", "shard") if len(shape) == 2 else None)


@pytest.mark.parametrize(
    "saved, loaded", [((4,), (2,)), ((2,), (4,)), ((2, 2), (2,))], ids=["4to2", "2to4", "2x2to2"]
)
def test_a_checkpoint_is_loaded_on_another_number_of_ranks(
    tmp_path: Path, saved: tuple[int, ...], loaded: tuple[int, ...]
) -> None:
    folder = str(tmp_path / "checkpoint")
    num_saved, num_loaded = torch.Size(saved).numel(), torch.Size(loaded).numel()
    weights, moments = pool(num_saved).run(save_checkpoint, folder, saved)[0]
    for found_weights, found_moments, trained in pool(num_loaded).run(
        load_checkpoint, folder, loaded
    ):
        assert_same(found_weights, weights)
        assert_same(found_moments, moments)
        reference = built(seed=1)
        optimizer = adam(reference)
        train_whole(reference, optimizer, num_saved)
        train_whole(reference, optimizer, num_loaded, (3, 4))
        assert_same(trained, dict(reference.state_dict()))


@on_ranks(2)
def test_dcp_loads_in_place_into_the_models_own_state_dict(rank: Rank, tmp_path: Path) -> None:
    folder = str(tmp_path)
    dcp.save({"model": sharded(rank.mesh(), seed=1).state_dict()}, checkpoint_id=folder)
    model = sharded(rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    with torch.no_grad():
        model(x)
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        torch.testing.assert_close(model(x), built(seed=1)(x))
    dist.barrier()

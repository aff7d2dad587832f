"""State dicts of `fully_shard`: what they hold, loading, ties, and checkpoints of torch.

`test_state_matrix.py` compares their values with those of the unsharded model and of torch.
"""

import copy
from collections.abc import Callable
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
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD, AdamW, Optimizer

from fullshard import fully_shard
from fullshard.testing import Rank, on_ranks
from tests.support.sharded_states import (
    BOTH,
    Form,
    Net,
    TiedNet,
    assert_same,
    batch,
    built,
    gathered,
    snapshot,
    train,
    train_whole,
)
from tests.support.wrapped import OURS, TORCH


class ScalarNet(Net):
    """With a parameter of no dims, which torch's `fully_shard` refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.75))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def sharded(mesh: Any, api: Any = OURS, seed: int = 0, **options: Any) -> Any:
    return Form({"mesh": mesh, **options}, is_wrapper=False).shard(built(Net, seed), api)


def sgd(model: nn.Module) -> Optimizer:
    return SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.01)


def weights_of(model: nn.Module) -> dict[str, Any]:
    return gathered(dict(model.state_dict()))


def assert_trains_on(
    model: nn.Module,
    weights: dict[str, torch.Tensor],
    rank: Rank,
    kind: type[nn.Module] = Net,
    optimizer: Optimizer | None = None,
) -> None:
    """From here on, `model` must train as an unsharded model with these weights does."""
    reference = kind()
    reference.load_state_dict(weights)
    train_whole(reference, sgd(reference), rank.size, (7, 8))
    train(model, optimizer or sgd(model), rank, (7, 8))
    assert_same(weights_of(model), dict(reference.state_dict()))


# What a state dict holds


@on_ranks(2)
def test_a_submodules_state_dict_and_its_prefix_are_those_of_torch(rank: Rank) -> None:
    ours, theirs = sharded(rank.mesh()), sharded(rank.mesh(), TORCH)
    for name, options in (("second", {"prefix": "a.b."}), ("second.1", {}), ("first", {})):
        found = ours.get_submodule(name).state_dict(**options)
        expected = theirs.get_submodule(name).state_dict(**options)
        assert_same(dict(found), dict(expected), ordered=True)


@on_ranks(2)
def test_values_in_a_state_dict_take_no_gradient_and_with_keep_vars_are_the_parameters(
    rank: Rank,
) -> None:
    model = sharded(rank.mesh())
    assert not any(value.requires_grad for value in model.state_dict().values())
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is parameter for name, parameter in model.named_parameters())


@on_ranks(2)
def test_a_state_dict_taken_while_unsharded_holds_shards_and_backward_goes_on(rank: Rank) -> None:
    model = sharded(rank.mesh(), reshard_after_forward=False)
    before = model.state_dict()
    loss = model(batch(0, rank.rank)).square().mean()
    assert not isinstance(model.first.weight, DTensor)
    assert_same(dict(model.state_dict()), dict(before))
    assert isinstance(model.first.state_dict()["weight"], DTensor)
    loss.backward()
    reference = built()
    for other in range(rank.size):
        (reference(batch(0, other)).square().mean() / rank.size).backward()
    for name, parameter in reference.named_parameters():
        assert_same(gathered(model.get_parameter(name).grad), parameter.grad, name)


def freeze(model: Any) -> None:
    model.second[1].weight.requires_grad_(False)


def load_swapping(model: Any, state: dict[str, Any]) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(state)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


EVENTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any, Any], Any]]] = {
    # Before the state dict is taken, and after.
    "training": (lambda m, s: None, lambda m, s: None),
    "freezing": (lambda m, s: None, lambda m, s: freeze(m)),
    "freezing before": (lambda m, s: freeze(m), lambda m, s: None),
    "an assigning load before": (lambda m, s: m.load_state_dict(s, assign=True), lambda m, s: None),
    "a conversion": (lambda m, s: None, lambda m, s: m.float().cpu()),
    "a load": (lambda m, s: None, lambda m, s: m.load_state_dict(s)),
    "a swapping load": (lambda m, s: None, load_swapping),
}


@on_ranks(2)
def test_a_state_dict_that_is_held_sees_the_trained_values(rank: Rank) -> None:
    for event, (before, after) in EVENTS.items():
        for api in (OURS, TORCH):
            model = sharded(rank.mesh(), api)
            other = sharded(rank.mesh(), seed=1).state_dict()
            before(model, other)
            held = model.state_dict()
            values = snapshot(held)
            after(model, other)
            train(model, sgd(model), rank)
            assert_same(dict(held), dict(model.state_dict()), event)
            assert not torch.equal(gathered(held["first.weight"]), values["first.weight"]), event
    tied = built(TiedNet)
    for layer in (tied.first, tied.last, tied):
        fully_shard(layer, mesh=rank.mesh())
    held = tied.state_dict()
    train(tied, sgd(tied), rank)
    assert_same(dict(held), dict(tied.state_dict()), "tied parameters")


@on_ranks(2)
def test_a_state_dict_can_be_copied_and_pickled_in_little_room(rank: Rank, tmp_path: Path) -> None:
    model = sharded(rank.mesh())
    state = model.state_dict()
    copied = copy.deepcopy(state)
    path = tmp_path / f"rank{rank.rank}.pt"
    torch.save(state, path)
    pickled = torch.load(path, weights_only=False)
    before = snapshot(dict(state))
    train(model, sgd(model), rank)
    assert not torch.equal(gathered(state["first.weight"]), before["first.weight"])
    assert_same(gathered(dict(copied)), before)
    assert_same(gathered(dict(pickled)), before)
    large = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 1)), mesh=rank.mesh())
    torch.save(large.state_dict()["1.bias"].to_local(), path)
    assert path.stat().st_size < 8192


# Loading


@pytest.mark.sampled(2)
@pytest.mark.parametrize("source", ["shards", "full values", "a mixture", "shards of torch"])
@on_ranks(2)
def test_training_goes_on_from_what_was_loaded(rank: Rank, source: str) -> None:
    for assign in BOTH:
        for when in ("before the first forward", "while unsharded", "after a step"):
            model = sharded(rank.mesh(), reshard_after_forward=False)
            if when == "while unsharded":
                model(batch(0, rank.rank))
            elif when == "after a step":
                train(model, sgd(model), rank)
            weights = built(seed=1).state_dict()
            # The state of another model: with assign, its shards become this model's.
            state = sharded(rank.mesh(), TORCH if "torch" in source else OURS, seed=1).state_dict()
            if source == "full values":
                state = copy.deepcopy(weights)
            elif source == "a mixture":
                state["first.weight"] = weights["first.weight"].clone()
            if when != "while unsharded":
                parameters, optimizer = list(model.parameters()), sgd(model)
            result = model.load_state_dict(state, assign=assign)
            assert not result.missing_keys
            assert not result.unexpected_keys
            assert_same(weights_of(model), dict(weights))
            if when == "while unsharded" or assign:
                assert_trains_on(model, weights, rank)
            else:  # an optimizer that was built before goes on
                assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
                assert_trains_on(model, weights, rank, optimizer=optimizer)
            if source == "full values" and not assign:
                assert_same(dict(state), dict(weights))  # what was given is not written to


@on_ranks(2)
def test_torch_loads_our_state_dict(rank: Rank) -> None:
    for assign in BOTH:
        ours = sharded(rank.mesh(), seed=1)
        train(ours, sgd(ours), rank)
        theirs = sharded(rank.mesh(), TORCH)
        theirs.load_state_dict(ours.state_dict(), assign=assign)
        assert_trains_on(theirs, snapshot(dict(ours.state_dict())), rank)


@on_ranks(2)
def test_full_values_are_loaded_into_columns_and_scalars(rank: Rank) -> None:
    def by_columns(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    for assign in BOTH:
        model = built(ScalarNet)
        fully_shard(model, mesh=rank.mesh(), shard_placement_fn=by_columns)
        weights = built(ScalarNet, seed=1).state_dict()
        weights["scale"].fill_(2.0)
        originals = copy.deepcopy(weights)
        model.load_state_dict(weights, assign=assign)
        assert model.state_dict()["scale"].placements == (Replicate(),)
        assert model.state_dict()["last.weight"].placements == (Shard(1),)
        assert_same(weights_of(model), dict(originals))
        assert_trains_on(model, originals, rank, ScalarNet)


@on_ranks(2)
def test_parameters_keep_requires_grad_when_a_state_dict_is_assigned(rank: Rank) -> None:
    model = sharded(rank.mesh())
    model.second[1].requires_grad_(False)
    model.load_state_dict(sharded(rank.mesh(), seed=1).state_dict(), assign=True)
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert frozen == {"second.1.weight", "second.1.bias"}
    before = snapshot(dict(model.state_dict()))
    train(model, SGD(model.parameters(), lr=0.1), rank)
    after = weights_of(model)
    assert torch.equal(after["second.1.weight"], before["second.1.weight"])
    assert not torch.equal(after["first.weight"], before["first.weight"])


@on_ranks(2)
def test_missing_unexpected_and_misshapen_keys_are_refused_by_name(rank: Rank) -> None:
    for whole in BOTH:
        model = sharded(rank.mesh())
        state = built(seed=1).state_dict() if whole else sharded(rank.mesh(), seed=1).state_dict()
        with pytest.raises(RuntimeError, match=r'Missing key\(s\).*"first.bias"'):
            model.load_state_dict({k: v for k, v in state.items() if k != "first.bias"})
        with pytest.raises(RuntimeError, match=r'Unexpected key\(s\).*"first.extra"'):
            model.load_state_dict({**state, "first.extra": state["first.bias"]})
        with pytest.raises(RuntimeError, match=r"size mismatch for last.weight"):
            model.load_state_dict({**state, "last.weight": torch.zeros(4, 8)})
        result = model.load_state_dict({"first.bias": state["first.bias"], "x": 1}, strict=False)
        assert result.unexpected_keys == ["x"]
        assert set(result.missing_keys) == set(state) - {"first.bias"}
        # Whatever did not fail above has been loaded.
        assert_same(weights_of(model), {**built().state_dict(), **gathered(dict(state))})


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
    assert_same(weights_of(model), dict(weights))


@pytest.mark.parametrize("nested", BOTH, ids=["one unit", "several units"])
@on_ranks(2)
def test_tied_parameters_stay_tied_through_save_and_load(rank: Rank, nested: bool) -> None:
    def shard(model: Any) -> Any:
        for layer in (model.first, model.last) if nested else ():
            fully_shard(layer, mesh=rank.mesh())
        return fully_shard(model, mesh=rank.mesh())

    for assign in BOTH:
        for whole in BOTH:
            model = shard(built(TiedNet))
            train(model, sgd(model), rank)
            reference = built(TiedNet, seed=1)
            state = copy.deepcopy(reference.state_dict())
            if not whole:
                state = shard(built(TiedNet, seed=1)).state_dict()
            assert list(state) == list(model.state_dict())
            model.load_state_dict(state, assign=assign)
            # The optimizer is made after a forward, when tied places hold one object again.
            with torch.no_grad():
                model(batch(0, rank.rank))
            model.reshard()
            assert model.last.weight is model.first.weight
            train(model, sgd(model), rank, (7, 8))
            train_whole(reference, sgd(reference), rank.size, (7, 8))
            assert_same(weights_of(model), dict(reference.state_dict()))


# torch's functions for state dicts, and its checkpoints


@on_ranks(4)
def test_torch_broadcasts_state_of_rank_0_onto_a_2d_mesh(rank: Rank) -> None:
    reference = built(seed=1)
    reference_optimizer = adamw(reference)
    train_whole(reference, reference_optimizer, rank.size)
    weights, moments = copy.deepcopy(get_state_dict(reference, reference_optimizer))
    model = sharded(rank.mesh((2, 2), ("replicate", "shard")))
    optimizer = adamw(model)
    is_first = rank.rank == 0
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if is_first else {}, options=options)
    set_optimizer_state_dict(model, optimizer, moments if is_first else {}, options=options)
    train(model, optimizer, rank, (3, 4))
    train_whole(reference, reference_optimizer, rank.size, (3, 4))
    assert_same(weights_of(model), dict(reference.state_dict()))


@on_ranks(2)
def test_torch_leaves_frozen_parameters_out_when_asked(rank: Rank) -> None:
    model = sharded(rank.mesh())
    model.second.requires_grad_(False)
    train(model, sgd(model), rank)
    state = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert set(state) == {"first.weight", "first.bias", "gain", "last.weight", "offset"}


@on_ranks(2)
def test_state_of_tied_parameters_goes_through_torchs_functions(rank: Rank) -> None:
    def make(seed: int) -> tuple[Any, Optimizer]:
        model = Form({"mesh": rank.mesh()}, is_wrapper=False).shard(built(TiedNet, seed))
        return model, adamw(model)

    old, old_optimizer = make(1)
    train(old, old_optimizer, rank)
    weights, moments = copy.deepcopy(get_state_dict(old, old_optimizer))
    new, new_optimizer = make(0)
    set_state_dict(new, new_optimizer, model_state_dict=weights, optim_state_dict=moments)
    train(old, old_optimizer, rank, (3, 4))
    train(new, new_optimizer, rank, (3, 4))
    assert_same(weights_of(new), weights_of(old))


@on_ranks(2)
def test_a_checkpoint_of_torch_loads_into_the_models_own_state_dict(
    rank: Rank, tmp_path: Path
) -> None:
    folder = str(tmp_path)
    dcp.save({"model": sharded(rank.mesh(), seed=1).state_dict()}, checkpoint_id=folder)
    model = sharded(rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    with torch.no_grad():
        model(x)  # the values that it gathered must not be used again
        dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
        torch.testing.assert_close(model(x), built(seed=1)(x))
    dist.barrier()

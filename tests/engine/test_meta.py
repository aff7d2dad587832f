"""Models built on meta, given memory after sharding; conversions of a sharded model."""

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD

from fullshard import LifecycleError, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.testing import Rank, on_ranks

# On a CPU mesh DTensor draws each shard's values from the rank's own generator, and says so.
pytestmark = pytest.mark.filterwarnings("ignore:DTensor random operators:UserWarning")


class Net(nn.Module):
    """Uneven over 2 ranks; with buffers that are saved and that are not."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 5)
        self.norm = nn.LayerNorm(5)
        self.outer = nn.Linear(5, 3, bias=False)
        self.register_buffer("saved", torch.arange(3.0))
        self.register_buffer("unsaved", torch.full((3,), 0.5), persistent=False)

    def reset_parameters(self) -> None:
        self.saved.copy_(torch.arange(3.0))
        self.unsaved.fill_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.norm(self.inner(x))) + self.saved + self.unsaved


def built(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def shard(model: Any, mesh: Any, api: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    api(model.inner, mesh=mesh, **options)
    return api(model, mesh=mesh, **options)


def on_meta(mesh: Any, api: Callable[..., Any] = fully_shard, **options: Any) -> Any:
    with torch.device("meta"):
        model = Net()
    return shard(model, mesh, api, **options)


def initialize(model: nn.Module, seed: int = 0) -> None:
    torch.manual_seed(seed)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (full_tensor(value) if isinstance(value, DTensor) else value).clone()
        for name, value in model.state_dict().items()
    }


def assert_same_weights(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float
) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **tolerance, msg=lambda m, n=name: n + m)


def assert_trains(
    model: nn.Module,
    rank: Rank,
    dtype: torch.dtype = torch.float32,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Two steps, as an unsharded model with the same weights makes them."""
    reference = Net().to(dtype)
    reference.load_state_dict(weights_of(model) if weights is None else weights)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    reference_optimizer = SGD(reference.parameters(), lr=0.1, momentum=0.9)
    for step in (7, 8):
        for other in range(rank.size):
            loss = reference(batch(step, other).to(dtype)).float().square().mean()
            (loss / rank.size).backward()
        loss = model(batch(step, rank.rank).to(dtype)).float().square().mean()
        assert torch.isfinite(loss)
        loss.backward()
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    tolerance = {} if dtype.itemsize >= 4 else {"rtol": 0.05, "atol": 0.05}
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert_same_weights(weights_of(model), dict(reference.state_dict()), **tolerance)


@contextmanager
def swapping(swap: bool) -> Iterator[None]:
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


# Memory and values for models built on meta


@on_ranks(2)
def test_a_model_on_meta_is_sharded_without_memory(rank: Rank) -> None:
    model, real = on_meta(rank.mesh()), shard(built(), rank.mesh())
    for (name, parameter), expected in zip(
        model.named_parameters(), real.parameters(), strict=True
    ):
        assert isinstance(parameter, DTensor), name
        assert parameter.is_meta, name
        assert parameter.shape == expected.shape
        assert parameter.placements == expected.placements
        assert parameter.to_local().shape == expected.to_local().shape
    assert list(model.state_dict()) == list(real.state_dict())


@on_ranks(2)
def test_to_empty_and_reset_parameters_give_the_values_that_torch_gives(rank: Rank) -> None:
    for swap in (False, True):
        with swapping(swap):
            models = [on_meta(rank.mesh(), api) for api in (fully_shard, torch_fully_shard)]
            for model in models:
                parameters = list(model.parameters())
                model.to_empty(device="cpu")
                initialize(model)
                assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
        ours, theirs = models
        assert_same_weights(weights_of(ours), weights_of(theirs))
        assert weights_of(ours)["inner.weight"].abs().sum() > 0
        assert ours.saved.tolist() == [0.0, 1.0, 2.0]
        assert ours.unsaved.tolist() == [0.5, 0.5, 0.5]
        assert "unsaved" not in ours.state_dict()
        assert_trains(ours, rank)


@on_ranks(2)
def test_a_model_may_be_frozen_and_get_its_optimizer_while_it_is_on_meta(rank: Rank) -> None:
    model = on_meta(rank.mesh())
    model.norm.requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.1)
    model.to_empty(device="cpu")
    initialize(model)
    before = weights_of(model)
    model(batch(0, rank.rank)).square().mean().backward()
    optimizer.step()
    after = weights_of(model)
    changed = {name for name in after if not torch.equal(after[name], before[name])}
    assert changed == {"inner.weight", "inner.bias", "outer.weight"}


@on_ranks(2)
def test_a_state_dict_is_assigned_to_a_model_on_meta(rank: Rank) -> None:
    for whole, swap in itertools.product((False, True), repeat=2):
        source = built(seed=1)
        weights = copy.deepcopy(source.state_dict())
        state = source.state_dict() if whole else shard(source, rank.mesh()).state_dict()
        model = on_meta(rank.mesh())
        with swapping(swap):
            model.load_state_dict(state, assign=True)
        assert not any(p.is_meta for p in model.parameters())
        assert model.unsaved.is_meta
        model.unsaved = torch.full((3,), 0.5)
        assert_same_weights(weights_of(model), dict(weights))
        assert_trains(model, rank, weights=weights)


@on_ranks(2)
def test_a_parameter_left_on_meta_is_named_and_can_be_supplied_later(rank: Rank) -> None:
    weights = built(seed=1).state_dict()
    for missing in ("inner.weight", "norm.bias", "outer.weight"):
        model = on_meta(rank.mesh())
        model.unsaved = torch.full((3,), 0.5)
        some = {name: value for name, value in weights.items() if name != missing}
        model.load_state_dict(some, assign=True, strict=False)
        for _ in range(2):
            with pytest.raises(LifecycleError, match=rf"on meta device: .*'{missing}'.*to_empty"):
                model(batch(0, rank.rank))
        model.load_state_dict({missing: weights[missing]}, assign=True, strict=False)
        assert_trains(model, rank, weights=weights)


@on_ranks(2)
def test_modules_may_get_memory_one_by_one(rank: Rank) -> None:
    weights = built(seed=1).state_dict()
    model = on_meta(rank.mesh())
    model.inner.to_empty(device="cpu")
    model.norm.to_empty(device="cpu")
    with pytest.raises(LifecycleError, match=r"on meta device: .*'outer.weight'"):
        model(batch(0, rank.rank))
    model.outer.to_empty(device="cpu")
    model.saved = torch.zeros(3)
    model.unsaved = torch.full((3,), 0.5)
    model.load_state_dict(weights)
    assert_trains(model, rank, weights=weights)


@on_ranks(2)
def test_a_model_that_is_partly_on_meta_may_be_sharded(rank: Rank) -> None:
    model = built()
    model.norm.to_empty(device="meta")
    shard(model, rank.mesh())
    assert model.norm.weight.is_meta
    assert not model.inner.weight.is_meta
    model.norm.to_empty(device="cpu")
    model.norm.reset_parameters()
    assert_trains(model, rank, weights=built().state_dict())


@on_ranks(2)
def test_tied_parameters_on_meta_stay_tied(rank: Rank) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    fully_shard(model, mesh=rank.mesh())
    model.to_empty(device="cpu")
    assert model[1].weight is model[0].weight
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.fill_(0.25)
    model(batch(0, rank.rank)).square().mean().backward()
    assert model[1].weight is model[0].weight
    assert model[0].weight.grad is not None


# Conversions of a sharded model


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "to bfloat16": (lambda model: model.to(torch.bfloat16), torch.bfloat16),
    "half": (lambda model: model.half(), torch.float16),
    "double": (lambda model: model.double(), torch.float64),
    "float": (lambda model: model.float(), torch.float32),
    "cpu": (lambda model: model.cpu(), torch.float32),
    "double and back": (lambda model: model.double().float(), torch.float32),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", CONVERSIONS)
@on_ranks(2)
def test_a_converted_model_trains_on_in_its_new_dtype(rank: Rank, kind: str) -> None:
    convert, dtype = CONVERSIONS[kind]
    for swap in (False, True):
        for when in ("before", "after a step", "while unsharded"):
            model = shard(built(), rank.mesh())
            if when == "after a step":
                optimizer = SGD(model.parameters(), lr=0.1)
                model(batch(0, rank.rank)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            weights = {name: value.to(dtype) for name, value in weights_of(model).items()}
            weight = model.inner.weight
            if when == "while unsharded":
                model.unshard()
                model.inner.unshard()
            with swapping(swap):
                assert convert(model) is model
            if when == "after a step":
                assert model.inner.weight is weight
            assert {p.dtype for p in model.parameters()} == {dtype}
            assert {p.to_local().dtype for p in model.parameters()} == {dtype}
            assert model.saved.dtype == model.unsaved.dtype == dtype
            assert_same_weights(weights_of(model), weights)
            assert_trains(model, rank, dtype, weights)


@on_ranks(2)
def test_gradients_are_converted_with_their_parameters(rank: Rank) -> None:
    model = shard(built(), rank.mesh())
    model(batch(0, rank.rank)).square().mean().backward()
    before = full_tensor(model.inner.weight.grad)
    model.double()
    assert model.inner.weight.grad.dtype == torch.float64
    torch.testing.assert_close(full_tensor(model.inner.weight.grad), before.double())
    model(batch(0, rank.rank).double()).square().mean().backward()
    torch.testing.assert_close(
        full_tensor(model.inner.weight.grad), 2 * before.double(), rtol=1e-5, atol=1e-6
    )


@on_ranks(2)
def test_an_optimizer_built_before_a_conversion_goes_on_working(rank: Rank) -> None:
    model = shard(built(), rank.mesh())
    optimizer = SGD(model.parameters(), lr=0.1)
    model.double()
    reference = built().double()
    reference_optimizer = SGD(reference.parameters(), lr=0.1)
    for step in range(2):
        for other in range(rank.size):
            loss = reference(batch(step, other).double()).square().mean() / rank.size
            loss.backward()
        model(batch(step, rank.rank).double()).square().mean().backward()
        for each in (optimizer, reference_optimizer):
            each.step()
            each.zero_grad()
    assert_same_weights(weights_of(model), dict(reference.state_dict()))


@on_ranks(2)
def test_one_layer_may_be_converted(rank: Rank) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3))
    fully_shard(model, mesh=rank.mesh())
    with torch.no_grad():
        model(batch(0, rank.rank))
    model.reshard()
    model[1].double()
    model[0].register_forward_hook(lambda module, args, output: output.double())
    model(batch(0, rank.rank)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32
    assert model[1].weight.grad.dtype == torch.float64


@on_ranks(2)
def test_apply_changes_shards_in_place(rank: Rank) -> None:
    def halve(module: nn.Module) -> None:
        with torch.no_grad():
            for parameter in module.parameters(recurse=False):
                parameter.mul_(0.5)

    expected = built().apply(halve)
    for when in ("before", "after a step"):
        model = shard(built(), rank.mesh())
        if when == "after a step":
            model(batch(0, rank.rank)).square().mean().backward()
            model.zero_grad()
        assert model.apply(halve) is model
        assert_same_weights(weights_of(model), dict(expected.state_dict()))
        assert_trains(model, rank, weights=expected.state_dict())


@on_ranks(2)
def test_an_unsharded_unit_below_a_plain_parent_is_converted(rank: Rank) -> None:
    parent = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(parent[1], mesh=rank.mesh(), reshard_after_forward=False)
    with torch.no_grad():
        parent(batch(0, rank.rank))
    assert not isinstance(parent[1].weight, DTensor)
    parent.double()
    parent(batch(0, rank.rank).double()).sum().backward()
    assert parent[1].weight.grad.dtype == torch.float64
    assert isinstance(parent[1].weight, DTensor)

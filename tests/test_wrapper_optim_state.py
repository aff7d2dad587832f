"""Optimizer state dicts of wrapped models, as they are saved."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard.comm.placement import full_tensor
from fullshard.errors import DisagreementError, UnknownNameError
from fullshard.testing import Rank, on_ranks
from tests.wrapped import OURS, TORCH, Door

BOTH = (False, True)


class Net(nn.Module):
    """Uneven over 2 and over 4 ranks; on 4 ranks some have no element of some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3))
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.last = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)) * self.gain)


class TiedNet(nn.Module):
    """The weight of the first layer is the weight of the last one too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.last = nn.Linear(5, 5)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


class TiedAcrossNet(TiedNet):
    """The second layer, which may be a unit of its own, shares the weight as well."""

    def __init__(self) -> None:
        super().__init__()
        self.second.weight = self.first.weight


class OddNet(nn.Module):
    """With parameters that have no dims, one element, or another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Linear(7, 3).double()
        self.scale = nn.Parameter(torch.tensor(0.75))
        self.shift = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.second((self.first(x) * self.scale + self.shift).double())


class UnusedNet(Net):
    """With a frozen parameter, and with a layer that no gradient ever reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.last.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.first(x)[:, :3] * self.gain)


class Counting(Optimizer):
    """Has state of many kinds: elements, a number, a string, a 0-dim tensor.

    With `is_rich` also elements of another dtype, and a tensor of a shape of its own, neither of
    which torch's class can save.
    """

    def __init__(self, params: Any, is_rich: bool = False, num_past: int = 3) -> None:
        super().__init__(params, {"lr": 0.1})
        self._is_rich = is_rich
        self._past = torch.arange(float(num_past))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, self.state[param])
                    param.sub_(group["lr"] * self.state[param]["sum"])

    def _update(self, param: nn.Parameter, state: dict[str, Any]) -> None:
        state["label"] = "made"
        state["calls"] = state.get("calls", 0) + 1
        state["total"] = state.get("total", torch.zeros((), dtype=torch.float64)) + 0.5
        state["sum"] = state.get("sum", 0) + param.grad
        if self._is_rich:
            state["history"] = state.get("history", 0) + self._past
            state["sign"] = state["sum"].sign().to(torch.int8)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        # All optimizers cast what they load to the dtype of the parameter, and unpack strings.
        params = [param for group in self.param_groups for param in group["params"]]
        for number, state in state_dict["state"].items():
            self.state[params[number]] = copy.deepcopy(state)


class NamedAdamW(AdamW):
    """Its state dicts have the names that the model lists its parameters by."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        return self._renamed(super().state_dict(), dict(enumerate(self.names)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(self._renamed(state_dict, numbers))

    @staticmethod
    def _renamed(state_dict: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": [keys[key] for key in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        state = {keys[key]: value for key, value in state_dict["state"].items()}
        return {"state": state, "param_groups": groups}


Make = Callable[[nn.Module], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda m: SGD(m.parameters(), lr=0.1),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.1),
    "counting": lambda m: Counting(m.parameters()),
}


def built(kind: Callable[[], Any] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def wrapped(
    door: Door, kind: Callable[[], Any] = Net, *, seed: int = 0, nested: bool = True, **options: Any
) -> Any:
    """A model whose second layer may be a unit of its own."""
    model = built(kind, seed)
    if nested:
        model.second = door(model.second, **options)
    return door(model, **options)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, rank: Rank, steps: Any = (0, 1)) -> None:
    for step in steps:
        model(batch(step, rank.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_whole(model: nn.Module, optimizer: Any, num_ranks: int, steps: Any = (0, 1)) -> None:
    """What `train` on all ranks does, on one model that is not wrapped."""
    for step in steps:
        for rank in range(num_ranks):
            (model(batch(step, rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The state dict of an optimizer of a model that is not wrapped, by name."""
    names: dict[Any, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, name)
    own = copy.deepcopy(optimizer.state_dict())
    order = [names[p] for group in optimizer.param_groups for p in group["params"]]
    for group in own["param_groups"]:
        group["params"] = [order[number] for number in group["params"]]
    return {
        "state": {order[number]: state for number, state in own["state"].items()},
        "param_groups": own["param_groups"],
    }


def whole(value: Any) -> Any:
    """With sharded tensors gathered."""
    if isinstance(value, dict):
        return {key: whole(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        return full_tensor(value)
    if isinstance(value, ShardedTensor):
        empty = torch.empty(0, dtype=value.metadata().tensor_properties.dtype)
        sent = torch.cat([empty, *(shard.tensor.flatten() for shard in value.local_shards())])
        received: list[Any] = [None] * dist.get_world_size(value._process_group)
        dist.all_gather_object(received, sent, group=value._process_group)
        return torch.cat(received).view(value.metadata().size)
    return value


def assert_same(actual: Any, expected: Any, what: str = "state dict") -> None:
    """The same keys in any order, the same types, and close values."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), what
        assert sorted(actual, key=str) == sorted(expected, key=str), what
        for key, value in expected.items():
            assert_same(actual[key], value, f"{what}[{key!r}]")
    elif isinstance(expected, list):
        assert len(actual) == len(expected), f"{what}: {actual} against {expected}"
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{what}[{index}]")
    elif isinstance(expected, ShardedTensor):
        assert isinstance(actual, ShardedTensor), what
        ours, theirs = actual.metadata(), expected.metadata()
        assert ours.shards_metadata == theirs.shards_metadata, what
        assert ours.size == theirs.size, what
        assert len(actual.local_shards()) == len(expected.local_shards()), what
        for mine, other in zip(actual.local_shards(), expected.local_shards(), strict=True):
            assert_same(mine.tensor, other.tensor, what)
    elif isinstance(expected, Tensor):
        assert type(actual) is type(expected), f"{what}: {type(actual)}"
        if isinstance(expected, DTensor):
            assert actual.placements == expected.placements, what
            assert actual.device_mesh == expected.device_mesh, what
            assert actual.shape == expected.shape, what
            actual, expected = actual.to_local(), expected.to_local()
        torch.testing.assert_close(actual, expected, msg=lambda m: f"{what}: {m}")
    else:
        assert type(actual) is type(expected), what
        assert actual == expected, what


def by_set(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Without the order of the parameters in their groups, which follows the wrapping."""
    groups = [{**g, "params": sorted(g["params"])} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, dict):
        for inner in value.values():
            yield from tensors(inner)
    elif isinstance(value, Tensor):
        yield value


def saved(door: Door, model: nn.Module, optimizer: Any, kind: str = "FULL", **config: Any) -> Any:
    """`optim_state_dict` in one form."""
    set_form(door, model, kind, **config)
    with quiet():
        return door.FSDP.optim_state_dict(model, optimizer)


@contextmanager
def quiet() -> Iterator[None]:
    """Without what torch says about calls that it makes itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
        warnings.filterwarnings("ignore", "Multiple backends are registered with this")
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def set_form(door: Door, model: nn.Module, kind: str = "FULL", **config: Any) -> None:
    configs = {
        "FULL": door.api.FullOptimStateDictConfig,
        "SHARDED": door.api.ShardedOptimStateDictConfig,
        "LOCAL": door.api.LocalOptimStateDictConfig,
    }
    if door is TORCH and kind == "FULL":
        # On the CPU torch's class takes a view for a copy, and gathers the next state over it.
        config["offload_to_cpu"] = False
    state_type = door.api.StateDictType[f"{kind}_STATE_DICT"]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type.* deprecated", FutureWarning)
        door.FSDP.set_state_dict_type(model, state_type, None, configs[kind](**config))


def trained_pair(
    rank: Rank, make: Make, kind: type[nn.Module] = Net, **options: Any
) -> list[tuple[Door, Any, Any]]:
    """A model of each door with its optimizer, trained alike."""
    result = []
    for door in (OURS, TORCH):
        model = wrapped(door, kind, **options)
        optimizer = make(model)
        train(model, optimizer, rank)
        result.append((door, model, optimizer))
    return result


@contextmanager
def deprecated(*subjects: str) -> Iterator[None]:
    """FutureWarnings about these, in this order, that point at the caller."""
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=FutureWarning)
        yield
    found = [str(warning.message) for warning in caught]
    assert len(found) == len(subjects), found
    for subject, warning in zip(subjects, caught, strict=True):
        assert subject in str(warning.message), found
        assert warning.category is FutureWarning
        assert "/tests/test_wrapper_optim" in warning.filename, warning.filename


# Against torch's class


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(2)
def test_a_full_state_dict_is_that_of_torch(rank: Rank, use_orig_params: bool) -> None:
    strategies = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
    for number, (name, make) in enumerate(OPTIMIZERS.items()):
        options = {
            "sharding_strategy": strategies[number % 3],
            "use_orig_params": use_orig_params,
            "nested": number % 2 == 0,
        }
        (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(rank, make, **options)
        for config in ({}, {"rank0_only": True}, {"offload_to_cpu": False}):
            actual = saved(door, ours, our_optim, **config)
            assert_same(actual, saved(TORCH, theirs, their_optim, **config), f"{name} {config}")
            assert bool(actual) == (rank.rank == 0 or "rank0_only" not in config)


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(4)
def test_a_sharded_state_dict_is_that_of_torch(rank: Rank, use_orig_params: bool) -> None:
    for mesh in (None, rank.mesh(), rank.mesh((2, 2), ("replicate", "shard"))):
        is_hybrid = mesh is not None and mesh.ndim == 2
        options = {
            "sharding_strategy": "HYBRID_SHARD" if is_hybrid else "FULL_SHARD",
            "use_orig_params": use_orig_params,
            "device_mesh": mesh,
        }
        (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(
            rank, OPTIMIZERS["adamw"], **options
        )
        actual = saved(door, ours, our_optim, "SHARDED")
        assert_same(actual, saved(TORCH, theirs, their_optim, "SHARDED"))
        moment = actual["state"]["first.weight"]["exp_avg"]
        assert isinstance(moment, ShardedTensor if mesh is None else DTensor)
        if is_hybrid:
            assert moment.placements == (Replicate(), Shard(0))
        full = saved(door, ours, our_optim, rank0_only=is_hybrid)
        assert_same(full, saved(TORCH, theirs, their_optim, rank0_only=is_hybrid))


@on_ranks(2)
def test_a_local_state_dict_holds_sharded_tensors_as_torchs_does(rank: Rank) -> None:
    for use_orig_params in BOTH:
        (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(
            rank, OPTIMIZERS["adamw"], use_orig_params=use_orig_params
        )
        actual = saved(door, ours, our_optim, "LOCAL")
        assert_same(actual, saved(TORCH, theirs, their_optim, "LOCAL"))
        assert isinstance(actual["state"]["second.0.bias"]["exp_avg_sq"], ShardedTensor)


@on_ranks(2)
def test_without_settings_the_state_dict_is_full_and_on_every_rank(rank: Rank) -> None:
    (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(rank, OPTIMIZERS["adamw"])
    with quiet():
        expected = TORCH.FSDP.optim_state_dict(theirs, their_optim)
    assert_same(door.FSDP.optim_state_dict(ours, our_optim), expected)


@on_ranks(2)
def test_several_parameter_groups_are_saved_with_their_options(rank: Rank) -> None:
    def grouped(model: nn.Module) -> Optimizer:
        params = dict(model.named_parameters())
        biases = [p for name, p in params.items() if "bias" in name]
        others = [p for name, p in params.items() if "bias" not in name]
        return AdamW([{"params": biases, "weight_decay": 0.0}, {"params": others, "lr": 0.02}])

    (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(
        rank, grouped, use_orig_params=True
    )
    actual = saved(door, ours, our_optim)
    assert_same(actual, saved(TORCH, theirs, their_optim))
    assert [group["lr"] for group in actual["param_groups"]] == [0.001, 0.02]
    assert "second.0.bias" in actual["param_groups"][0]["params"]


@on_ranks(2)
def test_a_tied_parameter_is_saved_once_under_its_first_name(rank: Rank) -> None:
    for use_orig_params in BOTH:
        (door, ours, our_optim), (_, theirs, their_optim) = trained_pair(
            rank, OPTIMIZERS["adamw"], TiedNet, use_orig_params=use_orig_params
        )
        actual = saved(door, ours, our_optim)
        assert_same(actual, saved(TORCH, theirs, their_optim))
        assert "first.weight" in actual["state"]
        assert "last.weight" not in actual["state"]


@on_ranks(2)
def test_the_state_of_a_parameter_that_is_not_wrapped_passes_by_name(rank: Rank) -> None:
    for use_orig_params in BOTH:
        pair = []
        for door in (OURS, TORCH):
            ignoring, around = built(), built()
            ignored = [ignoring.first]
            ignoring = door(ignoring, ignored_modules=ignored, use_orig_params=use_orig_params)
            around.second = door(around.second, use_orig_params=use_orig_params)
            for model in (ignoring, around):
                optimizer = AdamW(model.parameters(), lr=0.01)
                train(model, optimizer, rank)
                full = saved(door, model, optimizer)
                pair.append([full, saved(door, model, optimizer, "SHARDED")])
        ours, theirs = pair[:2], pair[2:]
        assert_same(ours, theirs)
        for full, cut in ours:
            assert type(cut["state"]["first.weight"]["exp_avg"]) is Tensor
            assert isinstance(cut["state"]["second.0.weight"]["exp_avg"], ShardedTensor)
            assert full["state"]["first.weight"]["exp_avg"].shape == (7, 5)


@on_ranks(2)
def test_an_optimizer_that_is_keyed_by_name_is_saved_like_any_other(rank: Rank) -> None:
    for use_orig_params in BOTH:
        results = []
        for door in (OURS, TORCH):
            model = wrapped(door, use_orig_params=use_orig_params)
            optimizer = NamedAdamW(model)
            train(model, optimizer, rank)
            set_form(door, model)
            own = optimizer.state_dict()
            assert all(isinstance(key, str) for key in own["state"])
            with quiet():
                results.append(door.FSDP.optim_state_dict(model, optimizer, own))
        assert_same(*results)
        assert results[0]["state"]["second.0.weight"]["exp_avg"].shape == (3, 7)


@on_ranks(2)
def test_the_older_names_warn_and_return_what_torchs_do(rank: Rank) -> None:
    for use_orig_params in BOTH:
        # With one state only: see `set_form`.
        (_, ours, our_optim), (_, theirs, their_optim) = trained_pair(
            rank, OPTIMIZERS["momentum"], use_orig_params=use_orig_params
        )
        full, torch_full = OURS.FSDP.full_optim_state_dict, TORCH.FSDP.full_optim_state_dict
        with deprecated("full_optim_state_dict"):
            actual = full(ours, our_optim)
        with deprecated("full_optim_state_dict"):
            expected = torch_full(theirs, their_optim)
        assert_same(actual, expected)
        assert bool(actual) == (rank.rank == 0)
        with deprecated("full_optim_state_dict"):
            actual = full(ours, our_optim, rank0_only=False)
        with deprecated("full_optim_state_dict"):
            expected = torch_full(theirs, their_optim, rank0_only=False)
        assert_same(actual, expected)
        for given in (list(ours.parameters()), [{"params": list(ours.parameters())}]):
            with deprecated("full_optim_state_dict", "optim_input"):
                assert_same(full(ours, our_optim, given, rank0_only=False), expected)
        with deprecated("sharded_optim_state_dict"):
            actual = OURS.FSDP.sharded_optim_state_dict(ours, our_optim)
        with deprecated("sharded_optim_state_dict"):
            assert_same(actual, TORCH.FSDP.sharded_optim_state_dict(theirs, their_optim))


@on_ranks(4)
def test_a_model_on_some_ranks_is_saved_by_the_first_rank_of_its_group(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("pair", "inside"))
    group = mesh.get_group("inside")
    model = wrapped(OURS, use_orig_params=True, process_group=group)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    set_form(OURS, model, rank0_only=True)
    actual = OURS.FSDP.optim_state_dict(model, optimizer, group=group)
    assert bool(actual) == (rank.rank in (0, 2))
    set_form(OURS, model)
    everywhere = OURS.FSDP.optim_state_dict(model, optimizer, group=group)
    if actual:
        assert_same(actual, everywhere)


# Against the model that is not wrapped


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(4)
def test_a_full_state_dict_is_that_of_the_unwrapped_model(
    rank: Rank, use_orig_params: bool
) -> None:
    cases: list[tuple[type[nn.Module], Make]] = [
        (Net, lambda m: Counting(m.parameters(), is_rich=True)),
        (TiedNet, OPTIMIZERS["momentum"]),
        (UnusedNet, OPTIMIZERS["adamw"]),
        (TiedAcrossNet, OPTIMIZERS["momentum"]),
        (OddNet, OPTIMIZERS["adamw"]),
        (OddNet, OPTIMIZERS["adagrad"]),
    ]
    for number, (kind, make) in enumerate(cases):
        reference = built(kind)
        reference_optim = make(reference)
        train_whole(reference, reference_optim, rank.size)
        for options in ({"cpu_offload": True}, {"sharding_strategy": "NO_SHARD"}, {}):
            model = wrapped(
                OURS, kind, use_orig_params=use_orig_params, nested=number != 1, **options
            )
            optimizer = make(model)
            train(model, optimizer, rank)
            expected = named_state(reference, reference_optim)
            actual = saved(OURS, model, optimizer)
            assert_same(by_set(actual), by_set(expected), f"{kind.__name__} {options}")
            cut = saved(OURS, model, optimizer, "SHARDED")
            assert_same(whole(cut["state"]), expected["state"], f"{kind.__name__} {options}")


@on_ranks(2)
def test_parameters_without_state_are_named_in_their_group_only(rank: Rank) -> None:
    names = {name for name, _ in built(UnusedNet).named_parameters()}
    for use_orig_params in BOTH:
        model = wrapped(OURS, UnusedNet, use_orig_params=use_orig_params)
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        actual = saved(OURS, model, optimizer)
        assert set(actual["state"]) == {"first.weight", "first.bias", "gain"}
        assert set(actual["param_groups"][0]["params"]) == names


@on_ranks(2)
def test_an_optimizer_that_never_stepped_is_saved_without_state(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(OURS, use_orig_params=use_orig_params)
        actual = saved(OURS, model, AdamW(model.parameters()))
        assert actual["state"] == {}
        assert set(actual["param_groups"][0]["params"]) == {
            n for n, _ in built().named_parameters()
        }


@on_ranks(2)
def test_a_saved_state_dict_does_not_change_when_training_goes_on(rank: Rank) -> None:
    for use_orig_params in BOTH:
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            model = wrapped(OURS, use_orig_params=use_orig_params, sharding_strategy=strategy)
            optimizer = AdamW(model.parameters(), lr=0.01)
            train(model, optimizer, rank)
            forms = ({}, {"offload_to_cpu": False}, {"kind": "SHARDED"})
            held = [saved(OURS, model, optimizer, **form) for form in forms]
            before = [copy.deepcopy(whole(state["state"])) for state in held]
            train(model, optimizer, rank, (2,))
            for state, values in zip(held, before, strict=True):
                assert_same(whole(state["state"]), values)


@on_ranks(2)
def test_every_tensor_of_a_full_state_dict_has_memory_of_its_own(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(OURS, use_orig_params=use_orig_params)
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        for value in tensors(saved(OURS, model, optimizer)["state"]):
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size()


@on_ranks(2)
def test_state_that_belongs_to_no_parameter_is_saved_as_it_is_with_a_warning(rank: Rank) -> None:
    model = wrapped(OURS, use_orig_params=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    own = optimizer.state_dict()
    own["state"]["schedule"] = {"phase": torch.ones(2)}
    set_form(OURS, model)
    with pytest.warns(UserWarning, match="'schedule'"):
        actual = OURS.FSDP.optim_state_dict(model, optimizer, own)
    assert_same(actual["state"]["schedule"], {"phase": torch.ones(2)})


@on_ranks(2)
def test_state_of_a_shape_of_its_own_may_have_the_size_of_a_slice(rank: Rank) -> None:
    for use_orig_params in BOTH:
        layers = [nn.Linear(4, 2, bias=False), nn.Linear(2, 9, bias=False)]
        model = nn.Sequential(*(OURS(layer, use_orig_params=use_orig_params) for layer in layers))
        # Each rank has 4 elements of the first weight.
        optimizer = Counting(model.parameters(), is_rich=True, num_past=4)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert next(model[0].parameters()).numel() == 4
        for state in saved(OURS, model, optimizer)["state"].values():
            assert_same(state["history"], torch.arange(4.0))


# Mistakes


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused_on_every_rank(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(OURS, use_orig_params=use_orig_params)
        own = AdamW(model.parameters(), lr=0.01)
        train(model, own, rank)
        foreign = AdamW(built().parameters(), lr=0.01)
        # On one rank only: the other must hear of it.
        optimizer = foreign if rank.rank == 1 else own
        with pytest.raises(KeyError, match=r"parameter 0.*shape") as caught:
            saved(OURS, model, optimizer)
        assert isinstance(caught.value, UnknownNameError)
        assert ("rank 1" in str(caught.value)) == (rank.rank == 0)
        assert saved(OURS, model, own)["state"]


@on_ranks(2)
def test_a_model_without_wrappers_is_refused(rank: Rank) -> None:
    model = built()
    with pytest.raises(ValueError, match=r"Net: .*FullyShardedDataParallel"):
        OURS.FSDP.optim_state_dict(model, AdamW(model.parameters()))


@on_ranks(2)
def test_numbers_that_differ_between_ranks_are_refused_by_name(rank: Rank) -> None:
    model = wrapped(OURS, use_orig_params=True, nested=False)
    optimizer = Counting(model.parameters())
    train(model, optimizer, rank)
    split = [p for p in model.parameters() if p in optimizer.state]
    for param in split:
        optimizer.state[param]["calls"] = 10 + rank.rank
    with pytest.raises(DisagreementError, match=r"first\.bias: .*'calls'.*10, 11"):
        saved(OURS, model, optimizer)


# Parts of a model


@on_ranks(2)
def test_a_part_of_a_model_may_have_an_optimizer_of_its_own(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(OURS, use_orig_params=use_orig_params)
        optimizer = AdamW(model.second.parameters(), lr=0.01)
        train(model, optimizer, rank)
        inner = saved(OURS, model.second, optimizer)["state"]
        assert set(inner) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        outer = saved(OURS, model, optimizer)["state"]
        assert_same(outer, {f"second.{name}": state for name, state in inner.items()})


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_holds_the_original_parameters(rank: Rank) -> None:
    model = built()
    optimizer = AdamW(model.parameters(), lr=0.01)
    wrapper = OURS(model, use_orig_params=True)
    train(wrapper, optimizer, rank)
    reference = built()
    reference_optim = AdamW(reference.parameters(), lr=0.01)
    train_whole(reference, reference_optim, rank.size)
    assert_same(saved(OURS, wrapper, optimizer), named_state(reference, reference_optim))


@on_ranks(2)
def test_names_are_without_those_of_checkpoint_wrappers(rank: Rank) -> None:
    model = built()
    model.second = OURS(checkpoint_wrapper(model.second), use_orig_params=True)
    model = OURS(model, use_orig_params=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    assert set(saved(OURS, model, optimizer)["state"]) == {n for n, _ in built().named_parameters()}


@on_ranks(1, 4)
def test_where_nothing_is_split_the_state_is_whole_in_every_form(rank: Rank) -> None:
    mesh = rank.mesh((rank.size, 1), ("replicate", "shard"))
    for use_orig_params in BOTH:
        model = wrapped(
            OURS,
            use_orig_params=use_orig_params,
            sharding_strategy="HYBRID_SHARD",
            device_mesh=mesh,
        )
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        reference = built()
        reference_optim = AdamW(reference.parameters(), lr=0.01)
        train_whole(reference, reference_optim, rank.size)
        expected = named_state(reference, reference_optim)["state"]
        for kind in ("FULL", "SHARDED"):
            assert_same(saved(OURS, model, optimizer, kind)["state"], expected)

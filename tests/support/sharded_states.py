"""Small models in every sharded form, their state dicts of every kind, and how they compare."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard import CPUOffloadPolicy, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.optim import Muon
from fullshard.testing import Rank
from tests.support.wrapped import OURS, TORCH, are_close

BOTH = (False, True)
Make = Callable[[nn.Module], Optimizer]


class Net(nn.Module):
    """Uneven over 2 and over 4 ranks; on 4 ranks some have no element of some parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.second = nn.Sequential(nn.Linear(7, 3), nn.LayerNorm(3))
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.last = nn.Linear(3, 2, bias=False)
        self.register_buffer("offset", torch.linspace(0.0, 1.0, 2))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)) * self.gain) + self.offset


class MatrixNet(nn.Module):
    """Has matrices only, for Muon."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 7, bias=False)
        self.second = nn.Linear(7, 3, bias=False)
        self.last = nn.Linear(3, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x)))


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


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda m: AdamW(m.parameters(), lr=0.01, amsgrad=True),
    "momentum": lambda m: SGD(m.parameters(), lr=0.1, momentum=0.9),
    "plain": lambda m: SGD(m.parameters(), lr=0.1),
    "adagrad": lambda m: Adagrad(m.parameters(), lr=0.1),
    "counting": lambda m: Counting(m.parameters()),
    "muon": lambda m: Muon(m.parameters(), lr=0.001),
    "rich": lambda m: Counting(m.parameters(), is_rich=True),
}


# Forms


@dataclass(frozen=True, slots=True)
class Form:
    """A way to shard a model: `fully_shard`, or the wrapper, with these options."""

    options: dict[str, Any] = field(default_factory=dict)
    is_wrapper: bool = True
    is_nested: bool = True
    torch_has_it: bool = True

    @property
    def mesh(self) -> Any:
        return self.options.get("device_mesh", self.options.get("mesh"))

    @property
    def is_sharded(self) -> bool:
        return self.options.get("sharding_strategy") != "NO_SHARD"

    def shard(self, model: Any, api: Any = OURS) -> Any:
        """The second layer may be a unit of its own."""
        if self.is_wrapper:
            if self.is_nested:
                model.second = api(model.second, **self.options)
            return api(model, **self.options)
        shard = fully_shard if api is OURS else torch_fully_shard
        if self.is_nested:
            shard(model.second, **self.options)
        shard(model, **self.options)
        return model


def forms(rank: Rank) -> dict[str, Form]:
    """On 4 ranks. They differ in where every element lies."""
    mesh, hybrid_mesh = rank.mesh(), rank.mesh((2, 2), ("replicate", "shard"))
    originals: dict[str, Any] = {"use_orig_params": True}
    hybrid = {"sharding_strategy": "HYBRID_SHARD", "device_mesh": hybrid_mesh}
    whole = {"sharding_strategy": "NO_SHARD"}
    offloaded = {"sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True}
    kept = {"mesh": mesh, "offload_policy": CPUOffloadPolicy(), "reshard_after_forward": False}
    return {
        "fully_shard": Form({"mesh": mesh}, is_wrapper=False),
        "fully_shard hybrid": Form({"mesh": hybrid_mesh}, is_wrapper=False),
        "fully_shard kept": Form(kept, is_wrapper=False, torch_has_it=False),
        "flat": Form(),
        "flat mesh": Form({"device_mesh": mesh}),
        "flat hybrid": Form(hybrid),
        "flat whole": Form(whole),
        "originals": Form(originals),
        "originals mesh": Form({**originals, "device_mesh": mesh}, is_nested=False),
        "originals hybrid": Form({**originals, **hybrid}),
        "originals whole": Form({**originals, **whole}, is_nested=False),
        "originals offloaded": Form({**originals, **offloaded}, torch_has_it=False),
    }


# Kinds of state dicts


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of state dict: of the wrapper with its configuration, or of `torch`'s functions."""

    name: str = "FULL"
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def is_on_rank0_only(self) -> bool:
        is_full_on_host = self.name == "dcp" and len(self.config) == 2
        return is_full_on_host or bool(self.config.get("rank0_only"))


FULL, SHARDED, LOCAL = Kind("FULL"), Kind("SHARDED"), Kind("LOCAL")
WRAPPER_KINDS = [
    FULL,
    Kind("FULL", {"rank0_only": True}),
    Kind("FULL", {"offload_to_cpu": True, "rank0_only": True}),
    Kind("FULL", {"offload_to_cpu": False}),
    SHARDED,
    Kind("SHARDED", {"offload_to_cpu": True}),
    LOCAL,
]
FULLY_SHARD_KINDS = [
    Kind("dcp"),
    Kind("dcp", {"cpu_offload": True}),
    Kind("dcp", {"full_state_dict": True}),
    Kind("dcp", {"full_state_dict": True, "cpu_offload": True}),
]


@contextmanager
def quiet() -> Iterator[None]:
    """Ignore torch's warnings about calls that it makes itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`_get_pg_default_device` will be deprecated")
        warnings.filterwarnings("ignore", "Multiple backends are registered with this")
        warnings.filterwarnings("ignore", "Please use DTensor instead", FutureWarning)
        yield


def set_kind(model: nn.Module, kind: Kind = FULL, api: Any = OURS) -> None:
    """Choose the kind for state dicts of the model and of its optimizers."""
    name = kind.name.capitalize()
    optim_config = dict(kind.config)
    if api is TORCH and kind.name == "FULL":
        # On the CPU torch's class takes a view for a copy, and gathers the next state over it.
        optim_config["offload_to_cpu"] = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "FSDP.state_dict_type.* deprecated", FutureWarning)
        api.FSDP.set_state_dict_type(
            model,
            api.api.StateDictType[f"{kind.name}_STATE_DICT"],
            getattr(api.api, f"{name}StateDictConfig")(**kind.config),
            getattr(api.api, f"{name}OptimStateDictConfig")(**optim_config),
        )


def saved_optim(model: nn.Module, optimizer: Any, kind: Kind = FULL, api: Any = OURS) -> Any:
    """`optim_state_dict` of a wrapped model."""
    set_kind(model, kind, api)
    with quiet():
        return api.FSDP.optim_state_dict(model, optimizer)


@dataclass(slots=True)
class Trainee:
    """A model and its optimizer, sharded in a form by an API; None: not sharded."""

    model: Any
    optimizer: Any
    form: Form | None
    api: Any = OURS

    @classmethod
    def of(
        cls,
        form: Form | None,
        build: Callable[[], Any] = Net,
        make: Make = OPTIMIZERS["adamw"],
        *,
        api: Any = OURS,
        seed: int = 0,
    ) -> Trainee:
        model = built(build, seed)
        if form is not None:
            model = form.shard(model, api)
        return cls(model, make(model), form, api)

    def train(self, rank: Rank, steps: Iterable[int] = (0, 1)) -> Trainee:
        """Train on the batch of this rank; an unsharded model trains on the batches of all."""
        if self.form is None:
            train_whole(self.model, self.optimizer, rank.size, steps)
        else:
            train(self.model, self.optimizer, rank, steps)
        return self

    def saved(self, kind: Kind) -> tuple[Any, Any]:
        """The state dicts of the model and of the optimizer."""
        with warnings.catch_warnings():
            if self.form is None or not self.form.is_sharded:
                warnings.filterwarnings("ignore", ".*full_state_dict will be returned", UserWarning)
            if self.api is TORCH:
                warnings.simplefilter("ignore")
            if kind.name == "dcp":
                options = StateDictOptions(**kind.config)
                optim = get_optimizer_state_dict(self.model, self.optimizer, options=options)
                return dict(get_model_state_dict(self.model, options=options)), dict(optim)
            optim = saved_optim(self.model, self.optimizer, kind, self.api)
            return dict(self.model.state_dict()), optim

    def load(self, model_state: Any, optim_state: Any, kind: Kind) -> None:
        assert self.form is not None
        if not self.form.is_wrapper:
            is_full = kind.name == "FULL" or "full_state_dict" in kind.config
            is_first = kind.is_on_rank0_only
            options = StateDictOptions(full_state_dict=is_full, broadcast_from_rank0=is_first)
            set_model_state_dict(self.model, model_state, options=options)
            set_optimizer_state_dict(self.model, self.optimizer, optim_state, options=options)
            return
        if kind.name == "dcp":
            full = Kind("FULL", {"rank0_only": kind.is_on_rank0_only})
            kind = full if "full_state_dict" in kind.config else SHARDED
        result = self.model.load_state_dict(model_state)
        assert not result.missing_keys
        assert not result.unexpected_keys
        set_kind(self.model, kind)
        load_optim(self.model, self.optimizer, optim_state)


def load_optim(model: nn.Module, optimizer: Any, state_dict: Any, **options: Any) -> Any:
    result = OURS.FSDP.optim_state_dict_to_load(model, optimizer, state_dict, **options)
    optimizer.load_state_dict(result)
    return result


# Models


def built(kind: Callable[[], Any] = Net, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return kind()


def wrapped(
    kind: Callable[[], Any] = Net,
    *,
    api: Any = OURS,
    seed: int = 0,
    nested: bool = True,
    **options: Any,
) -> Any:
    return Form(options, is_nested=nested).shard(built(kind, seed), api)


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(100 * step + rank))


def train(model: nn.Module, optimizer: Any, rank: Rank, steps: Iterable[int] = (0, 1)) -> None:
    for step in steps:
        model(batch(step, rank.rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def train_whole(
    model: nn.Module, optimizer: Any, num_ranks: int, steps: Iterable[int] = (0, 1)
) -> None:
    """Do what `train` on all ranks does, on one unsharded model."""
    for step in steps:
        for rank in range(num_ranks):
            (model(batch(step, rank)).square().mean() / num_ranks).backward()
        optimizer.step()
        optimizer.zero_grad()


# Comparison


def named_state(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """The optimizer state dict of an unsharded model, by name."""
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


def by_set(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Drop the order of the parameters in their groups, which follows the wrapping."""
    groups = [{**g, "params": sorted(g["params"])} for g in state_dict["param_groups"]]
    return {**state_dict, "param_groups": groups}


def gathered(value: Any) -> Any:
    """Gather the values of all ranks into every tensor."""
    if isinstance(value, dict):
        return {key: gathered(inner) for key, inner in value.items()}
    if isinstance(value, DTensor):
        return full_tensor(value)
    if isinstance(value, ShardedTensor):
        empty = torch.empty(0, dtype=value.metadata().tensor_properties.dtype)
        sent = torch.cat([empty, *(shard.tensor.flatten() for shard in value.local_shards())])
        received: list[Any] = [None] * dist.get_world_size(value._process_group)
        dist.all_gather_object(received, sent, group=value._process_group)
        return torch.cat(received).view(value.metadata().size)
    return value


def snapshot(state: Any) -> Any:
    return copy.deepcopy(gathered(state))


def assert_same(actual: Any, expected: Any, what: str = "state", *, ordered: bool = False) -> None:
    """Check for the same keys, kinds of values and pieces on this rank, and for close values."""
    if isinstance(expected, dict):
        assert isinstance(actual, dict), what
        keys, others = list(actual), list(expected)
        if not ordered:
            keys, others = sorted(keys, key=str), sorted(others, key=str)
        assert keys == others, what
        for key, value in expected.items():
            assert_same(actual[key], value, f"{what}[{key!r}]", ordered=ordered)
    elif isinstance(expected, list):
        assert len(actual) == len(expected), f"{what}: {actual} against {expected}"
        for index, value in enumerate(expected):
            assert_same(actual[index], value, f"{what}[{index}]")
    elif isinstance(expected, ShardedTensor):
        assert isinstance(actual, ShardedTensor), what
        assert actual.metadata().shards_metadata == expected.metadata().shards_metadata, what
        assert actual.metadata().size == expected.metadata().size, what
        for mine, other in zip(actual.local_shards(), expected.local_shards(), strict=True):
            assert mine.metadata.shard_offsets == other.metadata.shard_offsets, what
            assert_same(mine.tensor, other.tensor, what)
    elif isinstance(expected, Tensor):
        assert isinstance(actual, DTensor) == isinstance(expected, DTensor), f"{what}: {actual}"
        assert actual.dtype == expected.dtype, what
        if isinstance(expected, DTensor):
            assert actual.placements == expected.placements, what
            assert actual.device_mesh == expected.device_mesh, what
            assert (actual.shape, actual.stride()) == (expected.shape, expected.stride()), what
            actual, expected = actual.to_local(), expected.to_local()
        if not are_close(actual, expected):
            torch.testing.assert_close(actual, expected, msg=lambda m: f"{what}: {m}")
    elif isinstance(expected, tuple):  # torch's functions make a list of it
        assert tuple(actual) == expected, what
    else:
        assert type(actual) is type(expected), what
        assert actual == expected, what

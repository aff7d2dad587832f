"""Invalid requests are refused with a message, by an error that torch's callers catch too.

One process simulates a rank of four: nothing here gets as far as a collective.
"""

import copy
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor import Shard as Sharded

from fullshard import (
    ConfigError,
    DataParallelMeshDims,
    FullshardError,
    FullyShardedDataParallel,
    LifecycleError,
    OffloadPolicy,
    TopologyError,
    fully_shard,
    register_fsdp_forward_method,
    share_comm_ctx,
)
from fullshard.api import own_offload
from fullshard.errors import MisuseError, UnsupportedError
from fullshard.testing import Rank, fake_world

WIDTH = 4
Sharder = Callable[..., Any]


@pytest.fixture
def rank() -> Iterator[Rank]:
    with fake_world(4) as simulated:
        yield simulated


def refused(call: Callable[[], object], kind: type[FullshardError], *words: str) -> FullshardError:
    """The error, after a check of its form: what is wrong with what; remedy."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind, type(error)
    message = str(error)
    wrong, remedy = re.split(r"[;.] (?=\S+ )", message)[-2:]
    assert wrong, message
    assert remedy, message
    assert message.endswith("."), message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return error


def model_with_blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


def axes(*sizes: int, names: tuple[str, ...] | None = None) -> DeviceMesh:
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def on_mesh(mesh: DeviceMesh, *placements: Any) -> nn.Linear:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    weight = distribute_tensor(module.weight.detach(), mesh, placements)
    module.weight = nn.Parameter(weight)
    return module


def shard_twice(shard: Sharder, mesh: DeviceMesh) -> None:
    shard(shard(linear(), mesh=mesh), mesh=mesh)


def run_on_meta(shard: Sharder, mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = model_with_blocks()
    shard(model[1], mesh=mesh)
    shard(model, mesh=mesh)
    model(torch.ones(2, WIDTH))


def shard_on_another_root(shard: Sharder, mesh: DeviceMesh) -> None:
    other = axes(2, 2, names=("x", "tensor"))["tensor"]
    shard(on_mesh(other, Sharded(0)), mesh=axes(4, names=("data",)))


Case = tuple[Callable[[Sharder, DeviceMesh], object], type[FullshardError], tuple[str, ...]]
# torch refuses these too, with an exception class that ours derives from.
LIKE_TORCH: dict[str, Case] = {
    "a module list": (
        lambda shard, mesh: shard(nn.ModuleList([linear()]), mesh=mesh),
        ConfigError,
        ("ModuleList", "each of its"),
    ),
    "a module dict": (
        lambda shard, mesh: shard(nn.ModuleDict({"a": linear()}), mesh=mesh),
        ConfigError,
        ("ModuleDict",),
    ),
    "a sharded module": (shard_twice, MisuseError, ("Linear", "once")),
    "a mesh of three axes": (
        lambda shard, mesh: shard(linear(), mesh=axes(2, 2, 1, names=("a", "b", "c"))),
        TopologyError,
        ("mesh", "1D or 2D"),
    ),
    "two axes without names": (
        lambda shard, mesh: shard(linear(), mesh=axes(2, 2)),
        TopologyError,
        ("mesh", "mesh_dim_names"),
    ),
    "a DTensor on another root mesh": (
        shard_on_another_root,
        TopologyError,
        ("weight", "one root mesh"),
    ),
    "a copy": (
        lambda shard, mesh: copy.deepcopy(shard(model_with_blocks(), mesh=mesh)),
        MisuseError,
        ("Sequential", "deepcopy", "state dict"),
    ),
    "parameters on meta": (run_on_meta, LifecycleError, ("on meta device", "to_empty", "0.weight")),
    **{
        f"reshard_after_forward={value!r}": (
            lambda shard, mesh, v=value: shard(linear(), mesh=mesh, reshard_after_forward=v),
            ConfigError,
            ("reshard_after_forward", repr(value)),
        )
        for value in (3, 5, 0, -2, "yes", 2.0)
    },
    **{
        f"placement {value!r}": (
            lambda shard, mesh, v=value: shard(linear(), mesh=mesh, shard_placement_fn=lambda _: v),
            ConfigError,
            ("weight", repr(value)),
        )
        for value in (0, "Shard(0)", Replicate(), (Sharded(0), None))
    },
}


@pytest.mark.parametrize("case", LIKE_TORCH)
def test_what_torch_refuses_is_refused_by_an_error_of_the_same_type(rank: Rank, case: str) -> None:
    call, kind, words = LIKE_TORCH[case]
    error = refused(lambda: call(fully_shard, rank.mesh()), kind, *words)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        call(torch_fully_shard, rank.mesh())
    assert isinstance(error, type(theirs.value)), (type(error).__mro__, repr(theirs.value))


def on_named_axes(cut: bool = False, **dims: str) -> nn.Module:
    mesh = axes(2, 2, names=("data", "tensor"))
    module = on_mesh(mesh, Sharded(0), Replicate()) if cut else linear()
    return fully_shard(module, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))


def placed(dim: int, mesh: DeviceMesh) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    return fully_shard(module, mesh=mesh, shard_placement_fn=lambda _: Sharded(dim))


def sharded(mesh: DeviceMesh) -> Any:
    return fully_shard(linear(), mesh=mesh)


OwnCase = tuple[Callable[[DeviceMesh], object], type[FullshardError], tuple[str, ...]]
REFUSED: dict[str, OwnCase] = {
    "no modules": (lambda mesh: fully_shard([], mesh=mesh), ConfigError, ("empty list",)),
    "a module dict in a list": (
        lambda mesh: fully_shard([linear(), nn.ModuleDict()], mesh=mesh),
        ConfigError,
        ("ModuleDict",),
    ),
    **{
        f"{value!r} as a module{' in a list' * in_list}": (
            lambda mesh, v=value, i=in_list: fully_shard([linear(), v] if i else v, mesh=mesh),
            ConfigError,
            (type(value).__name__,),
        )
        for value in (None, "a name", 3, nn.Linear)
        for in_list in (False, True)
    },
    **{
        f"{value!r} as a mesh": (
            lambda _, v=value: fully_shard(linear(), mesh=v),
            ConfigError,
            (type(value).__name__,),
        )
        for value in ("cpu", 4, (2, 2))
    },
    "a plain parameter where axes are named": (
        lambda _: on_named_axes(shard="data"),
        ConfigError,
        ("weight", "DTensor"),
    ),
    "a parameter cut along a data parallel axis": (
        lambda _: on_named_axes(cut=True, shard="data"),
        ConfigError,
        ("weight", "data"),
    ),
    "an unknown axis": (
        lambda _: on_named_axes(shard="date"),
        TopologyError,
        ("date", "tensor"),
    ),
    "named axes of a mesh without names": (
        lambda _: fully_shard(
            linear(), mesh=axes(4), dp_mesh_dims=DataParallelMeshDims(shard="data")
        ),
        TopologyError,
        ("mesh_dim_names",),
    ),
    "no axes": (lambda _: DataParallelMeshDims(), ConfigError, ("shard", "replicate")),
    "dim 2": (lambda mesh: placed(2, mesh), UnsupportedError, ("weight", "dim 2", "2D")),
    "dim -3": (lambda mesh: placed(-3, mesh), UnsupportedError, ("weight", "dim -3", "2D")),
    "a setter's string": (
        lambda mesh: sharded(mesh).set_reshard_after_forward("yes"),
        ConfigError,
        ("yes",),
    ),
    "a setter's number": (
        lambda mesh: sharded(mesh).set_reshard_after_forward(3),
        ConfigError,
        ("3", "[1, 2, 4]"),
    ),
    "no reduce buffers": (
        lambda mesh: sharded(mesh).set_reduce_scatter_max_input_buffers(0),
        ConfigError,
        ("0",),
    ),
    "an unknown method": (
        lambda mesh: register_fsdp_forward_method(sharded(mesh), "encode"),
        ConfigError,
        ("encode",),
    ),
    "streams of an unsharded module": (
        lambda _: share_comm_ctx([linear()]),
        ConfigError,
        ("Linear",),
    ),
    "symmetric memory on a CPU": (
        lambda mesh: sharded(mesh).set_symm_mem_for_comm(),
        UnsupportedError,
        ("cpu",),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused(rank: Rank, case: str) -> None:
    call, kind, words = REFUSED[case]
    refused(lambda: call(rank.mesh()), kind, *words)


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def test_a_module_list_that_has_a_forward_is_taken(rank: Rank) -> None:
    sharded = fully_shard(ListWithForward([nn.Linear(WIDTH, WIDTH)]), mesh=rank.mesh())
    assert sharded(torch.ones(1, WIDTH)).shape == (1, WIDTH)


def test_a_refused_module_is_left_as_it_was(rank: Rank) -> None:
    model = model_with_blocks()
    parameters = list(model.parameters())
    for bad in (
        {"mesh": rank.mesh(), "reshard_after_forward": 3},
        {"mesh": rank.mesh(), "shard_placement_fn": lambda _: Sharded(5)},
        {"mesh": "cpu"},
    ):
        with pytest.raises(ConfigError):
            fully_shard(model, **bad)
        assert type(model) is nn.Sequential
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not model._forward_pre_hooks
    fully_shard(model, mesh=rank.mesh())


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with fake_world(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        refused(lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh), TopologyError, "rank (3)")


def test_a_process_group_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    assert "RANK" not in os.environ
    assert not dist.is_initialized()
    error = refused(
        lambda: fully_shard(nn.Linear(WIDTH, WIDTH)),
        TopologyError,
        "fully_shard",
        "RANK",
        "torchrun",
        "init_process_group",
    )
    assert isinstance(error, ValueError)  # what init_process_group raises without RANK
    assert not dist.is_initialized()


def test_an_unknown_setting_is_refused_and_changes_nothing(rank: Rank) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    before = module._units(recurse=True)[0].settings

    def enter() -> None:
        with module.settings(reshard_after_backward=False, reshard_after_backwards=False):
            raise AssertionError("the scope must not be entered")

    refused(enter, ConfigError, "reshard_after_backwards", "reshard_after_backward")
    assert module._units(recurse=True)[0].settings == before


@pytest.mark.parametrize("value", [1.5, True, "2"])
def test_the_number_of_reduce_buffers_must_be_a_number(rank: Rank, value: Any) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    with pytest.raises(TypeError, match=r"must be an int, got .*; pass"):
        module.set_reduce_scatter_max_input_buffers(value)


@pytest.mark.parametrize(
    "setter", ["set_modules_to_forward_prefetch", "set_modules_to_backward_prefetch"]
)
def test_a_prefetch_list_holds_sharded_modules(rank: Rank, setter: str) -> None:
    for make in (fully_shard, torch_fully_shard):
        model = model_with_blocks()
        make(model[0], mesh=rank.mesh())
        make(model, mesh=rank.mesh())
        if make is fully_shard:
            error = refused(lambda m=model: getattr(m, setter)([m[1]]), ConfigError, "Linear")
        else:
            with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
                getattr(model, setter)([model[1]])
    assert isinstance(error, type(theirs.value)), repr(theirs.value)


# Calls at the wrong time


class ReshardsItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.reshard()
        return self.linear(x)


def test_resharding_while_the_module_computes_is_refused(rank: Rank) -> None:
    model = fully_shard(ReshardsItself(), mesh=rank.mesh())
    refused(lambda: model(torch.ones(2, WIDTH)), LifecycleError, "ReshardsItself", "forward")


def test_resharding_in_the_modules_backward_is_refused(rank: Rank) -> None:
    model = model_with_blocks()
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh())
    caught: list[Exception] = []

    def hook(grad: torch.Tensor) -> None:
        try:
            model[1].reshard()
        except LifecycleError as error:
            caught.append(error)

    output = model[1](torch.ones(2, WIDTH, requires_grad=True))
    output.register_hook(hook)
    output.grad_fn.register_prehook(lambda grads: hook(grads[0]))
    output.sum().backward()
    assert len(caught) == 1, "before the gradient reaches the module nothing speaks against it"
    refused(lambda: _raise(caught[0]), LifecycleError, "backward")


def _raise(error: Exception) -> None:
    raise error


def test_unsharding_what_backward_is_done_with_is_refused(rank: Rank) -> None:
    model = model_with_blocks()
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh())
    model(torch.ones(2, WIDTH)).sum().backward()
    hidden: list[torch.Tensor] = []
    model[0].register_forward_hook(lambda _, args, output: hidden.append(output))
    caught: list[Exception] = []

    def hook(grads: Any) -> None:
        try:
            model[1].unshard()
        except LifecycleError as error:
            caught.append(error)

    output = model(torch.ones(2, WIDTH))
    hidden[0].grad_fn.register_prehook(hook)
    output.sum().backward()
    assert len(caught) == 1
    refused(lambda: _raise(caught[0]), LifecycleError, "1: unshard()", "after backward")


def test_reset_iter_state_below_the_root_is_refused(rank: Rank) -> None:
    model = model_with_blocks()
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    model(torch.ones(2, WIDTH))
    refused(model[0].reset_iter_state, LifecycleError, "root")


def test_a_model_with_a_sharded_part_is_not_copied_either(rank: Rank) -> None:
    model = model_with_blocks()
    fully_shard(model[1], mesh=rank.mesh())
    refused(lambda: copy.deepcopy(model), MisuseError, "FSDPLinear", "deepcopy")


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.during: Callable[[], object] = int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.during()
        return self.encode(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def fails_with(module: nn.Module) -> None:
    raise RuntimeError(f"not of {type(module).__name__}")


def noted(call: Callable[[], object]) -> str:
    """The notes of an error that ends the program."""
    with pytest.raises(RuntimeError) as caught:
        call()
    sys.excepthook(caught.type, caught.value, caught.tb)
    return "".join(getattr(caught.value, "__notes__", ()))


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_submodule_that_is_called_outside_forward_is_named(
    rank: Rank, api: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if api == "wrapper":
        model = FullyShardedDataParallel(Encoder(), use_orig_params=True, device_mesh=rank.mesh())
        inside: Any = model.module
    else:
        model = inside = fully_shard(Encoder(), mesh=rank.mesh())
    x = torch.ones(2, WIDTH)
    found = noted(lambda: inside.inner(x))
    assert "Linear was called with shards" in found
    owner = "FullyShardedDataParallel" if api == "wrapper" else "Encoder"
    assert f"belong to {owner}" in found
    if api == "fully_shard":
        assert "register_fsdp_forward_method(module, 'encode')" in noted(lambda: inside.encode(x))
        inside.during = inside.state_dict
        assert "call state_dict(), reshard() and the like after" in noted(lambda: model(x))
        inside.during = int
    # Errors while parameters are gathered, or elsewhere, have other reasons.
    assert noted(lambda: fails_with(inside.inner)) == ""
    assert noted(lambda: model(torch.ones(2, WIDTH + 1))) == ""
    assert model(x).shape == x.shape


def test_a_shard_replaced_by_a_plain_tensor_is_refused(rank: Rank) -> None:
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    model(torch.ones(2, WIDTH)).sum().backward()
    model.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    refused(lambda: model(torch.ones(2, WIDTH)), ConfigError, "weight", "DTensor", "Parameter")


def test_an_offload_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be an OffloadPolicy, not True; pass CPU"):
        own_offload(True)
    assert own_offload(torch_fsdp.OffloadPolicy()) == OffloadPolicy()

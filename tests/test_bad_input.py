"""What cannot be done is refused, in words, by an error that torch's callers catch too.

One process plays a rank of a fake world: nothing here gets as far as a collective.
"""

import copy
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fullshard import (
    ConfigError,
    DataParallelMeshDims,
    FullshardError,
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
Door = Callable[..., Any]


@pytest.fixture
def rank() -> Iterator[Rank]:
    with fake_world(4) as played:
        yield played


def refused(call: Callable[[], object], kind: type[FullshardError], *words: str) -> FullshardError:
    """The error, after a look at its form: subject: expected, found ...; remedy."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert type(error) is kind, type(error)
    message = str(error)
    subject, _, rest = message.partition(": ")
    assert subject, message
    assert "found" in rest, message
    assert ";" in rest, message
    assert rest.index("found") < rest.rindex(";"), message
    assert message.endswith("."), message
    for word in words:
        assert word in message, f"{word!r} is not in {message!r}"
    return error


def refused_like_torch(
    call: Callable[[Door], object], kind: type[FullshardError], *words: str
) -> None:
    """Ours is an instance of what torch's door raises in the same case."""
    error = refused(lambda: call(fully_shard), kind, *words)
    with pytest.raises(Exception) as theirs:  # noqa: PT011 - whatever it is
        call(torch_fully_shard)
    assert isinstance(error, type(theirs.value)), (type(error).__mro__, repr(theirs.value))


def model_with_blocks() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


# Modules


def test_a_module_list_is_refused(rank: Rank) -> None:
    modules = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
    refused_like_torch(
        lambda door: door(modules, mesh=rank.mesh()), ConfigError, "ModuleList", "each of its"
    )


def test_a_module_dict_is_refused(rank: Rank) -> None:
    modules = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH)})
    refused_like_torch(lambda door: door(modules, mesh=rank.mesh()), ConfigError, "ModuleDict")
    given = [nn.Linear(2, 2), modules]
    refused(lambda: fully_shard(given, mesh=rank.mesh()), ConfigError, "ModuleDict")


class ListWithForward(nn.ModuleList):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self:
            x = module(x)
        return x


def test_a_module_list_that_has_a_forward_is_taken(rank: Rank) -> None:
    sharded = fully_shard(ListWithForward([nn.Linear(WIDTH, WIDTH)]), mesh=rank.mesh())
    assert sharded(torch.ones(1, WIDTH)).shape == (1, WIDTH)


@pytest.mark.parametrize("thing", [None, "a name", 3, torch.ones(2), nn.Linear])
def test_things_that_are_no_modules_are_refused(rank: Rank, thing: Any) -> None:
    for given in (thing, [nn.Linear(2, 2), thing]):
        kind = type(thing).__name__
        refused(lambda given=given: fully_shard(given, mesh=rank.mesh()), ConfigError, kind)


def test_an_empty_list_is_refused(rank: Rank) -> None:
    refused(lambda: fully_shard([], mesh=rank.mesh()), ConfigError, "empty list")


def test_a_module_is_sharded_once(rank: Rank) -> None:
    def twice(door: Door) -> None:
        module = door(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
        door(module, mesh=rank.mesh())

    refused_like_torch(twice, MisuseError, "Linear", "once")


def test_a_refused_module_is_left_as_it_was(rank: Rank) -> None:
    model = model_with_blocks()
    parameters = list(model.parameters())
    for bad in (
        {"mesh": rank.mesh(), "reshard_after_forward": 3},
        {"mesh": rank.mesh(), "shard_placement_fn": lambda _: Shard(5)},
        {"mesh": "cpu"},
    ):
        with pytest.raises(ConfigError):
            fully_shard(model, **bad)
        assert type(model) is nn.Sequential
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert not model._forward_pre_hooks
    fully_shard(model, mesh=rank.mesh())


# Meshes


def test_a_mesh_of_three_axes_is_refused(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("a", "b", "c"))
    refused_like_torch(
        lambda door: door(nn.Linear(WIDTH, WIDTH), mesh=mesh), TopologyError, "mesh", "3"
    )


def test_a_mesh_of_two_axes_needs_names(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    refused_like_torch(
        lambda door: door(nn.Linear(WIDTH, WIDTH), mesh=mesh),
        TopologyError,
        "mesh",
        "mesh_dim_names",
    )


@pytest.mark.parametrize("mesh", ["cpu", 4, (2, 2)])
def test_a_mesh_of_the_wrong_type_is_refused(rank: Rank, mesh: Any) -> None:
    refused(
        lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh), ConfigError, type(mesh).__name__
    )


def test_a_rank_outside_the_mesh_is_refused() -> None:
    with fake_world(4, rank=3):
        mesh = DeviceMesh("cpu", [0, 1])
        refused(lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh), TopologyError, "rank (3)")


def test_a_dtensor_on_a_mesh_of_another_root_is_refused(rank: Rank) -> None:
    def shard(door: Door) -> None:
        other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("x", "tensor"))
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("data",))
        module = nn.Linear(WIDTH, WIDTH, bias=False)
        weight = distribute_tensor(module.weight.detach(), other["tensor"], [Shard(0)])
        module.weight = nn.Parameter(weight)
        door(module, mesh=mesh)

    refused_like_torch(shard, TopologyError, "weight", "one root mesh")


def test_a_plain_parameter_with_dp_mesh_dims_is_refused(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="data")
    refused(
        lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, dp_mesh_dims=dims),
        ConfigError,
        "weight",
        "DTensor",
    )


def test_dp_mesh_dims_must_name_axes_of_the_mesh(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    dims = DataParallelMeshDims(shard="date")
    refused(
        lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh, dp_mesh_dims=dims),
        TopologyError,
        "date",
        "tensor",
    )
    nameless = init_device_mesh("cpu", (4,))
    refused(
        lambda: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=nameless, dp_mesh_dims=dims),
        TopologyError,
        "mesh_dim_names",
    )
    refused(DataParallelMeshDims, ConfigError, "shard", "replicate")


def test_a_dtensor_cut_along_a_data_parallel_axis_is_refused(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    weight = distribute_tensor(module.weight.detach(), mesh, [Shard(0), Replicate()])
    module.weight = nn.Parameter(weight)
    dims = DataParallelMeshDims(shard="data")
    refused(
        lambda: fully_shard(module, mesh=mesh, dp_mesh_dims=dims), ConfigError, "weight", "data"
    )


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


# Arguments


@pytest.mark.parametrize("number", [3, 5, 0, -2])
def test_reshard_after_forward_must_divide_the_shard_axis(rank: Rank, number: int) -> None:
    refused_like_torch(
        lambda door: door(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh(), reshard_after_forward=number),
        ConfigError,
        "reshard_after_forward",
        str(number),
        "[1, 2, 4]",
    )


@pytest.mark.parametrize("value", ["yes", 2.0])
def test_reshard_after_forward_of_another_type_is_refused(rank: Rank, value: Any) -> None:
    refused_like_torch(
        lambda door: door(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh(), reshard_after_forward=value),
        ConfigError,
        "reshard_after_forward",
        repr(value),
    )


@pytest.mark.parametrize("value", ["yes", 3])
def test_a_setter_checks_reshard_after_forward_too(rank: Rank, value: Any) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    refused(lambda: module.set_reshard_after_forward(value), ConfigError, str(value))


@pytest.mark.parametrize("dim", [2, -3])
def test_a_placement_on_a_dim_that_is_not_there_is_refused(rank: Rank, dim: int) -> None:
    def place(parameter: nn.Parameter) -> Shard:
        return Shard(dim)

    refused(
        lambda: fully_shard(
            nn.Linear(WIDTH, WIDTH, bias=False), mesh=rank.mesh(), shard_placement_fn=place
        ),
        ConfigError,
        "weight",
        f"Shard({dim})",
        "2 dims",
    )


@pytest.mark.parametrize("nonsense", [0, "Shard(0)", Replicate(), (Shard(0), None)])
def test_a_placement_function_that_returns_nonsense_is_refused(rank: Rank, nonsense: Any) -> None:
    refused_like_torch(
        lambda door: door(
            nn.Linear(WIDTH, WIDTH), mesh=rank.mesh(), shard_placement_fn=lambda _: nonsense
        ),
        ConfigError,
        "weight",
        "Shard(0)",
    )


def test_an_unknown_setting_is_refused_and_changes_nothing(rank: Rank) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    before = module._units(recurse=True)[0].settings

    def enter() -> None:
        with module.settings(reshard_after_backward=False, reshard_after_backwards=False):
            raise AssertionError("the scope must not be entered")

    refused(enter, ConfigError, "reshard_after_backwards", "reshard_after_backward")
    assert module._units(recurse=True)[0].settings == before


@pytest.mark.parametrize("value", [0, -1])
def test_the_number_of_reduce_buffers_must_be_positive(rank: Rank, value: int) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    refused(lambda: module.set_reduce_scatter_max_input_buffers(value), ConfigError, str(value))


@pytest.mark.parametrize("value", [1.5, True, "2"])
def test_the_number_of_reduce_buffers_must_be_a_number(rank: Rank, value: Any) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    with pytest.raises(TypeError, match=r"found .*; pass"):
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


def test_a_method_to_register_must_exist(rank: Rank) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    refused(lambda: register_fsdp_forward_method(module, "encode"), ConfigError, "encode")


def test_only_sharded_modules_share_streams(rank: Rank) -> None:
    refused(lambda: share_comm_ctx([nn.Linear(WIDTH, WIDTH)]), ConfigError, "Linear")


def test_symmetric_memory_needs_cuda(rank: Rank) -> None:
    module = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    refused(module.set_symm_mem_for_comm, UnsupportedError, "cpu")


# Calls at the wrong time


def test_parameters_on_meta_are_refused_at_the_first_forward(rank: Rank) -> None:
    def run(door: Door) -> None:
        with torch.device("meta"):
            model = model_with_blocks()
        door(model[1], mesh=rank.mesh())
        door(model, mesh=rank.mesh())
        model(torch.ones(2, WIDTH))

    refused_like_torch(run, LifecycleError, "on meta", "to_empty", "0.weight")


def test_after_the_refusal_a_model_on_meta_can_be_given_values(rank: Rank) -> None:
    with torch.device("meta"):
        model = model_with_blocks()
    fully_shard(model[1], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    with pytest.raises(LifecycleError):
        model(torch.ones(2, WIDTH))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert model(torch.ones(2, WIDTH)).shape == (2, WIDTH)


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


def test_a_sharded_model_is_not_copied_object_by_object(rank: Rank) -> None:
    def copied(door: Door) -> None:
        copy.deepcopy(door(model_with_blocks(), mesh=rank.mesh()))

    refused_like_torch(copied, MisuseError, "Sequential", "deepcopy", "state dict")


def test_a_model_with_a_sharded_part_is_not_copied_either(rank: Rank) -> None:
    model = model_with_blocks()
    fully_shard(model[1], mesh=rank.mesh())
    refused(lambda: copy.deepcopy(model), MisuseError, "FSDPLinear", "deepcopy")


def test_a_shard_replaced_by_a_plain_tensor_is_refused(rank: Rank) -> None:
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=rank.mesh())
    model(torch.ones(2, WIDTH)).sum().backward()
    model.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    refused(lambda: model(torch.ones(2, WIDTH)), ConfigError, "weight", "DTensor", "Parameter")


def test_an_offload_policy_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="an OffloadPolicy is expected, found True; pass CPU"):
        own_offload(True)
    assert own_offload(torch_fsdp.OffloadPolicy()) == OffloadPolicy()

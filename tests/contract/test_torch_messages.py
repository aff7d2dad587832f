"""The words that torch has for a mistake are in our message for the same mistake.

Programs that look for them find them, and `except` clauses for torch's error take ours.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.optim import SGD

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, WIDTH, Package, linear

CPU = torch.device("cpu")
Mistake = Callable[[Package, Rank], object]

# fully_shard


def sharded(package: Package, rank: Rank, module: nn.Module | None = None, **options: Any) -> Any:
    options.setdefault("mesh", rank.mesh())
    return package.package.fully_shard(linear() if module is None else module, **options)


@functools.cache
def hybrid_mesh(names: bool = True) -> DeviceMesh:
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("a", "b") if names else None)


def on_axes(
    package: Package,
    rank: Rank,
    *placements: Any,
    mesh: DeviceMesh | None = None,
    dims: dict[str, str] | None = None,
    **options: Any,
) -> Any:
    """A module whose parameter is placed on a mesh of which the axes of data are named."""
    module, mesh = nn.Linear(WIDTH, WIDTH, bias=False), mesh or hybrid_mesh()
    if placements:
        weight = distribute_tensor(module.weight.detach(), hybrid_mesh(), placements)
        module.weight = nn.Parameter(weight)
    named = package.package.DataParallelMeshDims(**(dims or {"shard": "b"}))
    return sharded(package, rank, module, mesh=mesh, dp_mesh_dims=named, **options)


def train(model: Any) -> Any:
    model(torch.ones(2, WIDTH)).sum().backward()
    return model


def on_meta(package: Package, rank: Rank) -> None:
    with torch.device("meta"):
        model = linear()
    train(sharded(package, rank, model))


def inner_reset(package: Package, rank: Rank) -> None:
    model = train(sharded(package, rank, nn.Sequential(sharded(package, rank), linear())))
    model[0].reset_iter_state()


OF_FULLY_SHARD: dict[str, tuple[Mistake, str]] = {
    "three axes": (
        lambda p, r: sharded(p, r, mesh=init_device_mesh("cpu", (1, 1, 2))),
        "fully_shard expects a 1D or 2D DeviceMesh but got",
    ),
    "no names": (
        lambda p, r: sharded(p, r, mesh=hybrid_mesh(names=False)),
        "init the 2D mesh for HSDP with mesh_dim_names",
    ),
    "a container": (
        lambda p, r: sharded(p, r, nn.ModuleList([linear()])),
        "does not support containers that do not implement forward",
    ),
    "twice": (
        lambda p, r: sharded(p, r, sharded(p, r)),
        "can only be applied to a module once",
    ),
    "no such dim": (
        lambda p, r: sharded(p, r, shard_placement_fn=lambda _: Shard(2)),
        "Shard dim 2 is invalid for 2D tensor",
    ),
    "no placement": (
        lambda p, r: sharded(p, r, shard_placement_fn=lambda _: 3),
        "Invalid shard_placement_fn result: 3",
    ),
    "on meta": (on_meta, "should be materialized from meta device before training"),
    "copied": (lambda p, r: copy.deepcopy(sharded(p, r)), "does not support deepcopy"),
    "reshards to a word": (
        lambda p, r: sharded(p, r, reshard_after_forward="yes"),
        "reshard_after_forward should be a bool or an int",
    ),
    "reshards to three": (
        lambda p, r: sharded(p, r, reshard_after_forward=3),
        "it should be a factor of 2, not 3",
    ),
    "sets a word": (
        lambda p, r: sharded(p, r).set_reshard_after_forward("yes"),
        "reshard_after_forward should be a bool",
    ),
    "no method": (
        lambda p, r: p.package.register_fsdp_forward_method(sharded(p, r), "encode"),
        "does not have a method encode",
    ),
    "shares with a plain module": (
        lambda p, r: p.package.share_comm_ctx([sharded(p, r), linear()]),
        "list of FSDPModules but got",
    ),
    "prefetches a plain module": (
        lambda p, r: sharded(p, r).set_modules_to_forward_prefetch([linear()]),
        "Expects FSDPModule but got",
    ),
    "inner reset": (inner_reset, "reset_iter_state must be called on the root FSDP module"),
    "no axes": (
        lambda p, r: p.package.DataParallelMeshDims(),
        "At least one of shard or replicate must be set",
    ),
    "axes without names": (
        lambda p, r: on_axes(p, r, mesh=r.mesh()),
        "mesh must have mesh_dim_names when dp_mesh_dims is provided",
    ),
    "no such axis": (
        lambda p, r: on_axes(p, r, dims={"shard": "c"}),
        "'c' not found in mesh.mesh_dim_names",
    ),
    "a plain parameter on axes": (
        lambda p, r: on_axes(p, r),
        "all parameters must be DTensors on the full SPMD mesh",
    ),
    "cut along an axis": (
        lambda p, r: on_axes(p, r, Replicate(), Shard(0)),
        "Expected Replicate() on DP shard dim 'b'",
    ),
    "cut along replicas": (
        lambda p, r: on_axes(p, r, Shard(0), Replicate(), dims={"shard": "b", "replicate": "a"}),
        "Expected Replicate() on DP replicate dim 'a'",
    ),
    "a number on axes": (
        lambda p, r: on_axes(p, r, Replicate(), Replicate(), reshard_after_forward=2),
        "reshard_after_forward as int is not yet supported",
    ),
    "another mesh": (
        lambda p, r: on_axes(
            p,
            r,
            Replicate(),
            Replicate(),
            mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("b", "a")),
        ),
        "to be the same mesh passed to fully_shard",
    ),
    "a stream with replicas": (
        lambda p, r: sharded(p, r, mesh=r.mesh((2, 1), ("a", "b"))).set_all_reduce_hook(
            print, stream=object()
        ),
        "stream cannot be set when using native HSDP",
    ),
    "a word as buffers": (
        lambda p, r: sharded(p, r).set_reduce_scatter_max_input_buffers("two"),
        "max_input_buffers must be an int, got str",
    ),
    "no buffers": (
        lambda p, r: sharded(p, r).set_reduce_scatter_max_input_buffers(0),
        "max_input_buffers must be a positive int, got 0",
    ),
}

# The wrapper


def two() -> nn.Sequential:
    return nn.Sequential(linear(), linear())


def tree(package: Package, **options: Any) -> Any:
    """A wrapper in a wrapper, trained once."""
    return train(package(nn.Sequential(package(linear(), **options), linear()), **options))


def kinds(package: Package, name: str) -> Any:
    return getattr(package.package, name)


def set_type(package: Package, kind: str, *configs: str) -> None:
    found = [kinds(package, each)() for each in configs]
    package.FSDP.set_state_dict_type(
        package(linear()), kinds(package, "StateDictType")[kind], *found
    )


def different_types(package: Package, rank: Rank) -> None:
    model, kind = tree(package), kinds(package, "StateDictType")
    package.FSDP.set_state_dict_type(model[0], kind.SHARDED_STATE_DICT)
    package.FSDP.get_state_dict_type(model)


def summoned(package: Package, **options: Any) -> Any:
    return package.FSDP.summon_full_params(tree(package), **options).__enter__()


def summoned_twice(package: Package, rank: Rank) -> None:
    model = package(linear())
    with package.FSDP.summon_full_params(model), package.FSDP.summon_full_params(model):
        pass


def applied_inside(package: Package, rank: Rank) -> None:
    model = package(linear())
    with package.FSDP.summon_full_params(model):
        model.apply(lambda _: None)


def summoned_in_forward(package: Package, rank: Rank) -> None:
    inner = linear()
    model = package(inner)

    def summon(*_: object) -> None:
        with package.FSDP.summon_full_params(model):
            pass

    inner.register_forward_pre_hook(summon)
    train(model)


def hook(state: object, grad: Tensor, shard: Tensor | None = None) -> None:
    """A communication hook."""


def hooked_twice(package: Package, rank: Rank) -> None:
    model = tree(package)
    model.register_comm_hook(None, hook)
    model.register_comm_hook(None, hook)


def wrapped_by_hand_and_policy(package: Package, rank: Rank) -> None:
    package(nn.Sequential(package(linear()), linear()), auto_wrap_policy={nn.Linear})


def nested_wrap(package: Package, rank: Rank) -> None:
    enable_wrap = package.wrap.enable_wrap
    with enable_wrap(wrapper_cls=package.FSDP), enable_wrap(wrapper_cls=package.FSDP):
        pass


def replaced_between(package: Package, rank: Rank) -> None:
    model = package(linear(), use_orig_params=True, sharding_strategy="SHARD_GRAD_OP")
    loss = model(torch.ones(2, WIDTH)).sum()
    for param in model.parameters():
        param.data = param.data.clone()
    loss.backward()
    train(model)


def reshaped(package: Package, rank: Rank) -> None:
    model = package(linear(), use_orig_params=True)
    for param in model.parameters():
        param.data = torch.ones(5, 5)
    train(model)


def local_on_mesh(package: Package, rank: Rank) -> None:
    model, kind = package(linear(), device_mesh=rank.mesh()), kinds(package, "StateDictType")
    with package.FSDP.state_dict_type(model, kind.LOCAL_STATE_DICT):
        model.state_dict()


def whole_of_local(package: Package, rank: Rank) -> None:
    kind = kinds(package, "StateDictType").SHARDED_STATE_DICT
    model = package(linear(), sharding_strategy="NO_SHARD")
    with package.FSDP.state_dict_type(model, kind):
        model.state_dict()


def optimizer_without_state(package: Package, rank: Rank) -> None:
    model = tree(package)
    optimizer = SGD(model.parameters(), lr=0.1)
    package.FSDP.optim_state_dict_to_load(model, optimizer, {"groups": []})


OF_THE_WRAPPER: dict[str, tuple[Mistake, str]] = {
    "group and mesh": (
        lambda p, r: p(linear(), process_group=dist.group.WORLD, device_mesh=r.mesh()),
        "Cannot pass both process_group and device_mesh",
    ),
    "one group for two axes": (
        lambda p, r: p(linear(), process_group=dist.group.WORLD, sharding_strategy="HYBRID_SHARD"),
        "Expected process_group to be passed in as either None or Tuple",
    ),
    "one axis for two": (
        lambda p, r: p(linear(), device_mesh=r.mesh(), sharding_strategy="HYBRID_SHARD"),
        "Expected device_mesh to have ndim=2 but got 1",
    ),
    "a parameter as module": (
        lambda p, r: p(two(), ignored_modules=[nn.Parameter(torch.ones(1))]),
        "ignored_modules expects nn.Module list elements but got types",
    ),
    "a name as state": (
        lambda p, r: p(two(), ignored_states=["0.weight"]),
        "ignored_states expects all nn.Parameter or all nn.Module list elements but got types",
    ),
    "ignores a wrapper": (
        lambda p, r: p(nn.Sequential(m := p(linear())), ignored_modules=[m]),
        "should not include FSDP modules",
    ),
    "ignores itself": (
        lambda p, r: p.FSDP(m := linear(), ignored_modules=[m], device_id=CPU),
        "ignore the top-level module passed into the FSDP constructor itself",
    ),
    "a word as param_init_fn": (
        lambda p, r: p(linear(device="meta"), param_init_fn="zeros"),
        "to be callable but got",
    ),
    "a container": (
        lambda p, r: p.FSDP(nn.ModuleList([linear()]), device_id=CPU),
        "containers that do not implement forward",
    ),
    "another config": (
        lambda p, r: set_type(p, "SHARDED_STATE_DICT", "FullStateDictConfig"),
        "Expected state_dict_config of type",
    ),
    "another config of the optimizer": (
        lambda p, r: set_type(
            p, "FULL_STATE_DICT", "FullStateDictConfig", "ShardedOptimStateDictConfig"
        ),
        "Expected optim_state_dict_config of type",
    ),
    "different types": (
        different_types,
        "All FSDP modules must have the same state dict settings",
    ),
    "applied inside": (applied_inside, "expected to be in states"),
    "no_sync inside": (
        lambda p, r: tree(p)[0].no_sync().__enter__(),
        "on inner FSDP instances is not supported",
    ),
    "clipped inside": (
        lambda p, r: tree(p)[0].clip_grad_norm_(1.0),
        "should only be called on the root FSDP instance",
    ),
    "clipped without gradients": (
        lambda p, r: (m := tree(p), m.zero_grad(), m.clip_grad_norm_(1.0)),
        "with no gradients -- returning the total norm in the default dtype",
    ),
    "hooked inside": (
        lambda p, r: tree(p)[0].register_comm_hook(None, hook),
        "register_comm_hook can only be called on a root instance",
    ),
    "hooked twice": (hooked_twice, "communication hook is already registered"),
    "no hook": (
        lambda p, r: tree(p).register_comm_hook(None, "sum"),
        "The communication hook must be callable but got",
    ),
    "hooked with replicas": (
        lambda p, r: train(
            p(linear(), device_mesh=hybrid_mesh(), sharding_strategy="HYBRID_SHARD")
        ).register_comm_hook(None, hook),
        "Communication hook is not supported for hybrid strategies",
    ),
    "a policy's answer": (
        lambda p, r: p(two(), auto_wrap_policy=p.wrap.CustomPolicy(lambda _: "yes")),
        "should return False/True or a kwarg dict, but it returned",
    ),
    "wraps in wraps": (nested_wrap, "already within an autowrap context"),
    "by hand and by policy": (
        wrapped_by_hand_and_policy,
        "requires modules to not already have FSDP applied but found",
    ),
    "summoned twice": (summoned_twice, "when already unsharding parameters"),
    "summoned in forward": (
        summoned_in_forward,
        "Cannot manually unshard parameters during forward/backward",
    ),
    "written by one rank": (
        lambda p, r: summoned(p, rank0_only=True),
        "writeback=True and rank0_only=True is not supported",
    ),
    "gradients of flat parameters": (
        lambda p, r: summoned(p, with_grads=True),
        "with_grads=True, use_orig_params=False, offload_to_cpu=False is not supported",
    ),
    "offloaded without sharding": (
        lambda p, r: p.FSDP.summon_full_params(
            train(p(linear(), sharding_strategy="NO_SHARD")), offload_to_cpu=True
        ).__enter__(),
        "offload_to_cpu=True and NO_SHARD is not supported",
    ),
    "replaced between": (
        replaced_between,
        "changing the parameters between forward and backward for",
    ),
    "reshaped": (reshaped, "Cannot writeback when the parameter shape changes"),
    "local on a mesh": (local_on_mesh, "DeviceMesh is not compatible with LOCAL_STATE_DICT"),
    "sharded without sharding": (whole_of_local, "full_state_dict will be returned"),
    "an optimizer's state without state": (
        optimizer_without_state,
        "must have the keys",
    ),
    "of one rank": (
        lambda p, r: p.FSDP(
            linear(), process_group=r.mesh((2, 1), ("a", "b")).get_group("b"), device_id=CPU
        ),
        "switching to use `NO_SHARD` instead of ShardingStrategy.FULL_SHARD since the world size",
    ),
}


def said_by(mistake: Mistake, package: Package, rank: Rank) -> tuple[Exception | None, str]:
    """The error of a mistake, and what it and warnings say."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        error = None
        try:
            mistake(package, rank)
        except Exception as raised:
            error = raised
    said = [f"{error}", *(str(each.message) for each in caught)]
    return error, "\n".join(" ".join(each.split()) for each in said)


@on_ranks(2)
def test_a_mistake_is_described_in_words_that_torch_has_for_it(rank: Rank) -> None:
    for name, (mistake, words) in [*OF_FULLY_SHARD.items(), *OF_THE_WRAPPER.items()]:
        theirs, expected = said_by(mistake, TORCH, rank)
        assert words in expected, (name, expected)
        error, found = said_by(mistake, OURS, rank)
        assert words in found, (name, found)
        assert theirs is None or isinstance(error, type(theirs)), (name, theirs, error)

"""Parameters that `spmd_types` annotates, which torch's `fully_shard` knows since 2.14."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import spmd_types as spmd
import torch
import torch.distributed as dist
from spmd_types.checker import typecheck
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fullshard.comm.placement import full_tensor
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, Package

Types = dict[str, Any]
X = torch.arange(8.0).view(2, 4) / 8


@functools.cache
def two_axes() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@functools.cache
def one_axis() -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))


@spmd.register_local_autograd_function
class Summed(torch.autograd.Function):
    """The sum over tensor-parallel ranks, each of which computes the rest of the model."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        summed = x.clone()
        dist.all_reduce(summed, group=two_axes().get_group("tp"))
        return summed

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Parallel(nn.Module):
    """Plain tensors of a tensor-parallel rank, of every kind."""

    TYPES = {"up": spmd.S(0), "down": spmd.S(1), "scale": spmd.R, "shift": spmd.I}  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = slice(3 * (first := two_axes().get_local_rank("tp")), 3 * first + 3)
        self.up = nn.Parameter(torch.randn(6, 4)[own].clone())
        self.down = nn.Parameter(torch.randn(4, 6)[:, own].clone())
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.randn(4))
        for name, param in self.named_parameters():
            annotate(param, {"dp": spmd.R, "tp": self.TYPES[name]})

    def forward(self, x: Tensor) -> Tensor:
        inner = torch.tanh((x * self.scale) @ self.up.T) @ self.down.T
        return Summed.apply(inner) + self.shift


def annotate(param: Tensor, types: Types, mesh: DeviceMesh | None = None) -> None:
    mesh = mesh or two_axes()
    spmd.assert_type(param, {mesh.get_group(axis): kind for axis, kind in types.items()})


def trained(package: Package) -> list[Any]:
    """Losses, gradients and placements, and what modules see of parameters in forward."""
    model = Parallel()
    dims = package.package.DataParallelMeshDims(shard="dp")
    package.package.fully_shard(model, mesh=two_axes(), dp_mesh_dims=dims)
    found: list[Any] = []

    def look(*_: Any) -> None:
        found.append([(type(p), spmd.get_local_type(p)) for p in model.parameters()])

    model.register_forward_pre_hook(look)
    for step in range(2):
        loss = model(X + two_axes().get_local_rank("dp") + step).square().mean()
        loss.backward()
        found.append(loss.detach())
        for param in model.parameters():
            found += [param.placements, full_tensor(param.detach()), full_tensor(param.grad)]
        model.zero_grad()
    return found


@on_ranks(4)
def test_annotated_parameters_train_as_with_torch(rank: Rank) -> None:
    for found, expected in zip(trained(OURS), trained(TORCH), strict=True):
        if isinstance(found, Tensor):
            torch.testing.assert_close(found, expected)
        else:
            assert found == expected


def checked(package: Package) -> Any:
    """The type of an output where types are checked."""
    mesh = one_axis()
    model = nn.Linear(4, 4)
    for param in model.parameters():
        annotate(param, {"dp": spmd.R}, mesh)
    dims = package.package.DataParallelMeshDims(shard="dp")
    package.package.fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    x = X.clone()
    annotate(x, {"dp": spmd.V}, mesh)
    with spmd.set_current_mesh(mesh), typecheck(strict_mode="strict"):
        output = model(x)
    output.sum().backward()
    return spmd.get_local_type(output)


@on_ranks(2)
def test_types_are_checked_as_with_torch(rank: Rank) -> None:
    assert checked(OURS) == checked(TORCH)


MISTAKES: dict[str, tuple[Types, str]] = {
    "not replicated over data": ({"dp": spmd.V, "tp": spmd.R}, "Expected spmd.R on FSDP DP axis"),
    "not on all axes": ({"dp": spmd.R}, "spmd_types annotations that cannot be restored from its "),
    "not on all axes of a mesh": ({"dp": spmd.R}, "incomplete spmd_types annotations for FSDP"),
    "without axes of data": (
        {"dp": spmd.R, "tp": spmd.R},
        "spmd_types parameters require fully_shard() to be called with both",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@on_ranks(4)
def test_a_mistake_in_annotations_is_refused_with_torchs_words(rank: Rank, mistake: str) -> None:
    types, words = MISTAKES[mistake]
    for package in (TORCH, OURS):
        model = nn.Linear(4, 4, bias=False)
        annotate(model.weight, types)
        options: dict[str, Any] = {"mesh": two_axes()["dp"]}
        if mistake != "without axes of data":
            options["mesh"] = two_axes()
            options["dp_mesh_dims"] = package.package.DataParallelMeshDims(shard="dp")
        has_mesh = mistake.endswith("of a mesh")
        current = spmd.set_current_mesh(two_axes()) if has_mesh else nullcontext()
        shard: Callable[..., Any] = package.package.fully_shard
        with current, pytest.raises(ValueError, match="spmd") as error:
            shard(model, **options)
        assert words in str(error.value)

"""Meshes: sharded, replicated and tensor parallel models, or parts on their own mesh, train alike.

Two oracles: the unsharded model, and torch's `fully_shard` on the same mesh.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import DataParallelMeshDims as TorchMeshDims
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    ShardPlacementResult as TorchPlacementResult,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from fullshard import DataParallelMeshDims, ShardPlacementResult, fully_shard
from fullshard.comm.collectives import ShmCollectives
from fullshard.comm.placement import full_tensor
from fullshard.comm.work import CollectiveWork
from fullshard.errors import TopologyError
from fullshard.layout import CostModel
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Trained, Training, assert_same_training, on_ranks

Sharder = Callable[..., Any]


def batch_of_8(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, 8, generator=generator)


def sequences_of_8(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 4, 8, generator=generator)


class Stack(nn.Module):
    """Layers with even, uneven and tiny parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 12)
        self.norm = nn.LayerNorm(12)
        self.second = nn.Linear(12, 7)
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(F.gelu(self.first(x)))
        return self.last(F.gelu(self.second(x))) * self.scale


def shard_stack(shard: Sharder, model: Stack, **options: Any) -> None:
    shard([model.first, model.norm], **options)
    shard(model.second, **options)
    shard(model, **options)


def assert_placed_like_torchs(sharded: nn.Module, torchs: nn.Module) -> None:
    """Names, placements, meshes and strides of all parameters."""
    ours = dict(sharded.named_parameters())
    theirs = dict(torchs.named_parameters())
    assert list(ours) == list(theirs)
    for name, their in theirs.items():
        our = ours[name]
        assert isinstance(our, DTensor), name
        assert isinstance(their, DTensor), name
        assert our.placements == their.placements, name
        assert our.device_mesh == their.device_mesh, name
        assert (our.shape, our.stride()) == (their.shape, their.stride()), name
        assert our.to_local().shape == their.to_local().shape, name
        assert our.to_local().stride() == their.to_local().stride(), name


def assert_trains_like_both(
    build: Callable[[], nn.Module],
    shard: Callable[[Sharder, nn.Module], object],
    training: Training,
) -> Trained:
    """Compare with the unsharded model, then with torch's; return the result of the first."""
    trained = assert_same_training(build, lambda m: shard(fully_shard, m), training)
    beside_torchs = assert_same_training(
        build,
        lambda m: shard(fully_shard, m),
        replace(training, steps=1),
        oracle=lambda m: shard(torch_fully_shard, m),
    )
    assert_placed_like_torchs(beside_torchs.sharded, beside_torchs.reference)
    return trained


def assert_trains_alike_and_is_placed_like_torchs(
    build: Callable[[], nn.Module],
    shard: Callable[[Sharder, nn.Module], object],
    training: Training,
) -> Trained:
    """Compare training with that of the unsharded model, and placements with torch's."""
    trained = assert_same_training(build, lambda m: shard(fully_shard, m), training)
    theirs = build()
    shard(torch_fully_shard, theirs)
    assert_placed_like_torchs(trained.sharded, theirs)
    return trained


# One axis, two axes, one rank


@pytest.mark.sampled(3)
@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)], ids=str)
@on_ranks(4)
def test_one_or_two_axes_train_alike(rank: Rank, shape: tuple[int, ...]) -> None:
    mesh = rank.mesh(shape, ("replicate", "shard")[-len(shape) :])

    def shard(how: Sharder, model: nn.Module) -> None:
        shard_stack(how, model, mesh=mesh)

    trained = assert_trains_like_both(Stack, shard, Training(batch_of_8))
    for parameter in trained.sharded.parameters():
        assert parameter.placements == (Replicate(), Shard(0))[-len(shape) :]


@on_ranks(1)
def test_two_axes_of_one_rank_train_alike(rank: Rank) -> None:
    def shard(how: Sharder, model: nn.Module) -> None:
        shard_stack(how, model, mesh=rank.mesh((1, 1), ("replicate", "shard")))

    training = Training(batch_of_8, steps=2, micro_batches=2)
    trained = assert_trains_alike_and_is_placed_like_torchs(Stack, shard, training)
    for parameter in trained.sharded.parameters():
        assert parameter.to_local().shape == parameter.shape


@on_ranks(2)
def test_without_a_mesh_all_ranks_are_one_axis(rank: Rank) -> None:
    assert fully_shard(Stack()).scale.device_mesh.shape == (2,)


@on_ranks(4)
def test_half_of_the_ranks_can_shard_apart_from_the_others(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("outer", "inner"))["inner"]
    training = Training(batch_of_8, data_mesh=mesh, seed=rank.rank // 2)

    def shard(how: Sharder, model: nn.Module) -> None:
        shard_stack(how, model, mesh=mesh)

    assert_trains_like_both(Stack, shard, training)


# Tensor parallelism


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def tensor_parallel(model: Tower, mesh: DeviceMesh) -> None:
    for block in model.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def shard_tower(shard: Sharder, model: Tower, **options: Any) -> None:
    for block in model.blocks:
        shard(block, **options)
    shard(model, **options)


def last_dim(parameter: nn.Parameter) -> Shard:
    return Shard(parameter.ndim - 1)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("placement_fn", [None, last_dim])
@on_ranks(4)
def test_tensor_parallel_parameters_train_alike(
    rank: Rank, placement_fn: Callable[[nn.Parameter], Shard] | None
) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def shard(how: Sharder, model: nn.Module) -> None:
        tensor_parallel(model, mesh["tp"])
        shard_tower(how, model, mesh=mesh["dp"], shard_placement_fn=placement_fn)

    def sync_last(model: Any, micro_batch: int) -> None:
        model.set_requires_gradient_sync(micro_batch == 1)

    training = Training(batch_of_8, data_mesh=mesh["dp"], micro_batches=2, before_forward=sync_last)
    trained = assert_trains_like_both(Tower, shard, training)
    weight = trained.sharded.blocks[0].up.weight
    assert weight.to_local().shape == ((3, 8) if placement_fn is None else (6, 4))
    assert full_tensor(weight).shape == (12, 8)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("shape", [(2, 1, 2), (1, 2, 2)])
@on_ranks(4)
def test_replicated_sharded_and_tensor_parallel_axes_together(
    rank: Rank, shape: tuple[int, int, int]
) -> None:
    mesh = rank.mesh(shape, ("replicate", "shard", "tp"))
    dp_mesh = mesh["replicate", "shard"]

    def shard(how: Sharder, model: nn.Module) -> None:
        tensor_parallel(model, mesh["tp"])
        shard_tower(how, model, mesh=dp_mesh)

    training = Training(batch_of_8, steps=2, data_mesh=dp_mesh)
    trained = assert_trains_alike_and_is_placed_like_torchs(Tower, shard, training)
    for parameter in trained.sharded.parameters():
        assert parameter.device_mesh.ndim == 3
        assert parameter.placements[0] == Replicate()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.block = Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.norm(x))


@on_ranks(4)
def test_sequence_parallel_norms_whose_gradients_are_partial_sums(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def shard(how: Sharder, model: nn.Module) -> None:
        parallelize_module(
            model,
            mesh["tp"],
            {
                "": PrepareModuleInput(
                    input_layouts=(Replicate(),), desired_input_layouts=(Shard(1),)
                ),
                "norm": SequenceParallel(),
                "block.up": ColwiseParallel(input_layouts=Shard(1)),
                "block.down": RowwiseParallel(),
            },
        )
        how(model.block, mesh=mesh["dp"])
        how(model, mesh=mesh["dp"])

    assert_trains_like_both(Normed, shard, Training(sequences_of_8, data_mesh=mesh["dp"]))


@on_ranks(4)
def test_a_second_mesh_like_the_first_is_a_mesh_of_its_own(rank: Rank) -> None:
    for _ in range(2):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = Tower()
        tensor_parallel(model, mesh["tp"])
        shard_tower(fully_shard, model, mesh=mesh["dp"])
        model(torch.ones(1, 8)).sum().backward()
        for parameter in model.parameters():
            assert full_tensor(parameter.grad).shape == parameter.shape


@on_ranks(4)
def test_a_mesh_that_overlaps_the_parameters_own_axis_is_refused(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    elsewhere = DeviceMesh("cpu", [[0, 2], [1, 3]], mesh_dim_names=("left", "right"))
    for overlapping in (mesh["tp"], rank.mesh((4,), ("all",)), elsewhere["left"]):
        model = Tower()
        tensor_parallel(model, mesh["tp"])
        with pytest.raises(TopologyError, match="slices of one root mesh"):
            fully_shard(model, mesh=overlapping)


# Checkpoints


def tower_on(rank: Rank, kind: str, how: Sharder = fully_shard, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = Tower()
    if kind == "1d":
        shard_tower(how, model, mesh=rank.mesh())
    elif kind == "hsdp":
        shard_tower(how, model, mesh=rank.mesh((2, 2), ("replicate", "shard")))
    elif kind == "tp":
        mesh = rank.mesh((2, 2), ("dp", "tp"))
        tensor_parallel(model, mesh["tp"])
        shard_tower(how, model, mesh=mesh["dp"])
    elif kind == "hsdp+tp":
        mesh = rank.mesh((2, 1, 2), ("replicate", "shard", "tp"))
        tensor_parallel(model, mesh["tp"])
        shard_tower(how, model, mesh=mesh["replicate", "shard"])
    return model


@pytest.mark.exhaustive
@pytest.mark.parametrize("saved", ["hsdp", "tp", "hsdp+tp"])
@on_ranks(4)
def test_a_checkpoint_survives_a_round_trip_and_a_change_of_mesh(
    rank: Rank, saved: str, tmp_path: Path
) -> None:
    torch.manual_seed(7)
    expected = Tower().state_dict()
    for source, folder in ((fully_shard, "ours"), (torch_fully_shard, "torchs")):
        state = {"model": tower_on(rank, saved, source, seed=7).state_dict()}
        dcp.save(state, checkpoint_id=tmp_path / folder)
    for kind, how, folder in [
        (saved, fully_shard, "ours"),
        ("1d", fully_shard, "ours"),
        ("tp", fully_shard, "ours"),
        (saved, torch_fully_shard, "ours"),
        (saved, fully_shard, "torchs"),
    ]:
        target = tower_on(rank, kind, how, seed=8)
        state = {"model": target.state_dict()}
        dcp.load(state, checkpoint_id=tmp_path / folder)
        target.load_state_dict(state["model"])
        for name, parameter in target.named_parameters():
            torch.testing.assert_close(full_tensor(parameter), expected[name], rtol=0, atol=0)
        assert target(torch.ones(1, 8)).shape == (1, 8)


@on_ranks(2)
def test_a_checkpoint_of_uneven_inner_dims_survives_a_round_trip(
    rank: Rank, tmp_path: Path
) -> None:
    def make(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7))
        return fully_shard(model, shard_placement_fn=lambda parameter: Shard(-1))

    torch.manual_seed(7)
    expected = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 7)).state_dict()
    dcp.save({"model": make(7).state_dict()}, checkpoint_id=tmp_path)
    target = make(8)
    dcp.load({"model": target.state_dict()}, checkpoint_id=tmp_path)
    for name, parameter in target.named_parameters():
        torch.testing.assert_close(full_tensor(parameter), expected[name], rtol=0, atol=0)


# Parameters that are DTensors on the full mesh


class Spmd(nn.Module):
    """A model that, once it is given a mesh, computes in DTensors on all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 5, bias=False)
        self.mesh: DeviceMesh | None = None
        self.placements: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mesh is None:
            return self.down(F.gelu(self.up(x)))
        on_mesh = DTensor.from_local(x, self.mesh, self.placements, run_check=False)
        y = self.down(F.gelu(self.up(on_mesh)))
        return y.redistribute(placements=self.placements).to_local()


def distribute_spmd(model: Spmd, mesh: DeviceMesh, tp: str | None) -> None:
    """Data-parallel axes replicate the weights and cut the batch; `tp` cuts the hidden dim."""
    names = mesh.mesh_dim_names
    assert names is not None

    def distribute(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        cut = {"up": Shard(0), "down": Shard(1)}.get(name)
        for parameter_name, parameter in list(module.named_parameters(recurse=False)):
            placements = [cut if axis == tp else Replicate() for axis in names]
            whole = distribute_tensor(parameter, mesh, placements)
            module.register_parameter(parameter_name, nn.Parameter(whole))

    distribute_module(model, mesh, distribute)
    model.mesh = mesh
    model.placements = [Replicate() if axis == tp else Shard(0) for axis in names]


@pytest.mark.parametrize(
    "shape, tp, dims",
    [
        ((2, 2), "b", {"shard": "a"}),
        ((2, 2), None, {"shard": "a", "replicate": "b"}),
        pytest.param(
            (1, 2, 2), "c", {"shard": "b", "replicate": "a"}, marks=pytest.mark.exhaustive
        ),
        ((2, 1, 2), None, {"shard": ("b", "c"), "replicate": "a"}),
        ((2, 2), "b", {"replicate": "a"}),
        ((2, 2), None, {"replicate": ("a", "b")}),
    ],
)
@on_ranks(4)
def test_named_axes_of_a_full_mesh_are_data_parallel(
    rank: Rank, shape: tuple[int, ...], tp: str | None, dims: dict[str, Any]
) -> None:
    names = ("a", "b", "c")[: len(shape)]
    mesh = rank.mesh(shape, names)
    data_names = tuple(name for name in names if name != tp)

    def shard(how: Sharder, model: nn.Module) -> None:
        kind = DataParallelMeshDims if how is fully_shard else TorchMeshDims
        distribute_spmd(model, mesh, tp)
        how(model.up, mesh=mesh, dp_mesh_dims=kind(**dims))
        how(model, mesh=mesh, dp_mesh_dims=kind(**dims))

    training = Training(batch_of_8, steps=2, data_mesh=mesh[data_names])
    assert_trains_alike_and_is_placed_like_torchs(Spmd, shard, training)


@pytest.mark.exhaustive
@on_ranks(4)
def test_named_axes_shard_the_dim_that_is_asked_for(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def shard(how: Sharder, model: nn.Module) -> None:
        kind = DataParallelMeshDims if how is fully_shard else TorchMeshDims
        distribute_spmd(model, mesh, "tp")
        how(
            model,
            mesh=mesh,
            dp_mesh_dims=kind(shard="dp"),
            shard_placement_fn=lambda p: Shard(1) if p.shape == (12, 8) else None,
        )

    training = Training(batch_of_8, steps=2, data_mesh=mesh["dp"])
    trained = assert_trains_alike_and_is_placed_like_torchs(Spmd, shard, training)
    assert trained.sharded.up.weight.placements == (Shard(1), Shard(0))


# Parameters on a mesh of their own


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(8, 6)
        self.expert = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.expert(F.gelu(self.dense(x)))


def own_mesh(how: Sharder, parameters: Any, mesh: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    """A placement function that puts `parameters` on `mesh` and leaves the others alone."""
    chosen = set(parameters)
    result: Any
    if how is fully_shard:
        result = ShardPlacementResult(Shard(0), mesh)
    elif mesh.ndim == 1:
        result = TorchPlacementResult(Shard(0), FSDPMeshInfo(mesh, shard_mesh_dim=0))
    else:
        info = HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)
        result = TorchPlacementResult(Shard(0), info)
    return lambda parameter: result if parameter in chosen else None


def shard_mixture(
    how: Sharder, model: Mixture, mesh: DeviceMesh, expert_mesh: DeviceMesh, **options: Any
) -> None:
    placement_fn = own_mesh(how, model.expert.parameters(), expert_mesh)
    how(model, mesh=mesh, shard_placement_fn=placement_fn, **options)


@pytest.mark.parametrize("reshard", [True, 2])
@on_ranks(4)
def test_a_parameter_on_its_own_mesh_is_reduced_over_that_mesh_only(
    rank: Rank, reshard: bool | int
) -> None:
    mesh, expert_mesh = rank.mesh(), rank.mesh((2, 2), ("ep", "efsdp"))["efsdp"]
    torch.manual_seed(0)
    reference = Mixture()
    batches = [batch_of_8(torch.Generator().manual_seed(each)) for each in range(4)]
    gradients = []
    for batch in batches:
        loss = reference(batch).square().mean()
        gradients.append(torch.autograd.grad(loss, list(reference.parameters())))
    group = [0, 1] if rank.rank < 2 else [2, 3]

    torch.manual_seed(0)
    model = Mixture()
    shard_mixture(fully_shard, model, mesh, expert_mesh, reshard_after_forward=reshard)
    for _ in range(2):
        model(batches[rank.rank]).square().mean().backward()
        for index, (name, parameter) in enumerate(model.named_parameters()):
            seen_by = group if name.startswith("expert") else range(4)
            expected = torch.stack([gradients[each][index] for each in seen_by]).mean(0)
            assert parameter.grad.device_mesh == parameter.device_mesh
            torch.testing.assert_close(full_tensor(parameter.grad), expected)
            parameter.grad = None
    assert model.expert.weight.device_mesh == expert_mesh
    assert model.dense.weight.device_mesh == mesh


@pytest.mark.parametrize("axes", [("efsdp",), ("ep", "efsdp")])
@on_ranks(4)
def test_a_parameter_on_its_own_mesh_trains_like_torchs(rank: Rank, axes: tuple[str, ...]) -> None:
    mesh, expert_mesh = rank.mesh(), rank.mesh((2, 2), ("ep", "efsdp"))[axes]

    def shard(how: Sharder) -> Callable[[nn.Module], None]:
        return lambda model: shard_mixture(how, model, mesh, expert_mesh)

    trained = assert_same_training(
        Mixture, shard(fully_shard), Training(batch_of_8), oracle=shard(torch_fully_shard)
    )
    assert_placed_like_torchs(trained.sharded, trained.reference)


@on_ranks(4)
def test_all_parameters_of_a_unit_can_be_on_another_mesh_than_its_own(rank: Rank) -> None:
    mesh, expert_mesh = rank.mesh(), rank.mesh((2, 2), ("ep", "efsdp"))["ep", "efsdp"]

    def shard(how: Sharder, model: nn.Module) -> None:
        fn = own_mesh(how, model.expert.parameters(), expert_mesh)
        how(model.expert, mesh=mesh, shard_placement_fn=fn)
        how(model, mesh=mesh)

    assert_trains_like_both(Mixture, shard, Training(batch_of_8))


class Experts(nn.Module):
    """Four experts, cut over the axis `ep`; every rank runs its own on its own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 8)
        self.experts = nn.Parameter(torch.randn(4, 8, 8) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        experts = self.experts.to_local() if isinstance(self.experts, DTensor) else self.experts
        return torch.einsum("bi,eij->bej", self.router(x), experts)


@on_ranks(4)
def test_expert_parallel_parameters_are_sharded_beside_their_own_axis(rank: Rank) -> None:
    mesh, ep_mesh = rank.mesh(), rank.mesh((2, 2), ("efsdp", "ep"))

    def shard(how: Sharder) -> Callable[[nn.Module], None]:
        def apply(model: nn.Module) -> None:
            experts = distribute_tensor(model.experts, ep_mesh["ep"], [Shard(0)])
            model.experts = nn.Parameter(experts)
            fn = own_mesh(how, [model.experts], ep_mesh["efsdp"])
            how(model, mesh=mesh, shard_placement_fn=fn)

        return apply

    trained = assert_same_training(
        Experts, shard(fully_shard), Training(batch_of_8), oracle=shard(torch_fully_shard)
    )
    assert_placed_like_torchs(trained.sharded, trained.reference)
    assert trained.sharded.experts.to_local().shape == (1, 8, 8)


# Other dims


class Convolutions(nn.Module):
    """Parameters of one to four dims."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Conv2d(2, width, 3, padding=1)
        self.outer = nn.Conv2d(width, 4, 1)
        self.shift = nn.Parameter(torch.zeros(1, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(F.gelu(self.inner(x))) + self.shift


def images(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(2, 2, 3, 3, generator=generator)


@on_ranks(2)
def test_an_inner_dim_that_divides_evenly_is_sharded_like_torchs(rank: Rank) -> None:
    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 6))

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(-1) if parameter.ndim == 2 else None

    def shard(how: Sharder, model: nn.Module) -> None:
        how(model[0], mesh=rank.mesh(), shard_placement_fn=placement)
        how(model, mesh=rank.mesh(), shard_placement_fn=placement)

    trained = assert_trains_like_both(build, shard, Training(batch_of_8))
    assert trained.sharded[0].weight.placements == (Shard(1),)
    assert trained.sharded[0].weight.to_local().shape == (12, 4)


@on_ranks(2, 4)
def test_an_inner_dim_that_does_not_divide_evenly_is_sharded_too(rank: Rank) -> None:
    for dim, width in ((1, 3), (3, 8), (-2, 3)) if rank.size == 2 else ((2, 5), (-1, 5)):

        def placement(parameter: nn.Parameter, dim: int = dim) -> Shard:
            return Shard(dim) if parameter.ndim == 4 else Shard(-1)

        def shard(model: nn.Module, fn: Any = placement) -> None:
            fully_shard(model, mesh=rank.mesh(), shard_placement_fn=fn)

        build = functools.partial(Convolutions, width)
        weight = assert_same_training(build, shard, Training(images, steps=2)).sharded.inner.weight
        assert weight.placements == (Shard(dim % 4),)
        chunks = torch.empty(width, 2, 3, 3).chunk(rank.size, dim=dim)
        rows = chunks[rank.rank].size(dim) if rank.rank < len(chunks) else 0
        assert weight.to_local().size(dim) == rows


@on_ranks(4)
def test_an_uneven_inner_dim_on_a_mesh_with_replicas(rank: Rank) -> None:
    def shard(model: nn.Module) -> None:
        mesh = rank.mesh((2, 2), ("replicate", "shard"))
        fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(p.ndim - 1))

    trained = assert_same_training(lambda: Convolutions(5), shard, Training(images))
    assert trained.sharded.inner.weight.placements == (Replicate(), Shard(3))


# Resharding after forward


@contextmanager
def gather_sizes() -> Iterator[list[int]]:
    """The number of ranks of every gather."""
    sizes: list[int] = []
    gather = ShmCollectives.all_gather

    def noted(
        self: ShmCollectives, outs: Any, ins: Any, group: dist.ProcessGroup
    ) -> CollectiveWork:
        sizes.append(group.size())
        return gather(self, outs, ins, group)

    ShmCollectives.all_gather = noted  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        ShmCollectives.all_gather = gather  # type: ignore[method-assign]


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 7), nn.Linear(7, 3))


def shard_layers(how: Sharder, model: nn.Module, **options: Any) -> None:
    """Two inner units, and a root that has a layer of its own."""
    how(model[0], **options)
    how(model[1], **options)
    how(model, **options)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reshard, shape", [(None, (4,)), (1, (4,)), (2, (4,)), (2, (1, 4))])
@on_ranks(4)
def test_every_way_to_reshard_after_forward_trains_alike(
    rank: Rank, reshard: int | None, shape: tuple[int, ...]
) -> None:
    mesh = rank.mesh(shape, ("replicate", "shard")[-len(shape) :])

    def shard(how: Sharder, model: nn.Module) -> None:
        shard_layers(how, model, mesh=mesh, reshard_after_forward=reshard)

    assert_trains_alike_and_is_placed_like_torchs(three_layers, shard, Training(batch_of_8))


@pytest.mark.exhaustive
@on_ranks(4)
def test_resharding_to_fewer_ranks_with_uneven_inner_dims_and_frozen_parameters(
    rank: Rank,
) -> None:
    def build() -> nn.Module:
        model = three_layers()
        model[1].weight.requires_grad_(False)
        model[0].bias.requires_grad_(False)
        return model

    def shard(model: nn.Module) -> None:
        options = {"mesh": rank.mesh(), "reshard_after_forward": 2}
        shard_layers(fully_shard, model, shard_placement_fn=lambda p: Shard(-1), **options)

    assert_same_training(build, shard, Training(batch_of_8))


@pytest.mark.parametrize("reshard, in_backward", [(True, {4}), (None, {4}), (2, {2}), (False, {})])
@on_ranks(4)
def test_backward_gathers_over_as_many_ranks_as_forward_resharded_to(
    rank: Rank, reshard: bool | int | None, in_backward: set[int]
) -> None:
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))
    for layer in model[:5]:
        fully_shard(layer, mesh=rank.mesh(), reshard_after_forward=reshard)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard)
    x = torch.ones(2, 8)
    model(x).sum().backward()  # in the first step the ranks also compare their plans
    with gather_sizes() as sizes:
        loss = model(x).sum()
    assert sizes == [4] * 6
    with gather_sizes() as sizes:
        loss.backward()
    assert set(sizes) == set(in_backward)
    assert len(sizes) <= 6


@pytest.mark.parametrize("reshard", [True, False, None])
@on_ranks(2)
def test_after_forward_the_registered_parameters_are_those_that_torch_registers(
    rank: Rank, reshard: bool | None
) -> None:
    def registered(how: Sharder) -> list[tuple[str, bool]]:
        model = three_layers()
        shard_layers(how, model, mesh=rank.mesh(), reshard_after_forward=reshard)
        model(torch.ones(2, 8))
        return [(name, isinstance(p, DTensor)) for name, p in model.named_parameters()]

    assert registered(fully_shard) == registered(torch_fully_shard)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("how", ["setter", "scope"])
@on_ranks(4)
def test_resharding_after_forward_can_change_from_step_to_step(rank: Rank, how: str) -> None:
    values = iter([True, False, 2, True, 2, False, 2, 2])

    def shard(model: nn.Module) -> None:
        shard_layers(fully_shard, model, mesh=rank.mesh())

    def change(model: Any, micro_batch: int) -> None:
        if how == "setter":
            model.set_reshard_after_forward(next(values))

    def loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
        if how == "setter" or not hasattr(model, "settings"):
            return model(batch).square().mean()
        with model.settings(reshard_after_forward=next(values)):
            return model(batch).square().mean()

    training = Training(batch_of_8, loss=loss, before_forward=change, steps=8)
    assert_same_training(three_layers, shard, training)
    assert next(values, None) is None


@on_ranks(2)
def test_the_setter_reaches_units_below_unless_told_not_to(rank: Rank) -> None:
    model = three_layers()
    shard_layers(fully_shard, model, mesh=rank.mesh(), reshard_after_forward=True)
    x = torch.ones(2, 8)
    model.set_reshard_after_forward(False, recurse=False)
    model(x)
    assert [isinstance(layer.weight, DTensor) for layer in model] == [True, True, False]
    model.set_reshard_after_forward(False)
    model(x)
    assert [isinstance(layer.weight, DTensor) for layer in model] == [False, False, False]


# Parameters so large that they have a bucket of their own


def num_rows_worth_a_bucket(width: int) -> int:
    """The smallest multiple of 8 rows with which a float32 matrix gets a bucket of its own."""
    cost, rows = CostModel.of_device("cpu"), 8
    while not cost.deserves_bucket(4 * width * rows, num_ranks=1):
        rows += 8
    return rows


class Wide(nn.Module):
    """A large parameter that divides evenly, one that does not, and small ones."""

    def __init__(self) -> None:
        super().__init__()
        num_rows = num_rows_worth_a_bucket(512)
        self.inner = nn.Linear(8, num_rows, bias=False)
        self.large = nn.Parameter(torch.randn(num_rows, 512) / 64)
        self.uneven = nn.Parameter(torch.randn(num_rows + 5, 512) / 64)
        self.bias = nn.Parameter(torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.inner(x)) @ self.large
        return F.linear(torch.tanh(x), self.uneven)[..., :3] + self.bias


def are_copied(model: Any) -> list[bool]:
    hooks = hooks_of(model)
    assert hooks is not None
    return [bucket.is_copied for lane in hooks.units[0].layout.lanes for bucket in lane.buckets]


@pytest.mark.parametrize("reshard, num_kept_back", [(True, 0), (False, 1)])
@on_ranks(2)
def test_large_parameters_in_buckets_of_their_own_train_alike(
    rank: Rank, reshard: bool, num_kept_back: int
) -> None:
    def shard(how: Sharder, model: nn.Module) -> None:
        how(model, mesh=rank.mesh(), reshard_after_forward=reshard)

    def switch(model: Any, micro_batch: int) -> None:
        model.set_requires_gradient_sync(micro_batch == num_kept_back)

    training = Training(batch_of_8, steps=2, micro_batches=num_kept_back + 1, before_forward=switch)
    trained = assert_trains_like_both(Wide, shard, training)
    assert are_copied(trained.sharded) == [False, False, True]


@pytest.mark.exhaustive
@on_ranks(4)
def test_large_parameters_on_a_mesh_with_replicas_train_alike(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))

    def shard(how: Sharder, model: nn.Module) -> None:
        how(model, mesh=mesh, reshard_after_forward=2)

    def switch(model: Any, micro_batch: int) -> None:
        model.set_requires_all_reduce(micro_batch == 1)

    training = Training(batch_of_8, steps=2, micro_batches=2, before_forward=switch)
    trained = assert_trains_alike_and_is_placed_like_torchs(Wide, shard, training)
    assert False in are_copied(trained.sharded)


@on_ranks(2)
def test_a_large_parameter_without_a_gradient_leaves_the_others_right(rank: Rank) -> None:
    class Idle(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.tanh(self.inner(x)) @ self.large)[..., :3] + self.bias

    def shard(how: Sharder, model: nn.Module) -> None:
        how(model, mesh=rank.mesh())

    assert_trains_like_both(Idle, shard, Training(batch_of_8, steps=2))


@on_ranks(2)
def test_units_on_equal_meshes_of_two_groups_each_use_their_own(rank: Rank) -> None:
    meshes = [DeviceMesh.from_group(dist.new_group(), "cpu") for _ in range(2)]
    groups = []
    for mesh in meshes:
        layer = nn.Linear(4, 4)
        fully_shard(layer, mesh=mesh)
        groups.append(hooks_of(layer).units[0].mesh_info.shard.group)
    assert groups == [mesh.get_group() for mesh in meshes]
    assert groups[0] is not groups[1]

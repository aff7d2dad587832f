"""Collectives in flight, destroyed process groups, what ranks compare, and full tensors."""

import gc
import os
import weakref
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import fullshard.comm.agreement as agreement_module
import fullshard.comm.order as order_module
from fullshard import DisagreementError, FullyShardedDataParallel, LifecycleError, fully_shard
from fullshard._torch import StridedShard, default_store, local_group, timeout_of
from fullshard.comm import heap
from fullshard.comm.agreement import Agreement, UnitPlan
from fullshard.comm.guard import PATIENCE
from fullshard.comm.mesh import _mesh_infos, mesh_info_of
from fullshard.comm.order import PassOrder, order_of
from fullshard.comm.placement import full_tensor
from fullshard.comm.work import CollectiveWork
from fullshard.state import save, save_async
from fullshard.testing import Rank, RankPool, on_ranks
from tests.support.wrapped import OURS, TORCH, Package

CPU = torch.device("cpu")


# Groups


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_group_of_the_same_ranks_never_has_a_name_again(rank: Rank) -> None:
    if rank.rank == 0:
        alone = dist.new_group([0], use_local_synchronization=True)
    names = []
    for _ in range(3):
        made = local_group([1, 0], timedelta(seconds=20), "gloo")
        total = torch.ones(1)
        dist.all_reduce(total, group=made)
        assert total.item() == 2
        assert dist.get_process_group_ranks(made) == [1, 0]
        names.append(made.group_name)
        dist.destroy_process_group(made)
    assert len(set(names)) == 3
    if rank.rank == 0:
        dist.destroy_process_group(alone)


# In flight


class PlannedWork:
    """A work that fails, or not, when it is waited for."""

    def __init__(self, error: str = "") -> None:
        self.error = error
        self.num_waits = 0

    def wait(self) -> None:
        self.num_waits += 1
        if self.error:
            raise RuntimeError(self.error)

    def get_future(self) -> Any:
        return torch.futures.Future()


def test_all_works_are_waited_for_before_the_first_error_is_raised() -> None:
    works = [PlannedWork(), PlannedWork("first"), PlannedWork("second"), PlannedWork()]
    work = CollectiveWork(works, buffers=[torch.ones(1)])
    with pytest.raises(RuntimeError, match="first"):
        work.wait()
    assert [each.num_waits for each in works] == [1, 1, 1, 1]
    work.wait()  # the error was raised once
    assert [each.num_waits for each in works] == [1, 1, 1, 1]
    assert work.futures == []


def test_works_that_were_started_are_waited_for_when_the_next_one_cannot_be() -> None:
    first = PlannedWork("this one too")

    def start() -> Any:
        yield first
        raise ValueError("cannot be started")

    with pytest.raises(ValueError, match="cannot be started"):
        CollectiveWork(start())
    assert first.num_waits == 1


# Destroyed groups


def num_threads_and_files() -> tuple[int, int]:
    """The threads of gloo, and all open files."""
    gc.collect()
    threads = [each.read_text() for each in Path("/proc/self/task").glob("*/comm")]
    return sum("gloo" in name for name in threads), len(os.listdir("/proc/self/fd"))


def destroy_the_world_with_a_model_alive(rank: Rank) -> tuple[bool, bool, bool, str]:
    mesh = rank.mesh()
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        fully_shard(layer, mesh=mesh, reshard_after_forward=2)
    fully_shard(model, mesh=mesh)
    before = num_threads_and_files()
    model[0].set_separate_reduce_scatter_group()
    model(torch.ones(2, 8)).sum().backward()
    info = mesh_info_of(mesh)
    axes = [info.subgroup_axis(2), info.second_shard_axis()]
    groups = [weakref.ref(axis.group) for axis in axes]
    during = num_threads_and_files()
    dist.barrier()
    dist.destroy_process_group()
    after = num_threads_and_files()
    try:
        message = str(axes[0].group)
    except LifecycleError as error:
        message = str(error)
    return (
        all(group() is None for group in groups),
        not _mesh_infos,
        all(a <= b < d for a, b, d in zip(after, before, during, strict=True)),
        message,
    )


def test_groups_that_were_made_for_a_mesh_go_with_the_default_group() -> None:
    with RankPool(4) as ranks:
        for are_gone, is_forgotten, is_closed, message in ranks.run(
            destroy_the_world_with_a_model_alive
        ):
            assert are_gone
            assert is_forgotten
            assert is_closed
            assert "was destroyed, but the model still needs it; build the model again" in message


def train_in_worlds_of_its_own(rank: Rank, folder: str) -> dict[str, list[tuple[int, int]]]:
    """The threads and files left after each of several worlds in which a model trained."""
    dist.destroy_process_group()
    shard: dict[str, Callable[[nn.Module], nn.Module]] = {
        "torch": torch_fully_shard,
        "fully_shard": partial(fully_shard, reshard_after_forward=2),
        "wrapper": FullyShardedDataParallel,
    }
    left: dict[str, list[tuple[int, int]]] = {name: [] for name in shard}
    for number, name in enumerate(2 * list(shard)):
        where = f"file://{folder}/store_{number}"
        dist.init_process_group("gloo", where, world_size=rank.size, rank=rank.rank)
        model = shard[name](nn.Linear(8, 8))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        if name != "torch":
            save(f"{folder}/{number}", model, optimizer)
            save_async(f"{folder}/{number}_again", model, optimizer).wait()
        del model, optimizer
        dist.destroy_process_group()
        left[name].append(num_threads_and_files())
    return left


@pytest.mark.exhaustive
def test_worlds_that_end_leave_no_more_threads_and_files_than_those_of_torch(
    tmp_path: Path,
) -> None:
    with RankPool(4) as ranks:
        for left in ranks.run(train_in_worlds_of_its_own, str(tmp_path)):
            assert left["fully_shard"] == left["wrapper"] == left["torch"]


@on_ranks(2)
def test_units_on_equal_meshes_share_the_groups_that_are_made(rank: Rank) -> None:
    first = mesh_info_of(DeviceMesh("cpu", list(range(rank.size))))
    second = mesh_info_of(DeviceMesh("cpu", list(range(rank.size))))
    assert first is second
    axis = first.second_shard_axis()
    assert axis is second.second_shard_axis()
    assert axis.group is not None
    assert timeout_of(axis.group) == timeout_of(rank.mesh().get_group()) != default_pg_timeout


# Detours


class CountingStore:
    """The default store, and how often it was asked."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        self.num_calls += 1
        return getattr(default_store(), name)


def order_on(mesh: DeviceMesh) -> PassOrder:
    """The order of passes on a mesh, after a model was made there."""
    mesh_info = mesh_info_of(mesh)
    Agreement(mesh_info, CPU).compare_plans([UnitPlan("unit", "weight")])
    return order_of(mesh_info)


@on_ranks(2, 4)
def test_detours_that_all_take_leave_no_keys_and_cost_the_same_in_any_world(rank: Rank) -> None:
    order = order_on(rank.mesh())
    num_keys = []
    counting = CountingStore()
    order_module.default_store = lambda: counting  # type: ignore[assignment]
    try:
        for number in range(7):
            order.compare(f"gather {number}", "something else")
            dist.barrier()
            num_keys.append(default_store().num_keys())
            dist.barrier()
    finally:
        order_module.default_store = default_store
    assert len(set(num_keys[1:])) == 1, num_keys
    assert counting.num_calls <= 7 * 30


@on_ranks(4)
def test_ranks_that_take_different_detours_are_all_told_and_can_go_on(rank: Rank) -> None:
    order = order_on(rank.mesh((2, 2), ("replicate", "shard")))
    order.compare("gather a", "gather b")
    found = "gather odd" if rank.rank == 2 else "gather even"
    with pytest.raises(DisagreementError) as raised:
        order.compare(found, "gather b")
    assert str(raised.value).startswith(f"{found}: rank {rank.rank} is about to do this")
    assert "where it did 'gather b' before" in str(raised.value)
    assert ("rank 2 does gather odd" in str(raised.value)) == (rank.rank != 2)
    for number in range(3):
        order.compare(f"gather {number}", "gather b")


@on_ranks(2)
def test_a_detour_that_one_rank_takes_alone_leaves_the_next_ones_right(rank: Rank) -> None:
    order = order_on(rank.mesh())
    if rank.rank == 1:
        os.environ[PATIENCE] = "0.2"
        try:
            with pytest.raises(DisagreementError, match=r"gather a: rank 1 .* only 1 of 2 ranks"):
                order.compare("gather a", "gather b")
        finally:
            del os.environ[PATIENCE]
    dist.barrier()
    order.compare("gather c", "gather b")
    order.compare("gather d", "gather b")


# Counts

KINDS = {
    "allgather_": "all-gather",
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "alltoall_base_": "reduce-scatter",  # on gloo
}


def counts_of(api: str, package: Package, group: dist.ProcessGroup) -> list[dict[str, int]]:
    """What a program counts in the forwards and backwards of three steps."""
    from torch.distributed.tensor.debug import CommDebugMode  # loads torch's compiler

    model: Any = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)])
    if api == "fully_shard":
        mesh = DeviceMesh.from_group(group, "cpu")
        shard = torch_fully_shard if package is TORCH else fully_shard
        for module in [*model, model]:
            shard(module, mesh=mesh)
    else:
        wrap = ModuleWrapPolicy({nn.Linear})
        model = package(model, process_group=group, auto_wrap_policy=wrap, use_orig_params=True)
    counts = []
    for _ in range(3):
        with CommDebugMode() as forward:
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with CommDebugMode() as backward:
            loss.backward()
        for counter in (forward, backward):
            found = {op.__name__: num for op, num in counter.get_comm_counts().items()}
            counts.append({KINDS[name]: num for name, num in found.items()})
    return counts


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@on_ranks(2)
def test_a_program_counts_the_collectives_of_torch_from_the_first_step_on(
    rank: Rank, api: str
) -> None:
    group = dist.new_group()
    os.environ[heap.SWITCH] = "0"
    try:
        expected, found = (counts_of(api, each, group) for each in (TORCH, OURS))
    finally:
        del os.environ[heap.SWITCH]
    for backward in expected[1::2]:
        backward["all-gather"] -= 1  # what forward ran last is still there
    assert found == expected
    assert found[0] == {"all-gather": 3}
    dist.destroy_process_group(group)


@on_ranks(2, 4)
def test_a_first_step_leaves_no_keys_in_the_store(rank: Rank) -> None:
    num_keys = []
    for _ in range(3):
        model = nn.Linear(4, 4)
        fully_shard(model, mesh=rank.mesh())
        model(torch.ones(2, 4)).sum().backward()
        dist.barrier()
        num_keys.append(default_store().num_keys())
        dist.barrier()
    assert num_keys[0] == num_keys[2]


@on_ranks(4)
def test_ranks_that_do_not_come_to_a_first_step_are_named(rank: Rank) -> None:
    mesh_info = mesh_info_of(rank.mesh())
    agreement = Agreement(mesh_info, CPU)
    dist.barrier()
    if rank.rank in (0, 2):
        with (
            patch.object(agreement_module, "timeout_of", lambda _: timedelta(seconds=0.5)),
            pytest.raises(
                DisagreementError, match=r"\[(1, 3|1, 2, 3|0, 1, 3)\] of 4 did not come to"
            ),
        ):
            agreement.exchange(7)
    dist.barrier()
    assert agreement.exchange(rank.rank) == [[each, each] for each in range(4)]


# Full tensors


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("an operation whose name is too long for gloo")


@pytest.mark.parametrize("shape", [(8, 12), (7, 5), (3, 2), (9,), (4, 0, 3)], ids=str)
@on_ranks(4)
def test_a_full_tensor_is_gathered_from_any_placements(rank: Rank, shape: tuple[int, ...]) -> None:
    full = torch.arange(float(torch.Size(shape).numel())).view(shape)
    last = len(shape) - 1
    cases: list[tuple[tuple[int, ...], list[Placement]]] = [
        ((4,), [Shard(0)]),
        ((4,), [Shard(last)]),
        ((4,), [Replicate()]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(last), Replicate()]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Shard(last), Shard(0)]),
    ]
    for sizes, placements in cases:
        mesh = rank.mesh(sizes, ("a", "b")[: len(sizes)])
        cut = distribute_tensor(full, mesh, placements)
        with patch.object(functional, "all_gather_tensor", refuse):
            found = full_tensor(cut)
        assert torch.equal(found, full), (sizes, placements)


def chunk(tensor: Tensor, num: int, index: int) -> Tensor:
    chunks = tensor.chunk(num)
    return chunks[index] if index < len(chunks) else tensor[:0]


@pytest.mark.parametrize("num_rows", [16, 9, 5, 1])
@on_ranks(4)
def test_a_full_tensor_is_gathered_where_the_right_axis_cuts_first(
    rank: Rank, num_rows: int
) -> None:
    full = torch.arange(num_rows * 3.0).view(num_rows, 3).to(torch.bfloat16)
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    dp, tp = mesh.get_coordinate() or (0, 0)
    local = chunk(chunk(full, 2, tp), 2, dp)
    placements = [StridedShard(0, split_factor=2), Shard(0)]
    cut = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride()
    )
    assert torch.equal(full_tensor(cut), full)

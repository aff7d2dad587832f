"""The result of training does not depend on how a model is sharded.

Every value of an option meets every value of every other option in a cell of the matrix. A cell is
compared with the unsharded model and with torch's `fully_shard` or wrapper under the same options.
"""

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import (
    APIS,
    EQUAL,
    ROUNDED,
    Closeness,
    Lesson,
    Net,
    Package,
    assert_trains_alike,
    each_backward,
    last_synced,
    pairs_covered,
    shard_parts,
    unit_sharder,
    unsynced,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PRECISIONS: dict[str, dict[str, torch.dtype] | None] = {
    "float32": None,
    "bf16": {"param_dtype": BF16},
    "bf16 reduced in float32": {"param_dtype": BF16, "reduce_dtype": FP32},
    "fp16 reduced in float32": {"param_dtype": FP16, "reduce_dtype": FP32},
    "reduced in bf16": {"reduce_dtype": BF16},
}
# Submodules that are units beside the root.
UNITS = {
    "root": (),
    "blocks": ("blocks.0", "blocks.1"),
    "all": ("blocks.0", "blocks.1", "head"),
}
PREFETCH: dict[str, dict[str, Any]] = {
    "default": {},
    "none": {"backward_prefetch": None, "limit_all_gathers": False},
    "early": {"forward_prefetch": True, "backward_prefetch": "BACKWARD_POST"},
}


def synced_in_turns(model: Any, batches: list[Any], scale: float) -> torch.Tensor:
    total = torch.zeros(())
    for index, batch in enumerate(batches):
        if index % 2:
            total += each_backward(model, [batch], scale)
        else:
            with unsynced(model):
                total += each_backward(model, [batch], scale)
    return total


ACCUMULATION: dict[str, Lesson] = {
    "one batch": Lesson(),
    "synced": Lesson(num_micro_batches=4),
    "unsynced": Lesson(step=last_synced, num_micro_batches=4),
    "in turns": Lesson(step=synced_in_turns, num_micro_batches=4),
}


def cells(*strategies: str) -> list[dict[str, Any]]:
    return list(
        pairs_covered(
            {
                "api": APIS,
                "strategy": strategies,
                "precision": tuple(PRECISIONS),
                "accumulation": tuple(ACCUMULATION),
                "prefetch": tuple(PREFETCH),
                "units": tuple(UNITS),
                "memory": ("device", "offloaded"),
            }
        )
    )


def name_of(cell: dict[str, Any]) -> str:
    return ", ".join(cell.values())


def prefetch_explicitly(model: Any, units: tuple[str, ...], prefetch: str) -> None:
    """Lists for `fully_shard`: two units ahead, or the unit itself, which prefetches nothing."""
    modules = [model.get_submodule(name) for name in units]
    for index, module in enumerate(modules):
        following, before = modules[index + 1 : index + 3], modules[max(0, index - 2) : index]
        if prefetch == "none":
            following = before = [module]
        module.set_modules_to_forward_prefetch(following)
        module.set_modules_to_backward_prefetch(before[::-1])


def train_cell(cell: dict[str, Any], mesh: Any, **near: Closeness) -> None:
    def shard(package: Package, model: Net) -> Any:
        shard_unit = unit_sharder(
            package,
            cell["api"],
            cell["strategy"],
            mesh=mesh,
            mixed_precision=PRECISIONS[cell["precision"]],
            cpu_offload=cell["memory"] == "offloaded",
            **PREFETCH[cell["prefetch"]],
        )
        units = UNITS[cell["units"]]
        sharded = shard_parts(shard_unit, model, *units)
        if cell["api"] == "fully_shard" and cell["prefetch"] != "default":
            prefetch_explicitly(model, units, cell["prefetch"])
        return sharded

    assert_trains_alike(
        Net,
        shard,
        ACCUMULATION[cell["accumulation"]],
        near=ROUNDED if PRECISIONS[cell["precision"]] else EQUAL,
        cell=name_of(cell),
        **near,
    )


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cell", cells("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"), ids=name_of)
@on_ranks(2)
def test_a_sharded_model_trains_alike(rank: Rank, cell: dict[str, Any]) -> None:
    mesh, near_torch = None, EQUAL
    if cell["api"] == "fully_shard" and cell["strategy"] == "NO_SHARD":
        mesh = rank.mesh((2, 1), ("replicate", "shard"))
    elif cell["api"] != "fully_shard" and PRECISIONS[cell["precision"]]:
        # Torch's wrapper adds gradients up in bf16 until they are reduced.
        is_one = cell["accumulation"] == "one batch"
        near_torch = Closeness(1e-3, 1e-4) if is_one else ROUNDED
    train_cell(cell, mesh, near_torch=near_torch)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("cell", cells("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"), ids=name_of)
@on_ranks(4)
def test_a_model_sharded_and_replicated_trains_alike(rank: Rank, cell: dict[str, Any]) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    # Four 16-bit gradients are summed in another order.
    train_cell(cell, mesh, near_torch=ROUNDED if PRECISIONS[cell["precision"]] else EQUAL)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("api", APIS)
@on_ranks(1, 4)
def test_a_world_of_one_or_four_ranks_trains_alike(rank: Rank, api: str) -> None:
    def shard(strategy: str, package: Package, model: Net) -> Any:
        return shard_parts(unit_sharder(package, api, strategy), model, *UNITS["all"])

    of_one = "NO_SHARD" if rank.size == 1 and api != "fully_shard" else "FULL_SHARD"
    assert_trains_alike(
        Net,
        functools.partial(shard, "FULL_SHARD"),
        replace(ACCUMULATION["unsynced"], num_steps=4),
        torch_shard=functools.partial(shard, of_one),
    )

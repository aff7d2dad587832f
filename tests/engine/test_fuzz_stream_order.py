"""Programs that use a sharded model in any order that is allowed: nothing that they do races."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fullshard._torch import to_local
from tests.engine.test_fuzz_programs import Program, Sides, num_programs, programs
from tests.engine.test_large_gradients import small_buckets
from tests.support.stream_order import emulated_streams

MESHES = ((2,), (2, 2))
# These need answers from other ranks.
LEFT_OUT = {"saved_and_loaded", "optimizer_state_dict", "clipped_step"}
# This writes shards that an all-gather may read, left under way by a failed backward or by
# `unshard(async_op=True)`. Its result is dropped: the next forward sees that shards have changed.
LEFT_OUT |= {"edited"}
# The tensors of a functional transform have no memory that could be followed.
LEFT_OUT |= {"transformed"}

some = settings(derandomize=not num_programs, deadline=None, max_examples=num_programs or 6)


class Played(Sides):
    """The sharded model of one rank, whose collectives move no data: values mean nothing."""

    def assert_same(self, subject: str, found: Tensor, expected: Tensor) -> None: ...

    def check_params(self) -> None: ...

    def check_grads(self) -> None:
        for param in self.model.parameters():
            if param.grad is not None:
                to_local(param.grad).sum()


def check(program: Program) -> None:
    num_ranks = torch.Size(program.mesh).numel()

    def mesh(sizes: tuple[int, ...], names: tuple[str, ...] | None) -> Any:
        return init_device_mesh("cpu", sizes, mesh_dim_names=names)

    rank: Any = SimpleNamespace(rank=0, size=num_ranks, device=torch.device("cpu"), mesh=mesh)
    actions = [each for each in program.actions if each.kind not in LEFT_OUT]
    program = replace(program, is_offloaded=False, actions=tuple(actions))
    with ExitStack() as stack:
        enter = stack.enter_context
        order = enter(emulated_streams(num_ranks))
        if program.has_large_units:
            enter(small_buckets())
        Played(rank, program, Path()).run()
    assert not order.races, order.report()


@pytest.mark.exhaustive
@some
@given(programs("fully_shard", MESHES))
def test_no_program_races(program: Program) -> None:
    check(program)


@pytest.mark.exhaustive
@some
@given(programs("wrapper", MESHES))
def test_no_program_races_with_a_wrapper(program: Program) -> None:
    check(program)


@pytest.mark.exhaustive
@some
@given(programs("flat wrapper", MESHES))
def test_no_program_races_with_flat_params(program: Program) -> None:
    check(program)

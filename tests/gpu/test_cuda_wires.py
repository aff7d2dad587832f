"""Wires with blocks on CUDA: one kernel each way, with the values of a CPU to the last bit."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fullshard.wire import Fp8, Int4, Int8

WIRES = [
    *(Int8(), Int8(block=16), Int8(block=64, stochastic=True), Fp8(), Fp8(block=32)),
    *(Int4(), Int4(block=16), Int4(block=64, stochastic=True)),
]


def segments_of(wire: Any, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Values of any magnitude, zeros, and some that are not finite."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randn(
        rows, 33 * wire.alignment_numel // wire.block, wire.block, generator=generator
    )
    blocks *= 10.0 ** torch.randint(-44, 30, blocks.shape[:2], generator=generator).unsqueeze(-1)
    blocks[0, 1] = 0.0
    for index, value in enumerate((math.nan, math.inf, -math.inf)):
        blocks[0, 3 + index, index] = value
    return blocks.flatten(1).to(dtype)


def encoded(wire: Any, segments: torch.Tensor) -> torch.Tensor:
    rows, numel = segments.shape
    messages = torch.empty(
        rows, wire.message_numel(numel), dtype=wire.dtype, device=segments.device
    )
    wire.encode(segments, messages)
    return messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_messages_and_sums_are_those_of_a_cpu(wire: Any, dtype: torch.dtype) -> None:
    segments = segments_of(wire, 3, dtype)
    messages = encoded(wire, segments)
    on_gpu = encoded(wire, segments.cuda())
    torch.testing.assert_close(on_gpu.cpu(), messages, rtol=0, atol=0)
    for out_dtype in (torch.float32, torch.bfloat16):
        expected = torch.empty(segments.shape, dtype=out_dtype)
        found = expected.cuda()
        wire.decode(messages, expected)
        wire.decode(on_gpu, found)
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)
        wire.add_up(messages.unbind(), expected[0])
        wire.add_up(on_gpu.unbind(), found[0])
        torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_messages_of_several_segments_are_added_up_at_once(wire: Any) -> None:
    """As what the ranks of a host send for each rank of a rail."""
    messages = encoded(wire, segments_of(wire, 6, torch.float32)).view(3, 2, -1)
    numel = 33 * wire.alignment_numel
    expected, found = torch.empty(2, numel), torch.empty(2, numel, device="cuda")
    wire.add_up(messages.unbind(), expected)
    wire.add_up(messages.cuda().unbind(), found)
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("wire", [Int4(), Int4(block=16), Int4(block=64, stochastic=True)], ids=str)
def test_four_bits_have_a_kernel_here(wire: Any) -> None:
    """Where the kernel does not compute what a CPU does, or does not compile, views are used."""
    assert wire._kernels(torch.empty(1, device="cuda")) is not None


def test_a_captured_encoding_reads_what_is_there_when_it_is_replayed() -> None:
    wire = Int8(stochastic=True)
    segments = torch.zeros(2, 4 * wire.alignment_numel, device="cuda")
    encoded(wire, segments)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        messages = encoded(wire, segments)
    for seed in range(2):
        given = torch.randn(segments.shape, generator=torch.Generator().manual_seed(seed))
        segments.copy_(given)
        graph.replay()
        assert torch.equal(messages.cpu(), encoded(wire, given))

"""Clipping by the norm of gradients that are in parts, as if they were on one rank."""

import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import ConfigError
from fullshard.optim.clip import clip_grads
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH

CPU = torch.device("cpu")
ORDERS = [2.0, 1, 2, 3.5, 0.5, math.inf, "inf"]


def with_grad(grad: torch.Tensor | None) -> nn.Parameter:
    param = nn.Parameter(torch.empty_like(grad if grad is not None else torch.empty(0)))
    param.grad = None if grad is None else grad.clone()
    return param


def whole_grads(dtypes: list[torch.dtype], seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(5 + 4 * i, generator=generator).to(d) for i, d in enumerate(dtypes)]


def part_of(grad: torch.Tensor, index: int, num_parts: int) -> torch.Tensor:
    """Parts differ in size, and the last part of a short gradient is empty."""
    size = len(grad) // num_parts + 1
    return grad[index * size : (index + 1) * size]


def expected_of(
    grads: list[torch.Tensor], max_norm: float, order: Any
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What torch makes of the whole gradients, in float32."""
    params = [with_grad(grad.float()) for grad in grads]
    norm = torch.nn.utils.clip_grad_norm_(params, max_norm, float(order))
    return norm, [param.grad for param in params]


@pytest.mark.parametrize(
    "dtypes",
    [[torch.float32] * 3, [torch.float32, torch.bfloat16, torch.float64], [torch.bfloat16] * 2],
    ids=["float32", "mixed", "bfloat16"],
)
@on_ranks(2, 4)
def test_parts_on_ranks_are_clipped_as_the_whole(rank: Rank, dtypes: list[torch.dtype]) -> None:
    for order in ORDERS:
        for max_norm in (0.1, 1, 1e6):
            sharded, replicated = whole_grads(dtypes), whole_grads(dtypes, seed=1)[:2]
            parts = [with_grad(part_of(grad, rank.rank, rank.size)) for grad in sharded]
            others = [with_grad(grad) for grad in replicated]
            got = clip_grads([(parts, (dist.group.WORLD,))], others, max_norm, order, CPU)

            norm, expected = expected_of(sharded + replicated, max_norm, order)
            largest = max(dtypes, key=lambda dtype: dtype.itemsize)
            tolerance = {"rtol": 1e-2, "atol": 1e-3} if torch.bfloat16 in dtypes else {}
            assert got.dtype == largest, order
            torch.testing.assert_close(got.float(), norm, **tolerance)
            for param, grad in zip(parts, expected, strict=False):
                mine = part_of(grad, rank.rank, rank.size)
                torch.testing.assert_close(param.grad.float(), mine, **tolerance)
            for param, grad in zip(others, expected[len(sharded) :], strict=True):
                torch.testing.assert_close(param.grad.float(), grad, **tolerance)


@on_ranks(4)
def test_parameters_over_different_groups_count_each_over_its_own(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    axis, index = mesh.get_group("shard"), mesh.get_local_rank("shard")
    grads = whole_grads([torch.float32] * 5)
    for order in (2.0, 1, math.inf):
        halves = [with_grad(part_of(grad, index, 2)) for grad in grads[:2]]
        quarters = [with_grad(part_of(grads[2], rank.rank, 4))]
        alone, whole = with_grad(grads[3]), with_grad(grads[4])
        pairs = [
            (halves[:1], (axis,)),
            (quarters, (dist.group.WORLD,)),
            (halves[1:], (axis,)),
            ([alone], ()),
        ]
        from torch.distributed.tensor.debug import CommDebugMode  # loads torch's compiler

        counter = CommDebugMode()
        with counter:
            norm = clip_grads(pairs, [whole], 0.5, order, CPU)
        assert counter.get_total_counts() == 2, "one all-reduce per group"
        expected_norm, expected = expected_of(grads, 0.5, order)
        torch.testing.assert_close(norm, expected_norm)
        torch.testing.assert_close(halves[0].grad, part_of(expected[0], index, 2))
        torch.testing.assert_close(halves[1].grad, part_of(expected[1], index, 2))
        torch.testing.assert_close(quarters[0].grad, part_of(expected[2], rank.rank, 4))
        torch.testing.assert_close(alone.grad, expected[3])
        torch.testing.assert_close(whole.grad, expected[4])


@on_ranks(2)
def test_a_rank_without_gradients_takes_part_and_warns(rank: Rank) -> None:
    grad = torch.tensor([3.0, 4.0])
    for order, total in ((2.0, 5.0), (1, 7.0), (math.inf, 4.0)):
        param = with_grad(grad.bfloat16() if rank.rank == 0 else None)
        pairs = [([param, with_grad(None)], (dist.group.WORLD,))]
        if rank.rank == 0:
            norm = clip_grads(pairs, [], 1.0, order, CPU)
            assert norm.dtype == torch.bfloat16
            torch.testing.assert_close(param.grad.float(), grad / total, rtol=1e-2, atol=1e-2)
        else:
            with pytest.warns(UserWarning, match="on rank 1 with no gradients"):
                norm = clip_grads(pairs, [], 1.0, order, CPU)
            assert norm.dtype == torch.float32
        assert norm.item() == total


@on_ranks(2)
def test_without_any_gradients_the_norm_is_zero(rank: Rank) -> None:
    for order in (2.0, 3.5, math.inf):
        with pytest.warns(UserWarning, match="no gradients"):
            norm = clip_grads([([with_grad(None)], (dist.group.WORLD,))], [], 1.0, order, CPU)
        assert norm.item() == 0.0
        # An empty gradient counts as a gradient: a rank may well have an empty part.
        norm = clip_grads([([with_grad(torch.empty(0))], (dist.group.WORLD,))], [], 1.0, order, CPU)
        assert norm.item() == 0.0


@on_ranks(2)
def test_a_float16_norm_does_not_overflow_on_the_way(rank: Rank) -> None:
    param = with_grad(torch.full((50,), 1e3, dtype=torch.float16))
    norm = clip_grads([([param], (dist.group.WORLD,))], [], 1.0, 2.0, CPU)
    assert norm.dtype == torch.float16
    assert norm.item() == 1e4
    torch.testing.assert_close(param.grad, torch.full((50,), 0.1, dtype=torch.float16))


@on_ranks(2)
def test_a_norm_that_is_not_finite_reaches_every_rank_as_unsharded(rank: Rank) -> None:
    values = (math.inf, -math.inf, math.nan)
    for planted, order, spoiled in itertools.product(values, (2.0, 1, 3.5, math.inf), (0, 1)):
        whole = torch.arange(1.0, 5.0)
        whole[2 * spoiled] = planted
        param = with_grad(whole[2 * rank.rank :][:2])
        norm = clip_grads([([param], (dist.group.WORLD,))], [], 1.0, order, CPU)
        expected_norm, expected = expected_of([whole], 1.0, order)
        torch.testing.assert_close(norm, expected_norm, equal_nan=True)
        mine = expected[0][2 * rank.rank :][:2]
        torch.testing.assert_close(param.grad, mine, equal_nan=True)


@on_ranks(2)
def test_a_parameter_that_is_named_twice_counts_and_shrinks_once(rank: Rank) -> None:
    param, other = with_grad(torch.tensor([3.0])), with_grad(torch.tensor([4.0]))
    pairs = [([param, param], (dist.group.WORLD,)), ([param], (dist.group.WORLD,))]
    norm = clip_grads(pairs, [other, param, other], 1.0, 1, CPU)
    assert norm.item() == 10.0  # 3 on each rank and the 4 that both have
    torch.testing.assert_close(param.grad, torch.tensor([0.3]))
    torch.testing.assert_close(other.grad, torch.tensor([0.4]))


# The wrapper


def wrapped(api: Any, use_orig_params: bool, inner: str) -> Any:
    """A model after backward; its last layer is ignored, the one before has its own strategy."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Linear(3, 1))
    model[2] = api(model[2], sharding_strategy=inner, use_orig_params=use_orig_params)
    wrapper = api(model, ignored_modules=[model[3]], use_orig_params=use_orig_params)
    torch.manual_seed(1)
    wrapper(torch.randn(4, 5)).sum().backward()
    return wrapper


@on_ranks(2)
def test_the_wrapper_clips_as_torchs_does(rank: Rank) -> None:
    for use_orig_params, inner, order, max_norm in itertools.product(
        (False, True), ("FULL_SHARD", "NO_SHARD"), (2.0, 1, 3.5, math.inf), (0.1, 100)
    ):
        ours, theirs = (wrapped(api, use_orig_params, inner) for api in (OURS, TORCH))
        for clipped in ({}, {"set_to_none": True}):
            if clipped:
                for model in (ours, theirs):
                    model.zero_grad(**clipped)
                with pytest.warns(UserWarning, match="no gradients"):
                    norms = [model.clip_grad_norm_(max_norm, order) for model in (ours, theirs)]
            else:
                norms = [model.clip_grad_norm_(max_norm, order) for model in (ours, theirs)]
            torch.testing.assert_close(*norms)
            if use_orig_params and not clipped:
                with (
                    OURS.FSDP.summon_full_params(ours, with_grads=True),
                    TORCH.FSDP.summon_full_params(theirs, with_grads=True),
                ):
                    pairs = zip(ours.parameters(), theirs.parameters(), strict=True)
                    for param, other in pairs:
                        torch.testing.assert_close(param.grad, other.grad)


# Without ranks


def test_whole_gradients_need_no_process_group():
    for order, max_norm in itertools.product(ORDERS, (0.1, 1e6)):
        grads = whole_grads([torch.float32] * 3)
        params = [with_grad(grad) for grad in grads] + [with_grad(None)]
        norm = clip_grads([], params, max_norm, order, CPU)
        expected_norm, expected = expected_of(grads, max_norm, order)
        torch.testing.assert_close(norm, expected_norm)
        torch.testing.assert_close([param.grad for param in params[:-1]], expected)
    # No warning, unlike torch's wrapper, which warns of dtypes that ranks may differ in.
    assert clip_grads([], [with_grad(None)], 1.0, 2.0, CPU).item() == 0.0
    assert clip_grads([([with_grad(None)], ())], [], 1.0, 2.0, CPU).item() == 0.0


@pytest.mark.parametrize("order", [0, -1, -math.inf, math.nan, "two", None, [2]])
def test_an_order_that_is_no_norm_is_refused_and_changes_nothing(order):
    param = with_grad(torch.tensor([3.0, 4.0]))
    with pytest.raises(ConfigError, match="norm_type must be"):
        clip_grads([], [param], 1.0, order, CPU)
    assert param.grad.tolist() == [3.0, 4.0]
    with pytest.raises(ConfigError, match=r"max_norm must be a number .* not 'one'"):
        clip_grads([], [param], "one", 2.0, CPU)

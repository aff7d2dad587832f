"""Loss scaling over ranks: all skip a step or none does, and the scale is the same everywhere."""

import copy
import inspect
import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchScaler
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError, TopologyError, UnsupportedError
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.testing import Rank, on_ranks

# The value planted into the gradients of each step: (rank, value). Growth takes two steps.
SCRIPT = [None, None, (0, math.inf), None, (1, math.nan), (1, -math.inf), None, None, None, None]


def make_scaler(kind: Callable[..., Any], **options: Any) -> Any:
    return kind("cpu", init_scale=2.0**8, growth_interval=2, **options)


def all_gather_flat(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def train_by_script(
    kind: Callable[..., Any], rank: int, dtype: torch.dtype, sizes: list[int]
) -> list[Any]:
    """Two optimizers of plain parameters whose scaled gradients the script spoils at times."""
    scaler = make_scaler(kind)
    generator = torch.Generator().manual_seed(rank)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in sizes]
    optimizers = [torch.optim.SGD(params[:1], lr=0.1), torch.optim.SGD(params[1:], lr=0.1)]
    seen = []
    for step, planted in enumerate(SCRIPT):
        scale = scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator).mul(scale).to(dtype)
        if planted is not None and planted[0] == rank:
            params[step % 2].grad[0] = planted[1]
        scaler.unscale_(optimizers[0])
        grads = [param.grad.clone() for param in params[:1]]
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        values = [param.detach().clone() for param in params]
        seen.append((scaler.get_scale(), scaler.state_dict(), values, grads))
    return seen


@on_ranks(2)
def test_scales_and_skipped_steps_are_those_of_torchs_scaler(rank: Rank) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        ours = train_by_script(ShardedGradScaler, rank.rank, dtype, [3, 5, 2])
        theirs = train_by_script(TorchScaler, rank.rank, dtype, [3, 5, 2])
        for got, expected in zip(ours, theirs, strict=True):
            assert got[:2] == expected[:2]
            torch.testing.assert_close(got[2:], expected[2:], rtol=0, atol=0, equal_nan=True)
        scales = [scale for scale, *_ in ours]
        assert scales == [256, 512, 256, 256, 128, 64, 64, 128, 128, 256]
        assert all_gather_flat(scales) == [scales] * rank.size


# Sharded models


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    # Checks and unscales in its own kernel, with what the scaler tells it.
    "fused_adam": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_a_sharded_model_steps_and_skips_as_the_unsharded_one(rank: Rank, name: str) -> None:
    model, reference = build(), build()
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, reference)]
    scalers = [make_scaler(ShardedGradScaler), make_scaler(GradScaler)]
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    for planted in SCRIPT[:6]:
        for m, optimizer, scaler in zip((model, reference), optimizers, scalers, strict=True):
            optimizer.zero_grad()
            scaler.scale(m(x).square().mean()).backward()
            if planted is not None:
                grad = m[0].weight.grad
                # The last row of the last rank: one rank alone sees it.
                row = grad.to_local() if isinstance(grad, DTensor) else grad
                if m is reference or rank.rank == rank.size - 1:
                    row[-1, -1] = planted[1]
            scaler.step(optimizer)
            scaler.update()
        assert scalers[0].state_dict() == scalers[1].state_dict()
        for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(full_tensor(param), expected)
    assert scalers[0].get_scale() == 64


# Ranks that differ


@on_ranks(4)
def test_ranks_with_fewer_gradients_or_none_take_part(rank: Rank) -> None:
    scaler = make_scaler(ShardedGradScaler)
    params = [nn.Parameter(torch.ones(n)) for n in (4, 0, 3)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    for step, expected in enumerate([256, 128, 128]):
        scale = scaler.scale(torch.ones(()))
        for param in params:
            param.grad = None
        if rank.rank > 0:
            params[1].grad = torch.empty(0)
            params[0].grad = scale.repeat(4)
        if rank.rank == 2:
            params[2].grad = scale.repeat(3)
            params[2].grad[-1] = math.nan if step == 1 else 1.0
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == expected
    assert scaler.state_dict()["_growth_tracker"] == 1
    # Of three steps, all ranks skipped the one with the nan.
    assert params[0].tolist() == [1.0 if rank.rank == 0 else -1.0] * 4


@on_ranks(2)
def test_a_gradient_of_mixed_dtypes_and_shapes_is_checked_whole(rank: Rank) -> None:
    for index, dtype in enumerate([torch.float16, torch.bfloat16, torch.float32, torch.float64]):
        scaler = make_scaler(ShardedGradScaler)
        dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
        params = [nn.Parameter(torch.zeros(2, 3, dtype=d)) for d in dtypes]
        optimizer = torch.optim.SGD(params, lr=1.0)
        scaler.scale(torch.ones(()))
        for param in params:
            param.grad = torch.full((3, 2), 256.0, dtype=param.dtype).t()
        if rank.rank == 0:
            params[index].grad[1, 2] = math.inf
        scaler.unscale_(optimizer)
        assert all(param.grad[0, 0] == 1.0 for param in params), dtype
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 128, dtype
        assert all(param.eq(0).all() for param in params), dtype


@on_ranks(2)
def test_sparse_gradients_are_checked_as_they_will_be_added_up(rank: Rank) -> None:
    scaler = make_scaler(ShardedGradScaler)
    param = nn.Parameter(torch.zeros(4, 2, dtype=torch.float16))
    optimizer = torch.optim.SGD([param], lr=1.0)
    with torch.sparse.check_sparse_tensor_invariants():
        for value, is_skipped in [(1.0, False), (4e4, True)]:
            scaler.scale(torch.ones(()))
            here = value if rank.rank == 1 else 1.0
            values = torch.full((3, 2), here, dtype=torch.float16)
            param.grad = torch.sparse_coo_tensor(torch.tensor([[0, 2, 2]]), values, (4, 2))
            before = param.detach().clone()
            scaler.step(optimizer)
            scaler.update()
            assert param.equal(before) == is_skipped
            if not is_skipped:
                assert param[2, 0] == -2.0 / 256


def one_step(scaler: Any, optimizer: torch.optim.Optimizer, value: float) -> float:
    """The scale after a step whose first gradient is `value`."""
    scaler.scale(torch.ones(()))
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
            local = param.grad.to_local() if isinstance(param, DTensor) else param.grad
            local.fill_(value)
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale()


@on_ranks(4)
def test_a_process_group_bounds_who_skips_and_a_mesh_that_reaches_further_widens_it(
    rank: Rank,
) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    value = math.inf if rank.rank == 1 else 1.0
    plain = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    row = mesh.get_group("shard")  # ranks 0 and 1, ranks 2 and 3
    scale = one_step(make_scaler(ShardedGradScaler, process_group=row), plain, value)
    assert all_gather_flat(scale) == [128, 128, 256, 256]
    assert one_step(make_scaler(ShardedGradScaler), plain, value) == 128

    model = nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    sharded = torch.optim.SGD(model.parameters(), lr=0.1)
    scale = one_step(make_scaler(ShardedGradScaler, process_group=row), sharded, value)
    assert all_gather_flat(scale) == [128] * 4

    first = dist.new_group([0, 1])
    scaler = make_scaler(ShardedGradScaler, process_group=first)
    if rank.rank < 2:
        assert one_step(scaler, plain, value) == 128
    else:
        with pytest.raises(TopologyError, match=f"this rank \\({rank.rank}\\)"):
            one_step(scaler, plain, value)


# The contract of the base class


@on_ranks(2)
def test_calls_in_the_wrong_order_raise_as_in_torch(rank: Rank) -> None:
    for kind in (ShardedGradScaler, TorchScaler):
        scaler = make_scaler(kind)
        param = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([param], lr=0.1)
        with pytest.raises(AssertionError, match="unscale_"):
            scaler.unscale_(optimizer)  # before anything was scaled
        scaler.scale(torch.ones(()))
        with pytest.raises(AssertionError, match="No inf checks"):
            scaler.update()
        param.grad = torch.ones(2)
        scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="after step"):
            scaler.unscale_(optimizer)
        with pytest.raises(RuntimeError, match="already been called"):
            scaler.step(optimizer)
        with pytest.raises(RuntimeError, match="Closure"):
            scaler.step(optimizer, closure=lambda: None)
        scaler.update(new_scale=32.0)
        assert scaler.get_scale() == 32.0
        scaler.update(new_scale=torch.tensor(16.0))
        assert scaler.get_scale() == 16.0


@on_ranks(2)
def test_a_scaler_goes_on_from_a_saved_state(rank: Rank) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    scaler = make_scaler(ShardedGradScaler)
    one_step(scaler, optimizer, math.inf if rank.rank == 1 else 1.0)
    one_step(scaler, optimizer, 1.0)
    restored = ShardedGradScaler("cpu")
    restored.load_state_dict(copy.deepcopy(scaler.state_dict()))
    assert restored.state_dict() == scaler.state_dict()
    # One more step without an inf makes two: the scale grows.
    assert one_step(restored, optimizer, 1.0) == one_step(scaler, optimizer, 1.0) == 256


def test_the_constructor_is_torchs():
    ours, theirs = inspect.signature(ShardedGradScaler), inspect.signature(TorchScaler)
    assert [(p.name, p.default) for p in ours.parameters.values()] == [
        (p.name, p.default) for p in theirs.parameters.values()
    ]
    assert issubclass(ShardedGradScaler, GradScaler)


def test_the_default_device_is_cuda_and_its_absence_disables():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scaler = ShardedGradScaler()
    assert scaler.is_enabled() == torch.cuda.is_available()
    assert len(caught) == (0 if torch.cuda.is_available() else 1)


def test_a_disabled_scaler_scales_nothing_and_needs_no_process_group():
    scaler = ShardedGradScaler("cpu", enabled=False)
    loss, param = torch.ones(()), nn.Parameter(torch.ones(2))
    assert scaler.scale(loss) is loss
    optimizer = torch.optim.SGD([param], lr=1.0)
    param.grad = torch.tensor([1.0, math.inf])
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [0.0, -math.inf]
    assert scaler.get_scale() == 1.0
    assert scaler.state_dict() == {}


def test_scaling_keeps_dtypes_and_containers():
    scaler, torchs = make_scaler(ShardedGradScaler), make_scaler(TorchScaler)
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (3,)):
            x = torch.full(shape, 1.5, dtype=dtype)
            torch.testing.assert_close(scaler.scale(x), torchs.scale(x), rtol=0, atol=0)
            assert scaler.scale(x).dtype == dtype
    nested = [torch.ones(()), (torch.ones(2).half(), [torch.ones(1)])]
    got, expected = scaler.scale(nested), torchs.scale(nested)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert isinstance(got[1], tuple)
    assert isinstance(got[1][1], list)
    lazily = scaler.scale(x for x in [torch.ones(()), torch.ones(2)])
    assert [x.sum().item() for x in lazily] == [256, 512]


def test_what_cannot_be_scaled_is_refused_as_in_torch():
    scaler, torchs = make_scaler(ShardedGradScaler), make_scaler(TorchScaler)
    with pytest.raises(ConfigError, match="not a float"):
        scaler.scale(1.0)
    with pytest.raises(ValueError, match="Tensor"):
        torchs.scale(1.0)
    meta = torch.ones((), device="meta")
    with pytest.raises(UnsupportedError, match="a tensor on meta"):
        scaler.scale([meta])
    with pytest.raises(AssertionError):
        torchs.scale([meta])

"""Muon on CUDA: over NCCL, captured, offloaded, and when the device skips a step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, capture, fully_shard
from fullshard.optim import Muon
from fullshard.optim.muon_kernels import add, update
from fullshard.optim.symmetric_products import product
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.gpu.transformer import Block, Transformer, shard_blocks

NUM_STEPS = 6


def built(rank: Rank) -> Transformer:
    torch.manual_seed(0)
    return Transformer(num_blocks=2).to(rank.device)


def sharded(rank: Rank, form: str, **options: Any) -> nn.Module:
    model = built(rank)
    if form == "rows":
        shard_blocks(model, fully_shard, mesh=rank.mesh(), **options)
    if form == "slices":
        return FullyShardedDataParallel(
            model,
            process_group=rank.mesh().get_group(),
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=rank.device,
            **options,
        )
    return model


def trained(rank: Rank, model: nn.Module, *, is_captured: bool = False) -> list[float]:
    optimizer = Muon.of(model, lr=1e-3)

    def step(tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    run = capture(step) if is_captured else step
    losses = []
    for number in range(NUM_STEPS):
        generator = torch.Generator().manual_seed(number)
        losses.append(run(torch.randint(0, 512, (2, 32), generator=generator).to(rank.device)))
    assert not is_captured or run.num_graphs == 1  # type: ignore[attr-defined]
    return [float(loss) for loss in losses]


@on_ranks(1, 2, backend="nccl", timeout_s=200)
def test_every_form_trains_as_the_unsharded_model_also_captured_and_offloaded(rank: Rank) -> None:
    expected = trained(rank, built(rank))
    assert expected[-1] != expected[0]
    for form in ("rows", "slices"):
        for is_captured in (False, True):
            found = trained(rank, sharded(rank, form), is_captured=is_captured)
            assert found == pytest.approx(expected, rel=1e-2), (form, is_captured)
    offloaded = sharded(rank, "rows", offload_policy=CPUOffloadPolicy())
    assert trained(rank, offloaded) == pytest.approx(expected, rel=1e-2)


@on_ranks(2, backend="nccl")
def test_a_step_that_the_device_skips_changes_nothing(rank: Rank) -> None:
    model = sharded(rank, "rows")
    optimizer = Muon.of(model, lr=torch.tensor(1e-2, device=rank.device))

    def step(factor: float, found_inf: float) -> list[torch.Tensor]:
        # Of all the vocabulary, so that every rank has embeddings to train.
        loss = model(torch.arange(0, 512, 8, device=rank.device).view(2, 32))
        (loss * factor).backward()
        optimizer.found_inf = torch.full((1,), found_inf, device=rank.device)
        optimizer.step()
        optimizer.zero_grad()
        return [param.to_local().clone() for param in model.parameters()]

    before = step(1.0, 0.0)
    assert all(map(torch.equal, step(float("nan"), 1.0), before))
    after = step(1.0, 0.0)
    assert all(each.isfinite().all() for each in after)
    assert not any(map(torch.equal, after, before))


@pytest.mark.parametrize("is_tall", [False, True])
@pytest.mark.parametrize("shape", [(2, 256, 128), (3, 800, 840), (1, 1024, 100)])
def test_products_by_halves_are_the_whole_products(shape: tuple[int, ...], is_tall: bool) -> None:
    torch.manual_seed(0)
    num, rows, depth = shape
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    batch = torch.randn(num, rows, depth, **options)
    if is_tall:
        batch = torch.randn(num, depth, rows, **options).mT
    gram, whole = product(batch), torch.bmm(batch, batch.mT)
    torch.testing.assert_close(gram, whole)
    assert torch.equal(gram, gram.mT)
    found = product(gram, gram, alpha=0.5, beta=-1.5)
    torch.testing.assert_close(found, torch.baddbmm(gram, gram, gram, beta=-1.5, alpha=0.5))


@pytest.mark.parametrize("factor", [None, 1.0, 0.0])
@pytest.mark.parametrize("nesterov", [False, True])
def test_passes_over_elements_are_those_of_torch(nesterov: bool, factor: float | None) -> None:
    torch.manual_seed(0)
    grad, momentum, param = torch.randn(3, 1_000_003, device="cuda").unbind()
    by = None if factor is None else torch.tensor(factor, device="cuda")
    before = momentum.clone()
    out = torch.empty_like(grad, dtype=torch.bfloat16)
    if factor == 0.0:
        update(torch.full_like(grad, torch.nan), momentum, out, 0.95, by, nesterov=nesterov)
        assert torch.equal(momentum, before)
        assert out.isfinite().all()
    else:
        update(grad, momentum, out, 0.95, by, nesterov=nesterov)
        before.lerp_(grad, 0.05)
        torch.testing.assert_close(momentum, before)
        expected = grad.lerp(before, 0.95) if nesterov else before
        torch.testing.assert_close(out, expected.bfloat16())
    expected = param * 0.9 - 0.1 * out.float()
    numbers = [torch.tensor(each, device="cuda") for each in (0.9, -0.1)]
    for rest, scale in ((0.9, -0.1), numbers):
        found = param.clone()
        add(found, out, rest, scale)
        torch.testing.assert_close(found, expected)

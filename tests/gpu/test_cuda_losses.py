"""The loss of a linear head on CUDA: its kernels, their memory, compiled and captured."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fullshard import MixedPrecisionPolicy, by_unit, capture, fully_shard
from fullshard.losses import LinearCrossEntropyHead, linear_cross_entropy
from fullshard.testing import Rank, on_ranks

NUM_TOKENS, WIDTH, VOCABULARY = 1024, 256, 32_001


def given(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        values = torch.randn(shape, generator=generator, device="cuda")
        return values.to(dtype).requires_grad_()

    targets = torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator, device="cuda")
    targets[::7] = -100
    return drawn(NUM_TOKENS, WIDTH), drawn(VOCABULARY, WIDTH), targets, drawn(VOCABULARY)


def plain(hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)


@pytest.mark.filterwarnings("ignore")  # what torch.compile says of itself
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_kernels_find_the_loss_and_the_gradients(dtype: torch.dtype, is_compiled: bool) -> None:
    hidden, weight, targets, bias = given(dtype)

    def loss_of(*tensors: Tensor) -> Tensor:
        return linear_cross_entropy(*tensors, chunk=300)

    run = torch.compile(loss_of, fullgraph=True) if is_compiled else loss_of
    found, wanted = run(hidden, weight, targets, bias), plain(hidden, weight, targets, bias)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    tensors, tolerance = (hidden, weight, bias), 2e-5 if dtype is torch.float32 else 2e-2
    for one, other in zip(
        torch.autograd.grad(found * 2**12, tensors),
        torch.autograd.grad(wanted * 2**12, tensors),
        strict=True,
    ):
        assert (one - other).norm() <= tolerance * other.norm()


def test_the_loss_takes_the_memory_of_a_chunk_and_of_the_gradients() -> None:
    hidden, weight, targets, _ = given(torch.bfloat16)
    linear_cross_entropy(hidden, weight, targets, chunk=128).backward()
    hidden.grad = weight.grad = None
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, chunk=128).backward()
    taken = torch.cuda.max_memory_allocated() - before
    sums_and_gradients = weight.numel() * (4 + 2)
    assert taken < sums_and_gradients + 128 * VOCABULARY * 2 + (8 << 20)


def test_counters_of_operations_see_all_three_products() -> None:
    hidden, weight, targets, _ = given(torch.bfloat16)
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, targets, chunk=300).backward()
    assert counter.get_total_flops() == 3 * 2 * NUM_TOKENS * WIDTH * VOCABULARY


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = LinearCrossEntropyHead(WIDTH, VOCABULARY, bias=False)
        self.is_plain = False

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        if self.is_plain:
            return F.cross_entropy(self.head(x).float(), targets)
        loss: Tensor = self.head(x, targets, chunk=128)
        return loss


@on_ranks(1, backend="nccl")
def test_a_captured_step_has_the_losses_of_eager_ones_and_of_the_plain_loss(rank: Rank) -> None:
    def trained(way: str) -> list[float]:
        torch.manual_seed(0)
        model: Any = Model().to(rank.device)
        model.is_plain = way == "plain"
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        fully_shard(model.middle, mesh=rank.mesh(), mp_policy=policy)
        fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
        lr = torch.tensor(1e-3, device=rank.device)
        optimizer = by_unit(
            torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
        )

        def step(tokens: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run: Any = capture(step) if way == "captured" else step
        generator = torch.Generator().manual_seed(0)
        losses = []
        for _ in range(6):
            pair = torch.randint(0, VOCABULARY, (2, 512), generator=generator).to(rank.device)
            losses.append(run(*pair))
        return [float(loss) for loss in losses]

    captured, eager, plain_losses = (trained(way) for way in ("captured", "eager", "plain"))
    assert captured == pytest.approx(eager, rel=1e-4)
    assert captured == pytest.approx(plain_losses, rel=1e-3)

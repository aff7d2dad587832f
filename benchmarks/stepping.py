"""One training step of one variant, and what it took."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import fullshard
from fullshard.testing import Rank
from measuring import synchronize
from models import GPT, GPTBlock, GPTSize, Llama, LlamaBlock, tokens_for
from variants import CAPTURED, Sharding, optimizer_for, shard


class Stepping:
    """A sharded model with its optimizer. `step` trains on the same tokens again and times it.

    Times, in seconds: `step` is the whole, `compute` forward and backward, `optimizer` the rest. On
    CUDA they are device times, and `host` is the time until the calls returned. On a CPU `host` is
    `step`. All of a captured step is `compute`.
    """

    def __init__(
        self, variant: str, build: Callable[[], nn.Module], how: Sharding, tokens: Tensor
    ) -> None:
        torch.manual_seed(0)
        with how.device:
            model = build()
        self.model = shard(variant, model, how)
        self.optimizer = optimizer_for(variant, self.model, learning_rate=1e-4)
        self.device = how.device
        self.tokens = tokens
        self.loss: Tensor | None = None
        self._captured: Callable[[Tensor], Tensor] | None = None
        if variant.endswith(CAPTURED):
            self._captured = fullshard.capture(self._whole)

    def step(self) -> dict[str, float]:
        if self.device.type == "cuda":
            return self._step_on_cuda()
        start = time.perf_counter()
        self._compute()
        middle = time.perf_counter()
        self._update()
        end = time.perf_counter()
        whole = end - start
        return {
            "step": whole,
            "compute": middle - start,
            "optimizer": end - middle,
            "host": whole,
        }

    def _step_on_cuda(self) -> dict[str, float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        synchronize(self.device)
        start = time.perf_counter()
        events[0].record()
        self._compute()
        events[1].record()
        self._update()
        events[2].record()
        host = time.perf_counter() - start
        synchronize(self.device)
        return {
            "step": events[0].elapsed_time(events[2]) / 1e3,
            "compute": events[0].elapsed_time(events[1]) / 1e3,
            "optimizer": events[1].elapsed_time(events[2]) / 1e3,
            "host": host,
        }

    def _whole(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def _compute(self) -> None:
        if self._captured is not None:
            self.loss = self._captured(self.tokens)
            return
        loss = self.model(self.tokens)
        loss.backward()
        self.loss = loss.detach()

    def _update(self) -> None:
        if self._captured is not None:
            return
        self.optimizer.step()
        self.optimizer.zero_grad()

    def losses(self, num_steps: int = 3) -> list[float]:
        found = []
        for _ in range(num_steps):
            self.step()
            assert self.loss is not None
            found.append(float(self.loss))
        return found


@dataclass(frozen=True)
class Task:
    """A model like Llama, or a GPT, in bf16: its shape, its batch, how often it is trained.

    A frozen one trains only vectors, as in fine-tuning that leaves matrices alone.
    """

    num_blocks: int
    width: int
    vocabulary: int
    batch: int
    length: int
    num_steps: int
    num_warm: int = 2
    is_gpt: bool = False
    is_frozen: bool = False

    def build(self) -> nn.Module:
        if self.is_gpt:
            model: nn.Module = GPT(GPTSize(self.num_blocks, self.width, self.vocabulary))
        else:
            model = Llama(self.num_blocks, self.width, self.vocabulary)
        for param in model.parameters() if self.is_frozen else ():
            param.requires_grad_(param.ndim == 1)
        return model

    def stepping(self, variant: str, rank: Rank) -> Stepping:
        block = GPTBlock if self.is_gpt else LlamaBlock
        how = Sharding(block, rank.mesh(), rank.device, torch.bfloat16)
        tokens = tokens_for(self.batch, self.length + 1, self.vocabulary, rank.device, rank.rank)
        return Stepping(variant, self.build, how, tokens)

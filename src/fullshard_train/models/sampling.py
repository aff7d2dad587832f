"""Autoregressive sampling from a sharded model."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard_train.models.architecture import Architecture

_TIME_IS_UP = -1  # instead of a token


@torch.no_grad()
def sample(
    architecture: Architecture,
    model: nn.Module,
    prompt_tokens: list[int],
    num_tokens: int,
    *,
    temperature: float,
    top_k: int,
    seed: int,
    end: int,
    device: torch.device,
    within_s: float = math.inf,
) -> list[int]:
    """Sample up to `num_tokens` tokens that follow a prompt. Sampling stops at `end`.

    No token is begun after `within_s`: over a slow network, each takes as long as gathering the
    model does.

    Every rank must call this function with the same arguments, and gets the same tokens. The
    model is given the last `max_sequence` tokens. An empty prompt starts a new document. With a
    temperature of 0 the most likely token is chosen; a `top_k` of 0 samples from all tokens.
    """
    deadline = time.monotonic() + within_s
    generator = torch.Generator().manual_seed(seed)
    prompt = prompt_tokens or [end]  # the token that precedes a new document
    tokens = list(prompt)
    with _eval_mode(model):
        next_logits = architecture.next_token_logits(model)
        for _ in range(num_tokens):
            window = tokens[-architecture.max_sequence :] if architecture.max_sequence else tokens
            logits = next_logits(torch.tensor([window], device=device)).float().cpu()
            drawn = _draw_token(logits, temperature, top_k, generator)
            token = _broadcast(drawn if time.monotonic() < deadline else _TIME_IS_UP, device)
            if token in (end, _TIME_IS_UP):
                break
            tokens.append(token)
    return tokens[len(prompt) :]


@contextmanager
def _eval_mode(model: nn.Module) -> Iterator[None]:
    """Disable dropout, and torch.compile, which would recompile for every length."""
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


def _draw_token(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def _broadcast(token: int, device: torch.device) -> int:
    """Return the token of rank 0: kernels tuned on each rank may round differently."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return token
    agreed = torch.tensor(token, device=device)
    dist.broadcast(agreed, src=0)
    return int(agreed)

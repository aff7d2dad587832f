"""Text from a model, token by token; all ranks of a sharded model together."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.models.architecture import Architecture


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
    end: int | None,
    device: torch.device,
) -> list[int]:
    """The tokens that follow a prompt, at most so many, without `end`, at which it stops.

    Every rank calls it with the same arguments and gets the same tokens. The model sees the last
    `max_sequence` tokens; without a prompt it begins a document. A temperature of 0 takes the
    likeliest token; a `top_k` of 0 draws from all of them.
    """
    generator = torch.Generator().manual_seed(seed)
    prompt = list(prompt_tokens)
    if not prompt:
        if end is None:
            raise ConfigError(
                "sample: a prompt of at least one token was expected, found none; give one, or the "
                "token that ends a document."
            )
        prompt = [end]  # where a document ended another begins
    tokens = list(prompt)
    with _evaluated(model):
        read = architecture.reader(model)
        for _ in range(num_tokens):
            window = tokens[-architecture.max_sequence :] if architecture.max_sequence else tokens
            logits = read(torch.tensor([window], device=device))
            token = _agreed(_drawn(logits.float().cpu(), temperature, top_k, generator), device)
            if token == end:
                break
            tokens.append(token)
    return tokens[len(prompt) :]


@contextmanager
def _evaluated(model: nn.Module) -> Iterator[None]:
    """Without dropout, until the end of the block.

    And without the compiler: every length would be compiled anew.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        model.train(was_training)


def _drawn(logits: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits.argmax())
    logits = logits / temperature
    if 0 < top_k < logits.numel():
        least = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial(logits.softmax(-1), 1, generator=generator))


def _agreed(token: int, device: torch.device) -> int:
    """The first rank's token: kernels that were tuned on each rank may round differently."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return token
    said = torch.tensor(token, device=device)
    dist.broadcast(said, src=0)
    return int(said)

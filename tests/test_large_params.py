"""Large parameters on a device with streams: gathered only as long as somebody reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.comm.collectives import CollectiveWork, ShmCollectives
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.test_large_gradients import ordered_and_small

VOCABULARY, WIDTH = 64, 8
LARGE = VOCABULARY * WIDTH


class Model(nn.Module):
    """An embedding and a head that are large, and something small between them."""

    way = "untied"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.num_calls = 0

    def logits(self, x: Tensor) -> Tensor:
        """With weights of both, from where a graph may not show them."""
        return F.linear(x, self.embed.weight) + self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        self.num_calls += 1
        x = torch.tanh(self.middle(self.embed(tokens)))
        if self.way == "tied by hand" or (self.way == "tied later" and self.num_calls > 2):
            return self.logits(x)
        if self.way == "detached":
            return self.head(x) + F.linear(x, self.embed.weight.detach())
        if self.way.startswith("checkpointed"):
            return checkpoint(self.logits, x, use_reentrant="reentrant" in self.way)
        if self.way == "recomputed embedding":
            x = checkpoint(lambda t: torch.tanh(self.embed(t)), tokens, use_reentrant=False)
        return self.head(x)


def built(way: str) -> Model:
    model = Model()
    model.way = way
    return model


def batch(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 5), generator=generator)


def shard(rank: Rank, model: Model) -> None:
    fully_shard(model.middle, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())


WAYS = (
    "untied",
    "tied by hand",
    "tied later",
    "detached",
    "checkpointed",
    "checkpointed, reentrant",
    "recomputed embedding",
)


@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_whoever_reads_a_large_parameter_finds_it(rank: Rank, way: str) -> None:
    with ordered_and_small():
        assert_same_training(
            partial(built, way),
            partial(shard, rank),
            Training(batch, steps=4, micro_batches=2),
            rtol=1e-4,
            atol=1e-5,
        )


@contextmanager
def watched_gathers() -> Iterator[list[int]]:
    """The elements of every full bucket that is gathered."""
    found: list[int] = []
    gather = ShmCollectives.all_gather

    def watched(self: ShmCollectives, outs: Any, *args: Any) -> CollectiveWork:
        found.extend(out.numel() for out in outs)
        return gather(self, outs, *args)

    with patch.object(ShmCollectives, "all_gather", watched):
        yield found


@pytest.mark.parametrize("reshard_after_forward", [None, True])
@on_ranks(2)
def test_an_embedding_is_neither_kept_for_backward_nor_gathered_again(
    rank: Rank, reshard_after_forward: bool | None
) -> None:
    with ordered_and_small(), watched_gathers() as gathered:
        model: Any = Model()
        fully_shard(model.middle, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
        tokens = batch(torch.Generator())
        model(tokens).sum().backward()
        gathered.clear()
        loss = model(tokens).sum()
        # Of the two, the head alone is there, if the root stays unsharded.
        full = [each.untyped_storage().size() > 0 for each in model.parameters()]
        loss.backward()
    is_kept = reshard_after_forward is None
    assert gathered.count(LARGE) == (2 if is_kept else 3)
    assert isinstance(model.embed.weight, torch.distributed.tensor.DTensor)
    assert len(full) == 4


@on_ranks(2)
def test_a_large_parameter_is_freed_when_its_gradient_is_there(rank: Rank) -> None:
    seen: list[list[bool]] = []
    with ordered_and_small():
        model: Any = Model()
        fully_shard(model, mesh=rank.mesh())
        units = {unit.name: unit for unit in model._get_fsdp_state()._hooks.units}
        for _ in range(2):
            out = torch.tanh(model.middle(model.embed.weight.to_local()[:1])) if False else None
            del out
            x = model(batch(torch.Generator()))
            handle = model.middle.weight.register_hook(
                lambda _: seen.append([unit.is_unsharded for unit in units.values()])
            )
            x.sum().backward()
            handle.remove()
    assert seen[-1] == [True, False, False]

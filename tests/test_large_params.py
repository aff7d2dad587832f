"""Large parameters on a device with streams: gathered only as long as somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.unit import Unit
from tests.test_large_gradients import ordered_and_small

VOCABULARY, WIDTH = 64, 8


class Model(nn.Module):
    """An embedding and a head that are large, and something small between them."""

    way = "untied"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        """With weights of both, from where a graph may not show them."""
        return F.linear(x, self.embed.weight) + self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        if self.way == "tied by hand":
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


def assert_same_if_large(grads: Callable[[], list[Tensor]]) -> None:
    """What is computed does not depend on which parameters are units for themselves."""
    expected = grads()
    with ordered_and_small():
        for found, wanted in zip(grads(), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@on_ranks(2)
def test_a_module_that_is_called_in_another_way_later_finds_its_parameters(rank: Rank) -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Model()
        shard(rank, model)
        for way in ("untied", "untied", "tied by hand", "detached", "untied"):
            model.way = way
            model(batch(torch.Generator().manual_seed(rank.rank))).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert_same_if_large(grads)


@on_ranks(2)
def test_a_parameter_that_is_used_outside_of_its_module_stays(rank: Rank) -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Model()
        shard(rank, model)
        for _ in range(3):
            out = model(batch(torch.Generator().manual_seed(rank.rank)))
            (out @ model.embed.weight).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert_same_if_large(grads)


@pytest.mark.parametrize("reshard_after_forward", [None, True])
@on_ranks(2)
def test_a_reference_that_one_rank_keeps_changes_no_collective(
    rank: Rank, reshard_after_forward: bool | None
) -> None:
    kept: list[Tensor] = []

    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Model()
        if rank.rank == 0:
            model.embed.register_forward_hook(lambda each, *_: kept.append(each.weight.detach()))
        fully_shard(model.embed, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
        for _ in range(3):
            model(batch(torch.Generator().manual_seed(rank.rank))).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert_same_if_large(grads)


@on_ranks(2)
def test_large_parameters_are_freed_when_backward_does_not_read_them_any_more(rank: Rank) -> None:
    def held_bytes(unit: Unit) -> int:
        full = unit.params[0].full
        return 0 if full is None else full.untyped_storage().nbytes()

    seen: list[dict[str, int]] = []
    with ordered_and_small():
        model: Any = Model()
        shard(rank, model)
        units = hooks_of(model).units
        for _ in range(2):
            model.middle.register_full_backward_hook(
                lambda *_: seen.append({unit.name: held_bytes(unit) for unit in units})
            )
            model(batch(torch.Generator())).sum().backward()
    assert seen[-1]["head.weight"] == 0
    assert seen[-1]["embed.weight"] == 0

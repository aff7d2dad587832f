"""Large parameters on a device with streams: gathered only as long as somebody reads them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.unit import Unit
from tests.engine.test_large_gradients import ordered_and_small

VOCABULARY, WIDTH = 64, 8


class Model(nn.Module):
    """An embedding and a head that are large, and something small before and between them."""

    way = "untied"

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def logits(self, x: Tensor) -> Tensor:
        """Read both weights where a graph may not show it."""
        return F.linear(x, self.embed.weight) + self.head(x)

    def forward(self, tokens: Tensor) -> Tensor:
        weight = self.embed.weight if self.way == "held" else None
        x = self.embed(tokens) * self.shift
        if self.way == "tied at the start":
            x = x + F.linear(F.linear(x, self.embed.weight), self.embed.weight.T) / VOCABULARY
        if self.way == "saved at the start":
            x = x + (x.mean() * self.embed.weight).mean()
        if self.way == "recomputed start":
            x = checkpoint(lambda t: self.embed(t) * self.shift, tokens, use_reentrant=False)
        x = torch.tanh(self.middle(x))
        if self.way == "tied by hand":
            return self.logits(x)
        if self.way == "detached":
            return self.head(x) + F.linear(x, self.embed.weight.detach())
        if self.way == "failing":
            raise RuntimeError("on purpose")
        if self.way == "normed":
            with torch.no_grad():
                norm = self.embed.weight.norm()
            return self.head(x) * (norm / VOCABULARY)
        if self.way == "held":
            assert weight is not None
            return self.head(x) * (weight.detach().norm() / VOCABULARY)
        if self.way == "looked up again":
            return self.head(x + self.embed(tokens))
        if self.way.startswith("checkpointed"):
            return checkpoint(self.logits, x, use_reentrant="reentrant" in self.way)
        if self.way == "recomputed embedding":
            x = checkpoint(lambda t: torch.tanh(self.embed(t)), tokens, use_reentrant=False)
        return self.head(x)


def built(way: str, *, is_frozen: bool = False) -> Model:
    """A model that is called in one of the ways; its embedding may be frozen."""
    model = Model()
    model.way = way
    model.embed.weight.requires_grad_(not is_frozen)
    return model


def batch(generator: torch.Generator) -> Tensor:
    return torch.randint(0, VOCABULARY, (3, 5), generator=generator)


def shard(rank: Rank, model: Model) -> None:
    fully_shard(model.middle, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())


def held_bytes(unit: Unit) -> int:
    full = unit.params[0].full
    return 0 if full is None else full.untyped_storage().nbytes()


WAYS = (
    "untied",
    "tied at the start",
    "saved at the start",
    "recomputed start",
    "tied by hand",
    "detached",
    "normed",
    "held",
    "looked up again",
    "checkpointed",
    "checkpointed, reentrant",
    "recomputed embedding",
)


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_whoever_reads_a_large_parameter_finds_it(rank: Rank, way: str, is_frozen: bool) -> None:
    with ordered_and_small():
        assert_same_training(
            partial(built, way, is_frozen=is_frozen),
            partial(shard, rank),
            Training(batch, steps=4, micro_batches=2),
            rtol=1e-4,
            atol=1e-5,
        )


def assert_same_if_large(grads: Callable[[], list[Tensor]]) -> None:
    """The result does not depend on which parameters are units by themselves."""
    expected = grads()
    with ordered_and_small():
        for found, wanted in zip(grads(), expected, strict=True):
            torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("later", WAYS[1:])
@on_ranks(2)
def test_a_module_that_is_called_in_another_way_later_finds_its_parameters(
    rank: Rank, later: str
) -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Model()
        shard(rank, model)
        for way in ("untied", "untied", later, "untied"):
            model.way = way
            model(batch(torch.Generator().manual_seed(rank.rank))).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert_same_if_large(grads)


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("way", ["untied", "saved at the start", "tied by hand"])
@on_ranks(2)
def test_a_second_backward_of_a_graph_finds_what_was_saved(
    rank: Rank, way: str, is_frozen: bool
) -> None:
    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = built("untied", is_frozen=is_frozen)
        shard(rank, model)
        for each in ("untied", "untied", way):
            model.way = each
            loss = model(batch(torch.Generator().manual_seed(rank.rank))).square().sum()
            loss.backward(retain_graph=True)
            loss.backward()
        return [param.grad.to_local() for param in model.parameters() if param.requires_grad]

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


@pytest.mark.parametrize("inner", ["embed", "middle"])
@pytest.mark.parametrize("reshard_after_forward", [None, True])
@on_ranks(2)
def test_a_reference_that_one_rank_keeps_changes_no_collective(
    rank: Rank, inner: str, reshard_after_forward: bool | None
) -> None:
    kept: list[Tensor] = []

    def grads() -> list[Tensor]:
        torch.manual_seed(0)
        model: Any = Model()
        if rank.rank == 0:
            model.embed.register_forward_hook(lambda each, *_: kept.append(each.weight.detach()))
        fully_shard(getattr(model, inner), mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard_after_forward)
        generator = torch.Generator().manual_seed(rank.rank)
        for _ in range(3):
            out = model(batch(generator)), model(batch(generator))  # before one backward
            torch.cat(out).square().sum().backward()
        return [param.grad.to_local() for param in model.parameters()]

    assert_same_if_large(grads)


@on_ranks(2)
def test_a_large_parameter_is_freed_when_backward_does_not_read_it_any_more(rank: Rank) -> None:
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


KEEPERS = {
    "set_reshard_after_forward": True,
    "set_reshard_after_backward": False,
    "set_uneven": True,
}


@pytest.mark.parametrize("setting", [None, "frozen", *KEEPERS])
@on_ranks(2)
def test_a_parameter_that_was_looked_up_is_freed_in_forward_and_stays_so_in_backward(
    rank: Rank, setting: str | None
) -> None:
    is_kept = setting in KEEPERS
    with ordered_and_small():
        model: Any = built("untied", is_frozen=setting == "frozen")
        shard(rank, model)
        if setting in KEEPERS:
            getattr(model, setting)(KEEPERS[setting])
        units = hooks_of(model).units
        seen: list[dict[str, bool]] = []

        def look(*_: Any) -> None:
            seen.append({unit.name: held_bytes(unit) > 0 for unit in units})

        model.middle.register_forward_hook(look)
        model.middle.register_full_backward_hook(look)
        for _ in range(3):
            model(batch(torch.Generator())).sum().backward()
    assert [each["embed.weight"] for each in seen] == [True, *[is_kept] * 5]
    assert all(each["head.weight"] for each in seen[::2])


@on_ranks(2)
def test_a_released_parameter_looks_like_the_full_one_and_is_gathered_when_read(rank: Rank) -> None:
    with ordered_and_small():
        model: Any = Model()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        fully_shard(model.middle, mesh=rank.mesh(), mp_policy=policy)
        fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
        comm_ctx = hooks_of(model).units[0].comm_ctx
        for _ in range(2):
            out = model(batch(torch.Generator()))
        full, before = model.embed.weight, comm_ctx.num_collectives
        assert (full.dtype, full.shape) == (torch.bfloat16, (VOCABULARY, WIDTH))
        assert (full.device.type, full.numel(), len(full)) == ("cpu", VOCABULARY * WIDTH, 64)
        assert (full.requires_grad, full.is_leaf, full.grad) == (True, True, None)
        assert isinstance(full, nn.Parameter)
        assert "when it is read" in repr(full)
        assert comm_ctx.num_collectives == before
        values = torch.stack([full, full]).detach()[1]
        assert comm_ctx.num_collectives == before + 1
        assert type(model.embed.weight) is nn.Parameter
        torch.testing.assert_close(values, model.embed.weight.detach(), rtol=0, atol=0)
        out.sum().backward()
        shards = model.embed.weight.full_tensor()
        torch.testing.assert_close(values, shards.bfloat16(), rtol=0, atol=0)


@on_ranks(2)
def test_shards_are_there_after_a_forward_that_fails_or_is_saved(rank: Rank) -> None:
    with ordered_and_small():
        model: Any = Model()
        shard(rank, model)
        tokens = batch(torch.Generator())
        for _ in range(2):
            model(tokens).sum().backward()
        state = model.state_dict()
        model(tokens)
        between = model.state_dict()
        for name, tensor in state.items():
            assert isinstance(between[name], DTensor)
            assert torch.equal(between[name].to_local(), tensor.to_local())
        model(tokens).sum().backward()
        model.way = "failing"
        with pytest.raises(RuntimeError, match="on purpose"):
            model(tokens)
        assert isinstance(model.embed.weight, DTensor)
        model.way = "untied"
        model(tokens).sum().backward()

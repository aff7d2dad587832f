"""Large parameters of a wrapper are units by themselves, on a device with streams (rule 15)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from fullshard import FullyShardedDataParallel, ShardingStrategy, StateDictType
from fullshard.errors import MisuseError
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from tests.engine.test_large_gradients import ordered_and_small
from tests.engine.test_large_params import WAYS, Model, batch, built, held_bytes


def wrapped(model: Model, *, use_orig_params: bool = True) -> Any:
    wrap = partial(FullyShardedDataParallel, use_orig_params=use_orig_params)
    model.middle = wrap(model.middle)  # type: ignore[assignment]
    return wrap(model)


def assert_same_if_large(results: Callable[[], list[Tensor]]) -> None:
    """The result does not depend on which parameters are units by themselves."""
    expected = results()
    with ordered_and_small():
        found = results()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def values_of(model: Any) -> list[Tensor]:
    with FullyShardedDataParallel.summon_full_params(model):
        return [param.detach().clone() for param in model.parameters()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_whoever_reads_a_large_parameter_of_a_wrapper_finds_it(
    rank: Rank, way: str, is_frozen: bool
) -> None:
    def results() -> list[Tensor]:
        torch.manual_seed(0)
        model = wrapped(built(way, is_frozen=is_frozen))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank.rank)
        for _ in range(4):
            for _ in range(2):
                model(batch(generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return values_of(model)

    assert_same_if_large(results)


@on_ranks(2)
def test_an_embedding_is_freed_in_forward_and_users_see_their_own_parameters(rank: Rank) -> None:
    with ordered_and_small():
        model = wrapped(Model())
        embed, before = model.module.embed, model.module.embed.weight
        units = hooks_of(model).units
        assert sorted(param.name for unit in units for param in unit.params) == sorted(
            name for name, _ in model.named_parameters() if "middle" not in name
        )
        seen: list[dict[str, bool]] = []

        def look(*_: Any) -> None:
            seen.append({unit.name: held_bytes(unit) > 0 for unit in units})

        model.middle.register_forward_hook(look)
        model.middle.register_full_backward_hook(look)
        collectives: list[int] = []
        for _ in range(4):
            loss = model(batch(torch.Generator())).sum()
            assert embed.weight is before
            assert before.shape == (before.numel(),)
            loss.backward()
            assert embed.weight is before
            assert before.grad is not None
            collectives.append(units[0].comm_ctx.num_collectives)
    assert [each["embed.weight"] for each in seen] == [True, *[False] * 7]
    # The three units of the root and that of the block are gathered once, and reduced once.
    assert collectives[-1] - collectives[-2] == 2 * (len(units) + 1) == 8


@on_ranks(2)
def test_values_given_between_forward_and_backward_are_refused_and_forgotten(rank: Rank) -> None:
    with ordered_and_small():
        model = FullyShardedDataParallel(
            Model(), sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, use_orig_params=True
        )
        tokens = batch(torch.Generator())
        expected = model(tokens).detach()
        loss = model(tokens).sum()
        for param in model.parameters():
            param.data = 0.9 * param.data
        with pytest.raises(MisuseError, match="changing the parameters between forward"):
            loss.backward()
        model.zero_grad()
        torch.testing.assert_close(model(tokens), expected)


TYPES = [StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT]
TYPES += [StateDictType.LOCAL_STATE_DICT]


def trained(generator: torch.Generator) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = wrapped(Model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(3):
        model(batch(generator)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.parametrize("kind", TYPES)
@on_ranks(2)
def test_state_dicts_have_all_units(rank: Rank, kind: StateDictType) -> None:
    def results() -> list[Tensor]:
        model, optimizer = trained(torch.Generator().manual_seed(rank.rank))
        with FullyShardedDataParallel.state_dict_type(model, kind):
            state = model.state_dict()
            if kind is not StateDictType.LOCAL_STATE_DICT:
                moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        with torch.no_grad(), FullyShardedDataParallel.summon_full_params(model):
            for param in model.parameters():
                param.zero_()
        with FullyShardedDataParallel.state_dict_type(model, kind):
            model.load_state_dict(state)
            if kind is not StateDictType.LOCAL_STATE_DICT:
                optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
                optimizer.load_state_dict(
                    FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, moments)
                )
        model(batch(torch.Generator().manual_seed(rank.rank))).square().sum().backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        return values_of(model)

    assert_same_if_large(results)


@on_ranks(2)
def test_a_flat_parameter_stays_one(rank: Rank) -> None:
    with ordered_and_small():
        model = wrapped(Model(), use_orig_params=False)
        assert len(hooks_of(model).units) == 1
        assert len(list(model.parameters())) == 2

"""A wrapper's errors say what is wrong and what to do, and nothing is changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fullshard import (
    BackwardPrefetch,
    FullStateDictConfig,
    FullyShardedDataParallel,
    ShardingStrategy,
    StateDictType,
)
from fullshard.errors import FullshardError
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 4


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3))


def options(rank: Rank, inside: nn.Module) -> dict[str, tuple[dict[str, Any], type, str]]:
    """Invalid arguments, what torch's class raises for the like, and words of our error."""
    two = rank.mesh((2, 1), ("replicate", "shard"))
    hybrid = ShardingStrategy.HYBRID_SHARD
    world = dist.group.WORLD
    return {
        "strategy": ({"sharding_strategy": "FULL_SHARD"}, ValueError, "ShardingStrategy"),
        "prefetch": ({"backward_prefetch": True}, ValueError, "BackwardPrefetch"),
        "group and mesh": (
            {"process_group": world, "device_mesh": rank.mesh()},
            ValueError,
            "at the same time; pass",
        ),
        "two axes": ({"device_mesh": two}, ValueError, "ndim=1 but got 2"),
        "one axis": (
            {"device_mesh": rank.mesh(), "sharding_strategy": hybrid},
            ValueError,
            "ndim=2 but got 1",
        ),
        "no mesh": ({"device_mesh": [0, 1]}, ValueError, "must be a DeviceMesh"),
        "one group": (
            {"process_group": world, "sharding_strategy": hybrid},
            ValueError,
            "Tuple[dist.ProcessGroup, dist.ProcessGroup]",
        ),
        "a pair": ({"process_group": (world, world)}, ValueError, "one process group"),
        "a parameter as module": (
            {"ignored_modules": [inside.weight]},
            ValueError,
            "ignored_modules expects nn.Module",
        ),
        "a name as state": ({"ignored_states": ["0.weight"]}, ValueError, "[<class 'str'>]"),
        "a number without GPU": ({"device_id": 0}, ValueError, "there is none"),
        "policy": ({"auto_wrap_policy": nn.Linear}, ValueError, "policy"),
        "policy's answer": (
            {"auto_wrap_policy": lambda module, recurse, nonwrapped_numel: None},
            ValueError,
            "instead of True or False",
        ),
    }


@on_ranks(2)
def test_arguments_that_do_not_fit_are_named_and_change_nothing(rank: Rank) -> None:
    for case in options(rank, nn.Linear(1, 1)):
        inner = model()
        arguments, kind, words = options(rank, inner[0])[case]
        before = copy.deepcopy(inner.state_dict())
        with pytest.raises(kind) as raised:
            FullyShardedDataParallel(inner, **arguments)
        assert words in str(raised.value), (case, str(raised.value))
        assert isinstance(raised.value, FullshardError | TypeError)
        assert "; " in str(raised.value), case
        assert all(hooks_of(module) is None for module in inner.modules()), case
        for name, value in before.items():
            assert torch.equal(inner.state_dict()[name], value), case
    with pytest.raises(ValueError, match=r"takes an nn\.Module"):
        FullyShardedDataParallel("model")


@on_ranks(2)
def test_a_model_that_is_wrapped_is_not_wrapped_by_a_policy_again(rank: Rank) -> None:
    inner = model()
    inner[0] = FullyShardedDataParallel(inner[0])
    with pytest.raises(ValueError, match="wrap either by hand or by a policy"):
        FullyShardedDataParallel(inner, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))


@on_ranks(2)
def test_calls_at_the_wrong_place_or_time_say_where_they_belong(rank: Rank) -> None:
    wrapped = FullyShardedDataParallel(
        model(),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        backward_prefetch=BackwardPrefetch.BACKWARD_POST,
    )
    wrapped(torch.ones(1, WIDTH)).sum().backward()
    inside = wrapped[0]
    calls: list[Callable[[], Any]] = [
        lambda: inside.clip_grad_norm_(1.0),
        lambda: inside.no_sync().__enter__(),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="call it on the outermost wrapper"):
            call()
    with pytest.raises(AssertionError, match="does not support deepcopy"):
        copy.deepcopy(wrapped)
    with pytest.raises(RuntimeError, match="ShardedStateDictConfig"):
        FullyShardedDataParallel.set_state_dict_type(
            wrapped, StateDictType.SHARDED_STATE_DICT, FullStateDictConfig()
        )
    with pytest.raises(RuntimeError, match="StateDictType"):
        FullyShardedDataParallel.set_state_dict_type(wrapped, "full")
    # All of it left the model as it was.
    wrapped.zero_grad()
    wrapped(torch.ones(1, WIDTH)).sum().backward()
    assert wrapped.clip_grad_norm_(1.0) > 0

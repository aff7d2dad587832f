"""A sharded model lives as long as someone holds it, and no longer."""

import gc
import weakref

import torch
from torch import nn

from fullshard import fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks


def build() -> nn.Sequential:
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(3)))


@on_ranks(2)
def test_a_model_that_nobody_holds_is_freed_with_all_that_was_made_for_it(rank: Rank) -> None:
    model = build()
    for block in model:
        fully_shard(block, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    unit = hooks_of(model[0]).units[0]
    refs = {
        "model": weakref.ref(model),
        "unit": weakref.ref(unit),
        "shard": weakref.ref(unit.params[0].shard),
        "full parameter": weakref.ref(unit.params[0].full),
    }
    del model, block, optimizer, unit
    gc.collect()
    assert [name for name, ref in refs.items() if ref() is not None] == []

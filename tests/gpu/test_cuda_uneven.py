"""Uneven units over NCCL: rounds that the host learns of, and collectives on streams."""

import torch
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.engine.test_uneven import (
    Layers,
    Model,
    adam,
    batch,
    shard,
    shard_layers,
    tokens,
    wrapped,
)


@on_ranks(2, backend="nccl", timeout_s=120)
def test_nccl_ranks_that_run_different_units_train_as_the_unsharded_model_does(rank: Rank) -> None:
    def build() -> nn.Module:
        return Layers().to(rank.device)

    training = Training(tokens, optimizer=adam, steps=6)
    for after in (None, False):
        options = {"mesh": rank.mesh(), "reshard_after_forward": after}
        trained = assert_same_training(build, lambda m, o=options: shard_layers(m, **o), training)
        assert trained.sharded.unused.weight.grad is None
    experts = Training(batch, steps=4)
    assert_same_training(
        lambda: Model().to(rank.device), lambda m: shard(m, mesh=rank.mesh()), experts
    )


@on_ranks(2, backend="nccl", timeout_s=120)
def test_nccl_ranks_compute_uneven_units_in_bf16_and_wrapped(rank: Rank) -> None:
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Layers().to(rank.device)
    shard_layers(model, mesh=rank.mesh(), mp_policy=low)
    optimizer = adam(model.parameters())
    for step in range(6):
        given = tokens(torch.Generator().manual_seed(10 * step + rank.rank)).to(rank.device)
        model(given).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(param.to_local().isfinite().all() for param in model.parameters())
    torch.manual_seed(0)
    reference = Model().to(rank.device)
    copied = Model().to(rank.device)
    copied.load_state_dict(reference.state_dict())
    whole = wrapped(copied, rank, use_orig_params=True)
    given = [batch(torch.Generator().manual_seed(each)).to(rank.device) for each in range(2)]
    (sum(reference(each).square().mean() for each in given) / 2).backward()
    whole(given[rank.rank]).square().mean().backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert isinstance(whole, FullyShardedDataParallel)
    torch.testing.assert_close(whole.clip_grad_norm_(1.0), norm)

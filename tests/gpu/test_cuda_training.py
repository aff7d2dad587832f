"""Training on CUDA over NCCL gives what the unsharded model gives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPrecision
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.state import Absent
from tests.gpu.transformer import Transformer, shard_blocks


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 512, (2, 32), generator=generator)


def build(rank: Rank, **options: int) -> nn.Module:
    return Transformer(**options).to(rank.device)


BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def both_doors(rank: Rank, types: dict[str, torch.dtype]) -> list[Callable[[Transformer], None]]:
    """Shard blocks in the same dtypes by our API, and by torch's."""
    apis = ((fully_shard, MixedPrecisionPolicy), (torch_fully_shard, TorchPrecision))
    return [
        partial(shard_blocks, fully_shard=api, mesh=rank.mesh(), mp_policy=policy(**types))
        for api, policy in apis
    ]


@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@on_ranks(1, 2, 4, backend="nccl")
def test_training_over_nccl_equals_the_unsharded_model(
    rank: Rank, reshard_after_forward: bool | None
) -> None:
    def shard(model: Transformer) -> None:
        options = {"mesh": rank.mesh(), "reshard_after_forward": reshard_after_forward}
        shard_blocks(model, fully_shard, **options)

    assert_same_training(
        partial(build, rank), shard, Training(tokens, steps=4), rtol=1e-4, atol=1e-5
    )


@on_ranks(4, backend="nccl")
def test_replicated_shards_over_nccl_equal_the_unsharded_model(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=mesh)
    assert_same_training(partial(build, rank), shard, Training(tokens), rtol=1e-4, atol=1e-5)


@on_ranks(4, backend="nccl")
def test_gathering_again_over_fewer_ranks_equals_the_unsharded_model(rank: Rank) -> None:
    shard = partial(
        shard_blocks, fully_shard=fully_shard, mesh=rank.mesh(), reshard_after_forward=2
    )
    assert_same_training(partial(build, rank), shard, Training(tokens), rtol=1e-4, atol=1e-5)


@on_ranks(2, backend="nccl")
def test_an_uneven_width_equals_the_unsharded_model(rank: Rank) -> None:
    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=rank.mesh())
    make = partial(build, rank, width=66, vocabulary=513)
    assert_same_training(make, shard, Training(tokens), rtol=1e-4, atol=1e-5)


@on_ranks(2, backend="nccl")
def test_mixed_precision_gives_the_shards_that_torchs_door_gives(rank: Rank) -> None:
    ours, theirs = both_doors(rank, BF16)
    training = Training(tokens, steps=3)
    assert_same_training(partial(build, rank), ours, training, oracle=theirs, rtol=2e-2, atol=2e-4)


@pytest.mark.parametrize("precision", [True, False], ids=["bf16", "float32"])
@on_ranks(2, backend="nccl")
def test_large_gradients_that_are_reduced_early_equal_those_of_torchs_door(
    rank: Rank, precision: bool
) -> None:
    """With a cast they are sent in pieces; without, autograd's own tensor is sent."""
    ours, theirs = both_doors(rank, BF16 if precision else {})
    make = partial(build, rank, num_blocks=1, width=1024, vocabulary=32768)
    model = make()
    ours(model)
    units = [[param.name for param in unit.params] for unit in hooks_of(model).units]
    assert units[1:] == [["embedding.weight"], ["head.weight"]]
    rtol, atol = (2e-2, 2e-4) if precision else (1e-4, 1e-5)
    assert_same_training(make, ours, Training(tokens, steps=3), oracle=theirs, rtol=rtol, atol=atol)


@pytest.mark.parametrize("pin_memory", [True, False])
@on_ranks(2, backend="nccl")
def test_offloaded_shards_train_on_the_host(rank: Rank, pin_memory: bool) -> None:
    shard = partial(
        shard_blocks,
        fully_shard=fully_shard,
        mesh=rank.mesh(),
        offload_policy=CPUOffloadPolicy(pin_memory=pin_memory),
    )
    trained = assert_same_training(
        partial(build, rank),
        shard,
        Training(tokens, steps=4, micro_batches=2),
        rtol=1e-4,
        atol=1e-5,
    )
    for param in trained.sharded.parameters():
        assert param.device.type == "cpu"
        assert param.to_local().is_pinned() == pin_memory


@on_ranks(2, backend="nccl")
def test_accumulation_without_sync_equals_the_unsharded_model(rank: Rank) -> None:
    def before_forward(model: nn.Module, micro_batch: int) -> None:
        model.set_requires_gradient_sync(micro_batch == 1)

    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=rank.mesh())
    training = Training(tokens, micro_batches=2, before_forward=before_forward)
    assert_same_training(partial(build, rank), shard, training, rtol=1e-4, atol=1e-5)


@on_ranks(4, backend="nccl")
def test_accumulation_without_all_reduce_equals_the_unsharded_model(rank: Rank) -> None:
    def before_forward(model: nn.Module, micro_batch: int) -> None:
        model.set_requires_all_reduce(micro_batch == 2)
        model.set_is_last_backward(micro_batch == 2)

    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=mesh)
    training = Training(tokens, micro_batches=3, before_forward=before_forward)
    assert_same_training(partial(build, rank), shard, training, rtol=1e-4, atol=1e-5)


@on_ranks(2, backend="nccl")
def test_a_failed_step_leaves_no_memory_and_the_next_one_trains(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Transformer().to(rank.device)
    shard_blocks(model, fully_shard, mesh=rank.mesh())
    batch = torch.randint(0, 512, (2, 32), device=rank.device)

    def fail(module: nn.Module, args: object) -> None:
        raise ValueError("planted")

    model(batch).backward()
    model.zero_grad()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    handle = model.blocks[2].register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match="planted"):
        model(batch)
    handle.remove()
    assert torch.cuda.memory_allocated() <= before
    loss = model(batch)
    loss.backward()
    assert all(param.grad is not None for param in model.parameters())
    root = hooks_of(model).scheduler
    assert all(isinstance(unit.state, Absent) for unit in root.units)

"""Settings of a unit that touch streams, memory or collectives of CUDA."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard, share_comm_ctx
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.gpu.transformer import Transformer, shard_blocks


def tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 512, (2, 32), generator=generator)


def assert_trains_alike(rank: Rank, shard: object, **options: object) -> None:
    training = Training(tokens, **options)
    build = partial(_built, rank)
    assert_same_training(build, shard, training, rtol=1e-4, atol=1e-5)


def _built(rank: Rank) -> Transformer:
    return Transformer().to(rank.device)


def _units(model: Transformer) -> list[nn.Module]:
    return [*model.blocks, model]


@on_ranks(2, backend="nccl")
def test_messages_in_memory_of_the_process_group_train_alike(rank: Rank) -> None:
    def shard(model: Transformer) -> None:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        for unit in _units(model):
            unit.set_allocate_memory_from_process_group_for_comm(True)

    assert_trains_alike(rank, shard)


@on_ranks(1, backend="nccl")
def test_gathers_in_symmetric_memory_train_alike(rank: Rank) -> None:
    def shard(model: Transformer) -> None:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        for unit in _units(model):
            unit.set_symm_mem_for_comm()

    assert_trains_alike(rank, shard)


@on_ranks(2, backend="nccl")
def test_reducing_on_a_group_of_its_own_trains_alike(rank: Rank) -> None:
    def shard(model: Transformer) -> None:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        model.set_separate_reduce_scatter_group()
        model.set_reduce_scatter_max_input_buffers(3)

    assert_trains_alike(rank, shard, steps=4)


@on_ranks(2, backend="nccl")
def test_an_all_reduce_hook_runs_on_its_stream_before_the_gradients_are_handed_over(
    rank: Rank,
) -> None:
    torch.manual_seed(0)
    models = [_built(rank) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    stream = torch.cuda.Stream()
    for model in models:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
    for unit in _units(models[1]):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(2), stream=stream)
    batch = torch.randint(0, 512, (2, 32), device=rank.device)
    for model in models:
        model(batch).backward()
    for plain, doubled in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(doubled.grad.to_local(), 2 * plain.grad.to_local())


@on_ranks(2, backend="nccl")
def test_gathers_may_wait_for_an_event_of_the_optimizer_instead_of_all_compute(rank: Rank) -> None:
    def before_forward(model: nn.Module, micro_batch: int) -> None:
        event = torch.cuda.Event()
        event.record()
        model.set_post_optim_event(event)

    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=rank.mesh())
    assert_trains_alike(rank, shard, before_forward=before_forward)


@on_ranks(2, backend="nccl")
def test_an_unshard_ahead_of_forward_is_waited_for_by_forward(rank: Rank) -> None:
    def before_forward(model: nn.Module, micro_batch: int) -> None:
        for block in model.blocks:
            assert block.unshard(async_op=True) is not None

    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=rank.mesh())
    assert_trains_alike(rank, shard, before_forward=before_forward)


@on_ranks(2, backend="nccl")
def test_prefetch_lists_train_alike(rank: Rank) -> None:
    def shard(model: Transformer) -> None:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        blocks = list(model.blocks)
        for index, block in enumerate(blocks):
            block.set_modules_to_forward_prefetch(blocks[index + 1 : index + 3])
            block.set_modules_to_backward_prefetch(blocks[max(0, index - 2) : index][::-1])

    assert_trains_alike(rank, shard)


@pytest.mark.parametrize("async_op", [False, True])
@on_ranks(2, backend="nccl")
def test_a_backward_that_the_caller_completes_has_the_same_gradients(
    rank: Rank, async_op: bool
) -> None:
    torch.manual_seed(0)
    expected, model = (_built(rank) for _ in range(2))
    model.load_state_dict(expected.state_dict())
    for each in (expected, model):
        shard_blocks(each, fully_shard, mesh=rank.mesh())
    model.set_manual_backward_finalization(True)
    for _ in range(3):
        batches = torch.randint(0, 512, (2, 2, 32), device=rank.device)
        for each in (expected, model):
            each.zero_grad()
            for batch in batches:
                each(batch).backward()
        handle = model.finalize_backward(async_op=async_op)
        if async_op:
            handle.wait()
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found.grad.to_local(), wanted.grad.to_local())


@on_ranks(2, backend="nccl")
def test_kept_storage_stays_where_it_is_and_trains_alike(rank: Rank) -> None:
    pointers = set()

    def shard(model: Transformer) -> None:
        shard_blocks(model, fully_shard, mesh=rank.mesh())
        model.set_keep_unsharded_storage(True)

    def before_forward(model: nn.Module, micro_batch: int) -> None:
        if hasattr(model.blocks[0], "unshard"):
            model.blocks[0].unshard()
            pointers.add(model.blocks[0].up.weight.data_ptr())
            model.blocks[0].reshard()

    assert_trains_alike(rank, shard, before_forward=before_forward)
    assert len(pointers) == 1


@on_ranks(2, backend="nccl")
def test_two_roots_that_share_their_streams_train_alike(rank: Rank) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in "ab")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    def shard(model: Chain) -> None:
        for part in (model.first, model.second):
            fully_shard(part, mesh=rank.mesh())
        share_comm_ctx([model.first, model.second])

    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 64, generator=generator)

    assert_same_training(
        lambda: Chain().to(rank.device), shard, Training(batch), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("reentrant", [True, False])
@on_ranks(2, backend="nccl")
def test_activation_checkpointing_trains_alike(rank: Rank, reentrant: bool) -> None:
    class Checkpointed(Transformer):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embedding(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return self.head(self.norm(x)).float().square().mean()

    shard = partial(shard_blocks, fully_shard=fully_shard, mesh=rank.mesh())
    build = partial(_on_device, Checkpointed, rank)
    assert_same_training(build, shard, Training(tokens), rtol=1e-4, atol=1e-5)


def _on_device(kind: type[nn.Module], rank: Rank) -> nn.Module:
    return kind().to(rank.device)


# The compiler imports parts of torch that torch calls deprecated, and looks for gradients of
# tensors that have none.
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning")
@on_ranks(2, backend="nccl", timeout_s=240)
def test_compiled_blocks_train_alike(rank: Rank) -> None:
    def shard(model: Transformer) -> None:
        for block in model.blocks:
            block.compile()
        shard_blocks(model, fully_shard, mesh=rank.mesh())

    training = Training(tokens)
    assert_same_training(partial(_built, rank), shard, training, rtol=1e-3, atol=1e-4)


@on_ranks(4, backend="nccl")
def test_tensor_parallel_parameters_train_alike(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    class MLP(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.down(self.up(x).relu())

    def shard(model: nn.Module) -> None:
        for block in model:
            parallelize_module(
                block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()}
            )
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])

    def batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, 64, generator=generator)

    training = Training(batch, data_mesh=mesh["dp"])
    build = partial(_stack, MLP, rank)
    assert_same_training(build, shard, training, rtol=1e-4, atol=1e-5)


def _stack(kind: type[nn.Module], rank: Rank) -> nn.Module:
    return nn.Sequential(kind(), kind()).to(rank.device)

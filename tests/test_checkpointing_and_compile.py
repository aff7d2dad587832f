"""Recomputation in backward, compiled blocks and autocast compute what the plain model computes."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.unit import Sharded

WIDTH = 6
Door = Callable[..., Any]


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def make_batch_with_gradient(generator: torch.Generator) -> Tensor:
    # Reentrant checkpoints run no backward unless one of their inputs takes a gradient.
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def assert_same(
    rank: Rank,
    build: Callable[[], nn.Module],
    shard: Callable[[Door, Any], None],
    training: Training | None = None,
    *,
    torch_too: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    training = training or Training(make_batch)
    ours = functools.partial(shard, functools.partial(fully_shard, mesh=rank.mesh()))
    trained = assert_same_training(build, ours, training, rtol=rtol, atol=atol)
    for module in trained.sharded.modules():
        hooks = hooks_of(module)
        for unit in hooks.units if hooks is not None else ():
            assert isinstance(unit.state, Sharded), unit
            assert unit._all_gather._full_buffer._storage.size() == 0, unit
    assert all(isinstance(p, DTensor) for p in trained.sharded.parameters())
    if torch_too:
        theirs = functools.partial(shard, functools.partial(torch_fully_shard, mesh=rank.mesh()))
        assert_same_training(build, ours, training, oracle=theirs, rtol=rtol, atol=atol)


class Block(nn.Module):
    """With dropout: recomputation has to draw the same numbers."""

    def __init__(self, inside: bool | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.inside = inside

    def inner(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.dropout(torch.tanh(self.up(x)), 0.2, self.training))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        if self.inside is None:
            return x + self.inner(x)
        return x + checkpoint(self.inner, x, use_reentrant=self.inside)


class Stack(nn.Module):
    """`outside`: each block is checkpointed; `around`: two blocks at a time are."""

    def __init__(
        self,
        *,
        inside: bool | None = None,
        outside: bool | None = None,
        around: bool | None = None,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inside) for _ in range(4))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.outside, self.around = outside, around

    def run_two(self, index: int, x: Tensor) -> Tensor:
        return self.blocks[index + 1](self.blocks[index](x))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.around is not None:
            for index in (0, 2):
                x = checkpoint(self.run_two, index, x, use_reentrant=self.around)
            return self.last(x)
        for block in self.blocks:
            if self.outside is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.outside)
        return self.last(x)


def shard_stack(door: Door, model: Stack) -> None:
    for block in model.blocks:
        door(block)
    door(model)


# Activation checkpointing


@pytest.mark.parametrize("place", ["inside", "outside", "around"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@on_ranks(2)
def test_checkpointed_activations_train_alike(rank: Rank, reentrant: bool, place: str) -> None:
    assert_same(rank, lambda: Stack(**{place: reentrant}), shard_stack)


# A reentrant checkpoint says so of the checkpoints inside it, which run without gradients first.
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@on_ranks(2)
def test_units_with_checkpoints_inside_and_outside(rank: Rank, reentrant: bool) -> None:
    assert_same(rank, lambda: Stack(inside=reentrant, outside=reentrant), shard_stack)


@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@on_ranks(2)
def test_the_root_itself_is_checkpointed(rank: Rank, reentrant: bool) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return checkpoint(model, batch, use_reentrant=reentrant).square().mean()

    training = Training(make_batch_with_gradient, loss=loss)
    assert_same(rank, Stack, shard_stack, training, torch_too=not reentrant)


@pytest.mark.parametrize("impl", [CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT])
@pytest.mark.parametrize("wrapper_is_unit", [True, False])
@on_ranks(2)
def test_the_checkpoint_wrapper(rank: Rank, impl: CheckpointImpl, wrapper_is_unit: bool) -> None:
    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)

    def shard(door: Door, model: Stack) -> None:
        if wrapper_is_unit:
            apply_activation_checkpointing(
                model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block)
            )
            shard_stack(door, model)
        else:
            for index, block in enumerate(model.blocks):
                door(block)
                model.blocks[index] = wrap(block)
            door(model)

    assert_same(rank, Stack, shard)


@on_ranks(2)
def test_checkpoints_without_early_stop(rank: Rank) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.utils.checkpoint.set_checkpoint_early_stop(False):
            return model(batch).square().mean()

    training = Training(make_batch, loss=loss)
    assert_same(rank, lambda: Stack(outside=False), shard_stack, training)


@on_ranks(2)
def test_frozen_blocks_are_recomputed_too(rank: Rank) -> None:
    def build() -> nn.Module:
        model = Stack(outside=False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model

    assert_same(rank, build, shard_stack)


@on_ranks(2)
def test_checkpointed_blocks_are_not_all_unsharded_at_once_in_backward(rank: Rank) -> None:
    model = Stack(outside=False)
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    held: list[int] = []

    def look(*_: Any) -> None:
        units = [hooks_of(block).units[0] for block in model.blocks]
        held.append(sum(unit._all_gather._full_buffer._storage.size() > 0 for unit in units))

    for step in range(2):
        output = model(make_batch(torch.Generator().manual_seed(step)))
        held.clear()
        for block in model.blocks:
            block.norm.register_forward_pre_hook(look)
        output.sum().backward()
        assert len(held) >= len(model.blocks)
        assert max(held) <= 2, held
        for block in model.blocks:
            block.norm._forward_pre_hooks.clear()


# Compiled blocks


# Dynamo asks every tensor that it is given for `.grad`, also those that have none.
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def forget_compiled() -> None:
    torch._dynamo.reset()


@compiling
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2)
def test_blocks_compiled_in_place_train_alike(rank: Rank, backend: str) -> None:
    def shard(door: Door, model: Stack) -> None:
        for block in model.blocks:
            block.compile(backend=backend)
        shard_stack(door, model)

    forget_compiled()
    assert_same(rank, build_without_dropout, shard, torch_too=False)
    forget_compiled()


@compiling
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@on_ranks(2)
def test_compiled_wrappers_can_be_sharded(rank: Rank, backend: str) -> None:
    def shard(door: Door, model: Stack) -> None:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend)
        shard_stack(door, model)

    forget_compiled()
    assert_same(rank, build_without_dropout, shard, torch_too=False)
    forget_compiled()


@compiling
@on_ranks(2)
def test_sharded_blocks_can_be_compiled(rank: Rank) -> None:
    def shard(door: Door, model: Stack) -> None:
        shard_stack(door, model)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend="aot_eager")

    forget_compiled()
    assert_same(rank, build_without_dropout, shard, torch_too=False)
    forget_compiled()


@compiling
@on_ranks(2)
def test_a_sharded_model_can_be_compiled_as_a_whole(rank: Rank) -> None:
    def shard(door: Door, model: Stack) -> nn.Module:
        shard_stack(door, model)
        return torch.compile(model, backend="aot_eager")

    forget_compiled()
    assert_same(rank, build_without_dropout, shard, torch_too=False)
    forget_compiled()


@compiling
@on_ranks(2)
def test_compiled_blocks_are_really_compiled_and_only_once(rank: Rank) -> None:
    """Parameters that come and go must neither break graphs apart nor recompile them."""
    forget_compiled()
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(
            sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes)
        )
        return graph.forward

    model = build_without_dropout()
    for block in model.blocks:
        block.compile(backend=counting)
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    for step in range(4):
        model(make_batch(torch.Generator().manual_seed(step))).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(len(graphs))
    forget_compiled()
    assert graphs, "nothing was compiled"
    assert seen[1] == seen[-1], f"recompiled: {seen}"


@compiling
@on_ranks(2)
def test_compiled_and_checkpointed_blocks(rank: Rank) -> None:
    def build() -> nn.Module:
        model = build_without_dropout()
        model.outside = False
        return model

    def shard(door: Door, model: Stack) -> None:
        for block in model.blocks:
            block.compile(backend="aot_eager")
        shard_stack(door, model)

    forget_compiled()
    assert_same(rank, build, shard, torch_too=False)
    forget_compiled()


def build_without_dropout() -> Stack:
    model = Stack()
    for block in model.blocks:
        block.inner = functools.partial(_inner, block)
    return model


def _inner(block: Block, x: Tensor) -> Tensor:
    return block.down(torch.tanh(block.up(x)))


# Autocast


@pytest.mark.parametrize("outside", [None, False, True], ids=["plain", "checkpoint", "reentrant"])
@on_ranks(2)
def test_autocast_trains_alike(rank: Rank, outside: bool | None) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch)
            assert output.dtype is torch.bfloat16
        return output.float().square().mean()

    training = Training(make_batch, loss=loss)
    # The reference sums gradients that were rounded to bfloat16 per rank in another order.
    assert_same(rank, lambda: Stack(outside=outside), shard_stack, training, rtol=2e-2, atol=1e-3)


@on_ranks(2)
def test_autocast_may_span_forward_backward_and_several_forwards(rank: Rank) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(batch)
            first, second = model(batch[:2]), model(batch[2:])
            return torch.cat([first, second]).float().square().mean()

    training = Training(make_batch, loss=loss)
    # Torch's door keeps what autocast cast without gradients, and then trains nothing.
    assert_same(rank, Stack, shard_stack, training, torch_too=False, rtol=2e-2, atol=1e-3)

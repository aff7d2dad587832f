"""Recomputation in backward, compiled blocks and autocast compute what the plain model computes."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from fullshard import fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.unit.state import Absent, Leaving

WIDTH = 6
FullyShard = Callable[..., Any]


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def assert_same(
    rank: Rank,
    build: Callable[[], nn.Module],
    shard: Callable[[FullyShard, Any], Any],
    training: Training | None = None,
    *,
    torch_too: bool = True,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> None:
    training = training or Training(make_batch, steps=2)
    ours = functools.partial(shard, functools.partial(fully_shard, mesh=rank.mesh()))
    trained = assert_same_training(build, ours, training, rtol=rtol, atol=atol)
    for module in trained.sharded.modules():
        hooks = hooks_of(module)
        for unit in hooks.units if hooks is not None else ():
            assert isinstance(unit.state, (Absent, Leaving)), unit
            assert unit.arrangement.all_gather._full_buffer._storage.size() == 0, unit
    assert all(isinstance(p, DTensor) for p in trained.sharded.parameters())
    if torch_too:
        theirs = functools.partial(shard, functools.partial(torch_fully_shard, mesh=rank.mesh()))
        assert_same_training(build, ours, training, oracle=theirs, rtol=rtol, atol=atol)


class Block(nn.Module):
    """With dropout: recomputation has to draw the same numbers."""

    def __init__(self, inside: bool | None = None, dropout: float = 0.2) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.dropout = inside, dropout

    def inner(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        if self.dropout:
            x = nn.functional.dropout(x, self.dropout, self.training)
        return self.down(x)

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
        num_blocks: int = 4,
        dropout: float = 0.2,
    ) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(inside, dropout) for _ in range(num_blocks))
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


def shard_stack(shard: FullyShard, model: Stack) -> None:
    for block in model.blocks:
        shard(block)
    shard(model)


# Activation checkpointing


# A reentrant checkpoint warns about checkpoints inside it, which run without gradients first.
@pytest.mark.sampled(2)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("reentrant", [False, True], ids=["non-reentrant", "reentrant"])
@on_ranks(2)
def test_checkpointed_activations_train_alike(rank: Rank, reentrant: bool) -> None:
    for places in (("inside",), ("outside",), ("around",), ("inside", "outside")):
        options = dict.fromkeys(places, reentrant)
        assert_same(rank, lambda options=options: Stack(**options), shard_stack)


def make_batch_with_gradient(generator: torch.Generator) -> Tensor:
    # Reentrant checkpoints run no backward unless one of their inputs takes a gradient.
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


@on_ranks(2)
def test_the_root_itself_is_checkpointed(rank: Rank) -> None:
    for reentrant in (False, True):

        def loss(model: nn.Module, batch: Tensor, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(model, batch, use_reentrant=reentrant).square().mean()

        training = Training(make_batch_with_gradient, loss=loss, steps=2)
        assert_same(rank, Stack, shard_stack, training, torch_too=not reentrant)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("wrapper_is_unit", [True, False])
@on_ranks(2)
def test_the_checkpoint_wrapper(rank: Rank, wrapper_is_unit: bool) -> None:
    for impl in (CheckpointImpl.NO_REENTRANT, CheckpointImpl.REENTRANT):
        wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=impl)

        def shard(shard: FullyShard, model: Stack, wrap: Any = wrap) -> None:
            if wrapper_is_unit:
                apply_activation_checkpointing(
                    model, checkpoint_wrapper_fn=wrap, check_fn=lambda m: isinstance(m, Block)
                )
                shard_stack(shard, model)
            else:
                for index, block in enumerate(model.blocks):
                    shard(block)
                    model.blocks[index] = wrap(block)
                shard(model)

        assert_same(rank, Stack, shard)


@on_ranks(2)
def test_frozen_blocks_are_recomputed_also_without_early_stop(rank: Rank) -> None:
    def build() -> nn.Module:
        model = Stack(outside=False)
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.requires_grad_(False)
        return model

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return model(batch).square().mean()

    assert_same(rank, build, shard_stack)
    assert_same(rank, build, shard_stack, Training(make_batch, loss=loss, steps=2))


@on_ranks(2)
def test_checkpointed_blocks_are_not_all_unsharded_at_once_in_backward(rank: Rank) -> None:
    model = Stack(outside=False)
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    held: list[int] = []

    def look(*_: Any) -> None:
        units = [hooks_of(block).units[0] for block in model.blocks]
        held.append(
            sum(unit.arrangement.all_gather._full_buffer._storage.size() > 0 for unit in units)
        )

    for step in range(2):
        output = model(make_batch(torch.Generator().manual_seed(step)))
        held.clear()
        handles = [block.norm.register_forward_pre_hook(look) for block in model.blocks]
        output.sum().backward()
        assert len(held) >= len(model.blocks)
        assert max(held) <= 2, held
        for handle in handles:
            handle.remove()


# Compiled blocks


# Dynamo asks every tensor that it is given for `.grad`, also those that have none.
compiling = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@contextmanager
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def compile_in_place(shard: FullyShard, model: Stack) -> None:
    for block in model.blocks:
        block.compile(backend="aot_eager")
    shard_stack(shard, model)


def compile_then_shard(shard: FullyShard, model: Stack) -> None:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    shard_stack(shard, model)


def shard_then_compile(shard: FullyShard, model: Stack) -> None:
    shard_stack(shard, model)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="aot_eager")


def compile_as_a_whole(shard: FullyShard, model: Stack) -> nn.Module:
    shard_stack(shard, model)
    return torch.compile(model, backend="aot_eager")


@pytest.mark.exhaustive
@compiling
@pytest.mark.parametrize(
    "shard, outside",
    [
        (compile_in_place, None),
        (compile_in_place, False),  # and checkpointed
        (compile_then_shard, None),
        (shard_then_compile, None),
        (compile_as_a_whole, None),
    ],
)
@on_ranks(2)
def test_compiled_models_train_alike(
    rank: Rank, shard: Callable[..., Any], outside: bool | None
) -> None:
    with fresh_compiler():
        build = functools.partial(Stack, outside=outside, num_blocks=2, dropout=0.0)
        assert_same(rank, build, shard, torch_too=False)


@compiling
@on_ranks(2)
def test_compiled_blocks_are_really_compiled_and_only_once(rank: Rank) -> None:
    """Parameters that come and go must neither break graphs apart nor recompile them."""
    graphs: list[int] = []

    def counting(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(
            sum(node.op in ("call_function", "call_method") for node in graph.graph.nodes)
        )
        return graph.forward

    with fresh_compiler():
        model = Stack(dropout=0.0, num_blocks=2)
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
    assert graphs, "nothing was compiled"
    assert seen[1] == seen[-1], f"recompiled: {seen}"


# Autocast


@on_ranks(2)
def test_autocast_trains_alike(rank: Rank) -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(batch)
            assert output.dtype is torch.bfloat16
        return output.float().square().mean()

    def spanning(model: nn.Module, batch: Tensor) -> Tensor:
        """Over several forwards, one of them without gradients."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                model(batch)
            first, second = model(batch[:2]), model(batch[2:])
            return torch.cat([first, second]).float().square().mean()

    # The reference sums gradients that were rounded to bfloat16 per rank in another order.
    near = {"rtol": 2e-2, "atol": 1e-3}
    for outside in (None, False, True):
        build = functools.partial(Stack, outside=outside)
        assert_same(rank, build, shard_stack, Training(make_batch, loss=loss, steps=2), **near)
    # torch caches what autocast cast without gradients, and then trains nothing.
    training = Training(make_batch, loss=spanning, steps=2)
    assert_same(rank, Stack, shard_stack, training, torch_too=False, **near)

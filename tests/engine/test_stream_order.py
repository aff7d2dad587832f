"""The engine orders its work on streams, whatever is asked of it.

A scenario trains a small model for a few steps on a device with emulated streams
(`stream_order.py`), and nothing may race. Then the proof that this proves something: without any
one of the engine's waits and events, a scenario must find a race.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard
from torch.optim import SGD, Adam, Optimizer
from torch.utils.checkpoint import checkpoint

import fullshard
from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    by_unit,
    fully_shard,
    share_comm_ctx,
)
from fullshard.comm.work import CollectiveWork
from fullshard.layout import CostModel
from fullshard.runtime.uneven import UnevenScope
from fullshard.unit.all_gather import InFlightAllGather, UnitAllGather
from fullshard.unit.context import CommContext
from fullshard.unit.grads import UnitGrads
from fullshard.unit.reduction import Reduction
from fullshard.unit.released import ReleasedParam
from fullshard.wrap import ModuleWrapPolicy
from tests.engine.test_extensions import Quantised
from tests.engine.test_large_gradients import small_buckets
from tests.support.counted import CountedGather, CountedReduce
from tests.support.stream_order import StreamOrder, emulated_streams

WIDTH = 16
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BF16_COMPUTE = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32)
BF16_REDUCE = MixedPrecisionPolicy(reduce_dtype=BF16)
BF16_SENT = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=F32, wire_dtype=BF16)


class Block(nn.Module):
    """Blocks differ in size, so that the memory of one is not just that of another."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())


class Model(nn.Module):
    def __init__(
        self, hidden: Sequence[int] = (32, 48, 64, 32), *, recomputes: bool = False
    ) -> None:
        super().__init__()
        self.entry = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, hidden))
        self.exit = nn.Linear(WIDTH, WIDTH)
        self.recomputes = recomputes

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return self.exit(x)


def mesh_of(*sizes: int) -> DeviceMesh:
    names = ("replicate", "shard")[-len(sizes) :]
    return init_device_mesh("cpu", sizes, mesh_dim_names=names)


def sharded(
    model: Any = None, *, mesh: DeviceMesh | None = None, policy: Any = None, **options: Any
) -> Any:
    """A model whose blocks are units; by default over all ranks."""
    model = Model() if model is None else model
    options.update(mesh=mesh or mesh_of(dist.get_world_size()))
    options.update(mp_policy=policy or MixedPrecisionPolicy())
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def wrapped(model: Any = None, **options: Any) -> Any:
    """A model whose blocks are wrappers."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy", FutureWarning)
        return FullyShardedDataParallel(
            Model() if model is None else model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            device_id=torch.device("cpu"),
            **options,
        )


def model_on_host() -> Model:
    with torch.device("cpu"):
        return Model()


def batch(width: int = WIDTH) -> Tensor:
    # This is on the device: with offload, plain `cpu` is the host.
    return torch.randn(3, width, device=torch.device("cpu", 0))


def loss_of(model: Any) -> Tensor:
    loss: Tensor = model(batch()).float().square().mean()
    return loss


def sgd(*models: Any) -> SGD:
    return SGD([p for model in models for p in model.parameters()], lr=0.1, foreach=True)


def train(
    model: Any,
    num_steps: int = 3,
    *,
    optimizer: Optimizer | None = None,
    before_step: Callable[[], object] = lambda: None,
) -> None:
    optimizer = optimizer or sgd(model)
    for _ in range(num_steps):
        loss_of(model).backward()
        before_step()
        optimizer.step()
        optimizer.zero_grad()


@contextmanager
def messages_apart() -> Iterator[None]:
    """Every parameter has a message of its own, which is reduced in place."""
    with own_buckets(CostModel(0.0, 0.0)):
        yield


@contextmanager
def own_buckets(cost: CostModel) -> Iterator[None]:
    with patch.object(CostModel, "of_device", lambda _: cost):
        yield


@contextmanager
def small_pieces() -> Iterator[None]:
    """A bucket of several parameters is reduced by pieces."""
    module = "fullshard.unit.grad_lane"
    with (
        patch(f"{module}.PIECE_BYTES", 64),
        patch(f"{module}.SMALLEST_PIECE_PART_BYTES", 64),
        patch(f"{module}.FEWEST_CUT_RANKS", 1),
    ):
        yield


# Scenarios


@dataclass(frozen=True)
class Scenario:
    """What is trained, by how many ranks, and which streams must have been at work."""

    run: Callable[[StreamOrder], None]
    num_ranks: int
    streams: Sequence[str]
    is_offloading: bool = False
    is_fresh: bool = False

    def order(
        self,
        *,
        fault: AbstractContextManager[object] | None = None,
        without_wait: Collection[str] = (),
        without_event: Collection[str] = (),
    ) -> StreamOrder:
        """Run the scenario with an engine that has a fault, or lacks waits or events."""
        torch.manual_seed(0)
        emulated = emulated_streams(
            self.num_ranks, is_offloading=self.is_offloading, is_fresh=self.is_fresh
        )
        with emulated as order, fault or nullcontext():
            order.without_wait.update(without_wait)
            order.without_event.update(without_event)
            self.run(order)
        return order


SCENARIOS: dict[str, Scenario] = {}

Run = Callable[[StreamOrder], None]


def scenario(
    *num_ranks: int, streams: Sequence[str] = ("gather", "reduce"), **options: bool
) -> Callable[[Run], Run]:
    """Make a function a scenario of worlds of these sizes; alone, a rank only has to compute."""

    def add(run: Run) -> Run:
        name = run.__name__.replace("_", " ")
        for size in num_ranks or (2,):
            used = streams if size > 1 else ()
            at = f"{name}, alone" if size == 1 else name
            assert at not in SCENARIOS
            SCENARIOS[at] = Scenario(run, size, used, **options)
        return run

    return add


@scenario(2, 1)
def float32(order: StreamOrder) -> None:
    train(sharded())


@scenario(2, 1)
def messages_of_their_own(order: StreamOrder) -> None:
    with messages_apart():
        train(sharded())


@scenario(2)
def uneven_units_that_other_ranks_ask_for(order: StreamOrder) -> None:
    summed, num_rounds = UnevenScope._summed, count()

    def asked(scope: UnevenScope, flags: Sequence[bool], *axes: Any) -> list[int]:
        own = summed(scope, flags, *axes)
        return [1] * len(own) if next(num_rounds) % 2 else own

    with messages_apart(), patch.object(UnevenScope, "_summed", asked):
        for after in (True, False):  # with False, units that are in use are asked for
            model = sharded(reshard_after_forward=after)
            model.set_uneven()
            train(model)


@scenario(2)
def by_pieces(order: StreamOrder) -> None:
    with small_pieces():
        train(sharded())


@scenario(2)
def computed_in_bfloat16_by_pieces(order: StreamOrder) -> None:
    with small_pieces():
        train(sharded(policy=BF16_COMPUTE))


@scenario(2, 1)
def compute_in_bfloat16(order: StreamOrder) -> None:
    train(sharded(policy=BF16_COMPUTE))


@scenario(2)
def compute_in_bfloat16_with_messages_of_their_own(order: StreamOrder) -> None:
    with messages_apart():
        train(sharded(policy=BF16_COMPUTE))


@scenario(2, 1)
def reduce_in_bfloat16(order: StreamOrder) -> None:
    train(sharded(policy=BF16_REDUCE))


@scenario(2, 1)
def reduce_in_bfloat16_with_messages_of_their_own(order: StreamOrder) -> None:
    with messages_apart():
        train(sharded(policy=BF16_REDUCE))


@scenario(2)
def reduce_in_float16(order: StreamOrder) -> None:
    train(sharded(policy=MixedPrecisionPolicy(param_dtype=F16, reduce_dtype=F16)))


@scenario(2)
def sent_in_bfloat16(order: StreamOrder) -> None:
    train(sharded(policy=BF16_SENT))


@scenario(2)
def sent_in_bfloat16_with_messages_of_their_own(order: StreamOrder) -> None:
    with messages_apart():
        train(sharded(policy=BF16_SENT))


@scenario(4, streams=("gather", "reduce", "replicate"))
def replicas(order: StreamOrder) -> None:
    train(sharded(mesh=mesh_of(2, 2)))


@scenario(4, streams=("gather", "reduce", "replicate"))
def replicas_reduced_in_bfloat16(order: StreamOrder) -> None:
    train(sharded(mesh=mesh_of(2, 2), policy=BF16_REDUCE))


@scenario(2, streams=("replicate",))
def replicas_of_whole_parameters_reduced_in_bfloat16(order: StreamOrder) -> None:
    train(sharded(mesh=mesh_of(2, 1), policy=BF16_REDUCE))


def put_aside(model: Any) -> None:
    optimizer = sgd(model)
    for _ in range(2):
        for is_last in (False, False, True):
            model.set_requires_all_reduce(is_last)
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(4, streams=("gather", "reduce", "replicate"))
def sums_put_aside_for_replicas(order: StreamOrder) -> None:
    put_aside(sharded(mesh=mesh_of(2, 2)))


@scenario(4, streams=("gather", "reduce", "replicate"))
def sums_in_bfloat16_put_aside_for_replicas(order: StreamOrder) -> None:
    with messages_apart():
        put_aside(sharded(mesh=mesh_of(2, 2), policy=BF16_REDUCE))


@scenario(2, streams=("reduce", "replicate"))
def sums_put_aside_for_replicas_of_whole_parameters(order: StreamOrder) -> None:
    put_aside(sharded(mesh=mesh_of(2, 1), policy=BF16_REDUCE))


def hook_all(model: Any, stream: Any = None) -> Any:
    for module in [*model.blocks, model]:
        module.set_all_reduce_hook(lambda sums: sums.mul_(0.5), stream=stream)
    return model


def hook_each(model: Any, order: StreamOrder) -> Any:
    for number, module in enumerate([*model.blocks, model]):
        stream = order.make_stream(f"of hook {number}")
        module.set_all_reduce_hook(lambda sums: sums.mul_(0.5), stream=stream)
    return model


@scenario(2, streams=("gather", "reduce", "of the hook"))
def all_reduce_hook_on_a_stream_of_its_own(order: StreamOrder) -> None:
    train(hook_all(sharded(), order.make_stream("of the hook")))


@scenario(2, streams=("gather", "reduce", "of the hook"))
def all_reduce_hook_on_a_stream_of_its_own_reduced_in_bfloat16(order: StreamOrder) -> None:
    train(hook_all(sharded(policy=BF16_REDUCE), order.make_stream("of the hook")))


@scenario(2, 1, streams=("gather", "reduce", "replicate"))
def all_reduce_hook_reduced_in_bfloat16(order: StreamOrder) -> None:
    train(hook_all(sharded(policy=BF16_REDUCE)))


@scenario(2, streams=("gather", "reduce", "of hook 3"))
def all_reduce_hooks_on_a_stream_each(order: StreamOrder) -> None:
    train(hook_each(sharded(policy=BF16_REDUCE), order))


@scenario(2, streams=("gather", "reduce", "replicate"))
def all_reduce_hook_of_one_block(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    model.blocks[0].set_all_reduce_hook(lambda sums: sums.mul_(0.5))
    train(model, 4)


@scenario(4, streams=("gather", "reduce", "replicate"))
def replicated_blocks_of_a_root_that_is_not(order: StreamOrder) -> None:
    model, mesh = Model(), mesh_of(2, 2)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    train(fully_shard(model, mesh=mesh_of(4)))


@scenario(4, streams=("gather", "reduce"))
def replicated_root_of_blocks_that_are_not(order: StreamOrder) -> None:
    model, mesh = Model(), mesh_of(4)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    train(fully_shard(model, mesh=mesh_of(2, 2)))


@scenario(2, 1)
def gradients_accumulated_without_sync(order: StreamOrder) -> None:
    model = sharded(policy=BF16_COMPUTE)
    optimizer = sgd(model)
    for _ in range(2):
        with model.no_sync():
            loss_of(model).backward()
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(2)
def gradients_accumulated_after_reduction(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    train(model, before_step=lambda: loss_of(model).backward())


@scenario(2)
def gradients_zeroed_in_place(order: StreamOrder) -> None:
    model = sharded()
    optimizer = sgd(model)
    for _ in range(3):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


@scenario(2)
def gradients_kept_by_the_user(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    kept: list[Any] = []
    train(model, 4, before_step=lambda: kept.append([p.grad for p in model.parameters()]))
    kept.clear()
    train(model)


@scenario(2)
def steps_in_backward(order: StreamOrder) -> None:
    model = sharded()
    for param in model.parameters():
        optimizer = SGD([param], lr=0.1)

        def step(param: Any, optimizer: SGD = optimizer) -> None:
            optimizer.step()
            param.grad = None

        param.register_post_accumulate_grad_hook(step)
    for _ in range(3):
        loss_of(model).backward()


@scenario(2)
def prefetch_lists(order: StreamOrder) -> None:
    model = sharded()
    blocks = list(model.blocks)
    for i, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[i + 1 : i + 3])
        block.set_modules_to_backward_prefetch(blocks[max(i - 2, 0) : i][::-1])
    train(model)


@scenario(2, 1)
def unshard_ahead_by_handle(order: StreamOrder) -> None:
    model = sharded(policy=BF16_COMPUTE)
    optimizer = sgd(model)
    for _ in range(3):
        handles = [block.unshard(async_op=True) for block in model.blocks[:2]]
        handles[0].wait()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.blocks[3].unshard()
        model.blocks[3].reshard()


@scenario(2)
def kept_after_forward(order: StreamOrder) -> None:
    train(sharded(reshard_after_forward=False))


@scenario(2)
def kept_after_backward(order: StreamOrder) -> None:
    model = sharded()
    model.set_reshard_after_backward(False)
    train(model)


@scenario(4)
def thinned_after_forward(order: StreamOrder) -> None:
    train(sharded(reshard_after_forward=2))


@scenario(4, is_fresh=True)
def thinned_after_forward_in_fresh_memory(order: StreamOrder) -> None:
    train(sharded(reshard_after_forward=2))


@scenario(2, is_fresh=True)
def compute_in_bfloat16_in_fresh_memory(order: StreamOrder) -> None:
    train(sharded(policy=BF16_COMPUTE))


@scenario(4)
def thinned_after_forward_in_bfloat16(order: StreamOrder) -> None:
    model = sharded(reshard_after_forward=2, policy=BF16_COMPUTE)
    train(model)
    with torch.no_grad():
        loss_of(model)
    train(model)


@scenario(2, 1)
def recomputation(order: StreamOrder) -> None:
    train(sharded(Model(recomputes=True), policy=BF16_COMPUTE))


class Fails(torch.autograd.Function):
    """Raises in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("on purpose")


def fail_between_steps(model: Any, number: int, hook: Callable[..., Any]) -> None:
    """Let a block fail in a step between two that succeed, twice."""
    train(model, 1)
    for _ in range(2):
        handle = model.blocks[number].register_forward_hook(hook)
        with pytest.raises(ArithmeticError):
            loss_of(model).backward()
        handle.remove()
        train(model, 2)


def fails(*_: Any) -> None:
    raise ArithmeticError("on purpose")


@scenario(2, 1)
def failure_in_forward(order: StreamOrder) -> None:
    fail_between_steps(sharded(policy=BF16_REDUCE), 2, fails)


@scenario(2, 1)
def failure_in_backward(order: StreamOrder) -> None:
    fail_between_steps(sharded(policy=BF16_REDUCE), 1, lambda m, args, x: Fails.apply(x))


@scenario(2, 1)
def failure_in_backward_that_adds_to_gradients(order: StreamOrder) -> None:
    """What the user drops after it is still being added to."""
    model = sharded(policy=BF16_REDUCE)
    train(model, 1)
    for _ in range(2):
        loss_of(model).backward()
        for param in model.parameters():
            param.grad = param.grad * 0.5
        handle = model.blocks[0].register_forward_hook(lambda m, args, x: Fails.apply(x))
        with pytest.raises(ArithmeticError):
            loss_of(model).backward()
        handle.remove()
        model.zero_grad()
        train(model, 1)


@scenario(4)
def failure_in_backward_with_replicas(order: StreamOrder) -> None:
    model = sharded(mesh=mesh_of(2, 2), policy=BF16_REDUCE)
    model.set_reduce_scatter_max_input_buffers(3)
    fail_between_steps(model, 0, lambda m, args, x: Fails.apply(x))


@scenario(2)
def failure_in_backward_with_all_reduce_hooks_on_a_stream_each(order: StreamOrder) -> None:
    model = hook_each(sharded(policy=BF16_REDUCE), order)
    fail_between_steps(model, 0, lambda m, args, x: Fails.apply(x))


@scenario(2)
def failure_in_an_all_reduce_hook(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    train(model, 1)
    for _ in range(2):
        model.blocks[1].set_all_reduce_hook(fails)
        with pytest.raises(ArithmeticError):
            loss_of(model).backward()
        model.blocks[1].set_all_reduce_hook(lambda sums: None)
        train(model, 2)


@scenario(2, 1)
def failure_in_a_hook_of_a_parameter(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    train(model, 1)
    for _ in range(2):
        param = next(model.blocks[1].parameters())
        handle = param.register_post_accumulate_grad_hook(fails)
        with pytest.raises(ArithmeticError):
            loss_of(model).backward()
        handle.remove()
        train(model, 2)


@scenario(2)
def large_gradients(order: StreamOrder) -> None:
    with small_buckets():
        train(sharded())


class WithVocabulary(nn.Module):
    """An embedding that backward does not read, and a head that it reads first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 8), nn.Linear(8, 64)
        self.blocks = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.blocks(self.embed(tokens)))


@scenario(2)
def large_parameters_that_backward_does_not_read(order: StreamOrder) -> None:
    with small_buckets():
        model = sharded(WithVocabulary(), policy=BF16_COMPUTE)
        optimizer = sgd(model)
        for _ in range(3):
            model(torch.arange(6)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@scenario(2)
def large_parameters_that_are_read_after_they_were_released(order: StreamOrder) -> None:
    with small_buckets():
        model = sharded(WithVocabulary(), policy=BF16_COMPUTE)
        optimizer = sgd(model)
        for step in range(4):
            out = model(torch.arange(6)).float()
            released = model.embed.weight
            (out.square().mean() * (released.detach().norm() if step == 2 else 1.0)).backward()
            optimizer.step()
            if step == 1:
                assert isinstance(released, ReleasedParam)
                released.detach().norm()
            optimizer.zero_grad()


@scenario(2, 1)
def large_gradients_reduced_in_bfloat16(order: StreamOrder) -> None:
    with small_buckets():
        train(sharded(policy=BF16_REDUCE))


@scenario(2)
def large_gradients_sent_in_bfloat16(order: StreamOrder) -> None:
    with small_buckets():
        train(sharded(policy=BF16_SENT))


@scenario(4, streams=("gather", "reduce", "replicate"))
def large_gradients_of_replicas(order: StreamOrder) -> None:
    with small_buckets(), patch("fullshard.unit.context.MAX_EARLY_BYTES", 1 << 12):
        train(sharded(mesh=mesh_of(2, 2), policy=BF16_COMPUTE))


# A full buffer of a growing model does not fit into freed memory; smaller things do.
GROWING = (16, 64, 256, 1024)


@scenario(2, 1, streams=("gather", "collectives"))
def custom_collectives(order: StreamOrder) -> None:
    with messages_apart():
        model = sharded(Model(GROWING), policy=BF16_COMPUTE)
    for module in [*model.blocks, model]:
        module.set_custom_all_gather(CountedGather())
        module.set_custom_reduce_scatter(CountedReduce())
    train(model)


@scenario(2)
def memory_of_the_process_group(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    for block in model.blocks:
        block.set_allocate_memory_from_process_group_for_comm(True)
    train(model)


class Extended(nn.Module):
    """A weight that brings its own gather, beside one that does not."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(Quantised(torch.randn(WIDTH, WIDTH)))
        self.plain = nn.Parameter(torch.randn(numel))

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight.t()) * self.plain.mean()


@scenario(2, 1)
def extensions(order: StreamOrder) -> None:
    model = nn.Sequential(*(Extended(WIDTH * numel) for numel in GROWING))
    mesh = mesh_of(dist.get_world_size())
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    train(model)


@scenario(2)
def kept_storage(order: StreamOrder) -> None:
    with messages_apart():
        model = sharded(policy=BF16_COMPUTE)
    model.set_keep_unsharded_storage(True)
    train(model)


@scenario(2)
def finalized_by_hand(order: StreamOrder) -> None:
    model = sharded(policy=BF16_COMPUTE)
    model.set_manual_backward_finalization(True)
    train(model, before_step=lambda: model.finalize_backward(async_op=True).wait())


@scenario(2)
def replaced_shards(order: StreamOrder) -> None:
    model = sharded()
    train(model, 1)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    train(model)


@scenario(2)
def steps_by_unit(order: StreamOrder) -> None:
    model = sharded(policy=BF16_COMPUTE)
    train(model, optimizer=by_unit(Adam(model.parameters(), lr=0.1, foreach=True)))


@scenario(2)
def clipping(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    train(model, before_step=lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@scenario(2)
def tied_parameters(order: StreamOrder) -> None:
    model = Model()
    model.exit.weight = model.entry.weight
    model.blocks[3].up.weight = model.blocks[0].up.weight  # type: ignore[union-attr]
    train(sharded(model))


@scenario(2)
def frozen_parameters(order: StreamOrder) -> None:
    model = Model()
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    model.blocks[2].up.requires_grad_(False)  # type: ignore[union-attr]
    train(sharded(model, policy=BF16_COMPUTE))


@scenario(2)
def unused_parameters(order: StreamOrder) -> None:
    model = sharded()
    model.set_reduce_scatter_unused_params(True)
    skipped = model.blocks[1].register_forward_pre_hook(lambda m, args: (args[0].detach(),))
    train(model, 2)
    skipped.remove()
    train(model, 2)


@scenario(2)
def many_reductions_under_way(order: StreamOrder) -> None:
    model = sharded(policy=BF16_REDUCE)
    model.set_reduce_scatter_max_input_buffers(3)
    train(model)


@scenario(2)
def reductions_left_under_way(order: StreamOrder) -> None:
    model = sharded()
    optimizer = sgd(model)
    for _ in range(2):
        for is_last in (False, True):
            model.set_is_last_backward(is_last)
            loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(2)
def group_of_its_own_for_reductions(order: StreamOrder) -> None:
    model = sharded()
    model.set_separate_reduce_scatter_group()
    model.set_gradient_divide_factor(3.0)
    train(model)


@scenario(4)
def cut_along_columns_and_unevenly(order: StreamOrder) -> None:
    def columns(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 else None

    model = Model()
    model.blocks[1] = Block(3)
    train(sharded(model, shard_placement_fn=columns, policy=BF16_COMPUTE))


@scenario(2)
def passes_without_gradients(order: StreamOrder) -> None:
    model = sharded(policy=BF16_COMPUTE)
    optimizer = sgd(model)
    for _ in range(2):
        train(model, 1, optimizer=optimizer)
        with torch.no_grad():
            loss_of(model)
            loss_of(model)


@scenario(2)
def two_forwards_before_two_backwards(order: StreamOrder) -> None:
    model = sharded()
    optimizer = sgd(model)
    for _ in range(2):
        losses = [loss_of(model), loss_of(model)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(2)
def two_roots_on_the_same_streams(order: StreamOrder) -> None:
    first, second = sharded(Model((32, 48))), sharded(Model((16, 64, 32)))
    share_comm_ctx([first, second])
    optimizer = sgd(first, second)
    for _ in range(3):
        second(first(batch())).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(2, 1, streams=("gather", "reduce", "of the optimizer"))
def optimizer_on_a_stream_of_its_own(order: StreamOrder) -> None:
    model, device = sharded(policy=BF16_COMPUTE), order.device
    optimizer, stream = sgd(model), order.make_stream("of the optimizer")
    for _ in range(3):
        loss_of(model).backward()
        device.wait(device.record(), stream)
        with device.on(stream):
            optimizer.step()
            model.set_post_optim_event(device.record())
        optimizer.zero_grad()


@scenario(2, 1, streams=("gather", "reduce", "of the optimizer"))
def step_left_out_on_a_stream_of_its_own(order: StreamOrder) -> None:
    """Only gradients are read there, as when they overflow: units may stay unsharded."""
    model, device = sharded(policy=BF16_COMPUTE), order.device
    model.set_reshard_after_backward(False)
    shards, stream = list(model.parameters()), order.make_stream("of the optimizer")
    for _ in range(3):
        loss_of(model).backward()
        device.wait(device.record(), stream)
        with device.on(stream):
            for shard in shards:
                shard.grad.to_local().square().sum()
            model.set_post_optim_event(device.record())
        for shard in shards:
            shard.grad = None


@scenario(2, streams=("gather", "reduce", "of the user"))
def compute_on_a_stream_of_the_users(order: StreamOrder) -> None:
    stream = order.make_stream("of the user")
    model = sharded(policy=BF16_COMPUTE)
    stream.see(order.record().clock)
    with order.on(stream):
        train(model)


@scenario(2, streams=("gather", "reduce", "host"), is_offloading=True)
def offload(order: StreamOrder) -> None:
    train(sharded(model_on_host(), policy=BF16_COMPUTE, offload_policy=CPUOffloadPolicy()))


@scenario(2, streams=("gather", "reduce", "host"), is_offloading=True)
def offload_and_accumulation(order: StreamOrder) -> None:
    model = sharded(model_on_host(), offload_policy=CPUOffloadPolicy())
    train(model, before_step=lambda: loss_of(model).backward())


# The wrapper


@scenario(2, 1)
def wrapper(order: StreamOrder) -> None:
    train(wrapped())


@scenario(2)
def wrapper_with_original_parameters(order: StreamOrder) -> None:
    train(wrapped(use_orig_params=True, forward_prefetch=True))


@scenario(2, 1)
def wrapper_computing_in_bfloat16(order: StreamOrder) -> None:
    train(wrapped(mixed_precision=MixedPrecision(param_dtype=BF16, reduce_dtype=F32)))


@scenario(2)
def wrapper_keeping_low_precision_gradients(order: StreamOrder) -> None:
    precision = MixedPrecision(param_dtype=BF16, keep_low_precision_grads=True)
    train(wrapped(mixed_precision=precision, use_orig_params=True))


@scenario(2)
def wrapper_reducing_in_bfloat16(order: StreamOrder) -> None:
    train(wrapped(mixed_precision=MixedPrecision(reduce_dtype=BF16), use_orig_params=True))


@scenario(2)
def wrapper_sharding_gradients(order: StreamOrder) -> None:
    train(wrapped(sharding_strategy=ShardingStrategy.SHARD_GRAD_OP))


@scenario(2, 1, streams=("replicate",))
def wrapper_sharding_nothing(order: StreamOrder) -> None:
    train(wrapped(sharding_strategy=ShardingStrategy.NO_SHARD))


@scenario(2, 1, streams=("replicate",))
def wrapper_sharding_nothing_reduced_in_bfloat16(order: StreamOrder) -> None:
    precision = MixedPrecision(reduce_dtype=BF16)
    train(wrapped(sharding_strategy=ShardingStrategy.NO_SHARD, mixed_precision=precision))


@scenario(4, streams=("gather", "reduce", "replicate"))
def hybrid_wrapper(order: StreamOrder) -> None:
    strategy = ShardingStrategy.HYBRID_SHARD
    precision = MixedPrecision(reduce_dtype=BF16)
    mesh = mesh_of(2, 2)
    train(wrapped(sharding_strategy=strategy, device_mesh=mesh, mixed_precision=precision))


@scenario(2, 1)
def wrapper_accumulating_without_sync(order: StreamOrder) -> None:
    model = wrapped(use_orig_params=True)
    optimizer = sgd(model)
    for _ in range(2):
        with model.no_sync():
            loss_of(model).backward()
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()


@scenario(2)
def wrapper_prefetching_late(order: StreamOrder) -> None:
    train(wrapped(backward_prefetch=BackwardPrefetch.BACKWARD_POST))


@scenario(2)
def wrapper_prefetching_nothing(order: StreamOrder) -> None:
    train(wrapped(backward_prefetch=None))


@scenario(2)
def wrapper_clipping(order: StreamOrder) -> None:
    model = wrapped()
    train(model, before_step=lambda: model.clip_grad_norm_(0.1))


@scenario(2)
def wrapper_with_a_comm_hook(order: StreamOrder) -> None:
    model = wrapped(mixed_precision=MixedPrecision(param_dtype=BF16))
    state = default_hooks.DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.reduce_scatter_hook)
    train(model)


@scenario(2)
def wrapper_with_a_comm_hook_that_compresses(order: StreamOrder) -> None:
    def compress(state: Any, grads: Tensor, shard: Tensor) -> None:
        small = torch.empty_like(shard, dtype=BF16)
        dist.group.WORLD._reduce_scatter_base(small, grads.to(BF16)).wait()
        shard.data = small.to(shard.dtype)

    model = wrapped()
    model.register_comm_hook(None, compress)
    train(model)


@scenario(2, streams=("replicate",))
def wrapper_sharding_nothing_with_a_comm_hook(order: StreamOrder) -> None:
    model = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    state = default_hooks.DefaultState(dist.group.WORLD)
    model.register_comm_hook(state, default_hooks.allreduce_hook)
    train(model)


@scenario(2)
def wrapper_summoned_and_saved(order: StreamOrder) -> None:
    model = wrapped(use_orig_params=True)
    for _ in range(2):
        train(model, 1)
        with FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for param in model.parameters():
                param.mul_(0.5)
        model.load_state_dict(model.state_dict())


@scenario(2)
def wrapper_recomputing(order: StreamOrder) -> None:
    train(wrapped(Model(recomputes=True)))


@scenario(2, streams=("gather", "reduce", "host"), is_offloading=True)
def wrapper_offloading(order: StreamOrder) -> None:
    offload = CPUOffload(offload_params=True)
    train(wrapped(model_on_host(), cpu_offload=offload, use_orig_params=True))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", SCENARIOS)
def test_nothing_races(name: str) -> None:
    scenario = SCENARIOS[name]
    order = scenario.order()
    assert not order.races, order.report()
    assert order.num_accesses.total() >= 500
    for stream in scenario.streams or ("compute",):
        assert order.num_accesses[stream] >= 8, stream


# What the engine needs, each with a scenario that races without it

NEEDED_WAITS = {
    "CommContext._finish_oldest": "replicas reduced in bfloat16",
    "CommContext._drop_held": "reduce in bfloat16",
    "CommContext.all_gathers_follow_compute": "float32",
    "CommContext.wait_until_unused": "float32",
    "Reduction._complete": "replicas",
    "Reduction._wait_for_enqueued": "failure in an all reduce hook",
    "Reduction.abort": "failure in backward with replicas",
    "Reduction.finish": "float32",
    "Reduction.start": "float32",
    "Scheduler.begin_forward": "step left out on a stream of its own, alone",
    "Unit._issue_all_gather": "thinned after forward in fresh memory",
    "UnitAllGather.finish": "float32",
    "UnitGrads._stored": "offload and accumulation",
    "UnitGrads.synchronize_host": "offload",
}
NEEDED_EVENTS = {
    "CommContext.all_gathers_follow_compute": "float32",
    "CommContext._drop_held": "all reduce hooks on a stream each",
    "CommContext.free_after_compute": "cut along columns and unevenly",
    "Reduction._complete": "float32",
    "Reduction._end": "replicas reduced in bfloat16",
    "Reduction._wait_for_enqueued": "failure in an all reduce hook",
    "Reduction.start": "float32",
    "Unit._leave": "messages of their own",
    "UnitAllGather.start": "float32",
    "UnitAllGather.start_from_subgroup": "thinned after forward",
    "HostStore.write": "offload",
}


def places_that_call(*methods: str) -> set[str]:
    """The functions of the engine that call these methods of a device."""
    found: set[str] = set()

    def visit(node: ast.AST, path: tuple[str, ...]) -> None:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            path = (*path, node.name)
        func = node.func if isinstance(node, ast.Call) else None
        if isinstance(func, ast.Attribute) and func.attr in methods:
            owner = ast.unparse(func.value).rpartition(".")[2]
            if owner in ("device", "_device"):
                found.add(".".join(path))
        for child in ast.iter_child_nodes(node):
            visit(child, path)

    source = Path(fullshard.__file__).parent
    for room in ("unit", "runtime", "comm", "optim", "state"):
        for file in (source / room).glob("*.py"):
            visit(ast.parse(file.read_text()), ())
    return found


def test_the_tables_have_every_wait_and_every_event_of_the_engine() -> None:
    assert places_that_call("wait", "synchronize") == set(NEEDED_WAITS)
    assert places_that_call("record") == set(NEEDED_EVENTS)


@pytest.mark.parametrize("place", NEEDED_WAITS)
def test_a_wait_that_is_taken_away_is_missed(place: str) -> None:
    order = SCENARIOS[NEEDED_WAITS[place]].order(without_wait=[place])
    assert order.waiting_places[place]
    assert order.races


@pytest.mark.parametrize("place", NEEDED_EVENTS)
def test_an_event_that_says_nothing_is_missed(place: str) -> None:
    order = SCENARIOS[NEEDED_EVENTS[place]].order(without_event=[place])
    assert order.recording_places[place]
    assert order.races


@contextmanager
def sums_dropped_once_they_are_cast() -> Iterator[None]:
    give = Reduction._deliver

    def dropping(reduction: Reduction) -> None:
        give(reduction)
        for lane in reduction.lanes:
            if lane.plan.is_cast:
                lane.outs = lane.results = []

    with patch.object(Reduction, "_deliver", dropping):
        yield


@contextmanager
def inputs_dropped_once_they_are_exchanged() -> Iterator[None]:
    """Compute waits for the exchange and no longer, also where sums are inputs."""
    conclude = Reduction.finish

    def concluding(reduction: Reduction) -> Any:
        event, reduction._event = reduction._event, reduction._scattered
        return replace(conclude(reduction), event=event)

    with patch.object(Reduction, "finish", concluding):
        yield


@contextmanager
def everything_dropped_once_it_is_exchanged() -> Iterator[None]:
    with sums_dropped_once_they_are_cast(), inputs_dropped_once_they_are_exchanged():
        yield


@contextmanager
def inputs_dropped_once_they_are_sent() -> Iterator[None]:
    start = Reduction.start

    def starting(reduction: Reduction) -> None:
        start(reduction)
        for lane in reduction.lanes:
            for bucket in lane.buckets:
                bucket.inp = None

    with patch.object(Reduction, "start", starting):
        yield


@contextmanager
def results_dropped_once_concluded() -> Iterator[None]:
    conclude = Reduction.finish
    with patch.object(Reduction, "finish", lambda self: replace(conclude(self), tensors=[])):
        yield


@contextmanager
def thinned_parameters_dropped_once_they_are_sent() -> Iterator[None]:
    start = UnitAllGather.start_from_subgroup

    def starting(*args: Any) -> InFlightAllGather:
        return replace(start(*args), staged=[])

    with patch.object(UnitAllGather, "start_from_subgroup", starting):
        yield


def gradients_forgotten_while_they_are_added_to() -> AbstractContextManager[object]:
    class Forgetful(list[Tensor]):
        def __iadd__(self, other: Any) -> Any:
            return self

    begin = UnitGrads.begin_taking

    def beginning(grads: UnitGrads) -> None:
        grads._added_to = Forgetful()
        begin(grads)

    return patch.object(UnitGrads, "begin_taking", beginning)


def users_code_before_releases() -> AbstractContextManager[object]:
    wait = CommContext.wait_until_unused

    def waiting(context: CommContext, *address_range: tuple[int, int]) -> None:
        if address_range:
            wait(context, *address_range)

    return patch.object(CommContext, "wait_until_unused", waiting)


def unawaited_transfers() -> AbstractContextManager[object]:
    return patch.object(CollectiveWork, "wait", lambda _: None)


FAULTS: list[tuple[Callable[[], AbstractContextManager[object]], str]] = [
    (sums_dropped_once_they_are_cast, "replicas reduced in bfloat16"),
    (
        sums_dropped_once_they_are_cast,
        "all reduce hook on a stream of its own reduced in bfloat16",
    ),
    (sums_dropped_once_they_are_cast, "hybrid wrapper"),
    (everything_dropped_once_it_is_exchanged, "reduce in bfloat16, alone"),
    (inputs_dropped_once_they_are_exchanged, "all reduce hook reduced in bfloat16, alone"),
    (
        everything_dropped_once_it_is_exchanged,
        "wrapper sharding nothing reduced in bfloat16, alone",
    ),
    (inputs_dropped_once_they_are_sent, "messages of their own"),
    (inputs_dropped_once_they_are_sent, "large gradients"),
    (results_dropped_once_concluded, "replicas reduced in bfloat16"),
    (thinned_parameters_dropped_once_they_are_sent, "thinned after forward"),
    (
        gradients_forgotten_while_they_are_added_to,
        "failure in backward that adds to gradients",
    ),
    (users_code_before_releases, "extensions"),
    (users_code_before_releases, "custom collectives"),
    (unawaited_transfers, "custom collectives"),
]


@pytest.mark.parametrize(
    "fault, name", FAULTS, ids=[f"{fault.__name__}: {name}" for fault, name in FAULTS]
)
def test_a_fault_of_the_engine_is_found(
    fault: Callable[[], AbstractContextManager[object]], name: str
) -> None:
    assert SCENARIOS[name].order(fault=fault()).races

"""Programs that use a sharded model in any order that is allowed, beside the unsharded one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, func, nn
from torch.distributed._composable import replicate
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import Shard
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from fullshard import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
    by_unit,
    fully_shard,
)
from fullshard.errors import MisuseError
from fullshard.runtime.names import clean_name
from fullshard.state import load, save
from fullshard.testing import Rank, pool
from fullshard.wire import Wire
from tests.engine.test_large_gradients import Ordered, small_buckets
from tests.support.wrapped import full

VOCABULARY, WIDTH, MAX_BLOCKS = 64, 8, 3
ROWS = 2  # of each rank's batch


@dataclass(frozen=True)
class Way:
    """How a forward runs. The model takes block numbers modulo the number of its blocks."""

    recomputes_embedding: bool = False
    reads_embedding: bool = False  # its weight, in a way that autograd saves
    tied_head: str = ""  # "plain" or "recomputed"
    skipped: int | None = None
    repeated: int | None = None
    checkpoint: str = ""  # "reentrant" or "not reentrant"


@dataclass(frozen=True)
class Action:
    kind: str
    way: Way
    seed: int  # of its data
    choice: int  # between what the kind leaves open


@dataclass(frozen=True)
class Program:
    api: str  # "fully_shard", that with torch's "replicate" around, "wrapper" or "flat wrapper"
    mesh: tuple[int, ...]
    num_blocks: int
    reshards: bool | int
    prefetches: BackwardPrefetch | None  # of a wrapper
    splits_columns: bool
    optimizer: str  # "plain", "momentum" or "adam"
    is_by_unit: bool
    is_cast: bool  # stored in float32, computed in float64
    has_large_units: bool  # as large models have on an accelerator
    is_offloaded: bool
    embedding_is_unit: bool
    head_is_embedding: bool
    has_nested_units: bool
    norm_goes_with_head: bool  # in one unit
    encodes: tuple[bool, bool]  # what is gathered, and what is reduced
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Disguised(Wire):
    """Loses nothing, but is useless before it is decoded: programs compute what they do without."""

    dtype = torch.uint8
    alignment_numel = 2

    def message_numel(self, numel: int) -> int:
        return 8 * numel + 16

    def encode(self, segments: Tensor, messages: Tensor) -> None:
        values = segments.double().contiguous().view(torch.uint8)
        messages[:, :-16].copy_(values).bitwise_xor_(0x5A)
        messages[:, -16:] = 0

    def decode(self, messages: Tensor, segments: Tensor) -> None:
        segments.copy_(messages[:, :-16].bitwise_xor(0x5A).contiguous().view(torch.float64))


class PlannedError(Exception):
    """Raised by the model when a program tells it to."""


class FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise PlannedError


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Model(nn.Module):
    def __init__(self, num_blocks: int, head_is_embedding: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if head_is_embedding:
            self.head.weight = self.embedding.weight
        self.way = Way()
        self.embedded = torch.empty(0)  # by the last forward
        self.failing: tuple[str, int] = ("", 0)  # in which phase, at which block
        self.gain: Tensor | None = None  # what a functional transform differentiates by

    def forward(self, tokens: Tensor) -> Tensor:
        way, num_blocks = self.way, len(self.blocks)
        if way.recomputes_embedding:
            x = checkpoint(self._embedded, tokens, use_reentrant=False)
        else:
            x = self._embedded(tokens)
        self.embedded = x
        if self.gain is not None:
            x = x * self.gain
        if way.reads_embedding:
            of_rows = x.mean((1, 2), keepdim=True) * self.embedding.weight
            x = x + of_rows.mean((1, 2), keepdim=True)
        phase, place = self.failing
        for number, block in enumerate(self.blocks):
            if phase == "forward" and place % num_blocks == number:
                raise PlannedError
            if phase == "backward" and place % num_blocks == number:
                x = FailInBackward.apply(x)
            if way.skipped is not None and way.skipped % num_blocks == number:
                continue
            is_repeated = way.repeated is not None and way.repeated % num_blocks == number
            for _ in range(2 if is_repeated else 1):
                if way.checkpoint:
                    # Its reentrant kind needs an input that requires gradients.
                    reentrant = way.checkpoint == "reentrant" and x.requires_grad
                    x = checkpoint(block, x, use_reentrant=reentrant)
                else:
                    x = block(x)
        x = self.norm(x)
        if way.tied_head == "recomputed":
            return checkpoint(self._from_both_heads, x, use_reentrant=False)
        return self._from_both_heads(x) if way.tied_head else self.head(x)

    def _embedded(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens) * self.shift

    def _from_both_heads(self, x: Tensor) -> Tensor:
        return F.linear(x, self.embedding.weight) + self.head(x)


class Sides:
    """A sharded model and the unsharded one, which do the same and must agree.

    The unsharded one computes on the batches of all ranks.
    """

    def __init__(self, rank: Rank, program: Program, folder: Path) -> None:
        self.rank, self.program, self.folder = rank, program, folder
        self.inner = Model(program.num_blocks, program.head_is_embedding).to(rank.device)
        self.unsharded = deepcopy(self.inner).double()
        if not program.is_cast:
            self.inner.double()
        self.model = self._sharded()
        # Take the parameters of a sharded model at once: later they may be gathered.
        self.params = named_params(self.model)
        self.models: tuple[nn.Module, nn.Module] = (self.unsharded, self.model)
        self.make_optimizers()
        self.num_saves = 0

    def make_optimizers(self) -> None:
        self.optimizers = [
            optimizer_of(list(params), self.program.optimizer)
            for params in (self.unsharded.parameters(), self.params.values())
        ]
        if self.program.is_by_unit:
            by_unit(self.optimizers[1])

    def run(self) -> None:
        for action in self.program.actions:
            self.follow(action.way)
            KINDS[action.kind](self, action)

    @property
    def is_wrapped(self) -> bool:
        return self.program.api.endswith("wrapper")

    def _sharded(self) -> Any:
        program, model = self.program, self.inner
        computed = torch.float64 if program.is_cast else None
        gather, reduce = (Disguised() if each else None for each in program.encodes)
        wires: Any = {"gather_wire": gather, "reduce_wire": reduce}
        names = ("replicate", "shard") if len(program.mesh) == 2 else None
        mesh = self.rank.mesh(program.mesh, names)
        if self.is_wrapped:
            strategy = {
                (1, True): ShardingStrategy.FULL_SHARD,
                (1, False): ShardingStrategy.SHARD_GRAD_OP,
                (2, True): ShardingStrategy.HYBRID_SHARD,
                (2, False): ShardingStrategy._HYBRID_SHARD_ZERO2,
            }[len(program.mesh), program.reshards]

            def wrapped(module: nn.Module) -> FullyShardedDataParallel:
                return FullyShardedDataParallel(
                    module,
                    device_mesh=mesh,
                    sharding_strategy=strategy,
                    use_orig_params=program.api == "wrapper",
                    mixed_precision=MixedPrecision(computed, computed, **wires),
                    backward_prefetch=program.prefetches,
                    cpu_offload=CPUOffload(offload_params=program.is_offloaded),
                )

            for number, block in enumerate(model.blocks):
                if program.has_nested_units:
                    block.up = wrapped(block.up)
                model.blocks[number] = wrapped(block)
            return wrapped(model)
        options: dict[str, Any] = {
            "mesh": mesh,
            "reshard_after_forward": program.reshards,
            "mp_policy": MixedPrecisionPolicy(computed, computed, **wires),
        }
        if program.is_offloaded:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        if program.splits_columns:
            options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1)
        for block in model.blocks:
            if program.has_nested_units:
                fully_shard(block.up, **options)
            fully_shard(block, **options)
        if program.api == "replicate":
            return replicate(model)
        if program.embedding_is_unit:
            fully_shard(model.embedding, **options)
        if program.norm_goes_with_head:
            fully_shard([model.norm, model.head], **options)
        return fully_shard(model, **options)

    def follow(self, way: Way) -> None:
        for model in (self.unsharded, self.inner):
            model.way = way

    def batches(self, seed: int) -> tuple[Tensor, Tensor]:
        """What each of the two models computes on."""
        generator = torch.Generator().manual_seed(seed)
        rows = torch.randint(0, VOCABULARY, (ROWS * self.rank.size, 5), generator=generator)
        rows = rows.to(self.rank.device)
        return rows, rows[self.rows]

    @property
    def rows(self) -> slice:
        return slice(ROWS * self.rank.rank, ROWS * (self.rank.rank + 1))

    def outputs(self, seed: int) -> tuple[Tensor, Tensor]:
        everyones, own = (
            model(batch) for model, batch in zip(self.models, self.batches(seed), strict=True)
        )
        self.assert_same("output", own.detach(), everyones[self.rows].detach())
        return everyones, own

    def losses(self, seed: int) -> tuple[Tensor, Tensor]:
        everyones, own = self.outputs(seed)
        return everyones.square().mean(), own.square().mean()

    def backward(self, seed: int) -> None:
        for loss in self.losses(seed):
            loss.backward()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
        self.zero_grad()

    def zero_grad(self, *, set_to_none: bool = True) -> None:
        for model in self.models:
            model.zero_grad(set_to_none)

    @property
    def all_params(self) -> list[nn.Parameter]:
        """The parameters of both, as optimizers see them."""
        return [*self.unsharded.parameters(), *self.params.values()]

    def train_sharded_alone(self, seed: int) -> None:
        """A step that is undone by loading what was saved before."""
        self.model(self.batches(seed)[1]).square().mean().backward()
        self.optimizers[1].step()
        self.zero_grad()

    @contextmanager
    def without_reducing(self) -> Iterator[None]:
        if self.is_wrapped:
            with self.model.no_sync():
                yield
        else:
            # torch's `replicate` does not pass it on to the blocks.
            modules = [self.model, *self.inner.blocks]
            for module in modules:
                module.set_requires_gradient_sync(False)
            yield
            for module in modules:
                module.set_requires_gradient_sync(True)

    def assert_same(self, subject: str, found: Tensor, expected: Tensor) -> None:
        rtol, atol = (1e-4, 1e-5) if self.program.is_cast else (1e-9, 1e-11)
        torch.testing.assert_close(
            found.to(expected), expected, rtol=rtol, atol=atol, msg=lambda m: f"{subject}: {m}"
        )

    def check_grads(self) -> None:
        """After a backward that reduces: gradients are the mean of those of all ranks."""
        if self.program.api == "flat wrapper":
            return  # flat parameters have the gradients; what a step does with them is compared
        summoned: AbstractContextManager[None] = nullcontext()
        if self.is_wrapped:
            summoned = FullyShardedDataParallel.summon_full_params(self.model, with_grads=True)
        with summoned:
            for name, reference in self.unsharded.named_parameters():
                param = self.params[name]
                found = torch.zeros_like(reference)
                if param.grad is not None:
                    found = full(param.grad)
                expected = torch.zeros_like(reference) if reference.grad is None else reference.grad
                self.assert_same(f"gradient of {name}", found, expected)

    def check_params(self) -> None:
        if self.is_wrapped:
            with FullyShardedDataParallel.summon_full_params(self.model, writeback=False):
                summoned = named_params(self.model)
                found = {name: param.detach().clone() for name, param in summoned.items()}
        else:
            found = {name: full(param).detach() for name, param in self.params.items()}
        expected = dict(self.unsharded.named_parameters())
        assert found.keys() == expected.keys()
        for name, value in found.items():
            self.assert_same(name, value, expected[name].detach())


def optimizer_of(params: list[nn.Parameter], kind: str) -> Optimizer:
    if kind == "adam":
        return AdamW(params, lr=0.01, eps=1e-3)
    return SGD(params, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0)


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """What modules have at this time, by the names of the unsharded model."""
    return {clean_name(name): param for name, param in model.named_parameters()}


def backward(sides: Sides, action: Action) -> None:
    sides.backward(action.seed)
    sides.check_grads()


def step(sides: Sides, action: Action) -> None:
    backward(sides, action)
    sides.step()
    sides.check_params()


def clipped_step(sides: Sides, action: Action) -> None:
    backward(sides, action)
    kind = (2.0, 1.0, inf)[action.choice % 3]
    expected = nn.utils.clip_grad_norm_(sides.unsharded.parameters(), 0.1, kind)
    if sides.is_wrapped:
        found = sides.model.clip_grad_norm_(0.1, kind)
    else:
        found = nn.utils.clip_grad_norm_(sides.params.values(), 0.1, kind)
    sides.assert_same("norm", full(found), expected)
    sides.step()
    sides.check_params()


def backward_twice(sides: Sides, action: Action) -> None:
    for loss in sides.losses(action.seed):
        loss.backward(retain_graph=True)
        loss.backward()
    sides.check_grads()


def backward_of_halves(sides: Sides, action: Action) -> None:
    for output in sides.outputs(action.seed):
        first, second = output.chunk(2, dim=-1)
        first.square().mean().backward(retain_graph=True)
        second.sin().mean().backward()
    sides.check_grads()


def two_forwards(sides: Sides, action: Action) -> None:
    for first, second in zip(sides.losses(action.seed), sides.losses(action.seed + 1), strict=True):
        if action.choice % 3 == 0:
            (first + second).backward()
        else:
            for loss in (first, second) if action.choice % 3 == 1 else (second, first):
                loss.backward()
    sides.check_grads()


def zeroed_before_backward(sides: Sides, action: Action) -> None:
    losses = sides.losses(action.seed)
    sides.zero_grad(set_to_none=action.choice % 2 == 0)
    for loss in losses:
        loss.backward()
    sides.check_grads()


def grad_of_activations(sides: Sides, action: Action) -> None:
    """Take it without gradients of parameters, or, every other time, before them."""
    # torch's reentrant checkpoints do not allow this.
    sides.follow(replace(action.way, checkpoint=action.way.checkpoint.removeprefix("reentrant")))
    everyones, own = sides.losses(action.seed)
    if not everyones.requires_grad or not sides.unsharded.embedded.requires_grad:
        return
    (expected,) = torch.autograd.grad(everyones, sides.unsharded.embedded, retain_graph=True)
    (found,) = torch.autograd.grad(own, sides.inner.embedded, retain_graph=True)
    sides.assert_same("gradient", found, expected[sides.rows] * sides.rank.size)
    if action.choice % 2:
        for loss in (everyones, own):
            loss.backward()
        sides.check_grads()


def evaluation(sides: Sides, action: Action) -> None:
    # torch's `replicate` cannot begin in inference mode.
    is_normal = action.choice % 2 or sides.program.api == "replicate"
    with torch.no_grad() if is_normal else torch.inference_mode():
        sides.outputs(action.seed)


def summoned_evaluation(sides: Sides, action: Action) -> None:
    """A forward inside `summon_full_params`, of the wrapper or of the module in it."""
    is_between = action.choice & 4
    losses = sides.losses(action.seed + 1) if is_between else ()
    summoned = FullyShardedDataParallel.summon_full_params(
        sides.model, recurse=action.choice % 2 == 0, writeback=False
    )
    everyones, own = sides.batches(action.seed)
    with torch.no_grad(), summoned:
        if not sides.program.is_cast:  # what is summoned is not
            found = (sides.inner if action.choice & 2 else sides.model)(own)
            sides.assert_same("output", found, sides.unsharded(everyones)[sides.rows])
    for loss in losses:
        loss.backward()
    if is_between:
        sides.check_grads()


def gain_by_jvp(function: Callable[[Tensor], Tensor], gain: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch compiles what it needs by its JIT
        result: Tensor = func.jvp(function, (gain,), (torch.ones_like(gain),))[1]
    return result


def gain_by_vjp(function: Callable[[Tensor], Tensor], gain: Tensor) -> Tensor:
    output, pull = func.vjp(function, gain)
    return torch.stack((output, *pull(torch.ones_like(output))))


TRANSFORMS: tuple[Callable[[Callable[[Tensor], Tensor], Tensor], Tensor], ...] = (
    lambda function, gain: func.grad(function)(gain),
    gain_by_jvp,
    lambda function, gain: func.jacrev(function)(gain),
    gain_by_vjp,
)


def transformed(sides: Sides, action: Action) -> None:
    """A forward inside of a functional transform, every other time by `functional_call`."""
    sides.follow(Way())  # functorch does not know checkpoints
    gain = torch.tensor(0.9, dtype=torch.float64, device=sides.rank.device)
    transform, own = TRANSFORMS[action.choice // 2 % len(TRANSFORMS)], sides.batches(action.seed)[1]
    values = []
    for model, inner in ((sides.unsharded, sides.unsharded), (sides.model, sides.inner)):

        def output(gain: Tensor, model: nn.Module = model, inner: Model = inner) -> Tensor:
            inner.gain = gain
            run = model if action.choice % 2 else partial(func.functional_call, model, {})
            return run(own).double().square().mean()

        values.append(transform(output, gain).detach())
        inner.gain = None
    sides.assert_same("transformed", values[1], values[0])


def evaluation_before_backward(sides: Sides, action: Action) -> None:
    losses = sides.losses(action.seed)
    with torch.no_grad():
        sides.outputs(action.seed + 1)
    for loss in losses:
        loss.backward()
    sides.check_grads()


def forward_alone(sides: Sides, action: Action) -> None:
    sides.losses(action.seed)


def failure(sides: Sides, action: Action) -> None:
    models = (sides.unsharded, sides.inner)
    for model in models:
        model.failing = ("forward" if action.choice % 2 else "backward", action.choice // 2)
    outcomes = []
    for model, batch in zip(sides.models, sides.batches(action.seed), strict=True):
        try:
            model(batch).square().mean().backward()
            outcomes.append("no failure")  # nothing before that block is trained
        except PlannedError:
            outcomes.append("failure")
    assert outcomes[0] == outcomes[1]
    for model in models:
        model.failing = ("", 0)
    sides.zero_grad()


def accumulation(sides: Sides, action: Action) -> None:
    with sides.without_reducing():
        sides.backward(action.seed)


def state_dict(sides: Sides, action: Action) -> None:
    state = sides.model.state_dict()
    if action.choice % 2:
        sides.model.load_state_dict(state)
    sides.check_params()


def optimizer_state_dict(sides: Sides, action: Action) -> None:
    """Save through torch's functions for either API, and load into a model trained since."""
    sides.zero_grad()
    model, optimizer = sides.model, sides.optimizers[1]
    if any(param not in optimizer.state for param in optimizer.param_groups[0]["params"]):
        return  # torch's functions create missing state by a step
    is_full = action.choice % 2 == 0
    if sides.is_wrapped:
        kind = StateDictType.FULL_STATE_DICT if is_full else StateDictType.SHARDED_STATE_DICT
        with FullyShardedDataParallel.state_dict_type(model, kind):
            of_model = model.state_dict()
            of_optimizer = FullyShardedDataParallel.optim_state_dict(model, optimizer)
            sides.train_sharded_alone(action.seed)
            model.load_state_dict(of_model)
            optimizer.load_state_dict(
                FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, of_optimizer)
            )
    else:
        model.set_reshard_after_backward(True)  # torch's functions look for shards in the model
        options = StateDictOptions(full_state_dict=is_full)
        states = deepcopy(get_state_dict(model, optimizer, options=options))
        sides.train_sharded_alone(action.seed)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=states[0],
            optim_state_dict=states[1],
            options=options,
        )
    sides.check_params()


def saved_and_loaded(sides: Sides, action: Action) -> None:
    sides.zero_grad()
    sides.num_saves += 1
    path = sides.folder / str(sides.num_saves)
    save(path, sides.model, sides.optimizers[1])
    sides.train_sharded_alone(action.seed)
    load(path, sides.model, sides.optimizers[1])
    sides.check_params()


def change_grads(params: Iterable[nn.Parameter], choice: int) -> None:
    for param in params:
        if param.grad is None or choice % 4 == 0:
            param.grad = None
        elif choice % 4 == 1:
            param.grad.zero_()
        elif choice % 4 == 2:
            param.grad.mul_(0.5)
        else:
            param.grad = param.grad * 0.5


def edited_grads(sides: Sides, action: Action) -> None:
    """Gradients are changed, and the next backward adds to them."""
    backward(sides, action)
    change_grads(sides.all_params, action.choice)
    backward(sides, action)


def edited_grads_between(sides: Sides, action: Action) -> None:
    """Gradients are read and changed between a forward and its backward, which adds to them."""
    backward(sides, action)
    shows_shards = sides.program.api == "wrapper" and sides.program.reshards
    before = [None if p.grad is None else p.grad.clone() for p in sides.params.values()]
    losses = sides.losses(action.seed + 1)
    params = [*sides.model.parameters()] if shows_shards else [*sides.params.values()]
    if shows_shards:
        for param, grad in zip(params, before, strict=True):
            torch.testing.assert_close(param.grad, grad, rtol=0, atol=0)
    change_grads([*sides.unsharded.parameters(), *params], action.choice)
    for loss in losses:
        loss.backward()
    sides.check_grads()


def replaced_data(sides: Sides, action: Action) -> None:
    """Parameters get other memory, every other time between a forward and its backward."""
    sides.zero_grad()
    sides.follow(Way())  # a recomputation would see the new values
    is_between = action.choice % 2 == 0
    losses = sides.losses(action.seed) if is_between else ()

    def replace(params: Iterable[nn.Parameter]) -> None:
        for param in params:
            param.data = param.data * 0.9

    is_refused = is_between and sides.program.api == "wrapper" and not sides.program.reshards
    replace(sides.model.parameters() if is_refused else sides.params.values())
    if is_refused:
        # They are unsharded now. If nothing is trained, the next forward refuses them.
        backward = losses[1].backward if losses[1].requires_grad else partial(sides.losses, 0)
        with pytest.raises(
            MisuseError, match="changing the parameters between forward and backward"
        ):
            backward()
        sides.zero_grad()
    else:
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
        # Not before: autograd has saved the parameters themselves.
        replace(sides.unsharded.parameters())
    sides.check_params()


def assigned(sides: Sides, action: Action) -> None:
    """All parameters are replaced by new ones."""
    sides.zero_grad()
    for model in sides.models:
        state = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
    sides.params = named_params(sides.model)
    sides.make_optimizers()
    sides.check_params()


def hooked_step(sides: Sides, action: Action) -> None:
    """A hook changes every gradient, or does the step, when the gradient is complete."""
    sides.zero_grad()
    sides.follow(replace(action.way, checkpoint=action.way.checkpoint.removeprefix("reentrant")))

    def change(param: Tensor) -> None:
        assert param.grad is not None
        if action.choice % 2:
            param.grad.mul_(2.0)
        else:
            with torch.no_grad():
                param.add_(param.grad, alpha=-0.05)

    handles = [
        param.register_post_accumulate_grad_hook(change)
        for param in sides.all_params
        if param.requires_grad
    ]
    backward(sides, action)
    for handle in handles:
        handle.remove()
    if action.choice % 2:
        sides.step()
    sides.zero_grad()
    sides.check_params()


def new_optimizer(sides: Sides, action: Action) -> None:
    sides.make_optimizers()


def edited(sides: Sides, action: Action) -> None:
    """Parameters are changed in place."""
    summoned: AbstractContextManager[None] = nullcontext()
    if sides.is_wrapped:
        summoned = FullyShardedDataParallel.summon_full_params(sides.model)
    with torch.no_grad(), summoned:
        of_sharded = sides.model.parameters() if sides.is_wrapped else sides.params.values()
        for param in (*sides.unsharded.parameters(), *of_sharded):
            param.mul_(0.9)
    sides.check_params()


def not_the_last_backward(sides: Sides, action: Action) -> None:
    sides.model.set_is_last_backward(False)
    sides.backward(action.seed)
    sides.model.set_is_last_backward(True)
    backward(sides, action)


def freezing(sides: Sides, action: Action) -> None:
    sides.zero_grad()
    prefix = ("embedding", "head", "blocks.0", "shift", "")[action.choice % 5]
    is_trained = not prefix or action.choice // 5 % 2 == 1
    for model in sides.models:
        for name, param in named_params(model).items():
            if name.startswith(prefix):
                param.requires_grad_(is_trained)


def finalized_by_hand(sides: Sides, action: Action) -> None:
    sides.model.set_manual_backward_finalization(True)
    for _ in range(1 + action.choice % 2):
        sides.backward(action.seed)
    handle = sides.model.finalize_backward(async_op=action.choice // 2 % 2 == 1)
    if handle is not None:
        handle.wait()
    sides.model.set_manual_backward_finalization(False)
    sides.check_grads()


def accumulation_of_a_block(sides: Sides, action: Action) -> None:
    """One block accumulates without communication while the others reduce."""
    block = sides.inner.blocks[action.choice % len(sides.inner.blocks)]
    block.set_requires_gradient_sync(False)
    sides.backward(action.seed)
    block.set_requires_gradient_sync(True)
    backward(sides, action)


def without_all_reduce(sides: Sides, action: Action) -> None:
    sides.model.set_requires_all_reduce(False)
    sides.backward(action.seed)
    sides.model.set_requires_all_reduce(True)


def unsharding(sides: Sides, action: Action) -> None:
    module = [sides.model, *sides.inner.blocks][action.choice // 8 % (1 + len(sides.inner.blocks))]
    handle = module.unshard(async_op=bool(action.choice & 1))
    if handle is not None and action.choice & 2:
        handle.wait()
    if action.choice & 4:
        module.reshard()


def setting(sides: Sides, action: Action) -> None:
    kind, is_on, blocks = action.choice % 3, action.choice // 3 % 2 == 1, sides.inner.blocks
    if kind == 0:
        sides.model.set_reshard_after_forward(is_on)
    elif kind == 1:
        sides.model.set_reshard_after_backward(is_on)
    else:
        blocks[0].set_modules_to_forward_prefetch([blocks[-1]])


KINDS: dict[str, Callable[[Sides, Action], None]] = {
    each.__name__: each
    for each in (
        backward,
        step,
        clipped_step,
        backward_twice,
        backward_of_halves,
        two_forwards,
        zeroed_before_backward,
        grad_of_activations,
        evaluation,
        summoned_evaluation,
        transformed,
        evaluation_before_backward,
        forward_alone,
        failure,
        accumulation,
        state_dict,
        optimizer_state_dict,
        saved_and_loaded,
        edited,
        edited_grads,
        edited_grads_between,
        replaced_data,
        assigned,
        hooked_step,
        new_optimizer,
        freezing,
        finalized_by_hand,
        accumulation_of_a_block,
        unsharding,
        setting,
        not_the_last_backward,
        without_all_reduce,
    )
}

# What torch's `replicate` allows.
REPLICATED = {"backward", "step", "evaluation", "accumulation", "state_dict", "edited"}
REPLICATED |= {"edited_grads", "saved_and_loaded", "new_optimizer"}


def run(rank: Rank, program: Program, folder: Path) -> None:
    with ExitStack() as stack:
        if rank.device.type == "cpu" and (program.has_large_units or program.is_offloaded):
            stack.enter_context(as_accelerator())
        if program.has_large_units:
            stack.enter_context(small_buckets())
        Sides(rank, program, folder).run()


@contextmanager
def as_accelerator() -> Iterator[None]:
    """Make the engine treat the CPU as a device with streams, apart from the host."""
    with patch("fullshard.runtime.build.device_for", lambda _: Ordered(torch.device("cpu", 0))):
        yield


@st.composite
def programs(draw: st.DrawFn, api: str, meshes: tuple[tuple[int, ...], ...]) -> Program:
    is_wrapped, mesh = api.endswith("wrapper"), draw(st.sampled_from(meshes))
    is_replicated = api == "replicate"  # which casts and offloads nothing
    embedding_is_unit = api == "fully_shard" and draw(st.sampled_from([False, False, True]))
    is_cast = not is_replicated and draw(st.sampled_from([False, False, True]))
    head_is_embedding = not embedding_is_unit and draw(st.sampled_from([False, False, True]))
    # No unit may read the weight of another unit.
    shares_embedding = not embedding_is_unit and api != "flat wrapper"
    block_numbers = st.sampled_from([None, None, None, *range(MAX_BLOCKS)])
    ways = st.builds(
        Way,
        recomputes_embedding=st.sampled_from([False, False, True]),
        reads_embedding=st.sampled_from([False, shares_embedding]),
        tied_head=st.sampled_from(["", "plain", "recomputed"] if shares_embedding else [""]),
        # With `replicate` around, what a block has accumulated waits for its own backward.
        skipped=st.none() if is_replicated else block_numbers,
        repeated=block_numbers,
        checkpoint=st.sampled_from(["", "", "reentrant", "not reentrant"]),
    )
    kinds = set(KINDS)
    if is_wrapped:
        kinds -= {"unsharding", "setting", "not_the_last_backward", "finalized_by_hand"}
        kinds -= {"accumulation_of_a_block"}
        kinds -= {"assigned"}
    if not is_wrapped:
        kinds -= {"replaced_data", "summoned_evaluation"}
    if head_is_embedding:
        kinds -= {"assigned"}  # which unties what is loaded
    if is_replicated:
        kinds &= REPLICATED
    if is_wrapped or len(mesh) == 1:
        kinds -= {"without_all_reduce"}
    if api == "flat wrapper":
        kinds -= {"freezing", "hooked_step"}
    actions = st.builds(
        Action,
        kind=st.sampled_from([kind for kind in KINDS if kind in kinds]),
        way=st.one_of(st.just(Way()), ways),
        seed=st.integers(0, 1000),
        choice=st.integers(0, 63),
    )
    return Program(
        api=api,
        mesh=mesh,
        num_blocks=draw(st.integers(1, MAX_BLOCKS)),
        reshards=draw(st.sampled_from([True, False, *([] if is_wrapped or mesh != (4,) else [2])])),
        prefetches=draw(st.sampled_from([*BackwardPrefetch, None])) if is_wrapped else None,
        splits_columns=not is_wrapped and draw(st.booleans()),
        optimizer=draw(st.sampled_from(["plain", "momentum", *(() if is_cast else ("adam",))])),
        is_by_unit=not is_replicated and draw(st.sampled_from([False, False, True])),
        is_cast=is_cast,
        has_large_units=draw(st.booleans()),
        is_offloaded=not is_replicated and draw(st.sampled_from([False, False, False, True])),
        embedding_is_unit=embedding_is_unit,
        head_is_embedding=head_is_embedding,
        norm_goes_with_head=api == "fully_shard" and not head_is_embedding and draw(st.booleans()),
        has_nested_units=draw(st.booleans()),
        encodes=draw(
            st.sampled_from([(False, False), (False, False), (True, False), (True, True)])
        ),
        actions=tuple(draw(st.lists(actions, min_size=4, max_size=12))),
    )


def check(program: Program, backend: str = "gloo") -> None:
    ranks = pool(torch.Size(program.mesh).numel(), backend)
    with TemporaryDirectory() as folder:
        ranks.run(run, program, Path(folder), timeout_s=60.0, expect_failure=True)


# FUZZ=500 tries that many programs of each kind, other ones each time.
num_programs = int(os.environ.get("FUZZ", "0"))
some = settings(derandomize=not num_programs, deadline=None, max_examples=num_programs or 3)
MESHES: dict[int, tuple[tuple[int, ...], ...]] = {2: ((2,),), 4: ((4,), (2, 2))}


@some
@given(programs("fully_shard", MESHES[2]))
def test_any_program_computes_what_it_does_unsharded(program: Program) -> None:
    check(program)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "api, num_ranks",
    [
        ("fully_shard", 4),
        *((api, n) for api in ("wrapper", "flat wrapper", "replicate") for n in MESHES),
    ],
)
@some
@given(data=st.data())
def test_any_program_computes_what_it_does_unsharded_with(
    api: str, num_ranks: int, data: st.DataObject
) -> None:
    meshes = MESHES[num_ranks] if api != "replicate" else ((num_ranks,),)
    check(data.draw(programs(api, meshes)))

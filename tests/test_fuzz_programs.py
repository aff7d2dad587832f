"""Programs that use a sharded model in any order that is allowed, beside the unsharded one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    fully_shard,
)
from fullshard.runtime.names import clean_name
from fullshard.state import load, save
from fullshard.testing import Rank, pool
from tests.test_large_gradients import ordered_and_small, small_buckets
from tests.wrapped import full

VOCABULARY, WIDTH, MAX_BLOCKS = 64, 8, 3
ROWS = 2  # of each rank's batch


@dataclass(frozen=True)
class Way:
    """How a forward runs. Blocks are numbers, of which the model takes the rest."""

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
    api: str
    mesh: tuple[int, ...]
    num_blocks: int
    reshards: bool
    momentum: float
    has_large_units: bool  # as large models have on a device with streams
    is_offloaded: bool
    embedding_is_unit: bool
    actions: tuple[Action, ...]


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
    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.shift = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.way = Way()
        self.failing: tuple[str, int] = ("", 0)  # in which phase, at which block

    def forward(self, tokens: Tensor) -> Tensor:
        way, num_blocks = self.way, len(self.blocks)
        if way.recomputes_embedding:
            x = checkpoint(self._embedded, tokens, use_reentrant=False)
        else:
            x = self._embedded(tokens)
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
    """A sharded model and the unsharded one, which do the same and must have the same.

    The unsharded one computes on the batches of all ranks.
    """

    def __init__(self, rank: Rank, program: Program, folder: Path) -> None:
        self.rank, self.program, self.folder = rank, program, folder
        self.unsharded = Model(program.num_blocks).double().to(rank.device)
        self.inner = deepcopy(self.unsharded)
        self.model = self._sharded()
        # Those of a sharded model are asked for at once: later ones may be gathered.
        self.params = named_params(self.model)
        self.models: tuple[nn.Module, nn.Module] = (self.unsharded, self.model)
        self.optimizers = [
            torch.optim.SGD(model.parameters(), lr=0.05, momentum=program.momentum)
            for model in self.models
        ]
        self.num_saves = 0

    @property
    def is_wrapped(self) -> bool:
        return self.program.api != "fully_shard"

    def _sharded(self) -> Any:
        program, model = self.program, self.inner
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
                )

            for number, block in enumerate(model.blocks):
                model.blocks[number] = wrapped(block)
            return wrapped(model)
        options: dict[str, Any] = {"mesh": mesh, "reshard_after_forward": program.reshards}
        if program.is_offloaded:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
        for block in model.blocks:
            fully_shard(block, **options)
        if program.embedding_is_unit:
            fully_shard(model.embedding, **options)
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
        assert_same("output", own.detach(), everyones[self.rows].detach())
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

    def zero_grad(self) -> None:
        for model in self.models:
            model.zero_grad()

    @contextmanager
    def without_reducing(self) -> Iterator[None]:
        if self.is_wrapped:
            with self.model.no_sync():
                yield
        else:
            self.model.set_requires_gradient_sync(False)
            yield
            self.model.set_requires_gradient_sync(True)

    def check_grads(self) -> None:
        """After a backward that reduces: gradients are the mean of those of all ranks."""
        if self.program.api == "flat wrapper":
            return  # has those of flat parameters; what a step does with them is compared
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
                assert_same(f"gradient of {name}", found, expected)

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
            assert_same(name, value, expected[name].detach())


def named_params(model: nn.Module) -> dict[str, nn.Parameter]:
    """What modules have at this time, by the names of the unsharded model."""
    return {clean_name(name): param for name, param in model.named_parameters()}


def assert_same(subject: str, found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.to(expected), expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{subject}: {m}"
    )


def backward(sides: Sides, action: Action) -> None:
    sides.backward(action.seed)
    sides.check_grads()


def step(sides: Sides, action: Action) -> None:
    backward(sides, action)
    sides.step()
    sides.check_params()


def clipped_step(sides: Sides, action: Action) -> None:
    backward(sides, action)
    expected = nn.utils.clip_grad_norm_(sides.unsharded.parameters(), 0.1)
    if sides.is_wrapped:
        found = sides.model.clip_grad_norm_(0.1)
    else:
        found = nn.utils.clip_grad_norm_(sides.params.values(), 0.1)
    torch.testing.assert_close(full(found).to(expected), expected, rtol=1e-6, atol=1e-9)
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


def evaluation(sides: Sides, action: Action) -> None:
    with torch.no_grad() if action.choice % 2 else torch.inference_mode():
        sides.outputs(action.seed)


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


def saved_and_loaded(sides: Sides, action: Action) -> None:
    sides.zero_grad()
    sides.num_saves += 1
    path = sides.folder / str(sides.num_saves)
    save(path, sides.model, sides.optimizers[1])
    sides.model(sides.batches(action.seed)[1]).sum().backward()
    sides.optimizers[1].step()
    sides.zero_grad()
    load(path, sides.model, sides.optimizers[1])
    sides.check_params()


def freezing(sides: Sides, action: Action) -> None:
    sides.zero_grad()
    prefix = ("embedding", "head", "blocks.0", "shift", "")[action.choice % 5]
    is_trained = not prefix or action.choice // 5 % 2 == 1
    for model in sides.models:
        for name, param in named_params(model).items():
            if name.startswith(prefix):
                param.requires_grad_(is_trained)


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
        evaluation,
        evaluation_before_backward,
        forward_alone,
        failure,
        accumulation,
        state_dict,
        saved_and_loaded,
        freezing,
        unsharding,
        setting,
        without_all_reduce,
    )
}


def run(rank: Rank, program: Program, folder: Path) -> None:
    large = ordered_and_small() if rank.device.type == "cpu" else small_buckets()
    with large if program.has_large_units else nullcontext():
        sides = Sides(rank, program, folder)
        for action in program.actions:
            sides.follow(action.way)
            KINDS[action.kind](sides, action)


@st.composite
def programs(draw: st.DrawFn, api: str, meshes: tuple[tuple[int, ...], ...]) -> Program:
    is_wrapped, mesh = api != "fully_shard", draw(st.sampled_from(meshes))
    embedding_is_unit = not is_wrapped and draw(st.sampled_from([False, False, True]))
    # Nobody may read the weight of another unit.
    shares_embedding = not embedding_is_unit and api != "flat wrapper"
    block_numbers = st.sampled_from([None, None, None, *range(MAX_BLOCKS)])
    ways = st.builds(
        Way,
        recomputes_embedding=st.sampled_from([False, False, True]),
        reads_embedding=st.sampled_from([False, shares_embedding]),
        tied_head=st.sampled_from(["", "plain", "recomputed"] if shares_embedding else [""]),
        skipped=block_numbers,
        repeated=block_numbers,
        checkpoint=st.sampled_from(["", "", "reentrant", "not reentrant"]),
    )
    kinds = set(KINDS)
    if is_wrapped:
        kinds -= {"unsharding", "setting"}
    if is_wrapped or len(mesh) == 1:
        kinds -= {"without_all_reduce"}
    if api == "flat wrapper":
        kinds -= {"freezing"}
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
        reshards=draw(st.booleans()),
        momentum=draw(st.sampled_from([0.0, 0.9])),
        has_large_units=draw(st.booleans()),
        is_offloaded=not is_wrapped and draw(st.sampled_from([False, False, False, True])),
        embedding_is_unit=embedding_is_unit,
        actions=tuple(draw(st.lists(actions, min_size=4, max_size=12))),
    )


def check(program: Program, backend: str = "gloo") -> None:
    ranks = pool(torch.Size(program.mesh).numel(), backend)
    with TemporaryDirectory() as folder:
        ranks.run(run, program, Path(folder), timeout_s=60.0, expect_failure=True)


# FUZZ=500 tries that many, other ones each time.
num_programs = int(os.environ.get("FUZZ", "0"))
some = settings(derandomize=not num_programs, deadline=None, max_examples=num_programs or 6)
few = settings(derandomize=not num_programs, deadline=None, max_examples=num_programs or 3)


@some
@given(programs("fully_shard", ((2,),)))
def test_any_program_computes_what_it_does_unsharded(program: Program) -> None:
    check(program)


@few
@given(programs("fully_shard", ((2, 2), (4,))))
def test_any_program_computes_what_it_does_unsharded_on_four_ranks(program: Program) -> None:
    check(program)


@some
@given(programs("wrapper", ((2,), (2, 2))))
def test_any_program_computes_what_it_does_unsharded_with_a_wrapper(program: Program) -> None:
    check(program)


@few
@given(programs("flat wrapper", ((2,), (2, 2))))
def test_any_program_computes_what_it_does_unsharded_with_flat_params(program: Program) -> None:
    check(program)

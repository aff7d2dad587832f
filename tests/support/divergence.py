"""Ranks whose programs differ: what each of them says, and after how long.

    python tests/support/divergence.py               every case, both APIs, shared memory and gloo
    python tests/support/divergence.py --cases clip --apis wrapper --transports gloo
    python tests/support/divergence.py --correct     programs in which nobody may say a word

A case is a program for two ranks that train a small model. In step 2 one of them (rank 1) does
something else. Ranks are forks of this process, each of which runs the case as its own program: an
error that nothing catches ends it. The store is in this process, as it is with torchrun.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import gc
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import fullshard
from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_below
from fullshard.state import save
from fullshard.wrap import ModuleWrapPolicy

ODD, ODD_STEP, NUM_STEPS = 1, 2, 5
APIS = ("fully_shard", "wrapper")
TRANSPORTS = ("shared memory", "gloo")
PATIENCE_S, TIMEOUT_S, LIMIT_S = 4.0, 40.0, 60.0
# How long after the patience all ranks have to know; a busy machine may take longer.
MARGIN_S = 5.0


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).tanh())


class Model(nn.Module):
    """Blocks of different sizes, so that exchanged collectives have different sizes, too."""

    def __init__(self, sizes: Sequence[int] = (16, 32, 48, 64)) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16, size) for size in sizes)
        self.head = nn.Linear(16, 4)
        self.order = list(range(len(sizes)))
        self.fails = False
        self.detached = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in self.order:
            x = self.blocks[number](x)
            if self.fails and number == 1:
                raise ZeroDivisionError("planned")
            if self.detached and number == 0:
                x = x.detach()
        return self.head(x)


@dataclass
class Program:
    """The program of one rank: a case changes what it needs to."""

    rank: int
    api: str
    folder: Path
    step: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    lr: float = 0.01
    make_optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW
    watches: bool = True

    @property
    def is_odd(self) -> bool:
        """Whether this rank is about to leave the others; notes when."""
        is_odd = self.rank == ODD and self.step == ODD_STEP
        if is_odd:
            self.note()
        return is_odd

    def note(self) -> None:
        path = self.folder / "diverged"
        if not path.exists():
            path.write_text(str(time.monotonic()))

    def sharded(self, model: nn.Module | None = None, **settings: Any) -> Any:
        model = Model() if model is None else model
        settings = {**self.settings, **settings}
        if self.api == "wrapper":
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({Block}),
                use_orig_params=True,
                **settings,
            )
        for block in model.blocks:
            fully_shard(block, **settings)
        return fully_shard(model, **settings)

    def build(self, **settings: Any) -> None:
        self.model = self.sharded(**settings)
        self.optimizer = self.make_optimizer(self.model.parameters(), lr=self.lr)

    @property
    def plain(self) -> Model:
        return getattr(self.model, "module", self.model)

    def blocks(self) -> list[nn.Module]:
        return list(self.plain.blocks)

    def input(self) -> torch.Tensor:
        return torch.ones(2, 16) * (self.step + self.rank + 1)

    def loss(self, model: Any = None) -> torch.Tensor:
        return (self.model if model is None else model)(self.input()).square().mean()

    def compute(self) -> None:
        self.loss().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def take(self) -> None:
        self.compute()
        self.update()

    def clip(self) -> None:
        if self.api == "wrapper":
            self.model.clip_grad_norm_(1.0)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def no_sync(self) -> Any:
        return self.model.no_sync()


Case = Callable[[Program], None]
CASES: dict[str, Case] = {}
CORRECT: dict[str, Case] = {}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


def correct(function: Case) -> Case:
    CORRECT[function.__name__] = function
    return function


def steps(program: Program, num_steps: int = NUM_STEPS) -> Iterator[int]:
    for program.step in range(num_steps):
        yield program.step


def train(program: Program, odd: Callable[[], object]) -> None:
    """Train; the odd rank does something else in the place of a step."""
    program.build()
    for _ in steps(program):
        odd() if program.is_odd else program.take()


def train_after(program: Program, odd: Callable[[], object]) -> None:
    """Train; the odd rank does something before one of its steps."""
    program.build()
    for _ in steps(program):
        if program.is_odd:
            odd()
        program.take()


# Forward and backward


@case
def forward_without_grad(p: Program) -> None:
    def odd() -> None:
        with torch.no_grad():
            p.loss()
        p.update()

    train(p, odd)


@case
def one_more_forward(p: Program) -> None:
    train_after(p, lambda: p.loss())


@case
def one_more_forward_without_grad(p: Program) -> None:
    def odd() -> None:
        with torch.no_grad():
            p.loss()

    train_after(p, odd)


@case
def validation_of_one_rank(p: Program) -> None:
    """Rank 1 validates after a step in which the others do not, though all have done so before."""
    p.build()
    for step in steps(p):
        p.take()
        if step == 0 or p.is_odd:
            with torch.no_grad():
                p.loss()


@case
def one_step_less(p: Program) -> None:
    train(p, lambda: None)


@case
def no_backward(p: Program) -> None:
    def odd() -> None:
        p.loss()
        p.update()

    train(p, odd)


@case
def no_backward_in_the_first_step(p: Program) -> None:
    p.build()
    for step in steps(p):
        if p.rank == ODD and step == 0:
            p.note()
            p.loss()
            p.update()
        else:
            p.take()


@case
def two_backwards(p: Program) -> None:
    def odd() -> None:
        loss = p.loss()
        loss.backward(retain_graph=True)
        loss.backward()
        p.update()

    train(p, odd)


@case
def a_block_without_gradient(p: Program) -> None:
    def odd() -> None:
        p.plain.detached = True
        p.take()
        p.plain.detached = False

    train(p, odd)


@case
def another_order_of_modules(p: Program) -> None:
    def odd() -> None:
        p.plain.order = [0, 2, 1, 3]
        p.take()
        p.plain.order = [0, 1, 2, 3]

    train(p, odd)


@case
def a_block_less(p: Program) -> None:
    def odd() -> None:
        p.plain.order = [0, 1, 3]
        p.take()
        p.plain.order = [0, 1, 2, 3]

    train(p, odd)


@case
def a_block_twice(p: Program) -> None:
    def odd() -> None:
        p.plain.order = [0, 1, 2, 3, 3]
        p.take()
        p.plain.order = [0, 1, 2, 3]

    train(p, odd)


@case
def one_more_micro_batch(p: Program) -> None:
    p.build()
    for _ in steps(p):
        for _ in range(3 if p.is_odd else 2):
            with p.no_sync():
                p.compute()
        p.take()


@case
def one_micro_batch_less(p: Program) -> None:
    p.build()
    for _ in steps(p):
        for _ in range(1 if p.is_odd else 2):
            with p.no_sync():
                p.compute()
        p.take()


@case
def no_sync_on_one_rank(p: Program) -> None:
    def odd() -> None:
        with p.no_sync():
            p.compute()
        p.update()

    train(p, odd)


@case
def sync_on_one_rank(p: Program) -> None:
    p.build()
    for _ in steps(p):
        with contextlib.nullcontext() if p.is_odd else p.no_sync():
            p.compute()
        p.take()


# What is frozen, and settings


@case
def a_block_frozen(p: Program) -> None:
    train_after(p, lambda: p.blocks()[1].requires_grad_(False))


@case
def a_weight_frozen(p: Program) -> None:
    train_after(p, lambda: p.blocks()[1].up.weight.requires_grad_(False))


@case
def a_block_unfrozen(p: Program) -> None:
    p.build()
    p.blocks()[1].requires_grad_(False)
    for _ in steps(p):
        if p.is_odd:
            p.blocks()[1].requires_grad_(True)
        p.take()


@case
def a_block_frozen_from_the_start(p: Program) -> None:
    model = Model()
    if p.rank == ODD:
        p.note()
        model.blocks[1].requires_grad_(False)
    p.model = p.sharded(model)
    p.optimizer = torch.optim.AdamW(p.model.parameters())
    for _ in steps(p):
        p.take()


def odd_settings(p: Program, **settings: Any) -> None:
    if p.rank == ODD:
        p.note()
        p.settings = settings
    p.build()
    for _ in steps(p):
        p.take()


@case
def another_reshard_after_forward(p: Program) -> None:
    strategy = fullshard.ShardingStrategy.SHARD_GRAD_OP
    settings = {"reshard_after_forward": False}
    odd_settings(p, **({"sharding_strategy": strategy} if p.api == "wrapper" else settings))


@case
def another_reshard_after_forward_later(p: Program) -> None:
    def odd() -> None:
        for hooks in hooks_below(p.model):
            for unit in hooks.units:
                unit.set(reshard_after_forward=False)

    train_after(p, odd)


@case
def another_reshard_after_backward(p: Program) -> None:
    p.build()
    for _ in steps(p):
        if p.is_odd:
            for hooks in hooks_below(p.model):
                for unit in hooks.units:
                    unit.set(reshard_after_backward=False)
        p.compute()
        p.take()


@case
def another_policy(p: Program) -> None:
    if p.api == "wrapper":
        odd_settings(p, mixed_precision=fullshard.MixedPrecision(reduce_dtype=torch.bfloat16))
    else:
        odd_settings(p, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))


@case
def another_prefetch(p: Program) -> None:
    if p.api == "wrapper":
        odd_settings(p, forward_prefetch=True, backward_prefetch=None)
        return
    p.build()
    if p.rank == ODD:
        p.note()
        blocks: Any = p.blocks()
        blocks[0].set_modules_to_forward_prefetch(blocks[1:3])
    for _ in steps(p):
        p.take()


@case
def another_prefetch_later(p: Program) -> None:
    def odd() -> None:
        found = hooks_below(p.model)
        found[1].forward_prefetch = found[2:4]

    train_after(p, odd)


@case
def another_learning_rate(p: Program) -> None:
    if p.rank == ODD:
        p.note()
        p.lr = 0.02
    p.build()
    for _ in steps(p):
        p.take()


@case
def another_optimizer(p: Program) -> None:
    if p.rank == ODD:
        p.note()
        p.make_optimizer = torch.optim.SGD
    p.build()
    for _ in steps(p):
        p.take()


@case
def another_width(p: Program) -> None:
    if p.rank == ODD:
        p.note()
    p.model = p.sharded(Model((16, 32, 56, 64) if p.rank == ODD else (16, 32, 48, 64)))
    p.optimizer = torch.optim.AdamW(p.model.parameters())
    for _ in steps(p):
        p.take()


# Calls


@case
def state_dict(p: Program) -> None:
    def odd() -> None:
        for value in p.model.state_dict().values():
            if p.api == "fully_shard":  # these are shards, until a program gathers them
                value.full_tensor()

    train_after(p, odd)


@case
def full_state_dict(p: Program) -> None:
    options = StateDictOptions(full_state_dict=True)
    train_after(p, lambda: get_model_state_dict(p.model, options=options))


@case
def optimizer_state_dict(p: Program) -> None:
    def odd() -> None:
        if p.api == "wrapper":
            FullyShardedDataParallel.optim_state_dict(p.model, p.optimizer)
        else:
            for state in p.optimizer.state.values():
                full_tensor(state["exp_avg"])

    train_after(p, odd)


@case
def unshard(p: Program) -> None:
    def odd() -> None:
        if p.api == "wrapper":
            with FullyShardedDataParallel.summon_full_params(p.model):
                pass
        else:
            p.model.unshard()

    train_after(p, odd)


@case
def first_save(p: Program) -> None:
    train_after(p, lambda: save(p.folder / "checkpoint", p.model, p.optimizer))


@case
def later_save(p: Program) -> None:
    p.build()
    for step in steps(p):
        if step == 0 or p.is_odd:
            save(p.folder / f"checkpoint{step}", p.model, p.optimizer)
        p.take()


@case
def clip(p: Program) -> None:
    def odd() -> None:
        p.compute()
        p.clip()
        p.update()

    train(p, odd)


@case
def no_clip(p: Program) -> None:
    p.build()
    for _ in steps(p):
        p.compute()
        if not p.is_odd:
            p.clip()
        p.update()


@case
def barrier(p: Program) -> None:
    train_after(p, dist.barrier)


@case
def all_reduce(p: Program) -> None:
    train_after(p, lambda: dist.all_reduce(torch.ones(3)))


@case
def all_gather(p: Program) -> None:
    train_after(p, lambda: dist.all_gather([torch.ones(3), torch.ones(3)], torch.ones(3)))


@case
def all_gather_of_objects(p: Program) -> None:
    train_after(p, lambda: dist.all_gather_object([None, None], "x" * 1000))


# Optimizer steps, and errors that a program catches


@case
def two_optimizer_steps(p: Program) -> None:
    def odd() -> None:
        p.compute()
        p.optimizer.step()
        p.update()

    train(p, odd)


@case
def an_optimizer_step_less(p: Program) -> None:
    train(p, p.compute)


class FailsOnce(torch.optim.AdamW):
    fails = False

    def step(self, closure: Any = None) -> Any:
        if self.fails:
            self.fails = False
            raise ZeroDivisionError("planned")
        return super().step(closure)


@case
def a_step_repeated_after_an_error_of_the_optimizer(p: Program) -> None:
    p.make_optimizer = FailsOnce

    def odd() -> None:
        p.optimizer.fails = True
        for _ in range(2):
            with contextlib.suppress(ZeroDivisionError):
                p.take()

    train(p, odd)


@case
def a_step_left_out_after_an_error_of_forward(p: Program) -> None:
    def odd() -> None:
        p.plain.fails = True
        with contextlib.suppress(ZeroDivisionError):
            p.take()
        p.plain.fails = False

    train(p, odd)


@case
def a_step_repeated_after_an_error_of_forward(p: Program) -> None:
    def odd() -> None:
        p.plain.fails = True
        with contextlib.suppress(ZeroDivisionError):
            p.take()
        p.plain.fails = False

    train_after(p, odd)


@case
def an_error_that_nothing_catches(p: Program) -> None:
    def odd() -> None:
        raise ZeroDivisionError("planned")

    train(p, odd)


@case
def stops_after_step_2(p: Program) -> None:
    p.build()
    for _ in steps(p):
        p.take()
        if p.is_odd:
            return


@case
def waits_at_the_end_after_step_2(p: Program) -> None:
    p.build()
    for _ in steps(p):
        p.take()
        if p.is_odd:
            break
    dist.barrier()


@case
def another_model_first(p: Program) -> None:
    """Two models, of which one rank runs the second one first in one step."""
    p.build()
    other = p.sharded(Model((8, 24)))
    for _ in steps(p):
        models = [p.model, other]
        for model in reversed(models) if p.is_odd else models:
            p.loss(model).backward()
        p.update()


@case
def a_model_more(p: Program) -> None:
    def odd() -> None:
        p.other = p.sharded(Model((8, 24)))
        p.loss(p.other)

    train_after(p, odd)


# Programs that are correct


@correct
def plain_training(p: Program) -> None:
    p.build()
    for _ in steps(p, 8):
        p.compute()
        p.clip()
        p.update()


@correct
def adversaries(p: Program) -> None:
    generator, critic = p.sharded(Model()), p.sharded(Model((8, 24)))
    mine = torch.optim.AdamW(generator.parameters())
    other = torch.optim.SGD(critic.parameters(), 0.1)
    adapt = nn.Linear(4, 16)
    for step in steps(p, 12):
        for _ in range(1 + step % 3):
            fake = adapt(generator(p.input()).detach())
            (critic(fake) - critic(p.input())).square().mean().backward()
            other.step()
            other.zero_grad()
        critic(adapt(generator(p.input()))).mean().backward()
        mine.step()
        mine.zero_grad()
        other.zero_grad()


@correct
def several_models_and_optimizers(p: Program) -> None:
    models = [p.sharded(Model((8, 24 + each))) for each in range(3)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for model in models]
    both = torch.optim.SGD([*models[0].head.parameters(), *models[1].head.parameters()], 0.1)
    for step in steps(p, 8):
        for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            if (step + number) % 2:
                p.loss(model).backward()
                optimizer.step()
                optimizer.zero_grad()
        both.step()


@correct
def models_that_come_and_go(p: Program) -> None:
    for step in steps(p, 6):
        p.build()
        for _ in range(1 + step % 3):
            p.take()
        if step == 3:
            gc.collect()


@correct
def a_scaler_that_skips_steps(p: Program) -> None:
    p.build()
    for step in steps(p, 8):
        p.compute()
        if step % 3 == 1:  # as a scaler that has found inf on all ranks
            p.optimizer.zero_grad()
        else:
            p.update()


@correct
def steps_in_hooks(p: Program) -> None:
    p.model = p.sharded()
    for param in p.model.parameters():
        optimizer = torch.optim.SGD([param], 0.1)

        def step(param: torch.Tensor, optimizer: Any = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        param.register_post_accumulate_grad_hook(step)
    for _ in steps(p, 6):
        p.compute()


@correct
def micro_batches_and_validation(p: Program) -> None:
    p.build()
    for step in steps(p, 9):
        for _ in range(step % 4):
            with p.no_sync():
                p.compute()
        p.take()
        if step % 3 == 2:
            p.model.eval()
            with torch.no_grad():
                for _ in range(1 + step % 5):
                    p.loss()
            p.model.train()


@correct
def ways_that_all_ranks_take(p: Program) -> None:
    p.build()
    for step in steps(p, 10):
        p.plain.order = [[0, 1, 2, 3], [0, 3], [1, 0, 2], [0, 1, 2, 3, 3]][step * 7 % 4]
        p.plain.detached = step % 5 == 4
        if step == 6:
            p.blocks()[1].requires_grad_(False)
        p.take()


@correct
def work_of_the_first_rank(p: Program) -> None:
    """A rank may be late by less than the patience, and may talk to all in between."""
    p.build()
    for step in steps(p, 4):
        p.take()
        if step == 1 and p.rank == 0:
            time.sleep(1.5)
        dist.barrier()
        dist.all_reduce(torch.ones(3))


@correct
def saves_and_states(p: Program) -> None:
    p.build()
    for step in steps(p, 4):
        p.take()
        p.model.state_dict()
        if step % 2:
            save(p.folder / f"checkpoint{step}", p.model, p.optimizer)
        get_model_state_dict(p.model, options=StateDictOptions(full_state_dict=True))


@correct
def an_error_that_all_ranks_catch(p: Program) -> None:
    p.build()
    for step in steps(p, 6):
        p.plain.fails = step in (2, 3)
        with contextlib.suppress(ZeroDivisionError):
            p.take()


# Running them


@dataclass(frozen=True)
class Said:
    """The exit code or signal of a rank, after how many seconds it raised, and what it wrote."""

    code: int
    seconds: float
    text: str

    @property
    def last_line(self) -> str:
        return ([line for line in self.text.splitlines() if line.strip()] or [""])[-1]


@dataclass(frozen=True)
class Outcome:
    name: str
    api: str
    transport: str
    ranks: list[Said]

    @property
    def title(self) -> str:
        return f"{self.name}, {self.api}, {self.transport}"

    @property
    def problem(self) -> str:
        return self.problem_within(MARGIN_S)

    def problem_within(self, margin_s: float) -> str:
        """What is wrong with how a divergence was told; nothing if that is as promised."""
        if self.name in CORRECT:
            words = [said.last_line for said in self.ranks if said.text or said.code]
            return f"somebody said something: {words[0]}" if words else ""
        for rank, said in enumerate(self.ranks):
            if said.code == -signal.SIGKILL:
                return f"rank {rank} was still there after {LIMIT_S:g} s"
            if said.code < 0:
                return f"rank {rank} died of {signal.Signals(-said.code).name}"
            if rank != ODD and said.code == 0:
                return f"rank {rank} ended as if nothing had happened"
            has_own = "planned" in said.text or said.code == 0  # it may end before the others
            if f"rank {ODD}" not in said.text and not (rank == ODD and has_own):
                return f"rank {rank} does not name rank {ODD}"
            if said.seconds > PATIENCE_S + margin_s:
                return f"rank {rank} learned it after {said.seconds:.1f} s"
        return ""


def run_rank(rank: int, name: str, api: str, transport: str, folder: Path, port: int) -> None:
    """Become a rank and run the case as a program."""
    output = os.open(folder / f"output{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    logging.basicConfig(format="%(levelname)s %(message)s")
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", GLOO_SOCKET_IFNAME="lo")
    os.environ.update(FULLSHARD_WATCH="1", FULLSHARD_PATIENCE_S=str(PATIENCE_S))
    os.environ["FULLSHARD_SHARED_MEMORY"] = "0" if transport == "gloo" else "1"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    limit = timedelta(seconds=TIMEOUT_S)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
    try:
        {**CASES, **CORRECT}[name](Program(rank, api, folder))
    except BaseException:
        (folder / f"raised{rank}").write_text(str(time.monotonic()))
        raise
    dist.destroy_process_group()


def outcome_of(name: str, api: str, transport: str) -> Outcome:
    """Run one case, in this process and forks of it."""
    folder = Path(tempfile.mkdtemp(prefix="divergence-"))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    began = time.monotonic()
    pids = [forked(partial(run_rank, r, name, api, transport, folder, store.port)) for r in (0, 1)]
    ends: dict[int, tuple[int, float]] = {}
    while len(ends) < len(pids):
        for rank, pid in enumerate(pids):
            if rank in ends:
                continue
            if time.monotonic() - began > LIMIT_S:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                ends[rank] = os.waitstatus_to_exitcode(status), time.monotonic()
        time.sleep(0.02)

    def noted(name: str, otherwise: float) -> float:
        path = folder / name
        return float(path.read_text()) if path.exists() else otherwise

    since = noted("diverged", began)
    said = [
        Said(code, noted(f"raised{rank}", at) - since, (folder / f"output{rank}").read_text())
        for rank, (code, at) in sorted(ends.items())
    ]
    shutil.rmtree(folder)
    return Outcome(name, api, transport, said)


def outcomes_of(chosen: Sequence[tuple[str, str, str]], at_once: int = 1) -> Iterator[Outcome]:
    """Run cases, some of them at once, each in a process of its own: mostly, they wait."""
    left, running = list(chosen), {}
    folder = tempfile.mkdtemp(prefix="divergences-")  # which forks do not delete when they end
    while left or running:
        while left and len(running) < at_once:
            case = left.pop(0)
            path = Path(folder, " ".join(case))
            running[forked(partial(write_outcome, case, path))] = path
        path = running.pop(os.wait()[0])
        found = json.loads(path.read_text())
        yield Outcome(**{**found, "ranks": [Said(**said) for said in found["ranks"]]})
    shutil.rmtree(folder)


def write_outcome(case: tuple[str, str, str], path: Path) -> None:
    path.write_text(json.dumps(asdict(outcome_of(*case))))


def forked(run: Callable[[], object]) -> int:
    """Fork a process that does this and ends as a program does."""
    pid = os.fork()
    if pid == 0:
        try:
            run()
        except BaseException:
            sys.excepthook(*sys.exc_info())
            end(1)
        end(0)
    return pid


def end(code: int) -> NoReturn:
    """End this process as an interpreter does, which a fork in the middle of a program does not."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", nargs="+", choices=[*CASES, *CORRECT])
    parser.add_argument("--apis", nargs="+", default=APIS, choices=APIS)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS, choices=TRANSPORTS)
    parser.add_argument("--correct", action="store_true", help="run the correct programs")
    parser.add_argument("--at-once", type=int, default=4, help="how many cases")
    parser.add_argument("--margin", type=float, default=MARGIN_S, help="seconds after patience")
    parser.add_argument("--full", action="store_true", help="print all that ranks said")
    options = parser.parse_args(arguments)
    load_modules()
    names = options.cases or (CORRECT if options.correct else CASES)
    problems = []
    for found in outcomes_of(
        list(product(names, options.apis, options.transports)), options.at_once
    ):
        problem = found.problem_within(options.margin)
        problems += [f"{found.title}: {problem}"] if problem else []
        print(f"{'BAD ' if problem else 'good'} {found.title}: {problem}", flush=True)
        for rank, said in enumerate(found.ranks):
            shown = said.text if options.full else said.last_line[:300]
            print(f"    rank {rank}: {said.code} after {said.seconds:.1f} s: {shown}", flush=True)
    print("\n".join([*problems, f"{len(problems)} problems"]))
    return bool(problems)


def load_modules() -> None:
    """Load what every case needs, and spare its processes the garbage collection of that."""
    torch.optim.SGD([torch.zeros(1)], 0.1)
    gc.freeze()


if __name__ == "__main__":
    sys.exit(main())

"""Replicas that kill themselves: `python -m tests.support.elastic_replicas`, `Scenario`s as JSON.

Runs in its own process, so that only a single thread is forked. It forks the ranks, tells the
others which ranks are dead, restarts those, and prints what the ranks say of every step.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.tensor import DTensor

import fullshard
from fullshard.processes import end_with_parent


@dataclass(frozen=True)
class Scenario:
    """Kills by step: which replica, and in which of its phases.

    Before a step in `asked`, replicas wait until others have asked that many times to be let in; by
    default once after each kill. Starts in `early_kills` die before they have done a step.
    """

    num_replicas: int
    num_shards: int
    api: str
    kills: dict[str, tuple[int, str]]
    num_steps: int
    asked: dict[str, int] = field(default_factory=dict)
    early_kills: dict[str, str] = field(default_factory=dict)
    device: str = "cpu"


class Net(nn.Module):
    """A model that leaves out a layer for every second part of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10)  # which has buffers
        self.last = nn.Linear(10, 10)

    def forward(self, inputs: torch.Tensor, part: int) -> torch.Tensor:
        hidden = self.norm(self.first(inputs))
        return (hidden if part % 2 else self.last(hidden)).square().mean()


def build() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def loss_of(model: nn.Module, step: int, part: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + part)
    inputs = torch.randn(4, 6, generator=generator).to(next(model.parameters()).device)
    loss: torch.Tensor = model(inputs, part)
    return loss


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02)


class Progress:
    """What a program counts."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def shard(model: nn.Module, scenario: Scenario) -> nn.Module:
    if scenario.api == "wrapper":
        kind = fullshard.FullyShardedDataParallel
        return kind(model, use_orig_params=True).eval()
    fullshard.fully_shard(model.first)
    fullshard.fully_shard(model)
    return model


def full_params(model: nn.Module) -> list[float]:
    if isinstance(model, fullshard.FullyShardedDataParallel):
        with model.summon_full_params(model):
            return torch.cat([each.detach().flatten() for each in model.parameters()]).tolist()
    found = (
        each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()
    )
    return torch.cat([each.detach().flatten() for each in found]).tolist()


def die_in(phase: str, replicas: fullshard.ReplicaGroup) -> None:
    """Have this process killed in a phase of its next average."""

    def killed(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGSTOP if phase == "stopped" else signal.SIGKILL)

    ballot: Any = replicas._ballot
    vote, wait_for = ballot.vote, replicas._wait_for

    def voted(**how: Any) -> None:
        vote(**how)
        killed()

    if phase == "giving":
        replicas._described = killed  # type: ignore[method-assign, assignment]
    elif phase == "taking":
        replicas._take = killed  # type: ignore[method-assign]
    elif phase in ("before", "stopped"):
        replicas._connected = killed  # type: ignore[method-assign]
    elif phase == "reducing":
        # The others wait for this one, which has only started.
        replicas._wait_for = lambda start: (start(), killed()) and wait_for(start)  # type: ignore
    elif phase == "reduced":
        ballot.vote = killed
    elif phase == "voted":
        ballot.vote = voted


def rank(scenario: Scenario, port: int, replica: int, start: int, index: int, out: int) -> None:
    store = TCPStore("localhost", port, is_master=False)
    world = PrefixStore(f"world/{replica}.{start}", store)
    # NCCL takes ranks on one GPU if they seem to be on different hosts.
    os.environ["NCCL_HOSTID"] = f"{replica}.{index}"
    backend = "nccl" if scenario.device == "cuda" else "gloo"
    dist.init_process_group(backend, store=world, rank=index, world_size=scenario.num_shards)
    model = shard(build().to(scenario.device), scenario)
    if start:
        for param in model.parameters():
            nn.init.constant_(param, float("nan"))
    optimizer, progress = optimizer_of(model), Progress()
    replicas = fullshard.ReplicaGroup(
        store,
        replica,
        scenario.num_replicas,
        model=model,
        optimizer=optimizer,
        extra={"progress": progress},
        start=start,
    )
    late = scenario.early_kills.get(f"{replica}.{start}")
    if late is not None:
        die_in(late, replicas)
    while True:
        present = replicas.begin_step()
        if progress.step == scenario.num_steps:
            break
        step = progress.step + 1
        wait_for_return(scenario, store, step)
        loss = loss_of(model, step, replicas.index * scenario.num_shards + index)
        loss.backward()
        victim, phase = scenario.kills.get(str(step), (None, ""))
        is_victim = victim == replica and index == scenario.num_shards - 1
        if is_victim:
            die_in(phase, replicas)
        averaged = replicas.average(loss.detach())
        if is_victim and phase != "giving":
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        progress.step = step
        assert averaged.extra is not None
        said = {"step": step, "present": present, "replicas": averaged.replicas}
        said |= {"rank": [replica, index], "loss": averaged.extra.item()}
        os.write(out, (json.dumps(said) + "\n").encode())
    leads = replicas.is_leader
    params = full_params(model)
    assert replicas.barrier()
    said = {"rank": [replica, index], "params": params, "leads": leads, "keys": store.num_keys()}
    os.write(out, (json.dumps(said) + "\n").encode())


def wait_for_return(scenario: Scenario, store: TCPStore, step: int) -> None:
    """Wait until replicas that were killed ask to be let in again."""
    number = sum(int(key) < step for key in scenario.kills) * (str(step - 1) in scenario.kills)
    while store.add("fullshard/replicas/asked", 0) < scenario.asked.get(str(step), number):
        time.sleep(0.001)


def start_store() -> tuple[int, int]:
    """A store in a process of its own, and its port.

    It has a thread: a lock that the thread holds during a fork would stay locked in the rank.
    """
    out, into = os.pipe()
    supervisor, pid = os.getpid(), os.fork()
    if pid == 0:
        end_with_parent(supervisor)
        store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        os.write(into, str(store.port).encode())
        os.close(into)
        while True:
            signal.pause()
    os.close(into)
    with open(out, "rb") as ports:
        return pid, int(ports.read())


class Supervisor:
    """Starts replicas, and restarts those of which a rank ended badly."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.store_pid, self.port = start_store()
        self.store = TCPStore("localhost", self.port, is_master=False)
        self.pids: dict[int, tuple[int, int]] = {}
        self.out, self.into = os.pipe()

    def start(self, replica: int, start: int) -> None:
        for index in range(self.scenario.num_shards):
            supervisor, pid = os.getpid(), os.fork()
            if pid == 0:
                status = 1
                try:
                    end_with_parent(supervisor)
                    rank(self.scenario, self.port, replica, start, index, self.into)
                    status = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stderr.flush()
                    os._exit(status)
            self.pids[pid] = (replica, start)

    def ended(self) -> Iterator[tuple[int, int]]:
        """Yield replicas of which a rank was killed or stopped, and kill their other ranks."""
        while self.pids:
            pid, status = os.waitpid(-1, os.WUNTRACED)
            member = self.pids[pid]
            if not os.WIFSTOPPED(status):
                del self.pids[pid]
            if os.WIFEXITED(status):
                assert os.WEXITSTATUS(status) == 0, member
                continue
            for other in [each for each, of in self.pids.items() if of == member]:
                os.kill(other, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(other, 0)
                del self.pids[other]
            yield member

    def run(self) -> None:
        for replica in range(self.scenario.num_replicas):
            self.start(replica, 0)
        for replica, start in self.ended():
            fullshard.ReplicaGroup.mark_dead(self.store, replica, start)
            self.start(replica, start + 1)
        os.kill(self.store_pid, signal.SIGKILL)
        os.waitpid(self.store_pid, 0)


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    for text in sys.argv[1:]:
        supervisor = Supervisor(Scenario(**json.loads(text)))
        reader = os.fork()
        if reader == 0:
            os.close(supervisor.into)
            with open(supervisor.out, "rb") as lines:
                print(json.dumps([json.loads(line) for line in lines]), flush=True)
            os._exit(0)
        supervisor.run()
        os.close(supervisor.into)
        os.waitpid(reader, 0)


if __name__ == "__main__":
    main()

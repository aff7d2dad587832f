"""The watcher: every rank learns which other one has failed, stopped or gone elsewhere."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import (
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    RankFailedError,
    fully_shard,
)
from fullshard.cli.commands import fullshard
from fullshard.comm import guard
from fullshard.errors import DisagreementError
from fullshard.ranks import RankGroup
from fullshard.resilience import watcher
from fullshard.resilience.links import Links, Peer
from fullshard.resilience.places import (
    Place,
    are_deadlocked,
    late_rank,
    rank_to_give_up,
    table,
    write_places,
)
from fullshard.state import save, save_async
from fullshard.testing import Rank, RankPool
from fullshard.testing.failures import RanksFailed
from fullshard.wire import Int4, Int8
from fullshard.wrap import ModuleWrapPolicy
from tests.support.programs import free_port

ODD = 1
BAD_STEP = 2


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.in_forward: Callable[[], object] = int
        self.in_backward: Callable[[], object] = int

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.in_forward()
        y = self.linear(x)
        y.register_hook(lambda _: (self.in_backward(), None)[1])
        return y.tanh()


def sharded(rank: Rank, api: str, timeout_s: float = 100) -> nn.Module:
    model = nn.Sequential(*[Block() for _ in range(3)]).to(rank.device)
    # Beside the default group, which has been used, too.
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    if api == "wrapper":
        return FullyShardedDataParallel(
            model,
            process_group=group,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
        )
    for module in [*model, model]:
        fully_shard(module, mesh=DeviceMesh.from_group(group, rank.device.type))
    return model


def fail(kind: str) -> None:
    if kind == "raises":
        raise ZeroDivisionError("planned")
    os.kill(os.getpid(), signal.SIGKILL if kind == "is killed" else signal.SIGSTOP)


def fail_in_background(kind: str) -> None:
    """Fail once, when another thread than the program's has something to tell the other ranks."""
    actual = RankGroup.all_gather

    def all_gather(self: RankGroup, value: Any) -> list[Any]:
        if self.in_background:
            RankGroup.all_gather = actual  # type: ignore[method-assign]
            fail(kind)
        return actual(self, value)

    RankGroup.all_gather = all_gather  # type: ignore[method-assign]


def train(rank: Rank, kind: str, phase: str, api: str, folder: Path) -> None:
    """Take several steps; in one of them, one rank fails in a phase."""
    os.environ[watcher.SWITCH] = "1"
    os.environ[guard.PATIENCE] = "4"
    pids = [0] * rank.size
    dist.all_gather_object(pids, os.getpid())
    try:
        take_steps(rank, kind, phase, api, folder)
    finally:
        if kind == "is stopped":
            os.kill(pids[ODD], signal.SIGCONT)  # so that it ends, too


def take_steps(rank: Rank, kind: str, phase: str, api: str, folder: Path) -> None:
    model = sharded(rank, api, timeout_s=10 if phase == "optimizer" else 100)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    RankGroup.world()  # as an earlier save has made it
    for step in range(BAD_STEP + 2):
        is_bad = rank.rank == ODD and step == BAD_STEP
        if is_bad:
            blocks[1].__dict__[f"in_{phase}"] = lambda: fail(kind)
        loss = model(torch.ones(2, 16, device=rank.device)).sum()
        loss.backward()
        loss.item()  # on a GPU, the program waits here
        if is_bad and phase == "clipping":
            model.clip_grad_norm_(1.0)
        if is_bad and phase in ("optimizer", "saving"):
            fail(kind)
        if phase == "saving" and step == BAD_STEP:
            save(folder / "step_3", model)
        if phase == "writing" and step == BAD_STEP:
            if is_bad:
                fail_in_background(kind)
            save_async(folder / "step_3", model).wait()
        optimizer.step()


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    with RankPool(3, timeout_s=120) as found:
        yield found


def errors_of(failed: RanksFailed) -> dict[int, BaseException | None]:
    return {rank: raised.exception for rank, raised in failed.exceptions.items()}


FAULTS = [
    ("is killed", "forward", "fully_shard", "its process is gone"),
    ("is stopped", "backward", "wrapper", "its process is stopped"),
    ("raises", "forward", "wrapper", "forward of 1 with ZeroDivisionError: planned .*in fail"),
    ("raises", "backward", "fully_shard", "it left a backward before its end"),
    ("is stopped", "saving", "fully_shard", "its process is stopped"),
    ("is stopped", "writing", "fully_shard", "its process is stopped"),
    ("is killed", "writing", "wrapper", "its process is gone"),
    ("raises", "optimizer", "fully_shard", "others wait for longer than the timeout of 10 s"),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("kind", "phase", "api", "found"), FAULTS)
def test_a_rank_that_fails_is_named_on_all_others(
    ranks: RankPool, kind: str, phase: str, api: str, found: str, tmp_path: Path
) -> None:
    require_named(ranks, kind, phase, api, found, tmp_path)


def require_named(
    ranks: RankPool, kind: str, phase: str, api: str, found: str, folder: Path
) -> None:
    """All ranks but one raise an error that says what that one did."""
    with pytest.raises(RanksFailed) as failed:
        ranks.run(train, kind, phase, api, folder, expect_failure=True)
    errors = errors_of(failed.value)
    errors.pop(ODD, None)
    assert set(errors) == {0, 2}, failed.value
    for error in errors.values():
        assert isinstance(error, RankFailedError), error
        assert isinstance(error, dist.DistBackendError)
        with pytest.raises(RankFailedError, match=f"^rank {ODD}: .*{found}"):
            raise error


def die_while_gradients_are_encoded(rank: Rank) -> None:
    os.environ[watcher.SWITCH] = "1"
    os.environ[guard.PATIENCE] = "4"
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
    policy = MixedPrecisionPolicy(reduce_wire=Int4(block=16))
    for module in (*model, model):
        fully_shard(module, mesh=rank.mesh(), mp_policy=policy)
    for step in range(3):
        if rank.rank == ODD and step == 1:  # in eight bits, which ranks of one host send
            Int8.encode = lambda *_: fail("is killed")  # type: ignore[method-assign]
        model(torch.ones(2, 64)).sum().backward()


def test_a_rank_that_dies_in_a_quantized_reduction_is_named_on_all_others(ranks: RankPool) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(die_while_gradients_are_encoded, expect_failure=True)
    errors = errors_of(failed.value)
    assert sorted(failed.value.silent) == [ODD]
    assert set(errors) == {0, 2}
    for error in errors.values():
        assert isinstance(error, RankFailedError)
        assert str(error).startswith(f"rank {ODD}: ")


def test_a_call_on_one_rank_alone_is_an_error_on_all_with_the_places_of_all(
    ranks: RankPool, tmp_path: Path
) -> None:
    with pytest.raises(RanksFailed) as failed:
        ranks.run(train, "", "clipping", "wrapper", tmp_path, expect_failure=True)
    errors = errors_of(failed.value)
    assert set(errors) == {0, 1, 2}
    for error in errors.values():
        assert isinstance(error, DisagreementError)
        text = str(error)
        assert "2 of 3 (rank 0, 2): step 3, forward of" in text
        assert f"1 of 3 (rank {ODD}): step 2, idle" in text
        assert "test_watcher.py" in text


PROGRAM = """
import os, sys, torch, fullshard
import torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.Linear(4, 4)
fullshard.fully_shard(model)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(100_000):
    model(torch.ones(1, 4)).sum().backward()
    if dist.get_rank() == 1 and step == 3:
        raise ZeroDivisionError("planned")
    optimizer.step()
"""


# Forks the ranks of one program after another, each of which runs it and ends as its own process.
FORKED = """
import gc, json, os, sys
from pathlib import Path
from typing import Any
import torch, fullshard

torch.optim.SGD([torch.zeros(1)], 0.1)  # loads many modules
gc.freeze()
ends = []
for program, port in zip(sys.argv[1::2], sys.argv[2::2]):
    ranks = []
    for rank in range(2):
        child = os.fork()
        if child == 0:
            file = os.open(f"{program}.{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(file, 2)
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=port, WORLD_SIZE="2")
            os.environ.update(RANK=str(rank), GLOO_SOCKET_IFNAME="lo")
            exec(compile(Path(program).read_text(), program, "exec"), {"__name__": "__main__"})
            sys.exit()
        ranks.append(child)
    ends.append([os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1]) for rank in ranks])
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[list[int], list[str]]]:
    """For two ranks of each program, the exit codes and what they wrote to standard error."""
    folder = tmp_path_factory.mktemp("programs")
    arguments = []
    for name, source in PROGRAMS.items():
        (folder / name).write_text(source)
        arguments += [str(folder / name), str(free_port())]
    command = [sys.executable, "-c", FORKED, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    # Triton, where torch has it, reports last what it did not free.
    said = {
        name: [(folder / f"{name}.{rank}").read_text().partition("nanobind:")[0] for rank in (0, 1)]
        for name in PROGRAMS
    }
    return {
        name: (codes, said[name])
        for name, codes in zip(PROGRAMS, json.loads(done.stdout), strict=True)
    }


@pytest.mark.exhaustive
def test_a_program_that_raises_is_named_with_its_last_lines(
    ended: dict[str, tuple[list[int], list[str]]],
) -> None:
    codes, said = ended["raises.py"]
    assert codes == [1, 1]
    assert said[1].rstrip().endswith("ZeroDivisionError: planned")
    last = said[0].rstrip().splitlines()[-1]
    assert "fullshard.resilience.watcher.RankFailedError: rank 1: " in last
    assert "step 3, idle" in last
    assert "it raised ZeroDivisionError: planned" in last
    assert "raises.py:11 in <module>" in last


ENDED = """
import torch, torch.distributed as dist
from fullshard import fully_shard
from fullshard.comm import guard
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
watching = guard.current()
dist.barrier()
while not watching._is_complete:
    watching._stopped.wait(0.1)
dist.barrier()
if dist.get_rank() == 0:
    while watching._neighbors:  # until it has seen that the process of rank 1 is gone
        watching._stopped.wait(0.1)
    watching._look()
    guard.check()
dist.destroy_process_group()
"""


OUTLIVED = """
import os, time, torch, torch.distributed as dist
from fullshard import fully_shard
from fullshard.comm import guard
dist.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(1, 4)).sum().backward()
watching = guard.current()
dist.barrier()
if dist.get_rank() == 1:
    while watching._lost_since is None or time.monotonic() - watching._lost_since < 4:
        watching._stopped.wait(0.1)
os._exit(0)  # on rank 0, the store ends with it
"""


PROGRAMS = {"raises.py": PROGRAM, "ends.py": ENDED, "outlived.py": OUTLIVED}


def test_a_rank_that_has_destroyed_its_group_and_ended_has_not_failed(
    ended: dict[str, tuple[list[int], list[str]]],
) -> None:
    assert ended["ends.py"] == ([0, 0], ["", ""])


def test_a_rank_that_outlives_the_store_says_so_once(
    ended: dict[str, tuple[list[int], list[str]]],
) -> None:
    codes, said = ended["outlived.py"]
    assert codes == [0, 0]
    assert said[1].count("Exception raised from") <= 1, said[1]


def waits(at: Place, seconds: float) -> Place:
    return replace(at, waited_s=seconds)


FORWARD = Place(4, 5, "forward", "blocks.1", 20)
BACKWARD = Place(4, 5, "backward", "blocks.0", 22)
LEFT = Place(4, 5, "idle", ended="it has left")


class EndsAfterItsSlice(dist.Work):
    """A collective that ends between the end of a slice and the look at it."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0

    def wait(self, timeout: object = None) -> bool:
        self.num_waits += 1
        if self.num_waits == 1:
            raise RuntimeError("Operation timed out!")
        return True

    def is_completed(self) -> bool:
        return True


def wait_once(rank: Rank) -> int:
    os.environ[watcher.SWITCH] = "1"
    sharded(rank, "fully_shard")(torch.ones(2, 16))
    assert guard.current() is not None
    work = EndsAfterItsSlice()
    guard.wait_for(work)
    return work.num_waits


def test_a_collective_that_ends_when_a_slice_times_out_has_not_failed(ranks: RankPool) -> None:
    assert ranks.run(wait_once) == [2, 2, 2]


def test_what_the_places_of_all_ranks_say() -> None:
    for slow in (FORWARD, BACKWARD, Place()):  # a rank that computes may still come
        assert rank_to_give_up([waits(FORWARD, 1e9), slow]) is None
        assert not are_deadlocked([waits(FORWARD, 1e9), slow], 60)
    assert not are_deadlocked([waits(FORWARD, 90), waits(FORWARD, 70)], 60)
    assert not are_deadlocked([waits(FORWARD, 90), waits(BACKWARD, 50)], 60)
    assert are_deadlocked([waits(FORWARD, 90), waits(BACKWARD, 70)], 60)

    limited = replace(FORWARD, limit_s=60)
    assert late_rank([waits(limited, 90), BACKWARD]) == (1, ANY)
    behind = replace(BACKWARD, num_collectives=21)
    assert late_rank([waits(limited, 90), BACKWARD, behind]) == (2, ANY)
    fewest = Place(9, 9, "forward", num_collectives=3)  # of another model
    assert late_rank([waits(limited, 90), behind, fewest]) == (2, ANY)
    assert late_rank([waits(limited, 50), BACKWARD]) is None
    assert late_rank([waits(limited, 90), waits(BACKWARD, 1)]) is None  # which may be a deadlock
    assert late_rank([waits(FORWARD, 90), BACKWARD]) is None

    assert rank_to_give_up([FORWARD, LEFT]) is None  # nobody waits for it
    assert rank_to_give_up([waits(FORWARD, 9), FORWARD, LEFT]) == 2

    # Both are about to do something that the other is not, at the same place.
    saving = replace(waits(FORWARD, 90), doing="save")
    assert not are_deadlocked([saving, replace(saving, waited_s=70)], 60)
    assert are_deadlocked([saving, waits(FORWARD, 70)], 60)


class Heard:
    """Takes in what links tell."""

    def __init__(self) -> None:
        self.news: queue.Queue[dict[str, object]] = queue.Queue()

    def on_news(self, rank: int, news: dict[str, object]) -> None:
        self.news.put(news)


def test_news_reaches_the_others_after_a_rank_has_said_goodbye() -> None:
    links = [Links(rank, "127.0.0.1", 1) for rank in range(3)]
    heard = [Heard() for _ in links]
    peers = {
        each.rank: Peer(
            each.rank, f"machine{each.rank}", "host", each.address, each.port, each.token
        )
        for each in links
    }
    for each, listener in zip(links, heard, strict=True):
        each.start(peers, listener)
    links[1].tell(said="first")
    assert [heard[rank].news.get(timeout=60) for rank in (0, 2)] == [{"said": "first"}] * 2
    links[1].close()
    left = threading.Event()
    while (place := links[0].place_of(1)) is None or place.ended != LEFT.ended:
        left.wait(0.01)
    for said in ("second", "third"):
        links[0].tell(said=said)
        assert heard[2].news.get(timeout=60) == {"said": said}
    for each in (links[0], links[2]):
        each.close()


def test_the_table_of_a_run_is_printed_from_outside(tmp_path: Path) -> None:
    places = [waits(FORWARD, 3 + rank / 100) for rank in range(99)] + [LEFT]
    text = table(places)
    assert len(text.splitlines()) == 2
    write_places(tmp_path / "places.json", places)
    ended = CliRunner().invoke(fullshard, ["doctor", "--attach", str(tmp_path)])
    assert ended.exit_code == 0, ended.output
    assert text in ended.stdout
    beside = CliRunner().invoke(fullshard, ["doctor", "--attach", str(tmp_path / "places.json")])
    assert beside.output.splitlines()[1:] == ended.output.splitlines()[1:]
    ended = CliRunner().invoke(fullshard, ["doctor", "--attach", str(tmp_path / "other")])
    assert ended.exit_code == 2
    assert "pass what the run has as --out" in ended.stderr

"""The ranks of one host, in rounds of training: forks of one process, which has loaded torch.

`python fault_ranks.py FOLDER` begins a round when its folder has a file `go`, and ends when the
round's folder is called `over`. A rank that has a file `signal` sends itself that signal. With
`DEVICE=cuda`, all ranks share the first GPU.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard import fully_shard

_PAUSE_S = 0.02
_FIRST_PORT = 29500
_DEVICE = torch.device(os.environ.get("DEVICE", "cpu"))


def write(path: Path, **found: object) -> None:
    """Write a file that is complete as soon as it is there."""
    beside = path.with_name(f".{path.name}")
    beside.write_text(json.dumps({"at": time.time(), **found}))
    beside.replace(path)


def join(rank: int) -> None:
    if _DEVICE.type == "cpu":
        dist.init_process_group("gloo")
        return
    # NCCL refuses two ranks on one GPU of one host, so every rank pretends to be a host.
    os.environ["NCCL_HOSTID"] = f"rank{rank}"
    # Otherwise torch ends a process before it can say which rank failed.
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "2"
    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=torch.device("cuda", 0))


def train(folder: Path, rank: int, num_steps: int, own: bool) -> None:
    """Take steps, at one of which something may happen; `own` adds the program's collectives."""
    join(rank)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3))).to(_DEVICE)
    for module in (*model, model):
        fully_shard(module)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    asked = folder / f"signal{rank}"
    try:
        for step in range(num_steps):
            loss = model(torch.full((1, 16), 1.0 + step % 3, device=_DEVICE)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if own:
                dist.all_reduce(torch.ones(1, device=_DEVICE))
            write(folder / f"step{rank}", step=step, loss=loss.item().hex())
            if asked.exists():
                os.kill(os.getpid(), int(asked.read_text()))
            time.sleep(_PAUSE_S)
    except Exception as error:
        write(folder / f"raised{rank}", kind=type(error).__name__, text=str(error))
        raise
    dist.destroy_process_group()


def play(folder: Path, number: int) -> None:
    """Run the ranks of this host for one round, until all have ended or the round is over."""
    asked = json.loads((folder / "go").read_text())
    size = int(os.environ["LOCAL_WORLD_SIZE"])
    first = int(os.environ["HOST"]) * size
    ranks: dict[int, int] = {}
    for rank in range(first, first + size):
        child = os.fork()
        if child == 0:
            log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank - first))
            os.environ["MASTER_PORT"] = str(_FIRST_PORT + number)
            train(folder, rank, asked["num_steps"], asked["own"])
            sys.exit()
        ranks[child] = rank
    while ranks:
        child, status = os.waitpid(-1, os.WNOHANG)
        if child in ranks:
            code = os.waitstatus_to_exitcode(status)
            write(folder / f"ended{ranks.pop(child)}", status=code)
        elif (folder / "over").exists():
            for child in ranks:
                os.kill(child, signal.SIGKILL)
        time.sleep(_PAUSE_S)


def main() -> None:
    torch.optim.SGD([torch.zeros(1)], 0.1)  # loads many modules
    for number in itertools.count():
        folder = Path(sys.argv[1], str(number))
        while not (folder / "go").exists():
            time.sleep(_PAUSE_S)
        play(folder, number)


if __name__ == "__main__":
    main()

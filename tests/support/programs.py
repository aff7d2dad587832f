"""Programs that make their own process group, and processes that are not ours."""

import contextlib
import io
import json
import os
import runpy
import select
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from fullshard.testing import Rank, RankPool


def printed_by_ranks(path: Path, num_ranks: int, *arguments: str) -> str:
    """What the ranks of a program print, one after another. A warning is an error."""
    return printed_by_each([path], num_ranks, *arguments)[0]


def printed_by_each(paths: Sequence[Path], num_ranks: int, *arguments: str) -> list[str]:
    """The same for programs that run one after another in the same processes."""
    with RankPool(num_ranks, timeout_s=240) as ranks:
        return ["".join(ranks.run(_run, str(path), arguments, free_port())) for path in paths]


def _run(rank: Rank, path: str, arguments: tuple[str, ...], port: int) -> str:
    """Leave the pool's world and become a rank of the program's, as a launcher would have it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
    sys.argv = [path, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def outcome_of_forks(before: str, *programs: str) -> str:
    """The output of programs that run one after another, each in a fork of one new process.

    `before` runs once, first: the imports that all of them share.
    """
    source = f"import json, os, sys\n{before}\n" + (
        "for program in json.loads(sys.argv[1]):\n"
        "    if os.fork() == 0:\n"
        "        exec(program, {**globals()})\n"
        "        sys.stdout.flush()\n"
        "        os._exit(0)\n"
        "    assert os.wait()[1] == 0\n"
    )
    command = [sys.executable, "-c", source, json.dumps(programs)]
    # A launch that was refused in this process has left its variable.
    env = {name: value for name, value in os.environ.items() if name != "FULLSHARD_LAUNCHER"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def has_ended(pid: int, within_s: float) -> bool:
    """Wait for a process that is not a child of ours to end."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], within_s)[0])
    finally:
        os.close(descriptor)

"""Programs of frameworks, run on ranks of their own with torch's FSDP and with fullshard."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PROGRAMS = Path(__file__).parent / "programs"
LAUNCH = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TIMEOUT_S = 900


@dataclass(frozen=True)
class Run:
    """A run of a program: where it wrote, and what it printed."""

    folder: Path
    printed: str

    def found(self, case: str) -> Any:
        """The values that a case returned."""
        found = torch.load(self.folder / f"{case}.pt", weights_only=False)
        assert not isinstance(found, str), f"{case} failed:\n{found}"
        return found

    def error(self, case: str) -> str:
        """The traceback of a case that failed."""
        found = torch.load(self.folder / f"{case}.pt", weights_only=False)
        assert isinstance(found, str), f"{case} did not fail"
        return found


def with_resumed(*variants: str) -> list[str]:
    """The cases of variants: from the start, and resumed in the middle."""
    return [*variants, *(f"resume_{variant}" for variant in variants)]


def run(program: str, folder: Path, *cases: str, on: str, num_ranks: int = 2) -> Run:
    """Run cases of a program on torch's FSDP (`on="torch"`) or on fullshard."""
    through = {"torch": (), "fullshard": ("-m", "fullshard.dropin")}[on]
    printed = launch(folder, *through, str(PROGRAMS / program), str(folder), *cases, num=num_ranks)
    return run_in(folder, printed, on=on)


def launch(folder: Path, *command: str, num: int = 2) -> str:
    """Run a program that writes to a folder on a number of ranks, and return what it printed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = subprocess.run(
        [*LAUNCH, str(num), *command],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run_in(folder: Path, printed: str, *, on: str) -> Run:
    """The run in a folder, after a check that the program used the expected library."""
    assert (folder / "library").read_text().startswith(on), "the program ran on another library"
    return Run(folder, printed)


def assert_same(ours: Any, theirs: Any, **tolerances: float) -> None:
    """Compare what two runs found: the same keys and dtypes, and close values."""
    torch.testing.assert_close(ours, theirs, equal_nan=True, **tolerances)

"""accelerate's plugins and the Trainer of transformers, with peft, on fullshard and on torch's.

The short form of `tests/clients`, which `make test-clients` runs with all frameworks.
"""

import os
import runpy
import sys
import warnings
from pathlib import Path

import pytest

from fullshard.testing import Rank, RankPool
from tests.clients.clients import PROGRAMS, assert_same, run_in, with_resumed

# accelerate's, and with LoRA the Trainer's.
VARIANTS = ("fsdp1", "fsdp2_bf16", "fsdp2_lora")


def run_short(rank: Rank, folder: Path, names: list[str]) -> None:
    """Run the program as torchrun does, in a process that has loaded torch."""
    os.environ.update(RANK=str(rank.rank), WORLD_SIZE=str(rank.size), HF_HUB_OFFLINE="1")
    sys.argv[:] = ["short.py", str(folder), *names]
    sys.path.insert(0, str(PROGRAMS))
    warnings.simplefilter("ignore")  # of the frameworks
    runpy.run_path(str(PROGRAMS / "short.py"), run_name="__main__")


@pytest.mark.soak
@pytest.mark.long
def test_frameworks_train_and_resume_on_fullshard_as_on_torchs_fsdp(tmp_path: Path) -> None:
    names = with_resumed(*VARIANTS)
    with RankPool(2) as ranks:
        ranks.run(run_short, tmp_path, names)
    theirs, ours = (run_in(tmp_path / on, "", on=on) for on in ("torch", "fullshard"))
    for name in names:
        assert_same(ours.found(name), theirs.found(name))
    for variant in VARIANTS:
        found = ours.found(variant)
        assert_same(ours.found(f"resume_{variant}"), found.get("then", found))

"""`fullshard train --elastic-replicas`: replicas that are killed at random moments."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import soak
from fullshard.errors import ConfigError
from fullshard_train.config import validate
from fullshard_train.config_file import config_of
from tests.support.elastic_losses import expected_losses, lines_of
from tests.support.tiny_run import TEXT, configured

NUM_KILLS, NUM_SHARDS, TIMEOUT_S = 5, 2, 200.0


def wait_until_back(process: subprocess.Popen[str], folder: Path, step: int) -> int:
    """Return a step after `step` in which all replicas took part."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        for line in lines_of(folder):
            if line["step"] > step and line["replicas"] == [0, 1]:
                return int(line["step"])
        time.sleep(0.02)
    raise AssertionError(f"replicas are not back after step {step}: {process.communicate()}")


@pytest.mark.soak
@pytest.mark.long
def test_a_run_goes_on_when_replicas_are_killed_and_has_the_losses_of_those_that_took_part(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    folder = tmp_path / "run"
    asked = ["--model", "tiny", "--sequence", "32", "--batch", "2", "--steps", "100000"]
    asked += ["--lr", "1e-4", "--save-every", "100", "--sample-tokens", "0", "--no-report"]
    asked += ["--device", "cpu", "--data", str(tmp_path / "text.txt"), "--out", str(folder)]
    asked += ["--mesh", "2x2", "--elastic-replicas", "--max-restarts", "30"]
    moments = random.Random(0)
    process = subprocess.Popen(
        [sys.executable, "-m", "fullshard", "train", *asked],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        step = wait_until_back(process, folder, 0)
        for _ in range(NUM_KILLS):
            wait_until_back(process, folder, step + moments.randrange(4))
            ranks = soak.ranks_of(process.pid)
            assert len(ranks) == 2 * NUM_SHARDS
            os.kill(moments.choice(ranks), signal.SIGKILL)
            while lines_of(folder)[-1]["replicas"] == [0, 1] and process.poll() is None:
                time.sleep(0.005)
            step = wait_until_back(process, folder, lines_of(folder)[-1]["step"])
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 130, errors
    lines = lines_of(folder)
    # No step is lost or written twice, and none was done again from a checkpoint.
    assert [line["step"] for line in lines] == [*range(1, len(lines) + 1)]
    assert not any(line["is_restart"] for line in lines)
    assert len(lines) > step
    assert (folder / "checkpoints" / f"step_{len(lines)}").is_dir()
    expected = expected_losses(config_of(folder / "config.toml", {}), lines, tmp_path, NUM_SHARDS)
    torch.testing.assert_close([line["loss"] for line in lines], expected, rtol=0, atol=2e-3)


@pytest.mark.parametrize(
    "changes",
    [
        {"sharding": {"mesh": "auto"}},
        {"sharding": {"mesh": "1x2"}},
        {"run": {"on_nan": "rollback"}},
        {"optimizer": {"name": "adamw8bit"}},
    ],
)
def test_what_does_not_fit_elastic_replicas_is_refused(tmp_path: Path, changes: Any) -> None:
    sharding = {"mesh": "2x2", "elastic_replicas": True, **changes.get("sharding", {})}
    config = configured(tmp_path, "run", **{**changes, "sharding": sharding})
    with pytest.raises(ConfigError, match=r"sharding.elastic_replicas \(--elastic-replicas\) "):
        validate(config)

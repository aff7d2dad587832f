"""The batch script for Slurm, on a real cluster of two nodes."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard.state import latest
from fullshard.testing import pool
from fullshard_train.config import TrainConfig
from fullshard_train.config_file import config_as_toml
from tests.hosts.slurm import Slurm
from tests.support.hosts import Hosts
from tests.support.tiny_run import TEXT, configured, losses
from tests.train.test_clusters import CLUSTER, train

NODES = ["--nodes", "2", "--gpus-per-node", "1", "--cpus-per-task", "1"]


def write(file: Path, config: TrainConfig, steps: int) -> None:
    """Write a configuration, without a folder: the script gives it."""
    config = replace(config, optimizer=replace(config.optimizer, steps=steps))
    incoming = file.with_suffix(".incoming")
    incoming.write_text(config_as_toml(replace(config, run=replace(config.run, out=""))))
    incoming.replace(file)


@pytest.mark.soak
def test_a_job_that_an_urgent_one_preempts_saves_and_is_started_again_to_its_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    steady = {"lr": 1e-3, "lr_end": 1.0, "warmup": 0}
    config, out = configured(tmp_path, "run", optimizer=steady), tmp_path / "run"
    file, log = tmp_path / "run.toml", tmp_path / "job.log"
    write(file, config, 100_000)
    with Hosts(2) as hosts:
        slurm = Slurm(hosts, tmp_path / "slurm")
        given = f"ALL,CONFIG={file},OUT={out},OMP_NUM_THREADS=1"
        submit = ["sbatch", "--parsable", *NODES, "--output", str(log), "--export", given]
        job = slurm.ask(shlex.join([*submit, str(CLUSTER / "slurm.sbatch")])).strip()
        slurm.wait_for(lambda: (out / "metrics.jsonl").exists() and losses(out))
        urgent = ["sbatch", "--partition", "urgent", *NODES, "--output", "/dev/null"]
        slurm.ask(shlex.join([*urgent, "--wrap", "true"]))
        slurm.wait_for(lambda: latest(out / "checkpoints"))
        (saved,) = (out / "checkpoints").glob("step_*")
        step = int(saved.name.removeprefix("step_"))
        assert len(losses(out)) == step
        write(file, config, step + 2)
        slurm.wait_for(lambda: "JobState=COMPLETED" in slurm.state_of(job))
        assert "Restarts=1 " in slurm.state_of(job)
    said = log.read_text()
    assert f"saving step {step} ..." in said
    assert f"on 2 CPU ranks, resuming from step {step}" in said
    undisturbed = configured(tmp_path, "other", optimizer=steady | {"steps": step + 2})
    pool(2).run(train, undisturbed)
    assert losses(out) == losses(tmp_path / "other")

"""Metrics of runs in Weights & Biases and MLflow, both without a network."""

import math
from pathlib import Path
from typing import Any

import pytest

from fullshard.errors import ConfigError
from fullshard.testing import Rank, on_ranks
from fullshard_train.control import StopRequest
from fullshard_train.loggers import Logger, Loggers, WandbLogger
from fullshard_train.run import Run
from fullshard_train.world import World
from tests.support.tiny_run import TEXT, configured, losses


class Kept(Logger):
    """Keeps what it is given, until it fails."""

    def __init__(self, fails_at: float = math.inf) -> None:
        self.fails_at, self.steps, self.is_closed = fails_at, [], False

    def log(self, step: int, values: Any) -> None:
        if step >= self.fails_at:
            raise ConnectionError("no network")
        self.steps.append(step)

    def close(self) -> None:
        self.is_closed = True


def test_a_logger_that_fails_is_left_out_and_the_others_go_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing, other = Kept(fails_at=2), Kept()
    loggers = Loggers([failing, other])
    for step in (1, 2, 3):
        loggers.log(step, {"loss": 1.0})
    loggers.close()
    assert (failing.steps, other.steps, other.is_closed) == ([1], [1, 2, 3], True)
    assert capsys.readouterr().out == "Kept failed (no network); the run continues without it\n"


def trains(rank: Rank, folder: Path, **run: Any) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    steps = run.pop("steps", 4)
    with StopRequest() as stop:
        Run(configured(folder, "run", run=run, optimizer={"steps": steps}), world).run(stop)


@on_ranks(2)
def test_mlflow_gets_the_losses_of_a_run_that_is_resumed_as_one(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    trains(rank, tmp_path, loggers=("mlflow",))
    trains(rank, tmp_path, loggers=("mlflow",), resume=True, steps=6)
    if rank.rank == 0:
        import mlflow

        client = mlflow.MlflowClient(tracking_uri=(tmp_path / "run" / "mlflow").as_uri())
        (experiment,) = client.search_experiments(filter_string="name = 'fullshard'")
        (run,) = client.search_runs([experiment.experiment_id])
        history = client.get_metric_history(run.info.run_id, "loss")
        found = [each.value for each in sorted(history, key=lambda each: each.step)]
        assert found == losses(tmp_path / "run")
        assert len(found) == 6
        assert run.data.params["optimizer.steps"] == "4"


@on_ranks(1)
def test_wandb_is_written_without_a_network(rank: Rank, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_SILENT", "true")
        trains(rank, tmp_path, loggers=("wandb",))
        (folder,) = (tmp_path / "run" / "wandb").glob("offline-run-*")
        (file,) = folder.glob("*.wandb")
        assert b"eval_loss" in file.read_bytes() or b"grad_norm" in file.read_bytes()


def test_what_wandb_refuses_is_said_in_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "nonsense")
    with pytest.raises(ConfigError, match=r"--log wandb: .* or set WANDB_MODE=offline"):
        WandbLogger(tmp_path, {}, 0)

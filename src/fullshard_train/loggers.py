"""Where the metrics of a run go beside its own files: TensorBoard, Weights & Biases, MLflow."""

from __future__ import annotations

import json
import os
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard_train.models.optional import first_line, optional

_NAMES = "loggers.json"  # under which names the run continues
_PROJECT = "fullshard"


class Logger(ABC):
    """Takes the metrics of steps. A run that goes back to a step gives later ones again."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the metrics of a step."""

    @abstractmethod
    def close(self) -> None:
        """Write what is not written yet."""


class TensorBoardLogger(Logger):
    """Writes files for TensorBoard into the folder of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], last_step: int) -> None:
        module: Any = optional("torch.utils.tensorboard", "--log tensorboard", "tensorboard")
        board = str(folder / "tensorboard")
        self._writer = module.SummaryWriter(board, purge_step=last_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger(Logger):
    """Logs to Weights & Biases, or to its files in the folder of the run if that is offline."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], last_step: int) -> None:
        wandb: Any = optional("wandb", "--log wandb", "wandb")
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", _PROJECT),
                name=folder.name,
                id=_kept_name(folder, "wandb", lambda: uuid.uuid4().hex[:12]),
                resume="allow",
                dir=str(folder),
                config=dict(settings),
            )
        except Exception as error:  # its types differ between versions
            raise ConfigError(
                f"--log wandb: {first_line(error)}; run `wandb login`, or set WANDB_MODE=offline."
            ) from error
        # Not its own count of steps: that cannot go back.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self) -> None:
        self._run.finish()


class MlflowLogger(Logger):
    """Logs to the server of MLFLOW_TRACKING_URI, or to files in the folder of the run."""

    def __init__(self, folder: Path, settings: Mapping[str, Any], last_step: int) -> None:
        mlflow: Any = optional("mlflow", "--log mlflow", "mlflow")
        place = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlflow").absolute().as_uri()
        if place.startswith("file:"):
            # MLflow asks for a database instead, which a run does not need.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        try:
            self._client = mlflow.MlflowClient(tracking_uri=place)
            self._metric = mlflow.entities.Metric
            self._run_id = _kept_name(folder, "mlflow", lambda: self._created(folder, settings))
        except Exception as error:
            raise ConfigError(
                f"--log mlflow: {place} cannot be used ({first_line(error)}); set "
                "MLFLOW_TRACKING_URI."
            ) from error

    def _created(self, folder: Path, settings: Mapping[str, Any]) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", _PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        run_id: str = self._client.create_run(experiment, run_name=folder.name).info.run_id
        for key, value in settings.items():
            self._client.log_param(run_id, key, value)
        return run_id

    def log(self, step: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(name, value, now, step) for name, value in values.items()]
        self._client.log_batch(self._run_id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


LOGGERS: Mapping[str, Callable[[Path, Mapping[str, Any], int], Logger]] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "mlflow": MlflowLogger,
}


class Loggers:
    """The loggers of a run. One that fails is left out from then on; the run is worth more."""

    def __init__(self, made: Sequence[Logger]) -> None:
        self._made = list(made)

    @classmethod
    def of(
        cls, names: Sequence[str], folder: Path, settings: Mapping[str, Any], last_step: int
    ) -> Loggers:
        return cls([LOGGERS[name](folder, settings, last_step) for name in dict.fromkeys(names)])

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._each(lambda logger: logger.log(step, values))

    def close(self) -> None:
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._made):
            try:
                call(logger)
            except Exception as error:
                self._made.remove(logger)
                name = type(logger).__name__
                print(
                    f"{name} failed ({first_line(error)}); the run continues without it", flush=True
                )


def _kept_name(folder: Path, key: str, make: Callable[[], str]) -> str:
    """Return the name of a run for a logger, which a run that is resumed has already."""
    path = folder / _NAMES
    known: dict[str, str] = json.loads(path.read_text()) if path.is_file() else {}
    if key not in known:
        known[key] = make()
        path.write_text(json.dumps(known))
    return known[key]

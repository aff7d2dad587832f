"""The files that a run writes: their names, and the log of metrics."""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import re
import socket
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard.processes import machine_id, start_of
from fullshard.state import checkpoints
from fullshard_train.config import TrainConfig
from fullshard_train.config_file import config_of
from fullshard_train.loggers import Loggers
from fullshard_train.models.tokenizers import is_path
from fullshard_train.report.record import CONFIG, METRICS, SAMPLE, TIMELINE, StepMetrics

TOKENIZER = "about.json"


class RunFolder:
    """The folder of a run, and the paths of the files in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / CONFIG
        self.metrics = path / METRICS
        self.timeline = path / TIMELINE
        self.sample = path / SAMPLE
        self.report = path / "report.html"
        self.checkpoints = path / "checkpoints"
        self.tokenizer = path / "tokenizer"
        self.profile = path / "profile"
        self.places = path / "places.json"
        self._lock = path / "lock.json"
        self._launch = path / "launch.txt"
        self._predicted = path / "predicted.json"
        self._is_locked = False

    @classmethod
    def of(cls, config: TrainConfig) -> RunFolder:
        """Return the folder that was asked for, or a new one named by model and time."""
        if config.run.out:
            return cls(Path(config.run.out))
        model = re.sub(r"[^\w.-]+", "-", Path(config.model.name).name) or "model"
        return cls(Path("runs") / f"{model}-{datetime.now():%Y%m%d-%H%M%S}")

    def lock(self) -> None:
        """Create the folder and make this process its only writer; raise if it has another one.

        Takes over the lock of a process that is gone, and the lock of a rank on another host that
        the launcher of this one has replaced.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock.touch()
        except OSError as error:
            where = f"{self.path} ({error.strerror})"
            raise ConfigError(f"--out: cannot write to {where}; pass another folder.") from error
        pid = os.getpid()
        own = {
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "machine": machine_id(),
            "process": pid,
            "started": start_of(pid),
            "launch": _launch(),
        }
        with self._lock.open("a+", encoding="utf-8") as file:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)  # only while the file is read and written
            file.seek(0)
            found = _parsed(file.read(), own)
            if _is_alive(found, own):
                raise ConfigError(
                    f"{self.path} is in use by process {found['process']} on {found['host']}; "
                    f"wait for it or end it, or remove {self._lock.name} if it is gone."
                )
            file.truncate(0)
            file.write(json.dumps(own))
        self._is_locked = True

    def unlock(self) -> None:
        if self._is_locked:
            self._lock.unlink(missing_ok=True)
            self._is_locked = False

    @property
    def lock_text(self) -> str:
        """What the lock says; empty if there is none, or this host does not see it."""
        return self._lock.read_text(encoding="utf-8") if self._lock.exists() else ""

    @property
    def is_of_this_launch(self) -> bool:
        """Whether ranks of this launch have begun the run: torchrun starts them anew if hosts come.

        The launch is the one that torchrun gave a name, or that of `fullshard train`.
        """
        launch = _launch()
        return bool(launch) and self._launch.exists() and self._launch.read_text() == launch

    def predicted_for(self, sizes: Sequence[int]) -> str:
        """What this launch has predicted for a world of these sizes; empty if it has not."""
        if not self.is_of_this_launch or not self._predicted.exists():
            return ""
        names = ("predicted", "sizes")
        found = _parsed(self._predicted.read_text(encoding="utf-8"), names)
        return str(found["predicted"]) if found.get("sizes") == [*sizes] else ""

    def begin(self, config: str, predicted: str, sizes: Sequence[int]) -> None:
        """Write the configuration of the run, what it predicts, and its launch."""
        self.config.write_text(config, encoding="utf-8")
        known = {"predicted": predicted, "sizes": [*sizes]}
        self._predicted.write_text(json.dumps(known), encoding="utf-8")
        self._launch.write_text(_launch(), encoding="utf-8")

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step_{step}"

    @property
    def about_tokenizer(self) -> dict[str, Any]:
        """What the folder says of the tokenizer in it; empty if there is none."""
        path = self.tokenizer / TOKENIZER
        found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
        return found

    @property
    def kept_tokenizer(self) -> Path | None:
        """The path of the tokenizer in the folder."""
        about = self.about_tokenizer
        if not about:
            return None
        return self.tokenizer if about["is_folder"] else self.tokenizer / "tokenizer.json"

    def complete(self) -> list[Path]:
        """Return the checkpoints that have all their files, newest first."""
        return checkpoints(self.checkpoints)[::-1]

    def incomplete(self) -> list[Path]:
        """Return checkpoints newer than complete ones: files are missing or of another size."""
        newest = max(map(_step_of, self.complete()), default=-1)
        folders = (path for path in self.checkpoints.glob("step_*") if path.is_dir())
        return [path for path in folders if _step_of(path) > newest]

    def put_aside(self, damaged: Path) -> None:
        """Move a checkpoint to a folder where it does not count among those to keep."""
        folder = self.path / "damaged"
        folder.mkdir(exist_ok=True)
        damaged.rename(folder / f"{damaged.name}-{datetime.now():%Y%m%d-%H%M%S-%f}")

    def require_usable(self, config: TrainConfig) -> None:
        """Raise if the folder contains a run that is not to be resumed, or lacks one that is."""
        found = next(iter(self.complete()), None)
        if config.run.resume and found is None:
            raise ConfigError(
                f"--resume: {self.checkpoints} contains no checkpoint; leave out --resume to "
                "start a run, or pass another folder with --out."
            )
        if config.run.resume_strict and (damaged := self.incomplete()):
            raise ConfigError(
                f"--resume-strict: {damaged[0]} is damaged: files are missing or have another "
                "size; leave out --resume-strict to resume from an older one."
            )
        if found is not None and not config.run.resume:
            raise ConfigError(
                f"{self.path} already contains a run ({found.name}); pass --resume to continue "
                "it, or choose another --out."
            )


def config_beside(checkpoint: Path) -> TrainConfig | None:
    """Return the configuration of the run whose folder contains a checkpoint, or None."""
    # abspath removes `..` but, unlike resolve, does not follow a link to a checkpoint.
    folder = RunFolder(folder_beside(checkpoint))
    if not folder.config.is_file():
        return None
    config = config_of(folder.config, {})
    kept = folder.kept_tokenizer
    if kept is not None and is_path(config.data.tokenizer):  # the original may be gone
        data = dataclasses.replace(config.data, tokenizer=str(kept))
        return dataclasses.replace(config, data=data)
    return config


def folder_beside(checkpoint: Path) -> Path:
    """Return the folder of the run that wrote a checkpoint."""
    return Path(os.path.abspath(checkpoint)).parent.parent


def _step_of(checkpoint: Path) -> int:
    """Return the step in a name; the name of a checkpoint that was put aside begins with a dot."""
    match = re.match(r"\.?step_(\d+)(?:\.|$)", checkpoint.name)
    return int(match[1]) if match else -1


_NUM_RECENT = 4  # metrics of steps that another replica may have had no time to write


def _parsed(text: str, names: Iterable[str]) -> dict[str, Any]:
    """Return the contents of a file; empty if its writer died while it wrote."""
    try:
        found: dict[str, Any] = json.loads(text)
        return {name: found[name] for name in names}
    except (ValueError, KeyError, TypeError):
        return {}


def _launch() -> str:
    """Return the name of the launch, which torchrun calls "none" if it was given no name."""
    name = os.environ.get("TORCHELASTIC_RUN_ID", "")
    return "" if name == "none" else name


def _boot_id() -> str:
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text().strip() if path.exists() else ""


def _is_alive(found: dict[str, Any], own: dict[str, Any]) -> bool:
    """Return whether the process of a lock may still write; on another host it is assumed to."""
    if not found:
        return False
    if found["machine"] == own["machine"]:
        is_own = found["process"] == own["process"]
        return not is_own and found["started"] == start_of(found["process"])
    was_rebooted = found["host"] == own["host"] and found["boot"] != own["boot"]
    is_same_launch = found["launch"] == own["launch"] != ""
    return not was_rebooted and not is_same_launch


class MetricsLog:
    """Writes the metrics of every step as a line of JSON, and gives them to loggers.

    Lines after `last_step`, from before a restart, are dropped.
    """

    def __init__(self, path: Path, make: Callable[[int], Loggers], *, last_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._make = path, make
        self._open(last_step)

    def _open(self, last_step: int) -> None:
        self.last_step = _drop_after(self._path, last_step)
        self._file = self._path.open("a", encoding="utf-8")
        self._loggers = self._make(last_step)

    def go_back(self, last_step: int) -> None:
        """Drop the metrics of later steps."""
        self.close()
        self._open(last_step)

    def add(self, metrics: StepMetrics) -> None:
        values = dataclasses.asdict(metrics).items()
        said = [(name, value) for name, value in values if value not in ((), "")]
        line = {name: None if value != value else value for name, value in said}
        self._file.write(json.dumps(line) + "\n")  # JSON has no NaN
        self._file.flush()
        self.last_step = metrics.step
        line |= {"tokens_per_s": metrics.tokens_per_s, "memory_GiB": metrics.memory_bytes / 2**30}
        numbers = {name: value for name, value in line.items() if isinstance(value, float)}
        self._loggers.log(metrics.step, numbers)

    def close(self) -> None:
        self._file.close()
        self._loggers.close()


class ReplicaLog:
    """The log of metrics with replicas: the leader writes it, and any other can take over."""

    def __init__(self, make: Callable[[int], MetricsLog], leads: Callable[[], bool]) -> None:
        self._make, self._leads = make, leads
        self._log: MetricsLog | None = None
        self._recent: deque[StepMetrics] = deque(maxlen=_NUM_RECENT)

    def add(self, metrics: StepMetrics) -> None:
        self._recent.append(metrics)
        self.write()

    def write(self) -> None:
        """Write what is not written yet, if this replica leads; the last leader may have died."""
        if self._leads() and self._recent:
            if self._log is None:
                self._log = self._make(self._recent[-1].step)
            for metrics in self._recent:
                if metrics.step > self._log.last_step:
                    self._log.add(metrics)

    def go_back(self, last_step: int) -> None:
        raise NotImplementedError  # the configuration refuses it

    def close(self) -> None:
        self.write()
        if self._log is not None:
            self._log.close()


def _drop_after(path: Path, last_step: int) -> int:
    """Keep the complete lines of steps up to `last_step`; return the last of them.

    The file is replaced atomically.
    """
    found = 0
    if not path.exists():
        return found
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            step = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # incomplete: a rank died
        if step <= last_step:
            kept.append(line + "\n")
            found = step
    incoming = path.with_name(f".{path.name}.{os.getpid()}")
    incoming.write_text("".join(kept), encoding="utf-8")
    incoming.replace(path)
    return found

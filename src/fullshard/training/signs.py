"""What ranks and the launcher on their machine tell each other: small files in a folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_VARIABLE = "FULLSHARD_SIGNS"
_REFUSED, _LEFT, _READY = "refused", "left", "ready-"


@dataclass(frozen=True, slots=True)
class Signs:
    """A folder that the launcher made for one run."""

    folder: Path

    @classmethod
    def of_launcher(cls) -> Signs | None:
        """Of the launcher that started this rank; None under torchrun and the like."""
        found = os.environ.get(_VARIABLE)
        return None if found is None else cls(Path(found))

    def announce(self) -> None:
        """Let ranks that are started from here find the folder."""
        os.environ[_VARIABLE] = str(self.folder)

    # What ranks say

    def ready(self) -> None:
        """This rank takes signals from now on."""
        (self.folder / f"{_READY}{os.getpid()}").touch()

    def refuse(self, reason: str) -> None:
        """What was asked for cannot be done, however often it is tried."""
        self._write(_REFUSED, reason)

    def leave(self) -> None:
        """The run was left before its end, and saved."""
        self._write(_LEFT, "")

    # What the launcher hears

    def ready_pids(self) -> Iterator[int]:
        for path in self.folder.glob(f"{_READY}*"):
            yield int(path.name.removeprefix(_READY))

    @property
    def refusal(self) -> str | None:
        path = self.folder / _REFUSED
        return path.read_text(encoding="utf-8") if path.exists() else None

    @property
    def was_left(self) -> bool:
        return (self.folder / _LEFT).exists()

    def _write(self, name: str, text: str) -> None:
        beside = self.folder / f".{name}.{os.getpid()}"
        beside.write_text(text, encoding="utf-8")
        beside.replace(self.folder / name)

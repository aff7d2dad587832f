"""Python loads this in every process that a program under `fullshard.dropin` starts.

`dropin.run` puts this folder on `PYTHONPATH`. The process pays for it only when it imports torch's
FSDP, whose names are then replaced as in the process that started it. It says that they will be
when it joins a process group, so that a rank which is late is not taken for one on torch's FSDP.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType
from typing import Any


class _Finder(MetaPathFinder):
    """Calls a function once a module of this name was imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self._name, self._then = name, then

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_go_on(module: ModuleType) -> None:
            load(module)
            self._then(module)

        spec.loader.exec_module = load_and_go_on  # type: ignore[method-assign]
        return spec


def _replace(fsdp: ModuleType) -> None:
    importlib.import_module("fullshard.dropin").install()


def _tell(distributed: Any) -> None:
    begin = distributed.init_process_group

    @wraps(begin)
    def begin_and_tell(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        importlib.import_module("fullshard.comm.redirected").tell()

    distributed.init_process_group = begin_and_tell


def _load_next() -> None:
    """Load the `sitecustomize` that this one hides."""
    folder = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != folder]
    own = sys.modules.pop("sitecustomize", None)
    with suppress(ImportError):
        importlib.import_module("sitecustomize")
    if own is not None:
        sys.modules.setdefault("sitecustomize", own)


if os.environ.get("FULLSHARD_DROPIN") == "1":
    sys.meta_path.insert(0, _Finder("torch.distributed.fsdp", _replace))
    sys.meta_path.insert(0, _Finder("torch.distributed", _tell))
_load_next()

"""Python loads this in every process that a program under `fullshard.dropin` starts.

`dropin.run` puts this folder on `PYTHONPATH`. The process pays for it only when it imports torch's
FSDP, whose names are then replaced as in the process that started it.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_WATCHED = "torch.distributed.fsdp"


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _WATCHED:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            importlib.import_module("fullshard.dropin").install()

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


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
    sys.meta_path.insert(0, _Finder())
_load_next()

"""What travels between a pool and its ranks.

Everything is pickled by `pack`, never by `multiprocessing`: its pickler would move tensors into
shared memory, which outlives neither the rank nor its file descriptors.
"""

import importlib
import importlib.util
import os
import pickle
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from fullshard.errors import ConfigError

pack = pickle.dumps
unpack = pickle.loads


@dataclass(frozen=True, slots=True)
class FunctionReference:
    """A module-level function, by the file it was defined in."""

    path: str
    module: str
    qualname: str

    @classmethod
    def of(cls, function: Callable[..., Any]) -> "FunctionReference":
        qualname = getattr(function, "__qualname__", "")
        module = sys.modules.get(getattr(function, "__module__", None) or "")
        path = getattr(module, "__file__", None)
        if not qualname or "<" in qualname or module is None or path is None:
            raise ConfigError(
                f"{function!r}: ranks run functions defined at module level in a file, found "
                f"{qualname or type(function).__name__!r}; move it to module level and pass what "
                "it closed over as arguments."
            )
        # A script's own functions: `__main__` is another module in the rank.
        name = "fullshard_ranks_main" if module.__name__ == "__main__" else module.__name__
        return cls(os.path.abspath(path), name, qualname)

    def load(self) -> Callable[..., Any]:
        found: Any = self._load_module()
        for part in self.qualname.split("."):
            found = getattr(found, part)
        # Under its name the module holds the test that pytest calls; the ranks want its body.
        body: Callable[..., Any] = getattr(found, "rank_body", found)
        return body

    def _load_module(self) -> ModuleType:
        known = sys.modules.get(self.module)
        if known is not None:
            return known
        # By name where that leads to the same file, so that relative imports work; by path else.
        spec = None
        try:
            spec = importlib.util.find_spec(self.module)
        except (ImportError, ValueError):
            pass
        if spec is not None and spec.origin and os.path.abspath(spec.origin) == self.path:
            return importlib.import_module(self.module)
        spec = importlib.util.spec_from_file_location(self.module, self.path)
        if spec is None or spec.loader is None:
            raise ImportError(f"{self.path}: expected a Python source file.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[self.module] = module
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[self.module]
            raise
        return module


@dataclass(frozen=True, slots=True)
class Birth:
    """What a rank's process needs to know to join the world."""

    rank: int
    size: int
    backend: str
    store_port: int
    timeout_s: float
    connection_fd: int
    stacks_path: str
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Call:
    """Run a function. Arguments are packed apart: they may need the function's module loaded."""

    function: FunctionReference
    arguments: bytes
    warning_filters: bytes
    sys_path: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Close:
    """Leave the world and exit."""


@dataclass(frozen=True, slots=True)
class Returned:
    """A rank's function returned; `result` is packed. The rank is in so many process groups."""

    result: bytes
    num_groups: int


@dataclass(frozen=True, slots=True)
class Raised:
    """A rank's function raised; `exception` is packed, or None where it cannot be."""

    type_name: str
    message: str
    traceback: str
    exception: bytes | None


Answer = Returned | Raised

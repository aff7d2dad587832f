"""Run programs and frameworks that are written for torch's FSDP on fullshard, unchanged.

    torchrun --nproc-per-node 2 -m fullshard.dropin train.py --lr 0.1
    torchrun --nproc-per-node 2 -m fullshard.dropin -m package.train --lr 0.1

Processes that the program starts run on fullshard, too. In a program, `install()` does the same for
its own process. Every public name of torch's FSDP becomes ours, in the modules that define it and
wherever a module that is already imported has bound it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from types import ModuleType
from typing import Any

import torch.distributed as dist

from fullshard.comm import redirected
from fullshard.compat.framework_attributes import lazy_init, module_state_of, wrapper_state_of

_OURS = {
    "torch.distributed.fsdp": "fullshard",
    "torch.distributed.fsdp.api": "fullshard.api",
    "torch.distributed.fsdp.wrap": "fullshard.wrap",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "fullshard.fully_sharded_data_parallel",
    "torch.distributed.fsdp.sharded_grad_scaler": "fullshard.sharded_grad_scaler",
    "torch.distributed.fsdp._fully_shard": "fullshard",
    "torch.distributed._composable.fsdp": "fullshard",
}
_OF_WRAPPERS: dict[str, Callable[..., Any]] = {
    "torch.distributed.fsdp._runtime_utils._lazy_init": lazy_init,
    "torch.distributed.fsdp._common_utils._get_module_fsdp_state": wrapper_state_of,
    "torch.distributed.fsdp._fully_shard._fsdp_state._get_module_fsdp_state": module_state_of,
}
"""Private functions that frameworks call with a wrapper or a sharded module."""
# It shares its base class and helpers with torch's `fully_shard`, and keeps torch's.
_APART = "torch.distributed._composable.replicate_with_fsdp"
_DEFINED_IN = ("torch.distributed.fsdp", "torch.distributed._composable.fsdp")
_log = logging.getLogger(__name__)


class _Redirect:
    """The names that were replaced, so that they can be put back.

    `theirs` maps torch's objects to ours, and `ours` does the opposite, by identity; `unknown` are
    names of torch that fullshard does not have.
    """

    def __init__(self) -> None:
        self.theirs: dict[int, tuple[Any, Any]] = {}
        self.unknown: list[str] = []
        importlib.import_module(_APART)  # now: its class derives from torch's `FSDPModule`
        for name, own_name in _OURS.items():
            module, own = importlib.import_module(name), importlib.import_module(own_name)
            for each in _public_names(module):
                value = getattr(module, each)
                if not _is_of_fsdp(value):
                    continue
                found = getattr(own, each, None)
                if found is not None:
                    self.theirs[id(value)] = value, found
                elif id(value) not in self.theirs:
                    self.unknown.append(f"{name}.{each}")
        for path, either in _OF_WRAPPERS.items():
            module_name, _, each = path.rpartition(".")
            value = getattr(importlib.import_module(module_name), each, None)
            if value is not None:
                self.theirs[id(value)] = value, partial(either, value)
        begin = dist.init_process_group
        self.theirs[id(begin)] = begin, _telling(begin)
        self.ours = {id(own): (own, theirs) for theirs, own in self.theirs.values()}
        self.imported_before = set(sys.modules)
        self.replaced = _replace(self.theirs, sys.modules)

    def undo(self) -> None:
        """Put torch's names back, also in modules that were imported in the meantime."""
        for module, name, theirs in self.replaced:
            setattr(module, name, theirs)
        _replace(self.ours, set(sys.modules) - self.imported_before)


def _telling(begin: Callable[..., None]) -> Callable[..., None]:
    """Let a rank say that it runs on fullshard as soon as there is a process group."""

    @wraps(begin)
    def begin_and_tell(*args: Any, **kwargs: Any) -> None:
        begin(*args, **kwargs)
        redirected.tell()

    return begin_and_tell


def _public_names(module: ModuleType) -> list[str]:
    listed: Sequence[str] = getattr(module, "__all__", ())
    return [*listed] or [name for name in vars(module) if not name.startswith("_")]


def _is_of_fsdp(value: Any) -> bool:
    is_definition = inspect.isclass(value) or inspect.isroutine(value)
    return is_definition and str(value.__module__).startswith(_DEFINED_IN)


def _replace(
    pairs: dict[int, tuple[Any, Any]], names: Iterable[str]
) -> list[tuple[ModuleType, str, Any]]:
    """Replace objects in the globals of modules; return what was replaced where."""
    replaced = []
    for name in list(names):
        module = sys.modules.get(name)
        is_ours = name.partition(".")[0] == "fullshard"
        if not isinstance(module, ModuleType) or is_ours or name == _APART:
            continue
        for each, value in list(vars(module).items()):
            old, new = pairs.get(id(value), (None, None))
            if old is not None and old is value:
                setattr(module, each, new)
                replaced.append((module, each, old))
    return replaced


_installed: _Redirect | None = None


def install() -> None:
    """Replace the names of torch's FSDP by ours, in all modules, until `uninstall`."""
    global _installed
    if _installed is not None:
        return
    _installed = _Redirect()
    redirected.tell()
    num_modules = len({id(module) for module, *_ in _installed.replaced})
    _log.info(
        "fullshard replaces %d names of torch.distributed.fsdp in %d modules; these stay "
        "torch's, because fullshard does not have them: %s",
        len(_installed.theirs),
        num_modules,
        ", ".join(_installed.unknown) or "none",
    )


def uninstall() -> None:
    """Put torch's names back."""
    global _installed
    if _installed is not None:
        _installed.undo()
        _installed = None
        redirected.take_back()


@contextmanager
def installed() -> Iterator[None]:
    """`install` for a scope."""
    was_installed = _installed is not None
    install()
    try:
        yield
    finally:
        if not was_installed:
            uninstall()


def _install_in_children() -> None:
    """Let every process that Python starts from here do the same, as `dropin_site` says."""
    folder = str(Path(__file__).parent / "dropin_site")
    others = os.environ.get("PYTHONPATH", "")
    os.environ["FULLSHARD_DROPIN"] = "1"
    if folder not in others.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, others]))


def run(arguments: Sequence[str]) -> None:
    """Run a program, `file.py ...` or `-m module ...`, with torch's names replaced."""
    is_module = bool(arguments) and arguments[0] == "-m"
    program = [*arguments[is_module:]]
    if not program or (not is_module and not Path(program[0]).is_file()):
        found = f"there is no file {program[0]}; " if program else ""
        raise SystemExit(
            f"fullshard.dropin: {found}pass a program, as in train.py or -m package.train."
        )
    install()
    _install_in_children()
    sys.argv = program
    if is_module:
        sys.path.insert(0, "")
        runpy.run_module(program[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


if __name__ == "__main__":
    # Use the module of this name, so that `install` does not run twice.
    importlib.import_module("fullshard.dropin").run(sys.argv[1:])

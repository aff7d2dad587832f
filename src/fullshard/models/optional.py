"""Packages that only a part of the models needs, and what they say when something is wrong."""

from __future__ import annotations

import importlib
from types import ModuleType

from fullshard.errors import ConfigError


def optional(package: str, subject: str, extra: str) -> ModuleType:
    """The package, or an error that says how it is installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{subject}: the package {package!r} is needed, found none that can be imported "
            f"({error}); pip install 'fullshard[{extra}]'."
        ) from error


def first_line(error: Exception) -> str:
    """What an error says, without the advice and the listings that follow."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

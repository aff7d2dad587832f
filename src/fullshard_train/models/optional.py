"""Imports of optional packages, and their error messages."""

from __future__ import annotations

import importlib
from types import ModuleType

from fullshard.errors import ConfigError


def optional(package: str, subject: str, extra: str) -> ModuleType:
    """Import a package, or raise an error that says how to install it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ConfigError(
            f"{subject}: the package {package!r} cannot be imported ({error}); run: pip install "
            f"'fullshard[{extra}]'"
        ) from error


def first_line(error: Exception) -> str:
    """Return an error's message without the advice and listings that follow its first line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__

"""The `fullshard` command. Its dependencies are the extra `cli`; the library does not need them."""

from __future__ import annotations

import os

__all__ = ["wants_tracebacks"]

DEBUG = "FULLSHARD_DEBUG"


def wants_tracebacks() -> bool:
    """Return whether to show tracebacks: an environment variable, which ranks inherit."""
    return os.environ.get(DEBUG, "0") not in ("", "0")

"""Whether tracebacks are wanted; in the environment, so that ranks hear of it as well."""

from __future__ import annotations

import os

DEBUG = "FULLSHARD_DEBUG"


def wants_tracebacks() -> bool:
    return os.environ.get(DEBUG, "0") not in ("", "0")

"""The end of a process that has used gloo."""

from __future__ import annotations

import atexit
import functools
import os
import sys
import time
from typing import NoReturn

_PAUSE_S = 0.02


@functools.cache
def pause_at_exit() -> None:
    """Let gloo's threads let go of tensors before the interpreter goes away.

    A collective has been waited for before its thread drops what it sent, for which it needs the
    interpreter's lock. Python ends threads that ask for the lock too late, and C++ ends the process
    for that: "terminate called without an active exception".
    """
    atexit.register(time.sleep, _PAUSE_S)


def leave(status: int) -> NoReturn:
    """End a process that has nothing left to do, whatever its threads are at."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)

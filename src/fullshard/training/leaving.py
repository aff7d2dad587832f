"""Ctrl-C: the first one lets a step end and saves, the second leaves at once.

Python runs signal handlers between its own instructions, and a rank that waits for another one is
in native code. So a thread reads the signals as they come, from the descriptor that Python's C
handler writes them to.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

# Of ranks that a launcher stops because another one died, and that wait for it in vain.
_GRACE_S = 20.0


class Leaving:
    """Whether this rank was asked to leave. A scope; the main thread's."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._is_answered = threading.Event()
        self._readable, self._writable = os.pipe()
        os.set_blocking(self._writable, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> Leaving:
        threading.Thread(target=self._listen, name="leaving", daemon=True).start()
        signal.set_wakeup_fd(self._writable, warn_on_full_buffer=False)
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, _heard)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(-1)
        os.close(self._writable)  # ends the thread

    def _listen(self) -> None:
        while heard := os.read(self._readable, 1):
            number = heard[0]
            if number not in (signal.SIGINT, signal.SIGTERM):
                continue
            if self.is_wanted:
                os._exit(128 + number)
            self.is_wanted = True
            if number == signal.SIGTERM:
                threading.Thread(target=self._insist, name="insisting", daemon=True).start()
        os.close(self._readable)

    def answer(self) -> None:
        """The step has ended and the ranks have agreed to leave: saving may take its time."""
        self._is_answered.set()

    def _insist(self) -> None:
        if not self._is_answered.wait(_GRACE_S):
            os._exit(128 + signal.SIGTERM)


def _heard(number: int, frame: FrameType | None) -> None:
    """The thread knows already; this only keeps Python's own handlers from raising."""

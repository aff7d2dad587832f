"""What a run shows while it runs: two live lines on a terminal, plain lines anywhere else."""

from __future__ import annotations

import math
import sys
from typing import Any

from fullshard.report.record import StepMetrics

_NUM_PLAIN_LINES = 20
_SMOOTHING = 0.9


class Display:
    """Shows steps as they end. A scope: what is live ends with it."""

    def __init__(self, num_steps: int, first_step: int, *, is_shown: bool) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self._is_shown = is_shown
        self._every = max(1, (num_steps - first_step) // _NUM_PLAIN_LINES)
        self._step_s = 0.0
        self._live: _LiveLines | None = None

    def __enter__(self) -> Display:
        if self._is_shown and sys.stdout.isatty():
            self._live = _LiveLines(self._num_steps, self._first_step)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def say(self, text: str) -> None:
        """A line that stays."""
        if not self._is_shown:
            return
        if self._live is not None:
            self._live.say(text)
        else:
            print(text, flush=True)

    def show(self, metrics: StepMetrics) -> None:
        """One more step has ended."""
        if not self._is_shown:
            return
        is_first = self._step_s == 0.0
        weight = 0.0 if is_first else _SMOOTHING
        self._step_s = weight * self._step_s + (1 - weight) * metrics.step_s
        left = in_words((self._num_steps - metrics.step) * self._step_s)
        if self._live is not None:
            self._live.show(metrics.step, facts_of(metrics), left)
        elif metrics.step % self._every == 0 or metrics.step in (
            self._first_step + 1,
            self._num_steps,
        ):
            print(
                f"step {metrics.step:>{len(str(self._num_steps))}}/{self._num_steps}  "
                f"{facts_of(metrics)}  {left} left",
                flush=True,
            )


class _LiveLines:
    """A progress bar, and the facts of the last step below it: narrow enough for any terminal."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn

        console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step, left="?")
        self._live = Live(self._shown(""), console=console, refresh_per_second=4)
        self._live.start()

    def _shown(self, facts: str) -> Any:
        from rich.console import Group
        from rich.text import Text

        return Group(self._progress, Text(facts))

    def show(self, step: int, facts: str, left: str) -> None:
        self._progress.update(self._task, completed=step, left=left)
        self._live.update(self._shown(facts))

    def say(self, text: str) -> None:
        self._live.console.print(text)

    def close(self) -> None:
        self._live.stop()


def facts_of(metrics: StepMetrics) -> str:
    """One step in one line."""
    share = metrics.exposed_s / metrics.step_s if metrics.step_s else 0.0
    return (
        f"loss {metrics.loss:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  "
        f"{metrics.step_s:.2f} s/step  {metrics.memory_bytes / 2**30:.2f} GiB  "
        f"exposed {share:.0%}"
    )


def in_words(seconds: float) -> str:
    """As in "2 h 05 min", "3 min 20 s", "12 s"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"

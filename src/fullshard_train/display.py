"""The output of a run: two live lines on a terminal, plain lines elsewhere, and a summary."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Iterator
from statistics import median

from fullshard_train.output import RunFolder
from fullshard_train.report.record import RunRecord, StepMetrics

_NUM_PLAIN_LINES = 20
_SMOOTHING = 0.9


class Display:
    """Shows steps as they finish. A context manager: leaving it ends the live display."""

    def __init__(self, num_steps: int, first_step: int, *, is_shown: bool) -> None:
        self._num_steps = num_steps
        self._first_step = first_step
        self.is_shown = is_shown
        self._every = max(1, (num_steps - first_step) // _NUM_PLAIN_LINES)
        self._step_s = 0.0
        self._live: _LiveLines | None = None

    def __enter__(self) -> Display:
        if self.is_shown and sys.stdout.isatty():
            self._live = _LiveLines(self._num_steps, self._first_step)
        return self

    def __exit__(self, *exception: object) -> None:
        if self._live is not None:
            self._live.close()
            self._live = None

    def say(self, text: str) -> None:
        """Print a permanent line."""
        if not self.is_shown:
            return
        if self._live is not None:
            self._live.say(text)
        else:
            print(text, flush=True)

    def show(self, metrics: StepMetrics) -> None:
        """Show a step that has finished."""
        if not self.is_shown:
            return
        weight = _SMOOTHING if self._step_s else 0.0
        self._step_s = weight * self._step_s + (1 - weight) * metrics.step_s
        left = shown_duration((self._num_steps - metrics.step) * self._step_s)
        ends = (self._first_step + 1, self._num_steps)
        if self._live is not None:
            self._live.show(metrics.step, step_line(metrics), left)
        elif metrics.step % self._every == 0 or metrics.step in ends:
            number = f"{metrics.step:>{len(str(self._num_steps))}}/{self._num_steps}"
            print(f"step {number}  {step_line(metrics)}  {left} left", flush=True)
        if not math.isnan(loss := metrics.eval_loss):
            perplexity = math.exp(min(loss, 700))
            self.say(
                f"step {metrics.step}: validation loss {loss:.4f}, perplexity {perplexity:.4g}"
            )


class _LiveLines:
    """A progress bar above the metrics of the last step, narrow enough for any terminal."""

    def __init__(self, num_steps: int, first_step: int) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.text import Text

        console = Console(file=sys.stdout, markup=False, highlight=False, emoji=False)
        self._progress = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(),
            TextColumn("{task.fields[left]} left"),
            console=console,
        )
        self._task = self._progress.add_task("", total=num_steps, completed=first_step, left="?")
        self._line = Text("")
        lines = Group(self._progress, self._line)
        self._live = Live(lines, console=console, refresh_per_second=4)
        self._live.start()

    def show(self, step: int, line: str, left: str) -> None:
        self._progress.update(self._task, completed=step, left=left)
        self._line.plain = line

    def say(self, text: str) -> None:
        self._live.console.print(text)

    def close(self) -> None:
        self._live.stop()


def step_line(metrics: StepMetrics) -> str:
    """Format the metrics of a step as one line."""
    share = metrics.exposed_s / metrics.step_s if metrics.step_s else 0.0
    # In a replayed step, the waits of compute are not measured.
    exposed = "captured" if math.isnan(share) else f"exposed {share:.0%}"
    speed = f"{metrics.tflops:.2g} TFLOP/s" if math.isnan(metrics.mfu) else f"MFU {metrics.mfu:.0%}"
    exposed += "" if math.isnan(metrics.tflops) else f"  {speed}"
    if metrics.slowest:
        exposed += f"  {metrics.slowest_s / metrics.step_s:.0%} waiting for {metrics.slowest}"
    return (
        f"loss {metrics.loss:.3f}  {metrics.tokens_per_s:,.0f} tokens/s  "
        f"{metrics.step_s:.2f} s/step  {metrics.memory_bytes / 2**30:.2f} GiB  {exposed}"
    )


def shown_duration(seconds: float) -> str:
    """Format seconds as in "2 h 05 min", "3 min 20 s" and "12 s"."""
    if not math.isfinite(seconds):
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02d} min"
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def closing_lines(folder: RunFolder, record: RunRecord, *, is_done: bool) -> Iterator[str]:
    """Yield the last lines of a run: its result, its files and the next commands to try."""
    run = shlex.quote(str(folder.path))
    metrics = record.metrics
    if metrics:
        last = metrics[-1]
        took = shown_duration(sum(each.step_s for each in metrics))
        speed = median(each.tokens_per_s for each in metrics)
        yield f"loss        {last.loss:.3f} after {last.step} steps ({took}, {speed:,.0f} tokens/s)"
    complete = folder.complete()
    if complete:
        yield f"checkpoint  {complete[0]}"
    evaluated = [each for each in metrics if not math.isnan(each.eval_loss)]
    kept = [each for each in evaluated if folder.checkpoint(each.step) in complete]
    if kept:
        best = min(kept, key=lambda each: each.eval_loss)
        yield f"best        {folder.checkpoint(best.step)} (validation loss {best.eval_loss:.4f})"
    if folder.report.exists():
        yield f"report      {folder.report}"
    if not is_done:
        yield f"resume with fullshard train --config {run}/config.toml --resume"
        return
    config, steps = record.config, 2 * metrics[-1].step if metrics else 0
    merge = " --merge" if config.get("model", {}).get("lora_rank") else ""
    prompt = shlex.quote(str(config.get("run", {}).get("prompt", "")))
    yield f"next        fullshard generate {run} --prompt {prompt}"
    yield f"            fullshard checkpoint export {run} {run}/exported{merge}"
    yield f"            fullshard train --config {run}/config.toml --resume --steps {steps}"
    if not config.get("data", {}).get("paths"):
        yield "            fullshard train --data your/texts; fullshard train --help"

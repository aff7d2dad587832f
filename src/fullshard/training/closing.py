"""The last lines of a run: what came of it, where it is, what to try next."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from statistics import median

from fullshard.report.record import RunRecord
from fullshard.training.display import in_words
from fullshard.training.run_folder import RunFolder


def closing_lines(folder: RunFolder, record: RunRecord, *, is_done: bool) -> Iterator[str]:
    """For whoever started the run, who may not know the command yet."""
    run = shlex.quote(str(folder.path))
    metrics = record.metrics
    if metrics:
        last = metrics[-1]
        took = in_words(sum(each.step_s for each in metrics))
        speed = median(each.tokens_per_s for each in metrics)
        yield f"loss        {last.loss:.3f} after {last.step} steps ({took}, {speed:,.0f} tokens/s)"
    found = folder.newest()
    if found is not None:
        yield f"checkpoint  {found}"
    if folder.report.exists():
        yield f"report      {folder.report}"
    if not is_done:
        yield f"go on with  fullshard train --config {run}/config.toml --resume"
        return
    steps = 2 * metrics[-1].step if metrics else 0
    yield f"next        fullshard generate {run} --prompt 'class '"
    yield f"            fullshard train --config {run}/config.toml --resume --steps {steps}"
    yield "            fullshard train --data your/texts --model 30m; fullshard train --help"

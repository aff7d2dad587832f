"""What a run shows and writes while it runs."""

import io
import json
import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fullshard_train.display import Display, closing_lines, shown_duration, step_line
from fullshard_train.loggers import Loggers
from fullshard_train.output import MetricsLog, RunFolder
from fullshard_train.report import StepMetrics
from tests.support.made_up_run import made_up_run


def metrics(step: int, loss: float = 2.5) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        lr=1e-3,
        grad_norm=1.0,
        tokens=2048,
        step_s=0.5,
        exposed_s=0.05,
        memory_bytes=3 * 2**30,
    )


@pytest.mark.parametrize("is_adapted", [False, True])
def test_what_to_do_next_fits_the_run(tmp_path, is_adapted):
    config = {
        "model": {"lora_rank": 4 * is_adapted},
        "data": {"paths": ["chats.jsonl"] if is_adapted else []},
        "run": {"prompt": "it's"},
    }
    record = made_up_run(config=config)
    *_, generate, export, resume, last = [
        "",
        *closing_lines(RunFolder(tmp_path), record, is_done=True),
    ]
    if is_adapted:
        _, generate, export, resume = generate, export, resume, last
        assert export.endswith("exported --merge")
    else:
        assert "--data your/texts" in last  # it was trained on Python's library
        assert export.endswith("exported")
    assert shlex.split(generate) == [
        "next",
        "fullshard",
        "generate",
        str(tmp_path),
        "--prompt",
        "it's",
    ]
    assert "--resume --steps" in resume


def test_facts_of_a_step_are_one_line():
    line = step_line(metrics(1))
    assert line == "loss 2.500  4,096 tokens/s  0.50 s/step  3.00 GiB  exposed 10%"
    known = replace(metrics(1), tflops=0.1234)
    assert step_line(known) == f"{line}  0.12 TFLOP/s"
    assert step_line(replace(known, mfu=0.412)) == f"{line}  MFU 41%"
    late = replace(metrics(1), slowest="rank 3 (host1)", slowest_s=0.1)
    assert step_line(late) == f"{line}  20% waiting for rank 3 (host1)"


@pytest.mark.parametrize(
    "seconds, words",
    [
        (0.2, "0 s"),
        (12, "12 s"),
        (200, "3 min 20 s"),
        (7500, "2 h 05 min"),
        (float("inf"), "?"),
        (float("nan"), "?"),
    ],
)
def test_time_left_is_said_in_words(seconds, words):
    assert shown_duration(seconds) == words


def test_anywhere_but_on_a_terminal_there_are_about_twenty_plain_lines(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Display(1000, 0, is_shown=True) as display:
        for step in range(1, 1001):
            display.show(metrics(step))
    lines = out.getvalue().splitlines()
    assert len(lines) == 21
    assert lines[0].startswith("step    1/1000  loss 2.500")
    assert lines[-1].endswith("0 s left")
    assert not any("\x1b" in line for line in lines)


def _all_of(terminal: int) -> str:
    """Everything that was written: one read may give what came in one write."""
    os.set_blocking(terminal, False)
    parts = []
    while True:
        try:
            parts.append(os.read(terminal, 100_000))
        except BlockingIOError:
            return b"".join(parts).decode()


def test_on_a_terminal_lines_are_live_and_what_is_said_stays(monkeypatch):
    main, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm-256color")
    with os.fdopen(terminal, "w") as screen:
        monkeypatch.setattr(sys, "stdout", screen)
        with Display(10, 0, is_shown=True) as display:
            display.show(metrics(3))
            display.say("[bold] is no markup")
            display.show(metrics(10))
        screen.flush()
        shown = _all_of(main)
    os.close(main)
    assert "step 10/10" in shown
    assert "[bold] is no markup" in shown
    assert step_line(metrics(10)) in shown
    assert shown.count("\n") < 12  # drawn again in its place


def test_only_the_first_rank_shows_anything(monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    with Display(10, 0, is_shown=False) as display:
        display.show(metrics(1))
        display.say("hello")
    assert out.getvalue() == ""


def test_metrics_after_the_step_that_a_run_goes_on_from_are_dropped(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path, lambda _: Loggers([]), last_step=0)
    for step in range(1, 6):
        log.add(metrics(step))
    log.close()
    with path.open("a") as file:
        file.write('{"step": 6, "lo')  # torn when a rank died
    again = MetricsLog(path, lambda _: Loggers([]), last_step=3)
    again.add(metrics(4, loss=1.0))
    again.close()
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert [each["step"] for each in found] == [1, 2, 3, 4]
    assert found[0]["mfu"] is None  # JSON has no NaN
    assert found[-1]["loss"] == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]

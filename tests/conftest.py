"""No test passes by not running: a session with a skipped test fails."""

import gc
import itertools
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import settings

from tests.hosts import slurm
from tests.support.hosts import reason_not_here

# Tests run side by side, so every process gets one thread. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Only torch 2.14 and later can be installed beside `spmd_types`.
collect_ignore = [] if find_spec("spmd_types") else ["engine/test_annotated_parameters.py"]
# `make test-clients` installs both.
if not (find_spec("wandb") and find_spec("mlflow")):
    collect_ignore.append("train/test_loggers.py")

# Runs share tokens and tokenizers with others of the session, and with none before it.
if "FULLSHARD_CACHE" not in os.environ:
    _cache = tempfile.TemporaryDirectory(prefix="fullshard-cache-")
    os.environ["FULLSHARD_CACHE"] = _cache.name

gc.disable()  # until everything is imported

# No test depends on how fast a busy machine is, or on which examples are drawn today.
settings.register_profile("fullshard", deadline=None, derandomize=True)
settings.load_profile("fullshard")

# Tests that may skip, each for one reason, word for word. No other test skips.
ALLOWED_SKIP_REASONS: dict[str, str] = {
    "tests/train/test_report_browser.py::test_the_report_opens_in_a_real_browser": (
        "no Chromium on this machine"
    ),
}

# Marks of tests that do not run in `make test`.
SELDOM = ("exhaustive", "soak")

# What the tests of a room may take in `make test`, in seconds of a worker on two idle cores.
BUDGETS_S = {
    "comm": 170,
    "contract": 55,
    "engine": 340,
    "hosts": 15,
    "layout": 75,
    "optim": 125,
    "plan": 65,
    "project": 35,
    "state": 145,
    "train": 285,
    "wrapper": 140,
}

_forbidden_skips: list[str] = []
_spent_s: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    for name in SELDOM:
        parser.addoption(f"--{name}", action="store_true", help=f"run {name} tests, too")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first for each worker, so that none of them runs alone at the end.

    xdist splits the tests into equal parts, in their order. What runs seldom has to be asked for:
    of a test that is `sampled(n)`, all cases but every n-th.
    """
    num_cases: Counter[tuple[Path, str]] = Counter()
    for item in items:
        if sampled := item.get_closest_marker("sampled"):
            function = item.path, item.name.partition("[")[0]
            if num_cases[function] % sampled.args[0]:
                item.add_marker(pytest.mark.exhaustive)
            num_cases[function] += 1
    for name in SELDOM:
        if not config.getoption(f"--{name}"):
            items[:] = [item for item in items if not item.get_closest_marker(name)]
    num_workers = getattr(config, "workerinput", {}).get("workercount", 1)
    size = len(items) // num_workers
    long = [item for item in items if item.get_closest_marker("long")]
    others = iter([item for item in items if not item.get_closest_marker("long")])
    items.clear()
    for worker in range(num_workers):
        first = long[worker::num_workers]
        items += [*first, *itertools.islice(others, max(0, size - len(first)))]
    items += others


def pytest_collection_finish(session: pytest.Session) -> None:
    """Spare the tests the garbage collection of permanent objects, and stack traces at every seed.

    Without an accelerator, `torch.manual_seed` records where it was called.
    """
    gc.freeze()
    gc.enable()
    gc.set_threshold(5000)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.accelerator.is_available():
        torch.manual_seed = torch.default_generator.manual_seed


def _note(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not report.skipped or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    reason = reason.removeprefix("Skipped: ")
    if ALLOWED_SKIP_REASONS.get(report.nodeid) != reason:
        _forbidden_skips.append(f"{report.nodeid}: {reason}")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _spent_s[Path(report.nodeid.partition("::")[0]).parts[1]] += report.duration
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    if _forbidden_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    _write_budgets(terminalreporter)
    if reason := reason_not_here():
        terminalreporter.write_line(f"tests on several hosts were left out: {reason}")
    elif terminalreporter.config.getoption("--soak") and (reason := slurm.reason_not_here()):
        terminalreporter.write_line(f"tests/hosts/test_slurm.py was left out: {reason}")
    if _forbidden_skips:
        terminalreporter.section("tests that did not run", red=True)
        for line in _forbidden_skips:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            "A skipped test fails the session; leave it uncollected where it cannot run, or add "
            "it and its reason to ALLOWED_SKIP_REASONS in tests/conftest.py."
        )


def _write_budgets(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what the rooms took, if all of them ran, and which took more than they may."""
    if not BUDGETS_S or not _spent_s.keys() >= BUDGETS_S.keys():
        return
    spent = ", ".join(f"{room} {_spent_s[room]:.0f}" for room in sorted(_spent_s))
    terminalreporter.write_line(f"seconds of the workers, by room: {spent}")
    if any(terminalreporter.config.getoption(f"--{name}") for name in SELDOM):
        return
    for room, budget_s in BUDGETS_S.items():
        if _spent_s[room] > budget_s:
            terminalreporter.write_line(
                f"warning: the tests of {room} took {_spent_s[room]:.0f} s, and may take "
                f"{budget_s} s on two idle cores; mark the longest `exhaustive`, or make them "
                "shorter (`--durations 20` lists them)."
            )

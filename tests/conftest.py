"""No test passes by not running: a session with a skipped test fails."""

import gc
import itertools
import os
import sys
import tempfile
from collections.abc import Generator
from importlib.util import find_spec

import pytest
from hypothesis import settings

from tests.hosts import slurm
from tests.support.hosts import reason_not_here

# Tests run side by side, so every process gets one thread. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Only torch 2.14 and later can be installed beside `spmd_types`.
collect_ignore = [] if find_spec("spmd_types") else ["engine/test_annotated_parameters.py"]

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

_forbidden_skips: list[str] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run tests that take long, too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put long tests first for each worker, so that none of them runs alone at the end.

    xdist splits the tests into equal parts, in their order. Exhaustive tests run if asked for.
    """
    if not config.getoption("--exhaustive"):
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
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
    _note(report)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    _note(report)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    if _forbidden_skips and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
    return (yield)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if reason := reason_not_here():
        terminalreporter.write_line(f"tests on several hosts were left out: {reason}")
    elif terminalreporter.config.getoption("--exhaustive") and (reason := slurm.reason_not_here()):
        terminalreporter.write_line(f"tests/hosts/test_slurm.py was left out: {reason}")
    if _forbidden_skips:
        terminalreporter.section("tests that did not run", red=True)
        for line in _forbidden_skips:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            "A skipped test fails the session; leave it uncollected where it cannot run, or add "
            "it and its reason to ALLOWED_SKIP_REASONS in tests/conftest.py."
        )

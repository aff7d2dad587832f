"""No test passes by not running: a session with a skipped test fails."""

import os
from collections.abc import Generator

import pytest

# Tests run side by side, so every process gets one thread. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests that may skip, each for one reason, word for word. No other test skips.
ALLOWED_SKIP_REASONS: dict[str, str] = {
    "tests/test_report_browser.py::test_the_report_opens_in_a_real_browser": (
        "no Chromium on this machine"
    ),
}

_forbidden_skips: list[str] = []


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
    if _forbidden_skips:
        terminalreporter.section("tests that did not run", red=True)
        for line in _forbidden_skips:
            terminalreporter.write_line(line)
        terminalreporter.write_line(
            "A skipped test fails the session; leave it uncollected where it cannot run, or add "
            "it and its reason to ALLOWED_SKIP_REASONS in tests/conftest.py."
        )

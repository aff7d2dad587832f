"""The public names are the documented ones: no more, no fewer."""

import inspect
import re
from pathlib import Path

import pytest

import fullshard
import fullshard.state
import fullshard.trace
import fullshard_train.report

API = Path(__file__).parent.parent / "docs" / "api.md"
# The first cell of a table row: | `name` | what it is |
DOCUMENTED = re.findall(r"^\| `(\w+)` \|", API.read_text(), flags=re.MULTILINE)


def test_the_public_names_are_the_documented_ones():
    assert sorted(fullshard.__all__) == sorted(DOCUMENTED)


def test_no_name_is_documented_twice():
    assert len(DOCUMENTED) == len(set(DOCUMENTED))


@pytest.mark.parametrize("name", DOCUMENTED)
def test_a_public_name_exists_and_says_what_it_is(name):
    found = getattr(fullshard, name)
    docstring = vars(found).get("__doc__") if inspect.isclass(found) else inspect.getdoc(found)
    assert docstring
    # Docstrings that dataclasses generate say nothing.
    assert not docstring.startswith(f"{name}(")


def test_the_names_of_checkpoints_are_the_documented_ones():
    text = (API.parent / "checkpoints.md").read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(fullshard.state.__all__) == sorted(documented)
    assert all(inspect.getdoc(getattr(fullshard.state, name)) for name in documented)


def test_the_names_of_traces_and_reports_are_the_documented_ones():
    text = (API.parent / "tracing.md").read_text()
    traces, reports = (
        re.findall(r"^\| `(\w+)` \|", part, flags=re.MULTILINE)
        for part in text.split("In `fullshard_train.report`:")
    )
    assert sorted(fullshard.trace.__all__) == sorted(traces)
    assert sorted(fullshard_train.report.__all__) == sorted(reports)
    assert all(inspect.getdoc(getattr(fullshard.trace, name)) for name in traces)
    assert all(inspect.getdoc(getattr(fullshard_train.report, name)) for name in reports)

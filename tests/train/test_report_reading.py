"""Reading a report from the folder of a run, whole or not."""

import json
import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fullshard.errors import ConfigError
from fullshard_train.cli import report
from fullshard_train.report import RunRecord, read_record
from fullshard_train.report.page import page_of
from tests.support.made_up_run import Sizes, made_up_run


def write_run(folder: Path, record: RunRecord) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps(asdict(each)) for each in record.metrics]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = {
        "step": record.traced_step,
        "ranks": [each.as_json() for each in record.timelines],
        "units": [asdict(each) for each in record.units],
        "environment": dict(record.environment),
        "memory": dict(record.memory),
    }
    (folder / "timeline.json").write_text(json.dumps(found))
    (folder / "config.toml").write_text('[model]\nname = "10m"\n[run]\nprompt = "def "\n')
    (folder / "sample.txt").write_text(record.sample)


@pytest.fixture
def run_folder(tmp_path) -> Path:
    folder = tmp_path / "my-run"
    write_run(folder, made_up_run(Sizes(12, 2, 3)))
    return folder


def test_a_run_is_read_back_as_it_was(run_folder):
    record = made_up_run(Sizes(12, 2, 3), title="my-run")
    found = read_record(run_folder)
    config = {"model": {"name": "10m"}, "run": {"prompt": "def "}}
    lists = {"metrics": list(record.metrics), "timelines": tuple(record.timelines)}
    assert found == replace(record, config=config, units=tuple(record.units), **lists)


def test_a_torn_line_is_left_out(run_folder):
    path = run_folder / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-40])
    assert [each.step for each in read_record(run_folder).metrics] == list(range(1, 12))


def test_steps_that_were_done_again_count_once(run_folder):
    path = run_folder / "metrics.jsonl"
    again = made_up_run(Sizes(12)).metrics[5]
    with path.open("a") as file:
        file.write('{"step": 13, "lo\n' + json.dumps(asdict(replace(again, loss=7.5))) + "\n")
    found = read_record(run_folder).metrics
    assert [each.step for each in found] == [1, 2, 3, 4, 5, 6]
    assert found[-1].loss == 7.5


def test_numbers_that_are_not_finite_are_read(run_folder):
    step = json.dumps(asdict(made_up_run(Sizes(1)).metrics[0]))
    nothing = re.sub(r'"loss": [^,]+', '"loss": NaN', step)
    null = re.sub(r'"loss": [^,]+', '"loss": null', step).replace('"step": 1', '"step": 2')
    (run_folder / "metrics.jsonl").write_text(f"{nothing}\n{null}\n")
    losses = [each.loss for each in read_record(run_folder).metrics]
    assert [loss != loss for loss in losses] == [True, True]


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.json", "config.toml", "sample.txt"])
def test_any_file_of_a_run_may_be_missing(run_folder, name):
    (run_folder / name).unlink()
    found = read_record(run_folder)
    assert "my-run" in page_of(found)
    assert [bool(each) for each in (found.metrics, found.units, found.config, found.sample)] == [
        each != name for each in ("metrics.jsonl", "timeline.json", "config.toml", "sample.txt")
    ]


@pytest.mark.parametrize(
    "name, said",
    [
        ("metrics.jsonl", "'something' is not a line of metrics"),
        ("timeline.json", "the timeline cannot be read"),
        ("config.toml", "is not valid TOML"),
    ],
)
def test_a_file_of_something_else_is_named(run_folder, name, said):
    (run_folder / name).write_text("something\nelse\n")
    with pytest.raises(ConfigError, match=rf"{name}.* {said}"):
        read_record(run_folder)


def test_a_folder_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match="is not the folder of a run"):
        read_record(tmp_path)


def test_the_command_draws_a_run_again(run_folder, tmp_path):
    done = CliRunner().invoke(report, [str(run_folder)])
    assert done.exit_code == 0, done.output
    assert "<h1>my-run</h1>" in (run_folder / "report.html").read_text()
    other = tmp_path / "elsewhere.html"
    done = CliRunner().invoke(report, [str(run_folder), "--out", str(other)])
    assert done.exit_code == 0, done.output
    assert other.read_text() == (run_folder / "report.html").read_text()


def test_the_command_compares_runs(run_folder, tmp_path, monkeypatch):
    second = tmp_path / "my-other-run"
    write_run(second, made_up_run(Sizes(8, 2, 3)))
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(report, [str(run_folder), str(second)])
    assert done.exit_code == 0, done.output
    assert "<h1>my-run, my-other-run</h1>" in Path("comparison.html").read_text()
    assert not (run_folder / "report.html").exists()

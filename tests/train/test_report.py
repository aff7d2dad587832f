"""The page of a run: what is on it, and what cannot break it."""

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import ConfigError
from fullshard.trace.timeline import Timeline
from fullshard_train.report import RunRecord, StepMetrics, write_report
from fullshard_train.report.curves import MOST_POINTS, curves_of, downsampled, smoothed
from fullshard_train.report.formatting import plain, shown_bytes, shown_number, shown_time
from fullshard_train.report.page import page_of
from fullshard_train.report.palette import KEYS, NUM_SERIES, PALETTES
from fullshard_train.report.record import HostFacts
from fullshard_train.report.step_timeline import (
    MOST_RANKS,
    choices,
    kept_ranks,
    short_labels,
    step_figure,
)
from fullshard_train.report.tables import host_rows, summary, unit_table
from tests.support.made_up_run import MIB, Sizes, made_up_run

NAN, INF = float("nan"), float("inf")
NASTY = (
    "</script><script>alert('x')</script><!-- & \u202e\u2028 \x00\x1b[31m \ud800 日本 🙂 {{ 7*7 }}"
)


class Page(HTMLParser):
    """A page taken apart: its text, its scripts, its tables and what it refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text = ""
        self._inside: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._inside.append(tag)
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("script", "style"):
            self._inside.pop()

    def handle_data(self, data: str) -> None:
        if self._inside:
            self.scripts[-1] += data
        else:
            self.text += data

    @property
    def content(self) -> dict:
        return json.loads(next(each for each in self.scripts if each.startswith("{")))

    def num(self, tag: str) -> int:
        return sum(found == tag for found, _ in self.tags)


@pytest.fixture(scope="module")
def page() -> Page:
    return Page(page_of(made_up_run()))


def empty_run() -> RunRecord:
    return RunRecord("nothing", [], [], None, [], {}, {})


# The page


def test_the_page_has_the_headline_and_every_section(page):
    for heading in ("Training", "Step 60 in detail", "Units", "Sample", "Environment"):
        assert heading in page.text
    for fact in summary(made_up_run()):
        assert fact.value in page.text
    assert "corpus/a.txt, corpus/b.jsonl" in page.text
    assert "cpu, 8 cores" in page.text
    assert "return path.open()" in page.text
    assert any(tag == "u" for tag, _ in page.tags)  # a prompt is told from what follows it
    assert len(page_of(made_up_run(Sizes(steps=200))).encode()) < 150_000


def test_the_page_refers_to_nothing_outside(page):
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        for name in ("src", "srcset", "action", "data", "poster", "background"):
            assert name not in attributes
        assert (attributes.get("href") or "#").startswith("#")
    assert len(page.scripts) == 3  # the style, the content and the script
    for each in page.scripts:
        own = each.replace("http://www.w3.org/2000/svg", "")  # the name of a language
        assert not re.search(r"https?:|@import|url\((?!#)|\bfetch\b|XMLHttpRequest", own)
    policy = next(a["content"] for _, a in page.tags if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")


def test_figures_and_tables_can_be_read_without_eyes(page):
    figures = [attributes for _, attributes in page.tags if attributes.get("role") == "img"]
    assert len(figures) == 8
    assert all(len(each["aria-label"]) > 20 for each in figures)
    headings = [attributes for tag, attributes in page.tags if tag == "th"]
    assert all(each["scope"] in ("col", "row", "rowgroup") for each in headings)
    assert page.num("h1") == 1


def test_every_color_that_is_asked_for_is_in_both_palettes(page):
    style, script = page.scripts[0], page.scripts[-1]
    asked = {*re.findall(r"var\(--([a-z-]+)\)", style + script)}
    assert len(asked) > 8
    asked |= {f"{key}{tone}" for key in KEYS.values() for tone in ("", "-next", "-ink")}
    num_colors = int(re.search(r"NUM_COLORS = (\d+)", script)[1])
    asked |= {f"series-{index}" for index in range(num_colors)}
    for palette in PALETTES.values():
        assert asked <= set(palette)


def rgb(color: str) -> list[float]:
    return [int(color[start : start + 2], 16) / 255 for start in (1, 3, 5)]


def contrast(one: str, other: str) -> float:
    def luminance(color: str) -> float:
        red, green, blue = (
            c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb(color)
        )
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dim, bright = sorted((luminance(one), luminance(other)))
    return (bright + 0.05) / (dim + 0.05)


def test_a_text_on_a_bar_can_be_read():
    for palette in PALETTES.values():
        for key in KEYS.values():
            if key.startswith("await"):
                continue  # has no text
            for tone in (key, f"{key}-next"):
                assert contrast(palette[tone], palette[f"{key}-ink"]) >= 4.5, tone


def test_the_colors_of_ranks_and_runs_are_seen_and_told_apart():
    for palette in PALETTES.values():
        colors = [value for name, value in palette.items() if name.startswith("series-")]
        assert len(colors) == NUM_SERIES
        assert min(contrast(each, palette["card"]) for each in colors) >= 3
        assert min(math.dist(rgb(a), rgb(b)) for a, b in combinations(colors, 2)) > 0.2


def test_names_and_samples_cannot_break_out_of_the_page():
    record = made_up_run(Sizes(3, 1, 3))
    nasty = replace(
        record,
        title=NASTY,
        sample=f"def {NASTY}",
        units=[replace(record.units[0], name=NASTY), *record.units[1:]],
        timelines=[
            replace(each, spans=tuple(replace(span, unit=NASTY) for span in each.spans))
            for each in record.timelines
        ],
        config={NASTY: {NASTY: NASTY}, "run": {"prompt": "def "}},
        environment={NASTY: NASTY},
    )
    page, ordinary = Page(page_of(nasty)), Page(page_of(record))
    assert page.num("script") == ordinary.num("script") == 2
    shown = plain(NASTY)
    assert all(each in shown for each in ("alert('x')", "{{ 7*7 }}", "日本 🙂"))
    # The title of the window and of the page, the unit to choose and in the table, the sample,
    # three times in the configuration, twice in the environment.
    assert page.text.count(shown) == 10
    assert shown in page.content["step"]["units"]


def test_the_page_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "report.html"
    assert write_report(empty_run(), path) == path
    before = path.read_text()

    def torn(self, *args, **options):
        self.touch()
        raise OSError("no space left")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", torn)
        with pytest.raises(OSError, match="no space left"):
            write_report(made_up_run(), path)
    assert path.read_text() == before
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]


def test_without_the_extra_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(
        ConfigError, match=r"without jinja2; run: pip install 'fullshard\[report\]'"
    ):
        page_of(empty_run())


# Runs of every kind


def test_a_run_that_left_nothing_has_a_page():
    page = Page(page_of(empty_run()))
    assert "No step was recorded." in page.text
    assert "No step was traced" in page.text
    assert "No unit was recorded." in page.text
    assert page.content["step"] is None
    assert page.content["curves"] == {}


def test_short_runs_have_a_page():
    one = made_up_run(Sizes(1, 1, 2), sample="class A: ...")
    page = Page(page_of(one))
    assert page_of(one) == page_of(made_up_run(Sizes(1, 1, 2), sample="class A: ..."))
    (run,) = page.content["curves"]["loss"]["runs"]
    assert (run["line"][0], run["mean"]) == ([1], [[], []])
    assert "Step 1 in detail" in page.text
    assert not any(tag == "u" for tag, _ in page.tags)  # no prompt in the sample
    nothing = StepMetrics(1, NAN, NAN, INF, 0, 0.0, NAN, 0)
    assert "NaN" in Page(page_of(replace(one, metrics=[nothing]))).text
    untraced = made_up_run(Sizes(3, 2, 4), timelines=[], traced_step=None)
    table = unit_table(untraced)
    assert table is not None
    assert [cell.value for cell in table.rows[1].cells[-3:]] == [None, None, None]
    assert "No step was traced" in Page(page_of(untraced)).text


def test_a_loss_that_is_not_finite_is_a_gap_and_a_cross():
    metrics = list(made_up_run(Sizes(steps=20)).metrics)
    metrics[7] = replace(metrics[7], loss=NAN)
    metrics[19] = replace(metrics[19], loss=INF, grad_norm=-INF)
    page = Page(page_of(made_up_run(metrics=metrics)))
    (run,) = page.content["curves"]["loss"]["runs"]
    _, losses = run["line"]
    assert (losses[7], losses[19], losses.count(None)) == (None, None, 2)
    assert run["crosses"] == [[8, "NaN"], [20, "∞"]]
    assert "∞" in page.text
    assert "crosses: not finite (2 of 20 steps)" in page.text


def test_hosts_are_drawn_with_what_they_sent_and_what_their_ranks_waited():
    hosts = (HostFacts("a<b", (0, 1), 3 * 2**20, 2**20), HostFacts("host1", (2,), 2**20, 0))
    record = made_up_run(Sizes(ranks=3, units=2), hosts=hosts)
    first, second = host_rows(record)
    step_s = max(each.duration_s for each in record.timelines)
    assert (first.name, first.received) == (
        "a<b",
        f"{shown_bytes(3 * 2**20)}, {shown_bytes(int(3 * 2**20 / step_s))}/s",
    )
    assert second.waits == [(2, pytest.approx(100 * record.timelines[2].exposed_s() / step_s))]
    # Each of two ranks receives half of what they gather and reduce.
    moved = {
        (activity, unit.name): num_bytes
        for unit in record.units
        for activity, num_bytes in (("gather", unit.gather_bytes), ("reduce", 4 * unit.numel))
    }
    spans = [(each.activity.value, each.unit) for each in record.timelines[0].spans]
    inside = shown_bytes(sum(moved.get(each, 0) for each in spans))
    assert first.inside.startswith(f"{inside}, ")
    assert second.inside == ""
    page = page_of(record)
    assert "<b>a&lt;b</b>" in page
    assert f"inside: {inside}, " in page
    assert 'id="hosts"' not in page_of(made_up_run())


def test_validation_restarts_and_memory_by_kind_are_shown():
    record = made_up_run()
    page = Page(page_of(record))
    (run,) = page.content["curves"]["loss"]["runs"]
    assert run["validation"][0] == [20, 40, 60, 80, 100, 120]
    assert run["restarts"] == [71]  # not where it began
    assert "dashed: the run was resumed" in page.text
    best = min(record.metrics[19::20], key=lambda each: each.eval_loss)
    fact = next(each for each in summary(record) if each.name == "Best validation loss")
    perplexity = shown_number(math.exp(best.eval_loss))
    assert fact.value == shown_number(best.eval_loss)
    assert fact.note == f"after step {best.step}; perplexity {perplexity}"
    for name, size in record.memory.items():
        assert re.search(rf"{name} {shown_bytes(size)} {size / 5.85 / MIB:.0f} %", page.text)


def test_the_parts_of_a_step_are_shown_if_there_are_any():
    parts = {"matrix products": 0.06, "attention": 0.03, "waiting for communication": 0.01}
    page = Page(page_of(made_up_run(parts=parts)))
    for name, seconds in parts.items():
        assert f"{name} {shown_time(seconds)} {seconds * 1e3:.0f} %" in page.text
    assert "Time by part" not in Page(page_of(made_up_run())).text


def test_bytes_are_shown_by_wire_if_a_rank_sent_any():
    record = made_up_run()
    page = Page(page_of(record))
    for line in (
        "All-gathers of parameters: 10.5 MiB",
        "Int8(block=256, stochastic=False) 9.00 MiB 86 %",
        "float32 1.50 MiB 14 %",
        "Sums of gradients: 18.0 MiB",
        "float32 18.0 MiB 100 %",
    ):
        assert line in page.text.replace("\N{NARROW NO-BREAK SPACE}", " ")
    alone = [replace(each, sent=()) for each in record.timelines]
    assert "Bytes by wire" not in Page(page_of(replace(record, timelines=alone))).text


def test_mfu_is_shown_or_else_the_rate_or_else_nothing():
    def shown(**changes: float) -> tuple[list[str], list[str]]:
        metrics = [replace(each, **changes) for each in made_up_run().metrics]
        record = made_up_run(metrics=metrics)
        return [each.name for each in summary(record)], [each.key for each in curves_of([record])]

    (facts, keys), (rate_facts, rate_keys) = shown(), shown(mfu=NAN)
    assert (facts[-1], keys[-1]) == ("MFU", "mfu")
    assert (rate_facts[-1], rate_keys[-1]) == ("TFLOP/s per rank", "tflops")
    assert shown(mfu=NAN, tflops=NAN) == (facts[:-1], keys[:-1])
    (unknown,) = (c for c in curves_of([made_up_run(metrics=unmeasured())]) if c.key == "mfu")
    assert unknown.content["runs"][0]["crosses"] == []
    assert unknown.note == "gaps: not measured (1 of 120 steps)"


def unmeasured() -> list[StepMetrics]:
    first, *others = made_up_run().metrics
    return [replace(first, mfu=NAN), *others]


def test_many_steps_are_thinned_but_their_spike_is_seen():
    metrics = list(made_up_run(Sizes(steps=20_000, ranks=1, units=2)).metrics)
    metrics[17_345] = replace(metrics[17_345], loss=99.5)
    metrics[17_349] = replace(metrics[17_349], loss=NAN)
    record = made_up_run(metrics=metrics)
    runs = [run for curve in curves_of([record]) for run in curve.content["runs"]]
    assert max(value for value in runs[0]["line"][1] if value is not None) == 99.5
    assert [step for step, _ in runs[0]["crosses"]] == [17_350]
    for steps, values in [run[line] for run in runs for line in ("line", "mean")]:
        assert len(steps) == len(values) <= MOST_POINTS
    assert len(page_of(record)) < MIB


# Several runs


def other_run(**changes: object) -> RunRecord:
    """Shorter than the other, with a higher loss and another learning rate."""
    record = made_up_run(Sizes(steps=90), title="10m-other", **changes)
    metrics = [replace(each, loss=each.loss + 1) for each in record.metrics]
    config = {**record.config, "optimizer": {**record.config["optimizer"], "lr": 4e-3}}
    return replace(record, metrics=metrics, config=config)


def test_runs_are_compared_on_one_page():
    one, other = made_up_run(), other_run()
    page = Page(page_of(one, [other]))
    assert "Comparison of 2 runs" in page.text
    for curve in page.content["curves"].values():
        assert [run["name"] for run in curve["runs"]] == ["10m-stdlib", "10m-other"]
    losses = [run["line"][1] for run in page.content["curves"]["loss"]["runs"]]
    assert [len(each) for each in losses] == [120, 90]
    for record in (one, other):
        for fact in summary(record):
            assert fact.value in page.text
            assert fact.name in page.text
    settings = page.text.partition("Different settings")[2]
    cells = [line.strip() for line in settings.splitlines() if line.strip()]
    # In the configuration, only the steps and the learning rate differ.
    assert cells == [
        *("Key", "10m-stdlib", "10m-other"),
        *("optimizer.steps", "120", "90"),
        *("optimizer.lr", "0.002", "0.004"),
    ]
    headings = [attributes for tag, attributes in page.tags if tag == "th"]
    assert all(each["scope"] in ("col", "row") for each in headings)


def test_runs_of_every_kind_are_compared():
    same = made_up_run()
    page = Page(page_of(same, [same]))
    assert "10m-stdlib (1), 10m-stdlib (2)" in page.text
    assert "The runs have the same configuration and environment." in page.text
    nasty = replace(made_up_run(), title=NASTY, config={NASTY: {NASTY: NASTY}})
    page = Page(page_of(nasty, [empty_run()]))
    assert page.num("script") == 2
    assert page.text.count(plain(NASTY)) == 8  # twice as title, twice as column, legend, key, value
    assert [len(run["line"][0]) for run in page.content["curves"]["loss"]["runs"]] == [120, 0]


# Its parts


def test_the_opening_choice_shows_the_first_ranks_and_the_slowest():
    timelines = [Timeline(rank, 1.0 + (rank == 11), (), ()) for rank in range(16)]
    found = choices(timelines)
    assert found[0].places == (0, 1, 2, 3, 11)
    assert found[1].places[0] == 11
    assert {place for choice in found[2:] for place in choice.places} == set(range(16))
    assert choices(timelines[:5])[0].places == (0, 1, 2, 3, 4)


def test_of_thousands_of_ranks_the_first_and_the_slowest_are_kept():
    timelines = [Timeline(rank, 1.0 + (rank == 1777), (), ()) for rank in range(4096)]
    kept = [each.rank for each in kept_ranks(timelines)]
    assert {0, 1, 2, 3, 1777} <= set(kept)
    assert len(kept) <= MOST_RANKS
    assert kept == sorted(kept)
    picture = step_figure(replace(empty_run(), timelines=timelines))
    assert picture is not None
    assert "of 4,096 ranks" in picture.left_out
    picture = step_figure(made_up_run(Sizes(steps=5, ranks=64, units=200)))
    assert picture is not None
    assert len(picture.content["ranks"]) == len(picture.singles) == 64
    assert len(picture.groups[0].places) <= 5
    assert len(json.dumps(picture.content)) < 4 * MIB


def test_a_unit_is_labelled_by_the_end_of_its_name_that_no_other_has():
    names = ["", "embed", "encoder.0", "encoder.1", "decoder.0", "decoder.2"]
    labels = ["root", "embed", "encoder.0", "1", "decoder.0", "2"]
    assert short_labels(names) == labels
    assert short_labels(["layer", "a.layer"]) == ["layer", "a.layer"]


def test_the_sums_of_the_table_are_those_of_its_rows():
    record = made_up_run(Sizes(3, 4, 6))
    table = unit_table(record)
    assert table is not None
    for index, column in enumerate(table.columns):
        if column.heading == "Padding %":
            continue
        values = [row.cells[index].value or 0.0 for row in table.rows]
        assert table.total.cells[index].value == pytest.approx(sum(values)), column.heading
    exposed = sum(each.exposed_s() for each in record.timelines) / 4
    assert table.total.cells[-1].value == pytest.approx(exposed)


def test_every_moment_of_the_time_line_reaches_the_page():
    record = made_up_run(Sizes(3, 2, 6))
    picture = step_figure(record)
    assert picture is not None
    for timeline, found in zip(record.timelines, picture.content["ranks"], strict=True):
        for index, activity in enumerate(KEYS):
            asked = sum(s.duration_s for s in timeline.on(activity.track) if s.activity is activity)
            drawn = sum(span[3] for span in found["spans"] if span[0] == index) / 1e6
            assert drawn == pytest.approx(asked, abs=1e-5)


@pytest.mark.parametrize(
    "shown, expected",
    [
        (shown_bytes(0), "0 bytes"),
        (shown_bytes(1536), "1.50 KiB"),
        (shown_bytes(5 * 2**50), "5,120 TiB"),
        (shown_time(0.0812), "81.2 ms"),
        (shown_time(1.2344), "1.23 s"),
        (shown_time(0.0), "0.00 µs"),
        (shown_number(2.14729), "2.1473"),
        (shown_number(1.5e9), "1.5e+09"),
        (shown_number(-INF), "\N{MINUS SIGN}∞"),
    ],
)
def test_numbers_are_short_and_have_their_unit(shown, expected):
    assert shown.replace("\N{NARROW NO-BREAK SPACE}", " ") == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(), max_size=300), st.integers(5, 60))
def test_thinning_keeps_the_ends_and_the_extremes(values, most):
    kept = downsampled(values, most)
    assert len(kept) <= max(most, 5)
    assert kept == sorted(set(kept))
    if values:
        assert (kept[0], kept[-1]) == (0, len(values) - 1)
    finite = [value for value in values if abs(value) < INF]
    left = [values[index] for index in kept if abs(values[index]) < INF]
    if finite:
        assert (min(left), max(left)) == (min(finite), max(finite))
    assert any(not abs(values[index]) < INF for index in kept) == (len(finite) < len(values))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(NAN), max_size=60), st.integers(1, 30))
def test_a_mean_lies_between_what_it_is_the_mean_of(values, window):
    for index, mean in enumerate(smoothed(values, window)):
        near = values[max(0, index - window // 2) : index + window // 2 + 1]
        finite = [value for value in near if value == value]
        if finite:
            assert min(finite) - 1e-6 <= mean <= max(finite) + 1e-6
        else:
            assert mean != mean


@given(st.text(st.characters()))
def test_any_text_can_be_written_and_stays_one_line_if_it_was(text):
    shown = plain(text)
    shown.encode("utf-8")
    assert all(each >= " " or each in "\n\t" for each in shown)
    assert shown.count("\n") == text.count("\n")

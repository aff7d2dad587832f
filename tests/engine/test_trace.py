"""What the engine reports of a step, and what becomes of it."""

import gc
import json
import logging
import threading
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.errors import LifecycleError
from fullshard.facts import unit_facts
from fullshard.testing import Rank, on_ranks
from fullshard.trace import (
    Activity,
    MemorySample,
    SentBytes,
    Span,
    Timeline,
    Track,
    observed,
    record,
    seam,
)
from fullshard.trace.recording import Recording, StepTimes
from fullshard.wire import Int8, Plain
from fullshard.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.outer(self.inner(x).relu())


def sharded(api: str = "fully_shard", width: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), Block(width), Block(width), Block(width))
    if api == "wrapper":
        return FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True
        )
    for block in model[1:]:
        fully_shard(block)
    return fully_shard(model)


def train_step(model: nn.Module, width: int = 16) -> None:
    model(torch.randn(4, width)).sum().backward()
    model.zero_grad()


def recorded(model: nn.Module, rank: int = 0, width: int = 16) -> Timeline:
    train_step(model, width)
    with record("cpu", rank) as recording:
        train_step(model, width)
    return recording.timeline


def doing(timeline: Timeline, activity: Activity) -> list[str]:
    return [span.unit for span in timeline.spans if span.activity is activity]


# Pure


moments = st.integers(0, 50)
spans = st.lists(
    st.builds(
        lambda activity, unit, start, length: Span(activity, unit, start, start + length),
        st.sampled_from([Activity.FORWARD, Activity.BACKWARD, Activity.AWAIT_GATHER]),
        st.sampled_from(["a", "b", "c"]),
        moments,
        st.integers(1, 20),
    ),
    max_size=12,
)


def covered(some: Iterator[Span] | list[Span] | tuple[Span, ...]) -> set[int]:
    return {moment for span in some for moment in range(int(span.start_s), int(span.end_s))}


@given(spans)
def test_a_track_shows_one_span_at_a_time_and_leaves_no_moment_out(some):
    timeline = Timeline(0, 100.0, tuple(some), ())
    shown = timeline.on(Track.COMPUTE)
    assert covered(shown) == covered(some)
    assert sum(int(span.duration_s) for span in shown) == len(covered(some))
    assert all(a.end_s <= b.start_s for a, b in pairwise(shown))


@given(spans)
def test_what_ends_first_is_what_a_rank_does(some):
    timeline = Timeline(0, 100.0, tuple(some), ())
    for span in timeline.on(Track.COMPUTE):
        middle = span.start_s + 0.5
        under_way = [each for each in some if each.start_s <= middle < each.end_s]
        first_end = min(each.end_s for each in under_way)
        ending = {(each.activity, each.unit) for each in under_way if each.end_s == first_end}
        assert (span.activity, span.unit) in ending


def test_exposed_time_is_what_compute_stands_still_for():
    timeline = Timeline(
        0,
        10.0,
        (
            Span(Activity.FORWARD, "root", 0.0, 8.0),
            Span(Activity.AWAIT_GATHER, "a", 1.0, 2.0),
            Span(Activity.GATHER, "a", 0.0, 2.0),
            Span(Activity.AWAIT_REDUCE, "b", 8.0, 8.5),
            Span(Activity.REDUCE, "b", 3.0, 8.5),
        ),
        (),
    )
    assert timeline.exposed_s() == 1.5
    assert timeline.exposed_s("a") == 1.0
    assert timeline.exposed_s("root") == 0.0


@given(spans, st.integers(0, 7))
def test_a_timeline_comes_back_from_json_as_it_was(some, rank):
    memory, sent = (MemorySample(0.5, 10, 20),), (SentBytes(Activity.REDUCE, "float32", 8),)
    timeline = Timeline(rank, 3.0, tuple(some), memory, sent)
    assert Timeline.from_json(json.loads(json.dumps(timeline.as_json()))) == timeline


# On ranks


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@on_ranks(2)
def test_a_step_tells_of_every_gather_compute_and_reduce(rank: Rank, api: str) -> None:
    model = sharded(api)
    timeline = recorded(model, rank.rank)
    units = {facts.name for facts in unit_facts(model)}
    assert len(units) == 4
    assert timeline.rank == rank.rank
    for activity in (Activity.FORWARD, Activity.BACKWARD, Activity.REDUCE, Activity.GATHER):
        assert set(doing(timeline, activity)) == units, activity
    assert sorted(doing(timeline, Activity.REDUCE)) == sorted(units)  # once each
    assert all(0 <= span.start_s <= span.end_s <= timeline.duration_s for span in timeline.spans)


@on_ranks(2)
def test_a_unit_is_gathered_then_awaited_then_computed(rank: Rank) -> None:
    timeline = recorded(sharded())
    for unit in {span.unit for span in timeline.spans}:
        of_unit = [span for span in timeline.spans if span.unit == unit]
        first = {
            activity: min(
                (span for span in of_unit if span.activity is activity), key=lambda s: s.start_s
            )
            for activity in (Activity.GATHER, Activity.AWAIT_GATHER, Activity.FORWARD)
        }
        assert first[Activity.GATHER].start_s <= first[Activity.AWAIT_GATHER].start_s
        assert first[Activity.AWAIT_GATHER].end_s <= first[Activity.FORWARD].start_s


@on_ranks(2)
def test_the_next_gather_is_under_way_while_a_unit_computes(rank: Rank) -> None:
    timeline = recorded(sharded())
    computing = {s.unit: s for s in timeline.spans if s.activity is Activity.FORWARD}
    gathers = sorted(
        (span for span in timeline.spans if span.activity is Activity.GATHER),
        key=lambda span: span.start_s,
    )
    first_of_third = next(span for span in gathers if span.unit == "3")
    assert first_of_third.start_s < computing["2"].end_s


@on_ranks(2)
def test_full_parameters_are_held_only_while_they_are_needed(rank: Rank) -> None:
    model = sharded()
    timeline = recorded(model)
    held = [sample.full_bytes for sample in timeline.memory]
    sizes = sorted(facts.num_bytes for facts in unit_facts(model))
    assert held[-1] == 0
    assert max(held) > sizes[-1]
    # Two blocks and the root, each with its alignment; not all of them.
    assert max(held) < sizes[-1] + sizes[-2] + sizes[0] + 4096
    assert all(sample.allocated_bytes > 0 for sample in timeline.memory)


@on_ranks(2)
def test_an_observer_that_fails_is_dropped_and_the_step_goes_on(rank: Rank) -> None:
    class Failing:
        num_calls = 0

        def begin(self, activity: Activity, unit: str) -> None:
            self.num_calls += 1
            raise ValueError("no")

        end = begin

        def hold(self, unit: str, num_bytes: int) -> None: ...

    model, failing = sharded(), Failing()
    logging.disable(logging.CRITICAL)
    try:
        with observed(failing), record("cpu") as recording:
            train_step(model)
    finally:
        logging.disable(logging.NOTSET)
    assert failing.num_calls == 1
    assert set(doing(recording.timeline, Activity.REDUCE)) == {
        facts.name for facts in unit_facts(model)
    }


@on_ranks(2)
def test_nobody_is_told_anything_after_the_scope(rank: Rank) -> None:
    model = sharded()
    timeline = recorded(model)
    num_spans = len(timeline.spans)
    train_step(model)
    assert seam.observers == ()
    assert len(timeline.spans) == num_spans


@on_ranks(2)
def test_an_exception_in_forward_ends_the_recording_and_the_next_step_is_told_whole(
    rank: Rank,
) -> None:
    model = sharded()
    train_step(model)

    def fail(*_: object) -> None:
        raise RuntimeError("on purpose")

    hook = model[2].inner.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"), record("cpu"):
        train_step(model)
    hook.remove()
    assert seam.observers == ()
    assert len(doing(recorded(model), Activity.REDUCE)) == 4


@on_ranks(2)
def test_a_step_tells_how_many_bytes_travel_in_each_wire(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(gather_wire=Int8(), reduce_wire=Plain(torch.bfloat16))
    timeline = recorded(fully_shard(nn.Linear(64, 64), mp_policy=policy), width=64)
    shard, bias = 64 * 32, 32
    assert set(timeline.sent) == {
        SentBytes(Activity.GATHER, str(Int8()), Int8().message_numel(shard)),
        SentBytes(Activity.GATHER, "float32", 4 * bias),
        SentBytes(Activity.REDUCE, "bfloat16", 2 * (shard + bias)),
    }


def test_a_recording_that_goes_on_has_no_timeline_yet():
    with record("cpu") as recording, pytest.raises(LifecycleError, match="is still going on"):
        _ = recording.timeline


def test_a_garbage_collection_may_report_to_a_recording_that_is_noting_something(monkeypatch):
    recording = Recording(torch.device("cpu"))
    clock = recording._clock
    monkeypatch.setattr(clock, "allocated_bytes", lambda: gc.collect() and 0)

    class Finalized:
        """Reports when it is collected, as units do that are freed."""

        def __init__(self) -> None:
            self.cycle = self

        def __del__(self) -> None:
            recording.hold("finalized", 0)

    def work() -> None:
        Finalized()
        recording.begin(Activity.FORWARD, "a")
        recording.end(Activity.FORWARD, "a")

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    recording.finish()
    assert doing(recording.timeline, Activity.FORWARD) == ["a"]


def test_only_observers_that_want_it_are_told_of_the_end_of_a_collective(monkeypatch):
    collected = []
    collect_all = torch.futures.collect_all
    monkeypatch.setattr(
        torch.futures, "collect_all", lambda f: collected.append(f) or collect_all(f)
    )
    future: torch.futures.Future[None] = torch.futures.Future()
    with observed(StepTimes()):
        seam.end_after([future], Activity.GATHER, "a")
        assert collected == []  # no callback that runs Python on the thread of a process group
        with record("cpu") as recording:
            seam.begin(Activity.GATHER, "a")
            seam.end_after([future], Activity.GATHER, "a")
            assert len(collected) == 1
            future.set_result(None)
            seam.end_after([], Activity.GATHER, "a")
    assert doing(recording.timeline, Activity.GATHER) == ["a"]


def test_step_times_have_the_waits_of_each_step_alone():
    times = StepTimes()
    with observed(times):
        with seam.doing(Activity.AWAIT_GATHER, "a"):
            pass
        with seam.doing(Activity.FORWARD, "a"):
            pass
    waited, other = times.end_step(), times.end_step()
    assert 0 < waited.exposed_s < waited.duration_s
    assert other.exposed_s == 0 < other.duration_s


@on_ranks(2)
def test_the_facts_of_units_add_up_to_the_model(rank: Rank) -> None:
    numel = sum(param.numel() for param in nn.Sequential(nn.Linear(7, 7), Block(7)).parameters())
    model = nn.Sequential(nn.Linear(7, 7), Block(7))
    fully_shard(model[1])
    fully_shard(model)
    facts = unit_facts(model)
    assert sum(each.numel for each in facts) == numel
    assert sum(each.num_bytes for each in facts) == 4 * numel
    assert all(each.gather_bytes == each.num_bytes + each.padding_bytes for each in facts)
    assert all(each.padding_bytes > 0 for each in facts)  # 7 rows do not split evenly

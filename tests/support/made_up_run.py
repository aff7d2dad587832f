"""An invented run: metrics and time lines of any size, the same at every call."""

import math
import random
from dataclasses import dataclass

from fullshard.trace.seam import Activity
from fullshard.trace.timeline import MemorySample, SentBytes, Span, Timeline, UnitFacts
from fullshard_train.report.record import RunRecord, StepMetrics

MIB = 2**20


@dataclass(frozen=True)
class Sizes:
    steps: int = 120
    ranks: int = 2
    units: int = 8


def made_up_run(sizes: Sizes = Sizes(), **changes: object) -> RunRecord:  # noqa: B008
    names = ["", *(f"layers.{index}" for index in range(sizes.units - 1))]
    content = {
        "title": "10m-stdlib",
        "metrics": [_step(step, sizes.steps) for step in range(1, sizes.steps + 1)],
        "timelines": [_timeline(rank, names) for rank in range(sizes.ranks)],
        "traced_step": max(1, sizes.steps // 2),
        "units": [_unit(name) for name in names],
        "config": {
            "model": {"name": "10m", "sequence": 256, "lora_targets": ()},
            "data": {"paths": ("corpus/a.txt", "corpus/b.jsonl"), "tokenizer": "bytes"},
            "sharding": {"api": "fully_shard", "strategy": "full", "offload": False},
            "optimizer": {"steps": sizes.steps, "lr": 2e-3, "warmup": 10},
            "run": {"out": "runs/10m-stdlib", "seed": 0, "report": True, "prompt": "def "},
        },
        "environment": {"fullshard": "0.1.0", "torch": "2.13.0", "device": "cpu, 8 cores"},
        "memory": {
            "parameters": 36 * MIB,
            "gradients": 36 * MIB,
            "optimizer state": 72 * MIB,
            "activations": 431 * MIB,
            "full parameters": 10 * MIB,
        },
        "sample": 'def read(path):\n    """Return the text of a file."""\n    return path.open()\n',
    }
    return RunRecord(**{**content, **changes})


def _step(step: int, num_steps: int) -> StepMetrics:
    noise = random.Random(step)
    part = step / num_steps
    lr = 2e-3 * min(1.0, step / 10) * (0.55 + 0.45 * math.cos(math.pi * part))
    loss = 1.4 + 4.1 * math.exp(-6 * part) + noise.gauss(0, 0.05)
    step_s = abs(noise.gauss(0.21, 0.008)) + (0.3 if step == 1 else 0.0)
    exposed_s = abs(noise.gauss(0.012, 0.002))
    norm = 0.6 + 2 * math.exp(-8 * part) + abs(noise.gauss(0, 0.1))
    memory = 612 * MIB + step * 1024
    return StepMetrics(
        *(step, loss, lr, norm, 4096, step_s, exposed_s, memory),
        tflops=84 / step_s,
        mfu=0.09 / step_s,
        eval_loss=loss + 0.2 + part if step % 20 == 0 else math.nan,
        is_restart=step in (1, 71),
    )


def _unit(name: str) -> UnitFacts:
    numel = 1_262_208 if name else 197_760
    padding = 0 if name else 96
    return UnitFacts(name, 9 if name else 3, numel, numel * 4, padding, 3, numel * 4 + padding)


def _timeline(rank: int, names: list[str]) -> Timeline:
    """Gathers run one unit ahead of compute, reduces one behind."""
    noise = random.Random(rank)
    clock = _Clock(noise, 1.0 + 0.03 * (rank * 7 % 5))
    spans: list[Span] = []
    memory = [MemorySample(0.0, 0, 540 * MIB)]
    gather_free = reduce_free = 0.0
    for backward in (False, True):
        order = names[::-1] if backward else names
        for name in order:
            gather_end = max(gather_free, clock.now - 0.004) + clock.time(0.005)
            gather_start = max(gather_free, gather_end - 0.005)
            spans.append(Span(Activity.GATHER, name, gather_start, gather_end))
            gather_free = gather_end
            if gather_end > clock.now:
                spans.append(Span(Activity.AWAIT_GATHER, name, clock.now, gather_end))
                clock.now = gather_end
            memory.append(MemorySample(clock.now, 10 * MIB, int((570 + len(memory)) * MIB)))
            start = clock.now
            clock.now += clock.time(0.013 if backward else 0.006)
            activity = Activity.BACKWARD if backward else Activity.FORWARD
            spans.append(Span(activity, name, start, clock.now))
            memory.append(MemorySample(clock.now, 5 * MIB, int((560 + len(memory)) * MIB)))
            if backward:
                reduce_free = max(reduce_free, clock.now)
                spans.append(
                    Span(Activity.REDUCE, name, reduce_free, reduce_free + clock.time(0.009))
                )
                reduce_free = spans[-1].end_s
    if reduce_free > clock.now:
        spans.append(Span(Activity.AWAIT_REDUCE, names[0], clock.now, reduce_free))
        clock.now = reduce_free
    spans.append(Span(Activity.OPTIMIZER, names[0], clock.now, clock.now + clock.time(0.006)))
    clock.now = spans[-1].end_s
    memory.append(MemorySample(clock.now, 0, 545 * MIB))
    sent = (
        SentBytes(Activity.GATHER, "Int8(block=256, stochastic=False)", 9 * MIB),
        SentBytes(Activity.GATHER, "float32", (1 + rank) * MIB),
        SentBytes(Activity.REDUCE, "float32", 18 * MIB),
    )
    return Timeline(rank, clock.now, tuple(spans), tuple(memory), sent)


@dataclass
class _Clock:
    noise: random.Random
    slowness: float
    now: float = 0.0

    def time(self, seconds: float) -> float:
        return seconds * self.slowness * self.noise.uniform(0.85, 1.15)

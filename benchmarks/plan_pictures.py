"""Draws the pictures of docs/planning.md: memory over a step, and curves over the size of worlds.

python benchmarks/plan_pictures.py
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import log10
from pathlib import Path

from fullshard.plan import Kind, Machine, StepPlan, profile_named
from fullshard_train.config import ModelSection, OptimizerSection, ShardingSection, TrainConfig
from fullshard_train.planning import _estimated, plan_run
from fullshard_train.sharding import architecture_for

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
WIDTH, HEIGHT, LEFT, BOTTOM = 760, 330, 60, 40
COLORS = (
    "0072b2",
    "d55e00",
    "009e73",
    "c0609a",
    "a08f00",
    "3a9ad9",
    "6a3fa8",
    "3d434d",
    "999999",
    "e69f00",
)
WORLDS = (8, 64, 512, 4096, 16_384)
GIB = 1 << 30


def config_of(model: str) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(name=model, sequence=8192),
        sharding=ShardingSection(activation_checkpointing=True),
        optimizer=OptimizerSection(batch=1),
    )


def svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'font-family="sans-serif" font-size="12"><title>{escape(title)}</title>'
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="#333">{escape(words)}</text>'
    )


def memory_picture(plan: StepPlan, title: str) -> str:
    """Kinds of memory, stacked, over the time of the step."""
    right, top = WIDTH - 150, 30
    highest, end_s = 1.05 * plan.peak_bytes, plan.step_s

    def x(at_s: float) -> float:
        return LEFT + (right - LEFT) * at_s / end_s

    def y(size: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - top) * size / highest

    # The maximum of every interval of time.
    samples: dict[int, dict[Kind, int]] = {}
    for at_s, held in plan.memory:
        place = int(400 * at_s / end_s)
        if place not in samples or sum(held.values()) > sum(samples[place].values()):
            samples[place] = dict(held)
    times = sorted(samples)
    kinds = [kind for kind in Kind if any(samples[each][kind] for each in times)]
    below = dict.fromkeys(times, 0)
    parts = [text(LEFT, 18, title)]
    for number, kind in enumerate(kinds):
        above = {each: below[each] + samples[each][kind] for each in times}
        line = [f"{x(each * end_s / 400):.1f},{y(above[each]):.1f}" for each in times]
        line += [f"{x(each * end_s / 400):.1f},{y(below[each]):.1f}" for each in reversed(times)]
        parts.append(f'<polygon points="{" ".join(line)}" fill="#{COLORS[number]}"/>')
        row = top + 12 + 18 * (len(kinds) - number)
        box = f'<rect x="{right + 12}" y="{row - 9}" width="10" height="10"'
        parts += [f'{box} fill="#{COLORS[number]}"/>', text(right + 28, row, kind.value)]
        below = above
    step = 20 if highest > 40 * GIB else 5
    for size in range(0, int(highest / GIB) + 1, step):
        parts.append(text(LEFT - 6, y(size * GIB) + 4, f"{size} GiB", "end"))
    for share in (0, 0.25, 0.5, 0.75, 1):
        words = f"{1e3 * share * end_s:.0f} ms"
        parts.append(text(x(share * end_s), HEIGHT - BOTTOM + 18, words, "middle"))
    return svg(parts, title)


def worlds_picture() -> str:
    """Memory of a rank and time of a step, by the number of ranks."""
    parts, half = [], WIDTH // 2
    curves: dict[str, list[tuple[int, float, float]]] = {}
    for model in ("8b", "70b", "405b"):
        config = config_of(model)
        for ranks in WORLDS:
            machine = Machine(profile=profile_named("H100"), num_hosts=ranks // 8)
            found = _estimated(config, architecture_for(config.model), machine)
            curves.setdefault(model, []).append((ranks, found.peak_bytes / GIB, found.step_s))
            print(model, curves[model][-1], flush=True)
    for place, (title, unit) in enumerate((("memory of a rank", "GiB"), ("time of a step", "s"))):
        left, right = LEFT + place * half, half * (place + 1) - 20
        values = [point[place + 1] for points in curves.values() for point in points]
        low, high = log10(min(values) * 0.8), log10(max(values) * 1.2)

        def at(ranks: int, value: float, left=left, right=right, low=low, high=high) -> str:
            x = left + (right - left) * (log10(ranks) - log10(8)) / (log10(16_384) - log10(8))
            y = HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 40) * (log10(value) - low) / (high - low)
            return f"{x:.1f},{y:.1f}"

        parts.append(text(left, 18, f"{title}, {unit}"))
        for number, (model, points) in enumerate(curves.items()):
            line = " ".join(at(point[0], point[place + 1]) for point in points)
            color = f"#{COLORS[number]}"
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>'
            )
            for index, point in enumerate(points):
                x, y = map(float, at(point[0], point[place + 1]).split(","))
                parts.append(f'<circle cx="{x}" cy="{y}" r="3" fill="{color}"/>')
                if index in (0, len(points) - 1):
                    anchor = "start" if index == 0 else "end"
                    name = f"{model.upper()}: " if index == 0 else ""
                    value = point[place + 1]
                    shown = f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
                    parts.append(text(x, y - 8, f"{name}{shown}", anchor))
        for ranks in WORLDS:
            x = float(at(ranks, values[0]).split(",")[0])
            parts.append(text(x, HEIGHT - BOTTOM + 18, f"{ranks:,}", "middle"))
    return svg(parts, "Memory of a rank and time of a step of 8B, 70B and 405B, by ranks")


def main() -> None:
    for model, ranks in (("8b", 8), ("70b", 64), ("405b", 512)):
        config, machine = (
            config_of(model),
            Machine(profile=profile_named("H100"), num_hosts=ranks // 8),
        )
        found = plan_run(config, architecture_for(config.model), machine)
        title = f"{model.upper()} on {ranks} H100, one sequence of 8,192 tokens on each, recomputed"
        (IMAGES / f"plan_{model}.svg").write_text(memory_picture(found, title))
        print(title, found, sep="\n", flush=True)
    (IMAGES / "plan_worlds.svg").write_text(worlds_picture())


if __name__ == "__main__":
    main()

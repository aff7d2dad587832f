"""`fullshard plan`: what a run will need and how long its steps will take, before there is one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fullshard.console import progress, say, say_table
from fullshard.errors import ConfigError
from fullshard.formatting import readable
from fullshard_train.cli.train import KeyCommand, given_options
from fullshard_train.config import KEYS, validate
from fullshard_train.config_file import config_of

if TYPE_CHECKING:
    from fullshard.plan import Machine, StepPlan
    from fullshard_train.config import TrainConfig
    from fullshard_train.planning import Candidate

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40, "GB": 10**9}
_MOST_OTHERS = 8


class _PlanCommand(KeyCommand):
    keys = tuple(
        key
        for key in KEYS.values()
        if key.section in ("model", "sharding")
        or (key.section == "optimizer" and key.name in ("name", "batch", "accumulate"))
    )


@click.command(cls=_PlanCommand, short_help="Say what a run will need, without a GPU.")
@click.option("--gpus", default="8xH100", show_default=True, help="The GPUs of a machine, NxNAME.")
@click.option("--nodes", default=1, show_default=True, type=click.IntRange(1), help="Machines.")
@click.option(
    "--fabric",
    help="Speed of the network between machines for each GPU, as in 400Gb; by default that of the "
    "device profile, or 400Gb.",
)
@click.option(
    "--budget", help="Choose the fastest settings that fit into this memory of a GPU, as in 70GiB."
)
@click.option(
    "--device-profile",
    "profile",
    type=click.Path(path_type=Path),
    help="A profile that `fullshard doctor --profile FILE` wrote, instead of the GPU's name.",
)
@click.option(
    "--html", type=click.Path(path_type=Path), help="Draw the step as a report, in this file."
)
@click.pass_context
def plan(
    ctx: click.Context,
    /,
    gpus: str,
    nodes: int,
    fabric: str | None,
    budget: str | None,
    profile: Path | None,
    html: Path | None,
    **_: Any,
) -> None:
    """Simulate a step of `fullshard train`: memory of a rank by kind, communication and time.

    --model may also be module:function, a function that builds a model. Nothing is allocated, and
    no GPU is needed.
    """
    given = given_options(ctx)
    config = config_of(None, given)
    validate(config)
    # Imported here, because printing help does not need it.
    from fullshard_train.planning import choose_settings, plan_run, planned_architecture

    machine, architecture = machine_of(gpus, nodes, fabric, profile), planned_architecture(config)
    if budget is not None:
        limit = bytes_of(budget)
        # --batch and --accumulate set the sequences of a step, which may be divided otherwise.
        kept = [place for place in given if place[0] != "optimizer"]
        with progress("simulating settings") as report:
            candidates = choose_settings(config, architecture, machine, limit, kept, report)
        _say_choice(candidates, limit)
        config = candidates[0].config
    found = plan_run(config, architecture, machine)
    for line in repr(found).splitlines():
        say(line)
    if html is not None:
        _draw(found, config, html)


def machine_of(gpus: str, nodes: int, fabric: str | None, profile: Path | None) -> Machine:
    from fullshard.plan import Machine, profile_named, read_profile

    match = re.fullmatch(r"([1-9]\d{0,4})x(.+)", gpus)
    if match is None:
        raise ConfigError(f"--gpus: write a number and a name, as in 8xH100, not {gpus!r}.")
    known = profile_named(match[2]) if profile is None else read_profile(profile)
    if fabric is not None:
        speed = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:Gb(?:/s|ps)?)?", fabric)
        if speed is None or not float(speed[1]):
            raise ConfigError(f"--fabric: write Gb/s, as in 400Gb, not {fabric!r}.")
        known = replace(known, network_gbs=float(speed[1]) / 8, adapters_per_host=0)
    return Machine(profile=known, ranks_per_host=int(match[1]), num_hosts=nodes)


def bytes_of(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]iB|GB|)", text)
    if match is None:
        raise ConfigError(f"--budget: write a size, as in 70GiB, not {text!r}.")
    return int(float(match[1]) * _UNITS[match[2]])


def _say_choice(candidates: list[Candidate], limit: int) -> None:
    best, *others = candidates
    say(f"the fastest of {len(candidates)} settings that need {readable(limit)} or less:")
    say(f"  fullshard train {best.flags}")
    say(f"  {best.python}")
    if others:
        say("")
        rows = [
            (each.flags, readable(each.peak_bytes), f"{each.step_s * 1e3:,.0f} ms", each.verdict)
            for each in others[:_MOST_OTHERS]
        ]
        say_table(("others", "memory", "step", "why not"), rows)
    say("")


def _draw(found: StepPlan, config: TrainConfig, path: Path) -> None:
    from dataclasses import asdict

    from fullshard.plan import Kind
    from fullshard_train.report import RunRecord, write_report

    settings = asdict(config)
    shown = {name: settings[name] for name in ("model", "sharding")}
    profile = found.machine.profile
    record = RunRecord(
        title=f"Plan of {config.model.name}",
        metrics=(),
        timelines=(found.timeline,),
        traced_step=None,
        units=(),
        config=shown,
        environment={"device": profile.name, "ranks": f"{found.machine.num_ranks:,}"},
        memory={kind.value: found.peak.kinds.get(kind, 0) for kind in Kind},
        predicted={"step_s": found.step_s, "peak_bytes": found.peak_bytes},
        held=[(at_s, {k.value: size for k, size in held.items()}) for at_s, held in found.memory],
    )
    written = write_report(record, path)
    say(f"{written}: {readable(written.stat().st_size)}")

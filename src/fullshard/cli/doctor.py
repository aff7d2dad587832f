"""`fullshard doctor`: facts, speeds and problems of a machine."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fullshard import __version__
from fullshard.console import say, say_facts, say_table
from fullshard.errors import ConfigError, TopologyError
from fullshard.formatting import counted, listed, readable

if TYPE_CHECKING:
    from fullshard.doctor.bandwidth import Speeds
    from fullshard.doctor.findings import Finding
    from fullshard.doctor.machine import MachineFacts
    from fullshard.plan import DeviceProfile

# Places are written every second; older ones are of a run that nobody watches any more.
_OLD_S = 60


@click.command(short_help="Show facts, speeds and problems of this machine.")
@click.option("--quick", is_flag=True, help="Do not measure speeds.")
@click.option(
    "--profile",
    "--measure",
    is_flag=False,
    flag_value=Path("-"),
    type=click.Path(path_type=Path),
    help="Write the speeds as a device profile for `fullshard plan --device-profile`; without a "
    "file, print it.",
)
@click.option(
    "--attach",
    metavar="RUN",
    help="Only show where the ranks of a run are: its folder, or its FULLSHARD_WATCH_FILE.",
)
def doctor(quick: bool, profile: Path | None, attach: str | None) -> None:
    """Show the devices and limits of this machine, measure its speed and list its problems.

    Speeds are measured on real ranks, one per GPU or two on the CPU, which takes a few seconds.
    Under torchrun, the ranks that it has started measure: those of each host, and between hosts.

    Exit status: 0 no serious problem, 1 runs will fail, or may at any time.
    """
    if attach is not None:
        _say_places(Path(attach))
        return
    # Imported here, because printing help does not need it.
    from fullshard.doctor.findings import Finding, findings
    from fullshard.doctor.machine import gather_facts

    facts = gather_facts()
    found = findings(facts)
    if not quick and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _look_at_launch(facts, found, profile)
        return
    say_facts(_lines(facts))
    if not quick:
        from fullshard.doctor.bandwidth import measure_speeds
        from fullshard.doctor.profile import measured_profile

        say("")
        try:
            speeds = measure_speeds(len(facts.gpus))
            _say_speeds(speeds)
            if profile is not None:
                _write_profile(measured_profile(facts, speeds), profile)
        except TopologyError as error:
            say(f"no speeds: {error}")
            remedy = "see the other problems; GLOO_SOCKET_IFNAME=lo keeps gloo on this host"
            found.insert(0, Finding(f"ranks do not work: {error}", remedy, is_serious=True))
    say("")
    _end_with(found)


def _end_with(found: Sequence[Finding]) -> None:
    _say_findings(found)
    if any(finding.is_serious for finding in found):
        raise click.exceptions.Exit(1)


def _look_at_launch(facts: MachineFacts, own: Sequence[Finding], profile: Path | None) -> None:
    """Look at all hosts of a launch; its first rank prints."""
    import torch
    import torch.distributed as dist

    from fullshard.doctor.network import measure_launch
    from fullshard.doctor.profile import measured_profile
    from fullshard.ranks import init_process_group

    device = torch.device("cpu")
    if facts.gpus:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    init_process_group("cpu:gloo,cuda:nccl" if facts.gpus else "gloo")
    found, is_first = measure_launch(device, own), dist.get_rank() == 0
    dist.destroy_process_group()
    if not is_first:
        return
    say_facts(_lines(facts))
    say("")
    rows = [(host.name, listed(map(str, host.ranks)), host.interface) for host in found.hosts]
    say_table(("host", "ranks", "interface"), rows)
    _say_speeds(found.speeds)
    network = found.network
    if network is not None:
        is_shared = network.adapters_per_host < network.ranks_per_host
        adapters = counted(network.adapters_per_host, "adapter")
        say(
            f"between hosts: {network.host_gbs:.3g} GB/s into each, {network.rank_gbs:.3g} into "
            f"one rank alone ({f'ranks share {adapters}' if is_shared else 'an adapter each'}), "
            f"{network.latency_s * 1e3:.2f} ms for the smallest message"
        )
    if profile is not None:
        made = measured_profile(facts, found.speeds)
        _write_profile(made if network is None else network.of_profile(made), profile)
    say("")
    by_problem: dict[Finding, list[str]] = {}
    for host in found.hosts:
        for each in host.findings:
            by_problem.setdefault(each, []).append(host.name)
    merged = [
        replace(each, what=f"{listed(hosts)}: {each.what}") for each, hosts in by_problem.items()
    ]
    _end_with(sorted(merged, key=lambda each: not each.is_serious))


def _say_places(place: Path) -> None:
    from fullshard.resilience.places import read_places, table

    path = place if place.is_file() else place / "places.json"
    if not path.exists():
        raise ConfigError(
            f"--attach: {place} has no {path.name}, which runs on several ranks write; pass what "
            "the run has as --out, or the file of FULLSHARD_WATCH_FILE."
        )
    places, age_s = read_places(path)
    has_ended = "; the run has probably ended since" if age_s > _OLD_S else ""
    say(f"where its ranks were {age_s:.0f} s ago{has_ended}:")
    for line in table(places).splitlines():
        say(line)
    metrics = place / "metrics.jsonl"
    last = metrics.read_text().splitlines()[-1:] if metrics.is_file() else []
    slowest = json.loads(last[0]) if last and last[0].endswith("}") else {}
    if slowest.get("slowest"):
        waits = f"{slowest['slowest_s']:.2f} s of the last step's {slowest['step_s']:.2f} s"
        say(f"the others wait {waits} for {slowest['slowest']}")


def _lines(facts: MachineFacts) -> Iterator[tuple[str, str]]:
    software, limits, network = facts.software, facts.limits, facts.network
    yield "fullshard", __version__
    yield "python", software.python
    yield "torch", software.torch
    yield "CUDA", software.cuda or "none"
    yield "driver", software.driver or "none"
    yield "NCCL", software.nccl or "none"
    yield "backends", ", ".join(software.backends)
    for index, gpu in enumerate(facts.gpus):
        free, total = readable(gpu.free_bytes), readable(gpu.memory_bytes)
        capability = ".".join(map(str, gpu.capability))
        yield f"GPU {index}", f"{gpu.name}, {free} of {total} free, capability {capability}"
    if len(facts.gpus) > 1:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.without_peer_access)
        yield "peer access", f"all but {pairs}" if pairs else "all"
    if not facts.gpus:
        yield "GPUs", "none"
    cores = f"{facts.processor}, {counted(facts.num_cores, 'core')}"
    yield "processor", f"{cores}, {counted(facts.num_threads, 'thread')} in torch"
    yield "OMP_NUM_THREADS", facts.variables.get("OMP_NUM_THREADS", "not set")
    if limits.cores is not None:
        yield "cores allowed", f"{limits.cores:g}"
    free, total = readable(facts.free_memory_bytes), readable(facts.memory_bytes)
    yield "memory", f"{free} of {total} free"
    if limits.memory_bytes is not None:
        yield "memory allowed", readable(limits.memory_bytes)
    yield "/dev/shm", readable(facts.shared_memory_bytes)
    yield "disk", f"{readable(facts.free_disk_bytes)} free in this folder"
    yield "host", f"{network.hostname}, {network.address or 'no address'}"
    yield "interfaces", ", ".join(network.interfaces)
    yield "open files", _limit(limits.files, str)
    yield "locked memory", _limit(limits.locked_bytes, readable)
    have = (f"{name} {version}" for name, version in software.packages.items() if version)
    yield "packages", ", ".join(have)
    yield from ((name, value) for name, value in facts.variables.items() if name[:4] != "OMP_")


def _limit(value: int | None, words: Callable[[int], str]) -> str:
    return "unlimited" if value is None else words(value)


def _say_speeds(speeds: Speeds) -> None:
    if speeds.links:
        say(f"{counted(speeds.num_ranks, 'rank')} over {speeds.backend}, GB/s received by each:")
        columns = ("size", "all-gather", "reduce-scatter")
        rows = [(f"{s.size_mb} MB", f"{s.gather:.2f}", f"{s.reduce:.2f}") for s in speeds.links]
        say_table(columns, rows)
    per_s = (
        f"{speeds.matmul * 1000:.0f} GFLOP" if speeds.matmul < 1 else f"{speeds.matmul:.0f} TFLOP"
    )
    say(f"each rank, all working: copies {speeds.copy:.1f} GB/s, matmuls {per_s}/s")


def _write_profile(found: DeviceProfile, path: Path) -> None:
    from fullshard.plan import write_profile

    if path == Path("-"):
        say_facts((name, str(value)) for name, value in asdict(found).items())
        return
    write_profile(found, path)
    say(f"{path}: the profile of {found.name}, for fullshard plan --device-profile")


def _say_findings(found: Sequence[Finding]) -> None:
    """Print each problem and its remedy on one line."""
    if not found:
        say("no problems found")
        return
    say("problems:")
    for finding in found:
        say(f"- {'serious: ' if finding.is_serious else ''}{finding.what}; {finding.remedy}")

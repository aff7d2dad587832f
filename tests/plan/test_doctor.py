"""`fullshard doctor`: what it concludes from facts, and what it finds here."""

import re
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fullshard.cli.commands import fullshard
from fullshard.doctor.bandwidth import measure_speeds
from fullshard.doctor.findings import findings, is_within
from fullshard.doctor.machine import (
    OPTIONAL,
    Gpu,
    Limits,
    MachineFacts,
    Network,
    Software,
    environment,
    gather_facts,
)
from fullshard.errors import TopologyError

GIB = 2**30
H200 = Gpu(name="H200", memory_bytes=140 * GIB, free_bytes=139 * GIB, capability=(9, 0))
SUPPORTED = {"python": "<3.13,>=3.11", "torch": "<2.14,>=2.11"}
SOUND = MachineFacts(
    software=Software(
        python="3.12.1",
        torch="2.13.0+cpu",
        backends=("gloo",),
        packages=dict.fromkeys(OPTIONAL, "1.0"),
        supported=SUPPORTED,
    ),
    processor="x86_64",
    num_cores=16,
    num_threads=16,
    memory_bytes=64 * GIB,
    free_memory_bytes=60 * GIB,
    shared_memory_bytes=32 * GIB,
    free_disk_bytes=100 * GIB,
    limits=Limits(files=65536),
    network=Network(hostname="here", address="10.0.0.1", is_own_address=True, interfaces=("lo",)),
)
WITH_GPUS = replace(
    SOUND,
    gpus=(H200, H200),
    software=replace(
        SOUND.software,
        torch="2.13.0+cu130",
        cuda="13.0",
        driver="580.1",
        nccl="2.28",
        backends=("gloo", "nccl"),
    ),
)


def software(facts: MachineFacts, **values: Any) -> MachineFacts:
    return replace(facts, software=replace(facts.software, **values))


def network(facts: MachineFacts, **values: Any) -> MachineFacts:
    return replace(facts, network=replace(facts.network, **values))


def variables(facts: MachineFacts, **values: str) -> MachineFacts:
    return replace(facts, variables=values)


@pytest.mark.parametrize(
    "facts",
    [
        SOUND,
        WITH_GPUS,
        variables(SOUND, OMP_NUM_THREADS="8", NCCL_DEBUG="INFO", NCCL_P2P_DISABLE="0"),
        variables(SOUND, GLOO_SOCKET_IFNAME="lo"),
        variables(WITH_GPUS, NCCL_SOCKET_IFNAME="^docker", GLOO_SOCKET_IFNAME="lo"),
        software(SOUND, python="3.11.0", torch="2.11.0"),
    ],
)
def test_nothing_is_found_wrong_with_a_sound_machine(facts):
    assert findings(facts) == []


@pytest.mark.parametrize(
    "facts, said, remedy, is_serious",
    [
        (software(SOUND, torch="2.10.1"), "torch 2.10.1", "install torch", True),
        (software(SOUND, torch="2.14.0"), "torch 2.14.0", "install torch", True),
        (software(SOUND, python="3.13.0"), "python 3.13.0", "install python", True),
        (software(SOUND, driver="580.1"), "built without CUDA", "CUDA build", False),
        (replace(WITH_GPUS, gpus=()), "torch sees no GPU", "a driver", True),
        (
            variables(replace(WITH_GPUS, gpus=()), CUDA_VISIBLE_DEVICES=""),
            "torch sees no GPU",
            "CUDA_VISIBLE_DEVICES",
            False,
        ),
        (software(SOUND, backends=("mpi",)), "without gloo", "build of torch", True),
        (software(WITH_GPUS, backends=("gloo",)), "without NCCL", "build of torch", True),
        (
            replace(WITH_GPUS, gpus=(replace(H200, free_bytes=GIB), H200)),
            "GPU 0 has 1.0 GiB of 140.0 GiB free",
            "nvidia-smi",
            False,
        ),
        (
            replace(WITH_GPUS, gpus=(H200, replace(H200, capability=(7, 0)))),
            "not support bf16",
            "--precision fp16",
            False,
        ),
        (replace(WITH_GPUS, without_peer_access=((0, 1),)), "memory: 0-1", "peer-to-peer", False),
        (
            variables(SOUND, OMP_NUM_THREADS="9"),
            "has cores (16)",
            "THREADS=8",
            False,
        ),
        (replace(SOUND, limits=Limits(cores=4.0)), "allows 4 of 16 cores", "THREADS=2", False),
        (replace(SOUND, shared_memory_bytes=64 * 2**20), "64 MiB", "--shm-size", False),
        (replace(WITH_GPUS, shared_memory_bytes=64 * 2**20), "64 MiB", "--shm-size", True),
        (replace(SOUND, free_disk_bytes=3 * GIB), "3.0 GiB free", "--out", False),
        (replace(SOUND, free_disk_bytes=10**6), "976.6 KiB free", "--out", True),
        (
            replace(SOUND, limits=Limits(memory_bytes=GIB)),
            "1.0 GiB of memory",
            "raise the limit",
            False,
        ),
        (replace(SOUND, limits=Limits(files=256)), "open only 256 files", "ulimit -n", False),
        (replace(SOUND, limits=Limits(files=64)), "open only 64 files", "ulimit -n", True),
        (
            network(replace(SOUND, limits=Limits(locked_bytes=65536)), has_infiniband=True),
            "lock only 64 KiB",
            "ulimit -l",
            True,
        ),
        (network(SOUND, address=None), "'here' does not resolve", "/etc/hosts", False),
        (network(SOUND, is_own_address=False), "resolves to 10.0.0.1", "/etc/hosts", False),
        (variables(SOUND, GLOO_SOCKET_IFNAME="eth9"), "eth9", "choose one of lo", True),
        (variables(WITH_GPUS, NCCL_SOCKET_IFNAME="eth"), "=eth", "choose one of lo", True),
        (variables(SOUND, CUDA_LAUNCH_BLOCKING="1"), "every kernel", "unset", False),
        (variables(SOUND, TORCH_DISTRIBUTED_DEBUG="DETAIL"), "every collective", "unset", False),
        (
            software(SOUND, packages={**SOUND.software.packages, "peft": None}),
            "peft is not installed, which is needed for low-rank adapters",
            "fullshard[lora]",
            False,
        ),
    ],
)
def test_what_is_wrong_is_found_with_a_remedy(facts, said, remedy, is_serious):
    (finding,) = findings(facts)
    assert said in finding.what
    assert remedy in finding.remedy
    assert finding.is_serious == is_serious


def test_every_extra_that_is_recommended_exists():
    root = Path(__file__).parents[2]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    known = project["optional-dependencies"]
    missing = findings(software(SOUND, packages=dict.fromkeys(OPTIONAL)))
    texts = [*(each.remedy for each in missing), (root / "README.md").read_text()]
    for folder, kind in (("src", "*.py"), ("docs", "*.md")):
        texts += [path.read_text() for path in (root / folder).rglob(kind)]
    named = re.findall(r"fullshard\[([\w,]+)\]", "\n".join(texts))
    optional = re.findall(r'optional\("\w+", .*, "(\w+)"\)', "\n".join(texts))
    assert len(optional) >= 6
    assert {extra for each in (*named, *optional) for extra in each.split(",")} <= set(known)
    assert len(missing) == 4  # besides those without which there is no command


@given(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)))
def test_a_version_is_within_a_range_as_its_numbers_say(version):
    text = ".".join(map(str, version))
    assert is_within(f"{text}+cu130", ">=2.11,<2.14") == ((2, 11) <= version < (2, 14))
    assert is_within(text, f"=={text}")
    assert not is_within(text, f"!={text}")
    assert is_within(text, "")


def test_this_machine_is_seen(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    found = environment()  # as a report gets it
    assert {"fullshard", "torch", "python", "processor", "memory", "system"} <= found.keys()
    assert found["hosts"] == "2"
    assert all(isinstance(value, str) and value for value in found.values())
    facts = gather_facts()
    assert facts.software.supported.keys() == {"python", "torch"}
    assert facts.software.packages["click"]
    assert "gloo" in facts.software.backends
    assert 0 < facts.free_memory_bytes <= facts.memory_bytes
    assert facts.num_cores > 0
    assert facts.free_disk_bytes > 0
    assert not any(f.is_serious for f in findings(facts) if "range" in f.what)


def test_a_quick_look_shows_facts_and_measures_nothing(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    result = CliRunner().invoke(fullshard, ["doctor", "--quick"])
    lines = dict(line.split("  ", 1) for line in result.stdout.splitlines() if "  " in line)
    assert {"fullshard", "python", "torch", "memory", "disk", "NCCL_DEBUG"} <= {
        name.strip() for name in lines
    }
    assert "GB/s" not in result.stdout
    assert result.exit_code == any(found.is_serious for found in findings(gather_facts()))


@pytest.mark.exhaustive
def test_two_ranks_measure_their_links_and_themselves():
    with pytest.raises(TopologyError, match="did not finish measuring"):
        measure_speeds(0, timeout_s=0.0)
    speeds = measure_speeds(0, sizes_mb=(1, 2))
    assert (speeds.num_ranks, speeds.backend) == (2, "gloo")
    assert [link.size_mb for link in speeds.links] == [1, 2]
    assert all(min(link.gather, link.reduce) > 0 for link in speeds.links)
    assert speeds.copy > 0
    assert speeds.matmul > 0


@pytest.mark.exhaustive
def test_ranks_that_cannot_talk_are_a_serious_finding(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no_such_link")
    result = CliRunner().invoke(fullshard, ["doctor"])
    assert result.exit_code == 1
    assert "serious: ranks do not work: " in result.stdout
    assert "serious: GLOO_SOCKET_IFNAME=no_such_link names no interface" in result.stdout
    facts = replace(software(SOUND, torch="1.0"), limits=Limits(files=512))
    assert [finding.is_serious for finding in findings(facts)] == [True, False]  # first

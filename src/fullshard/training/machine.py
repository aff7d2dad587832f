"""What this machine has and how it is set up, as far as training is concerned."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

# Packages that a part of this one needs.
OPTIONAL = ("click", "rich", "plotly", "transformers", "peft", "tensorboard", "safetensors")
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "FULLSHARD_", "CUDA_", "OMP_", "PYTORCH_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; `capability` is that of CUDA, as in (9, 0)."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions; None for what is not there. `wanted` are the ranges that this package takes."""

    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    backends: tuple[str, ...] = ("gloo",)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    wanted: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may use; None where there is no limit."""

    memory_bytes: int | None = None
    cores: float | None = None
    files: int | None = None
    locked_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """How ranks find each other. `is_own_address`: whether the host's name leads back to it."""

    hostname: str
    address: str | None
    is_own_address: bool
    interfaces: tuple[str, ...] = ()
    has_infiniband: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All of it. `strangers` are pairs of GPUs that cannot read each other's memory."""

    software: Software
    processor: str
    num_cores: int
    num_threads: int
    memory_bytes: int
    free_memory_bytes: int
    shared_memory_bytes: int
    free_disk_bytes: int
    limits: Limits
    network: Network
    gpus: tuple[Gpu, ...] = ()
    strangers: tuple[tuple[int, int], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks a run has here by default."""
        return len(self.gpus) or 2


def gather_facts() -> MachineFacts:
    """Look at the machine; takes no measurements."""
    memory = _meminfo()
    gpus = tuple(_gpus())
    return MachineFacts(
        software=_software(),
        processor=_processor(),
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory.get("MemTotal", 0),
        free_memory_bytes=memory.get("MemAvailable", 0),
        shared_memory_bytes=_size_of("/dev/shm"),
        free_disk_bytes=shutil.disk_usage(".").free,
        limits=_limits(),
        network=_network(),
        gpus=gpus,
        strangers=tuple(_strangers(len(gpus))),
        variables={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    )


def environment() -> dict[str, str]:
    """What a report says of where a run took place."""
    software, gpus = _software(), list(_gpus())
    cores = f"{_processor()}, {_num_cores()} cores"
    names = [f"{sum(gpu.name == name for gpu in gpus)} x {name}" for name in _names(gpus)]
    size, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    found = {
        "fullshard": importlib.metadata.version("fullshard"),
        "torch": software.torch,
        "python": software.python,
        "CUDA": software.cuda,
        "NCCL": software.nccl,
        "driver": software.driver,
        "GPUs": ", ".join(names),
        "processor": cores,
        "memory": f"{_meminfo().get('MemTotal', 0) / 2**30:.1f} GiB",
        "system": platform.platform(),
        "hosts": str(-(-size // local)),
    }
    return {name: value for name, value in found.items() if value}


def _names(gpus: list[Gpu]) -> list[str]:
    return list(dict.fromkeys(gpu.name for gpu in gpus))


def _software() -> Software:
    available = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    nccl = None
    if available["nccl"] and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=_driver(),
        nccl=nccl,
        backends=tuple(name for name, is_there in available.items() if is_there),
        packages={name: _version(name) for name in OPTIONAL},
        wanted=_wanted(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _wanted() -> dict[str, str]:
    """The ranges of python and torch that this package declares, as in ">=2.11,<2.14"."""
    about = importlib.metadata.metadata("fullshard")
    found = {"python": about["Requires-Python"] or ""}
    for line in importlib.metadata.requires("fullshard") or ():
        if match := re.fullmatch(r"torch\s*\(?([<>=!~.,\d\s]+)\)?", line):
            found["torch"] = match[1]
    return found


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text()) if path.exists() else None
    return None if match is None else match[1]


def _gpus() -> Iterator[Gpu]:
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        yield Gpu(
            name=found.name,
            memory_bytes=total,
            free_bytes=free,
            capability=(found.major, found.minor),
        )


def _strangers(num_gpus: int) -> Iterator[tuple[int, int]]:
    for a in range(num_gpus):
        for b in range(a + 1, num_gpus):
            if not torch.cuda.can_device_access_peer(a, b):
                yield a, b


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text() if path.exists() else ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match[1] if match else platform.machine()


def _meminfo() -> dict[str, int]:
    path = Path("/proc/meminfo")
    lines = path.read_text().splitlines() if path.exists() else []
    parts = (line.split() for line in lines)
    return {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts}


def _size_of(folder: str) -> int:
    return shutil.disk_usage(folder).total if Path(folder).is_dir() else 0


def _limits() -> Limits:
    return Limits(
        memory_bytes=_smallest(_control_values("memory.max", "memory/memory.limit_in_bytes")),
        cores=_core_limit(),
        files=_soft(resource.RLIMIT_NOFILE),
        locked_bytes=_soft(resource.RLIMIT_MEMLOCK),
    )


def _soft(which: int) -> int | None:
    soft, _ = resource.getrlimit(which)
    return None if soft == resource.RLIM_INFINITY else soft


def _control_values(name: str, old_name: str) -> Iterator[str]:
    """What the control groups of this process say, in either version of them."""
    root = Path("/sys/fs/cgroup")
    folders = [root]
    own = Path("/proc/self/cgroup")
    for line in own.read_text().splitlines() if own.exists() else ():
        if line.startswith("0::/"):
            inner = root / line.removeprefix("0::/")
            folders += [inner, *(each for each in inner.parents if root in each.parents)]
    for path in (*(folder / name for folder in folders), root / old_name):
        try:
            yield path.read_text().strip()
        except OSError:
            pass  # not every group has every file, nor may everybody read it


def _smallest(values: Iterator[str]) -> int | None:
    # Without a limit, version 1 has the largest number of pages there is.
    found = [int(value) for value in values if value.isdigit() and int(value) < 2**60]
    return min(found, default=None)


def _core_limit() -> float | None:
    found = []
    for value in _control_values("cpu.max", "cpu/cpu.cfs_quota_us"):
        quota, _, period = value.partition(" ")
        if quota.isdigit():
            found.append(int(quota) / int(period or 100_000))
    return min(found, default=None)


def _network() -> Network:
    hostname = socket.gethostname()
    try:
        addresses = [str(found[4][0]) for found in socket.getaddrinfo(hostname, None)]
    except OSError:
        addresses = []
    return Network(
        hostname=hostname,
        address=addresses[0] if addresses else None,
        is_own_address=any(map(_is_own, addresses)),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        has_infiniband=Path("/sys/class/infiniband").is_dir(),
    )


def _is_own(address: str) -> bool:
    """Only an address of this machine can be listened on."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as listener:
            listener.bind((address, 0))
    except OSError:
        return False
    return True

"""Facts about this machine that concern training: devices, software, limits and network."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

import torch
import torch.distributed as dist

from fullshard.errors import ConfigError

OPTIONAL = ("click", "rich", "jinja2", "transformers", "peft", "tensorboard")
_CONTROL_GROUP = Path("/sys/fs/cgroup")
_PREFIXES = ("NCCL_", "TORCH_", "GLOO_", "FULLSHARD_", "CUDA_", "OMP_", "PYTORCH_", "TORCHELASTIC_")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU; `capability` is its CUDA compute capability, as in (9, 0)."""

    name: str
    memory_bytes: int
    free_bytes: int
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Software:
    """Versions, or None if missing. `supported` are the version ranges that fullshard requires."""

    python: str
    torch: str
    cuda: str | None = None
    driver: str | None = None
    nccl: str | None = None
    backends: tuple[str, ...] = ("gloo",)
    packages: Mapping[str, str | None] = field(default_factory=dict)
    supported: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a process; None is unlimited."""

    memory_bytes: int | None = None
    cores: float | None = None
    files: int | None = None
    locked_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """The network; `is_own_address`: whether the host name resolves to this machine."""

    hostname: str
    address: str | None
    is_own_address: bool
    interfaces: tuple[str, ...] = ()
    has_infiniband: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """All facts. `without_peer_access` are pairs of GPUs that cannot access each other's memory."""

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
    without_peer_access: tuple[tuple[int, int], ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """The number of ranks that a run starts here by default."""
        return len(self.gpus) or 2


def gather_facts() -> MachineFacts:
    """Collect the facts; measures nothing."""
    memory, gpus, shared = meminfo(), tuple(_gpus()), Path("/dev/shm")
    return MachineFacts(
        software=_software(),
        processor=_processor(),
        num_cores=_num_cores(),
        num_threads=torch.get_num_threads(),
        memory_bytes=memory.get("MemTotal", 0),
        free_memory_bytes=memory.get("MemAvailable", 0),
        shared_memory_bytes=shutil.disk_usage(shared).total if shared.is_dir() else 0,
        free_disk_bytes=shutil.disk_usage(".").free,
        limits=_limits(),
        network=_network(),
        gpus=gpus,
        without_peer_access=tuple(
            (a, b)
            for a, b in combinations(range(len(gpus)), 2)
            if not torch.cuda.can_device_access_peer(a, b)
        ),
        variables={
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)
        },
    )


def environment() -> dict[str, str]:
    """Describe the environment of a run, for its report."""
    software = _software()
    num_gpus = Counter(gpu.name for gpu in _gpus())
    size, local = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    found = {
        "fullshard": _version("fullshard"),
        "torch": software.torch,
        "python": software.python,
        "CUDA": software.cuda,
        "NCCL": software.nccl,
        "driver": software.driver,
        "GPUs": ", ".join(f"{number} x {name}" for name, number in num_gpus.items()),
        "processor": f"{_processor()}, {_num_cores()} cores",
        "memory": f"{meminfo().get('MemTotal', 0) / 2**30:.1f} GiB",
        "system": platform.platform(),
        "hosts": str(-(-size // local)),
    }
    return {name: value for name, value in found.items() if value}


def _software() -> Software:
    backends = tuple(filter(dist.is_backend_available, ("gloo", "nccl", "mpi")))
    nccl = None
    if "nccl" in backends and torch.cuda.is_available():
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return Software(
        python=platform.python_version(),
        torch=torch.__version__,
        cuda=torch.version.cuda,
        driver=_driver(),
        nccl=nccl,
        backends=backends,
        packages={name: _version(name) for name in OPTIONAL},
        supported=_supported(),
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _supported() -> dict[str, str]:
    """Return the required ranges of python and torch; none if fullshard is not installed."""
    if _version("fullshard") is None:
        return {}
    found = {"python": importlib.metadata.metadata("fullshard")["Requires-Python"] or ""}
    for line in importlib.metadata.requires("fullshard") or ():
        if match := re.fullmatch(r"torch\s*\(?([<>=!~.,\d\s]+)\)?", line):
            found["torch"] = match[1]
    return found


def _driver() -> str | None:
    match = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _text("/proc/driver/nvidia/version"))
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


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _processor() -> str:
    match = re.search(r"^model name\s*:\s*(.+)$", _text("/proc/cpuinfo"), flags=re.MULTILINE)
    return match[1] if match else platform.machine()


def meminfo() -> dict[str, int]:
    """Return the sizes in /proc/meminfo, in bytes."""
    parts = (line.split() for line in _text("/proc/meminfo").splitlines())
    return {part[0].rstrip(":"): int(part[1]) * 1024 for part in parts}


def available_bytes() -> int:
    """The memory of this machine that processes can still take, within its control group."""
    available = meminfo().get("MemAvailable")
    if available is None:
        raise ConfigError("/proc/meminfo has no line MemAvailable.")
    return min(available, _allowed_bytes())


def _allowed_bytes() -> int:
    """Return what the control group, such as a container's, still allows this process."""
    try:
        limit = (_CONTROL_GROUP / "memory.max").read_text().strip()
        if limit == "max":
            return sys.maxsize
        stat = dict(
            line.split() for line in (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        )
        # The page cache of files that are not in use is reclaimed on demand.
        used = int((_CONTROL_GROUP / "memory.current").read_text()) - int(stat["inactive_file"])
    except (OSError, ValueError, KeyError):
        return sys.maxsize  # there is no known limit
    return max(0, int(limit) - used)


def _text(path: str | Path) -> str:
    """Return the text of a file; empty if it is missing or not readable."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


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
    """Yield a value from each control group of this process, in version 1 or 2."""
    root = _CONTROL_GROUP
    folders = [root]
    for line in _text("/proc/self/cgroup").splitlines():
        if line.startswith("0::/"):
            inner = root / line.removeprefix("0::/")
            folders += [inner, *(each for each in inner.parents if root in each.parents)]
    for path in (*(folder / name for folder in folders), root / old_name):
        yield _text(path).strip()


def _smallest(values: Iterator[str]) -> int | None:
    # Version 1 represents "unlimited" as the largest number of pages.
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
    """Return whether this machine has the address: only then can it be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family) as listener:
            listener.bind((address, 0))
    except OSError:
        return False
    return True

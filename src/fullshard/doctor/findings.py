"""Diagnoses a machine: from facts to problems and their remedies."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from operator import eq, ge, gt, le, lt, ne

from fullshard.doctor.machine import MachineFacts
from fullshard.formatting import readable

_MIB, _GIB = 2**20, 2**30
_SMALL_SHARED = 256 * _MIB
_LITTLE_DISK, _NO_DISK = 5 * _GIB, 200 * _MIB
_LITTLE_MEMORY = 2 * _GIB
_FEW_FILES = 1024
_BF16_CAPABILITY = (8, 0)

# The extra and the feature that need a package.
_EXTRAS = {
    "jinja2": ("report", "report.html of a run"),
    "transformers": ("huggingface", "models in Hugging Face's layout"),
    "peft": ("lora", "low-rank adapters"),
    "tensorboard": ("tensorboard", "metrics for TensorBoard"),
}
_SLOW_VARIABLES = {
    "CUDA_LAUNCH_BLOCKING": "makes the host wait for every kernel",
    "NCCL_P2P_DISABLE": "prevents direct access between GPUs",
    "NCCL_SHM_DISABLE": "prevents NCCL from using shared memory",
    "NCCL_IB_DISABLE": "prevents NCCL from using InfiniBand",
    "TORCH_NCCL_BLOCKING_WAIT": "makes the host wait for every collective",
}
_COMPARED = {"<": lt, "<=": le, "==": eq, "!=": ne, ">=": ge, ">": gt}


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem and its remedy; a serious one makes runs fail, or may at any time."""

    what: str
    remedy: str
    is_serious: bool = False


def findings(facts: MachineFacts) -> list[Finding]:
    """Return the problems, serious ones first."""
    found = [finding for check in _CHECKS for finding in check(facts)]
    return sorted(found, key=lambda finding: not finding.is_serious)


def is_within(version: str, supported: str) -> bool:
    """Return whether a version, such as 2.13.0+cpu, is in a range such as ">=2.11,<2.14"."""
    bounds = re.findall(r"(>=|<=|==|!=|<|>)\s*([\d.]+)", supported)
    return all(_COMPARED[sign](_numbers(version), _numbers(bound)) for sign, bound in bounds)


def _numbers(version: str) -> list[int]:
    """Return the first four numbers of a version; those that it lacks are 0."""
    found = re.match(r"[\d.]*", version)
    numbers = [int(number) for number in found[0].split(".") if number] if found else []
    return [*numbers, 0, 0, 0, 0][:4]


def _versions(facts: MachineFacts) -> Iterator[Finding]:
    for name, found in (("python", facts.software.python), ("torch", facts.software.torch)):
        supported = facts.software.supported.get(name, "")
        if not is_within(found, supported):
            yield Finding(
                f"{name} {found} is not in the supported range {supported}",
                f"install {name} {supported}",
                is_serious=True,
            )


def _gpu_software(facts: MachineFacts) -> Iterator[Finding]:
    software = facts.software
    if software.driver is not None and software.cuda is None:
        yield Finding(
            f"there is an NVIDIA driver ({software.driver}), but torch {software.torch} was built "
            "without CUDA, so runs use the CPU",
            "install a CUDA build of torch from pytorch.org",
        )
    elif software.driver is not None and not facts.gpus:
        hidden = facts.variables.get("CUDA_VISIBLE_DEVICES")
        yield Finding(
            f"there is an NVIDIA driver ({software.driver}), but torch sees no GPU",
            "set CUDA_VISIBLE_DEVICES to GPUs that exist, or unset it"
            if hidden is not None
            else f"install a driver for CUDA {software.cuda}; nvidia-smi shows the current one",
            is_serious=hidden is None,
        )
    for backend, is_needed in (("gloo", True), ("NCCL", bool(facts.gpus))):
        if is_needed and backend.lower() not in software.backends:
            remedy = f"install a build of torch with {backend}"
            yield Finding(f"torch was built without {backend}", remedy, is_serious=True)


def _gpus(facts: MachineFacts) -> Iterator[Finding]:
    for index, gpu in enumerate(facts.gpus):
        if gpu.free_bytes < gpu.memory_bytes / 2:
            yield Finding(
                f"GPU {index} has {readable(gpu.free_bytes)} of {readable(gpu.memory_bytes)} free",
                "stop its other processes (see nvidia-smi), or exclude it with "
                "CUDA_VISIBLE_DEVICES",
            )
        if gpu.capability < _BF16_CAPABILITY:
            yield Finding(
                f"GPU {index} ({gpu.name}) does not support bf16", "train with --precision fp16"
            )
    if facts.without_peer_access:
        pairs = ", ".join(f"{a}-{b}" for a, b in facts.without_peer_access)
        yield Finding(
            f"GPUs cannot access each other's memory: {pairs}",
            "allow peer-to-peer access in a virtual machine; otherwise collectives go through "
            "host memory",
        )


def _threads(facts: MachineFacts) -> Iterator[Finding]:
    cores = min(float(facts.num_cores), facts.limits.cores or float(facts.num_cores))
    for_each = max(1, int(cores / facts.num_ranks))
    asked = facts.variables.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > for_each:
        yield Finding(
            f"OMP_NUM_THREADS={asked} gives {facts.num_ranks} ranks more threads than the machine "
            f"has cores ({cores:g})",
            f"set OMP_NUM_THREADS={for_each}, or unset it",
        )
    elif not asked and cores < facts.num_cores:
        yield Finding(
            f"the control group allows {cores:g} of {facts.num_cores} cores, which torch ignores",
            f"set OMP_NUM_THREADS={for_each}",
        )


def _space(facts: MachineFacts) -> Iterator[Finding]:
    if facts.shared_memory_bytes < _SMALL_SHARED:
        yield Finding(
            f"/dev/shm has {facts.shared_memory_bytes // _MIB} MiB; NCCL uses it if GPUs cannot "
            "access each other's memory",
            "enlarge it: docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm",
            is_serious=len(facts.gpus) > 1,
        )
    if facts.free_disk_bytes < _LITTLE_DISK:
        yield Finding(
            f"the disk of this folder has {readable(facts.free_disk_bytes)} free",
            "free some space, or pass another folder with --out: a checkpoint takes three times "
            "the bytes of the parameters",
            is_serious=facts.free_disk_bytes < _NO_DISK,
        )
    limit = min(facts.memory_bytes, facts.limits.memory_bytes or facts.memory_bytes)
    if limit < _LITTLE_MEMORY:
        yield Finding(
            f"processes may use {readable(limit)} of memory in total",
            "raise the limit, or train a small model on few ranks",
        )


def _limits(facts: MachineFacts) -> Iterator[Finding]:
    files, locked = facts.limits.files, facts.limits.locked_bytes
    if files is not None and files < _FEW_FILES:
        yield Finding(f"a process may open only {files} files", "run ulimit -n 65536", files < 128)
    if facts.network.has_infiniband and locked is not None:
        yield Finding(
            f"a process may lock only {locked // 1024} KiB of memory; InfiniBand needs more",
            "run ulimit -l unlimited",
            is_serious=True,
        )


def _network(facts: MachineFacts) -> Iterator[Finding]:
    network = facts.network
    remedy = f"add '127.0.0.1 {network.hostname}' to /etc/hosts, or set GLOO_SOCKET_IFNAME"
    if network.address is None:
        yield Finding(f"the host name {network.hostname!r} does not resolve", remedy)
    elif not network.is_own_address:
        yield Finding(
            f"the host name {network.hostname!r} resolves to {network.address}, which is not an "
            "address of this machine",
            remedy,
        )
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        asked = facts.variables.get(name, "")
        is_needed = name.startswith("GLOO") or bool(facts.gpus)
        # NCCL accepts prefixes of names, and names to exclude.
        missing = [
            each
            for each in asked.removeprefix("=").split(",")
            if each
            and not each.startswith("^")
            and not any(known.startswith(each) for known in network.interfaces)
        ]
        if is_needed and missing and not asked.startswith("^"):
            yield Finding(
                f"{name}={asked} names no interface of this machine",
                f"choose one of {', '.join(network.interfaces)}, or unset it",
                is_serious=True,
            )


def _variables(facts: MachineFacts) -> Iterator[Finding]:
    remedy = "unset it, unless this is intended"
    for name, what in _SLOW_VARIABLES.items():
        if facts.variables.get(name, "0") not in ("", "0"):
            yield Finding(f"{name}={facts.variables[name]} {what}", remedy)
    if facts.variables.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        yield Finding("TORCH_DISTRIBUTED_DEBUG=DETAIL checks every collective", remedy)


def _packages(facts: MachineFacts) -> Iterator[Finding]:
    for package, (extra, what) in _EXTRAS.items():
        if facts.software.packages.get(package, "") is None:
            yield Finding(
                f"{package} is not installed, which is needed for {what}",
                f"pip install 'fullshard[{extra}]'",
            )


_CHECKS = (
    _versions,
    _gpu_software,
    _gpus,
    _threads,
    _space,
    _limits,
    _network,
    _variables,
    _packages,
)

"""What a device can do: the peaks that its vendor states, and the shares of them it reaches."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from difflib import get_close_matches
from pathlib import Path

from fullshard.errors import ConfigError, UnknownNameError

_GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceProfile:
    """A device in numbers. Rates are per device: TFLOP/s, and GB/s in one direction.

    `link_gbs` connects the devices of a host and `host_gbs` each of them to the host's memory.
    Between hosts, each of a host's `adapters_per_host` network adapters (0: one for each device)
    has `network_gbs`, and messages take `network_latency_s` (0: as inside a host).
    Efficiencies are the shares of the peaks that matmuls, attention and memory reach. `kernel_s` is
    what a kernel takes in addition. The host needs `launch_s` to issue an operation, also a view.
    `context_bytes` are what the driver and the libraries take in addition to tensors, `comm_bytes`
    the buffers of a communicator, and `workspace_bytes` what matmuls allocate.
    """

    name: str
    tflops_16: float
    tflops_32: float
    memory_gbs: float
    memory_gib: float
    link_gbs: float
    host_gbs: float = 25.0
    network_gbs: float = 50.0
    adapters_per_host: int = 0
    device_type: str = "cuda"
    matmul_efficiency: float = 0.75
    attention_efficiency: float = 0.38
    memory_efficiency: float = 0.8
    link_efficiency: float = 0.8
    latency_s: float = 15e-6
    hop_s: float = 0.5e-6
    network_latency_s: float = 0.0
    kernel_s: float = 3e-6
    launch_s: float = 10e-6
    context_bytes: int = 500 << 20
    comm_bytes: int = 400 << 20
    workspace_bytes: int = 0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and value < 0:
                raise ConfigError(
                    f"device profile {self.name!r}: {each.name} must be 0 or more, not {value}."
                )

    def tflops(self, itemsize: int) -> float:
        """The peak for elements of this many bytes."""
        return self.tflops_16 if itemsize <= 2 else self.tflops_32


def _gpu(
    name: str, tflops: tuple[float, float], memory: tuple[float, float], link: float
) -> DeviceProfile:
    return DeviceProfile(
        name=name,
        tflops_16=tflops[0],
        tflops_32=tflops[1],
        memory_gbs=memory[0],
        memory_gib=memory[1],
        link_gbs=link,
        host_gbs=50.0 if link >= 400 else 25.0,
        workspace_bytes=64 << 20 if tflops[0] > 700 else 16 << 20,
    )


# Dense peaks as vendors state them: in 16 bits and in float32; memory in GB/s and GiB; the link
# between the GPUs of a host. The first name that is part of a GPU's name counts.
_GPUS = (
    _gpu("B200", (2250, 75), (8000, 180), 900),
    _gpu("H100 PCIe", (756, 51), (2000, 80), 55),
    _gpu("H100 NVL", (835, 60), (3900, 94), 300),
    _gpu("H100", (989, 67), (3350, 80), 450),
    # The host of the one that was measured is slow (docs/planning.md).
    replace(_gpu("H200", (989, 67), (4800, 141), 450), launch_s=23e-6),
    _gpu("A100 40GB", (312, 19.5), (1555, 40), 300),
    _gpu("A100", (312, 19.5), (2039, 80), 300),
    _gpu("A10G", (70, 35), (600, 24), 28),
    _gpu("A6000", (155, 38.7), (768, 48), 28),
    _gpu("L40S", (362, 91.6), (864, 48), 28),
    _gpu("L4", (121, 30.3), (300, 24), 28),
    _gpu("RTX 5090", (210, 105), (1792, 32), 28),
    _gpu("RTX 4090", (165, 82.6), (1008, 24), 28),
    _gpu("RTX 3090", (71, 35.6), (936, 24), 28),
    _gpu("MI300X", (1307, 163), (5300, 192), 64),
)
# One of two ranks on a machine with two cores, where its speeds were fitted (docs/planning.md).
CPU = DeviceProfile(
    name="CPU",
    tflops_16=0.1,
    tflops_32=0.13,
    memory_gbs=9.0,
    memory_gib=16.0,
    link_gbs=5.0,
    adapters_per_host=1,
    device_type="cpu",
    attention_efficiency=0.3,
    latency_s=100e-6,
    kernel_s=1e-6,
    launch_s=13e-6,
    context_bytes=0,
    comm_bytes=0,
)
PROFILES: Mapping[str, DeviceProfile] = {each.name: each for each in (*_GPUS, CPU)}


def known_profile(name: str) -> DeviceProfile | None:
    """The profile of a GPU by the name that its driver gives it; None if there is none."""
    return next((each for each in _GPUS if each.name in name), None)


def profile_named(name: str) -> DeviceProfile:
    """The profile of this name.

    Raises:
        UnknownNameError: If there is none; the message suggests the closest name.
    """
    by_lower = {each.lower(): profile for each, profile in PROFILES.items()}
    found = by_lower.get(name.lower().replace("-", " "))
    if found is not None:
        return found
    close = get_close_matches(name.lower(), by_lower, n=1, cutoff=0.3)
    meant = f"did you mean {by_lower[close[0]].name}?" if close else ""
    raise UnknownNameError(
        f"GPU {name!r} is not one of {', '.join(PROFILES)}; "
        f"{meant or 'measure it with fullshard doctor --profile FILE, for --device-profile FILE.'}"
    )


def read_profile(path: Path) -> DeviceProfile:
    """A profile that `write_profile` wrote. What a file leaves out is as for an H100."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(DeviceProfile)}
        unknown = sorted(set(content) - known)
        if not unknown:
            return replace(PROFILES["H100"], **content)
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a device profile in JSON ({error}); write one with fullshard doctor "
            "--profile."
        ) from None
    raise ConfigError(
        f"{path}: a device profile has no {', '.join(unknown)}; its keys are "
        f"{', '.join(sorted(known))}."
    )


def write_profile(profile: DeviceProfile, path: Path) -> None:
    """Write a profile as JSON, for `read_profile`."""
    path.write_text(json.dumps(asdict(profile), indent=2) + "\n", encoding="utf-8")

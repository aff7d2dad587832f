"""What a message costs against what a copy costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CostModel:
    """When a parameter is worth a message of its own.

    A parameter that shares its message is copied out of it once it has arrived, which reads and
    writes it; one that has its own is not, but one more message has to be started.
    """

    message_s: float
    copy_bytes_per_s: float

    def deserves_message(self, full_bytes: int) -> bool:
        return 2 * full_bytes / self.copy_bytes_per_s >= self.message_s

    @classmethod
    def of_device(cls, device_type: str) -> CostModel:
        """The model of a device: gloo between CPUs, NCCL and its like between accelerators.

        Sources: benchmarks/bench_collectives.py. A further message inside one coalesced call
        costs an accelerator a few microseconds; gloo runs it as a collective of its own.
        """
        if device_type == "cpu":
            return cls(message_s=150e-6, copy_bytes_per_s=30e9)
        return cls(message_s=5e-6, copy_bytes_per_s=3e12)

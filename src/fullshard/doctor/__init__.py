"""What a machine has, how fast it is, and what is wrong with it: `fullshard doctor`."""

from fullshard.doctor.machine import available_bytes, environment

__all__ = ["available_bytes", "environment"]

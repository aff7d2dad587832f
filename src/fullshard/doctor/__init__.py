"""What a machine has, how fast it is, and what is wrong with it: `fullshard doctor`."""

from fullshard.doctor.machine import available_bytes, environment
from fullshard.doctor.network import NetworkSpeeds, interface_of, measure_network

__all__ = ["NetworkSpeeds", "available_bytes", "environment", "interface_of", "measure_network"]

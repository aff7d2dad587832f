"""Optimizer steps by unit, gradient clipping and gradient scaling for sharded parameters."""

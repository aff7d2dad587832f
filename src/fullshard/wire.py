"""How parameters and gradients travel between ranks, for `MixedPrecisionPolicy` and others."""

from fullshard.layout.wire import Fp8, Int4, Int8, Plain, Wire

__all__ = ["Fp8", "Int4", "Int8", "Plain", "Wire"]

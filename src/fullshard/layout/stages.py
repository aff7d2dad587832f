"""The dtypes that a parameter passes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stages:
    """The dtypes a parameter passes through: kept, computed in, reduced in.

    `wire` is what its gradient travels in to be reduced: the same as `reduced`, or narrower.
    """

    kept: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype
    wire: torch.dtype

    @classmethod
    def of(
        cls,
        kept: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wire_dtype: torch.dtype | None = None,
    ) -> Stages:
        """Apply a precision policy; parameters that are not floating point keep their dtype.

        A gradient that is reduced in something as narrow as `wire_dtype` travels in that.
        """
        if not kept.is_floating_point:
            return cls(kept, kept, kept, kept)
        computed = param_dtype or kept
        reduced = reduce_dtype or computed
        wire = wire_dtype or reduced
        return cls(kept, computed, reduced, wire if wire.itemsize < reduced.itemsize else reduced)

    @property
    def casts_to_gather(self) -> bool:
        return self.kept != self.computed

    @property
    def sums_on_arrival(self) -> bool:
        """Whether gradients are added up in a wider dtype than they travel in (rule 6)."""
        return self.wire != self.reduced

    @property
    def alignment_numel(self) -> int:
        """Elements that fill 16 bytes in the narrowest of the four dtypes.

        A message has one element count in every stage, so this keeps each of them a multiple of
        16 bytes; NCCL falls back to element-sized copies otherwise.
        """
        dtypes = (self.kept, self.computed, self.reduced, self.wire)
        return max(1, 16 // min(dtype.itemsize for dtype in dtypes))

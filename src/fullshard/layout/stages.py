"""The dtypes that a parameter passes through."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Stages:
    """The dtypes a parameter passes through: kept, computed in, reduced in."""

    kept: torch.dtype
    computed: torch.dtype
    reduced: torch.dtype

    @classmethod
    def of(
        cls,
        kept: torch.dtype,
        param_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> Stages:
        """Apply a precision policy; parameters that are not floating point keep their dtype."""
        if not kept.is_floating_point:
            return cls(kept, kept, kept)
        computed = param_dtype or kept
        return cls(kept, computed, reduce_dtype or computed)

    @property
    def casts_to_gather(self) -> bool:
        return self.kept != self.computed

    @property
    def alignment_numel(self) -> int:
        """Elements that fill 16 bytes in the narrowest of the three dtypes.

        A message has one element count in every stage, so this keeps each of them a multiple of
        16 bytes; NCCL falls back to element-sized copies otherwise.
        """
        return max(1, 16 // min(self.kept.itemsize, self.computed.itemsize, self.reduced.itemsize))

"""Where a lane's reduced gradients live."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.tensor import DTensor

from fullshard.device.storage import Slab, num_references
from fullshard.unit.member import Holder


class GradientHome:
    """The gradients of a lane, arranged like its home, and the tensors that become `.grad`.

    They are made once: a step fills `result` and gives `gifts` to their holders (rule 7). That is
    safe only while nobody else has kept anything of the step before, which `is_free` tells;
    otherwise what is kept is left to whoever keeps it, and another one is made. Memory is given
    back between steps (`rest`), as it is for gradients that are dropped.
    """

    def __init__(
        self,
        numel: int,
        dtype: torch.dtype,
        device: torch.device,
        places: Sequence[tuple[Holder, int]],
    ) -> None:
        self._slab = Slab(numel * dtype.itemsize, device)
        self.result = self._slab.view(0, (numel,), dtype)
        self.gifts = {holder: holder.gradient(self.result, offset) for holder, offset in places}
        self.params = [(holder, holder.param, gift) for holder, gift in self.gifts.items()]
        self._watched = list(self.gifts.values())
        self._watched += [gift._local_tensor for gift in self._watched if isinstance(gift, DTensor)]
        self._counts = self._references()
        self._num_reserved = 0

    @property
    def is_free(self) -> bool:
        """Whether nobody holds a gift, a part of one, or the memory, beside this object."""
        if self._num_reserved:
            return False
        # What has no memory is not given to anyone.
        return not self._slab.is_filled or self._counts == self._references()

    def _references(self) -> list[int]:
        return [self._slab.num_holders, *num_references(self._watched)]

    def reserve(self) -> torch.Tensor:
        """The result, with memory of the current stream, for one reduction until it is given."""
        self._num_reserved += 1
        self._slab.fill()
        return self.result

    def given(self) -> None:
        self._num_reserved -= 1

    def rest(self) -> None:
        """Give the memory back if the gradients were dropped."""
        if self._slab.is_filled and self.is_free:
            self._slab.empty()

"""What is planned once of a unit's reductions (rule 7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from fullshard.device.storage import swift_attributes
from fullshard.layout import FlatSplit, Landing, Lane, Message, Split, UnitLayout
from fullshard.unit.gathering import permuted_pairs
from fullshard.unit.gradient_home import GradientHome
from fullshard.unit.handover import Gift
from fullshard.unit.member import Holder, Member

Gradient = torch.Tensor | None


# A message that is as large as embeddings are is worth collectives of its own, before the rest of
# its unit, if each rank's part is large enough for latency not to count.
LARGE_BYTES = 128 << 20
LARGE_PART_BYTES = 2 << 20
PIECE_BYTES = 64 << 20


class Piece(NamedTuple):
    """Part of every rank's segment of a message, and where in a segment it starts."""

    segments: torch.Tensor
    start: int


class GradientMessage:
    """A message on its way to be reduced: whose gradients it carries, and how they lie in it."""

    def __init__(
        self, lane: Lane, message: Message, members: Sequence[Member], num_ranks: int, rank: int
    ) -> None:
        self.message = message
        self.members = [members[slot.entry] for slot in message.slots]
        self.numel = num_ranks * message.segment_numel
        self.num_bytes = self.numel * lane.stages.wire.itemsize
        self.home_range = range(message.home_offset, message.home_offset + message.segment_numel)
        self.places = [
            (member, message.home_offset + message.shard_offset(slot, rank))
            for member, slot in zip(self.members, message.slots, strict=True)
        ]
        # What is cut as one is reduced as one, used or not: other ranks may use all of it, and a
        # rank cannot know whether they have used a parameter of which it has a part.
        is_cut_as_one = any(isinstance(member.split, FlatSplit) for member in self.members)
        self.is_always_due = is_cut_as_one and lane.is_trainable
        self.sums_on_arrival = lane.stages.sums_on_arrival
        self._dtype = lane.stages.wire
        self._num_ranks = num_ranks
        is_flat = message.landing is Landing.FLAT
        # Whether it is one parameter's, and worth being reduced before the others arrive.
        self.is_large = (
            message.landing is Landing.IN_PLACE
            and self.num_bytes >= LARGE_BYTES
            and self.num_bytes // num_ranks >= LARGE_PART_BYTES
        )
        self._padding_numel = (
            self.numel if is_flat else message.segment_numel
        ) - message.used_numel
        self._splits = [member.split for member in self.members]
        self._is_plain_split = all(
            isinstance(split, Split) and split.dim == 0 and slot.numel
            for split, slot in zip(self._splits, message.slots, strict=True)
        )

    def pieces(self, grads: Sequence[Gradient]) -> list[Piece]:
        """A large message in parts that can be copied and reduced one by one; none if it cannot."""
        grad, num_ranks = grads[0], self._num_ranks
        if not self.is_large or grad is None or grad.numel() != self.numel:
            return []
        if not grad.is_contiguous():
            return []
        segments = grad.view(num_ranks, -1)
        step = max(PIECE_BYTES // num_ranks, LARGE_PART_BYTES) // self._dtype.itemsize
        starts = range(0, segments.size(1), step)
        return [Piece(segments[:, start : start + step], start) for start in starts]

    def is_in_place(self, grads: Sequence[Gradient]) -> bool:
        """Whether the tensor that autograd produced is the message (rule 4)."""
        first = grads[0]
        return (
            len(grads) == 1
            and not self.message.landing.is_copied
            and first is not None
            and first.dtype == self._dtype
            and first.numel() == self.numel
            and first.is_contiguous()
        )

    def lay(self, grads: Sequence[Gradient], buffer: torch.Tensor) -> None:
        """Copy gradients to where they belong in a buffer of all ranks' segments, cast."""
        landing = self.message.landing
        if landing is Landing.SPLIT:
            self._lay_shared(grads, buffer.view(self._num_ranks, -1))
        elif landing is Landing.FLAT:
            self._lay_flat(grads, buffer)
        elif grads[0] is None:
            buffer.zero_()
        elif landing is Landing.IN_PLACE:
            buffer[: grads[0].numel()].copy_(grads[0].reshape(-1))
        else:
            split = self._splits[0]
            assert isinstance(split, Split)
            segments = buffer.view(self._num_ranks, -1)
            for in_full, in_message in permuted_pairs(split, grads[0], segments):
                in_message.copy_(in_full)

    def _lay_flat(self, grads: Sequence[Gradient], buffer: torch.Tensor) -> None:
        """One after another."""
        parts = [
            _flat_part(grad, slot.numel, buffer)
            for slot, grad in zip(self.message.slots, grads, strict=True)
            if slot.numel
        ]
        if self._padding_numel:
            parts.append(buffer.new_zeros(self._padding_numel))
        if len({part.dtype for part in parts}) > 1:
            parts = [part.to(buffer.dtype) for part in parts]
        if parts:
            torch._chunk_cat(parts, dim=0, num_chunks=1, out=buffer.view(1, -1))

    def _lay_shared(self, grads: Sequence[Gradient], segments: torch.Tensor) -> None:
        """Side by side in every rank's segment."""
        if len({grad.dtype for grad in grads if grad is not None}) > 1:
            # Some are fresh and some were accumulated, in the dtype of the reduction.
            grads = [None if grad is None else grad.to(segments.dtype) for grad in grads]
        present = [grad for grad in grads if grad is not None]
        like = present[0] if present else segments
        if self._is_plain_split and len(present) == len(grads):
            parts = present
        else:
            parts = [
                _part(grad, split, slot.numel, self._num_ranks, like)
                for slot, grad, split in zip(self.message.slots, grads, self._splits, strict=True)
                if slot.numel
            ]
        if self._padding_numel:
            parts.append(like.new_zeros(self._num_ranks, self._padding_numel))
        if parts:  # none if all parameters are empty
            torch._chunk_cat(parts, dim=0, num_chunks=self._num_ranks, out=segments)


class GradientLane:
    """A lane on its way to be reduced. Owns the home of its results.

    `holder` is who gets all of it, if one does.
    """

    def __init__(
        self,
        layout: UnitLayout,
        lane: Lane,
        members: Sequence[Member],
        rank: int,
        holder: Holder | None,
    ) -> None:
        self.lane = lane
        self.holder = holder
        self.messages = [
            GradientMessage(lane, message, members, layout.num_ranks, rank)
            for message in lane.messages
        ]
        self.gifts: list[Gift] = [
            (member, offset)
            for message in self.messages
            for member, offset in message.places
            if member.takes_gradient
        ]
        if holder is not None:
            self.gifts = [(holder, 0)]
        self.holders = [receiver for receiver, _ in self.gifts]
        self.home: GradientHome | None = None
        self._in_home: set[GradientMessage] = set()

    def room_for(
        self, messages: Sequence[GradientMessage], device: torch.device
    ) -> GradientHome | None:
        """A home that the results of these messages can be put into and given from.

        None if they have to be given one by one: to holders that have a gradient already, or that
        someone watches. The stream that reduces is current: memory is allocated there.
        """
        is_open = bool(self._in_home)  # by an earlier reduction of the same backward
        if any(message in self._in_home for message in messages):
            return None
        if self.home is None or not (is_open or self.home.is_free):
            dtype = self.lane.stages.kept
            self.home = GradientHome(self.lane.home_numel, dtype, device, self.gifts)
        params = self.home.params
        if len(messages) < len(self.messages):
            members = {member for message in messages for member in message.members}
            params = [place for place in params if place[0] in members]
        with swift_attributes():
            for _, param, _ in params:
                if (
                    param.grad is not None
                    or param._backward_hooks
                    or param._post_accumulate_grad_hooks
                ):
                    return None
        self._in_home.update(messages)
        return self.home

    def end_backward(self) -> None:
        self._in_home.clear()


def gradient_lanes(
    layout: UnitLayout,
    members: Sequence[Member],
    rank: int,
    holder_of: Callable[[int], Holder | None],
) -> list[GradientLane]:
    """All lanes of a layout."""
    return [
        GradientLane(layout, lane, members, rank, holder_of(index))
        for index, lane in enumerate(layout.lanes)
    ]


def _flat_part(grad: Gradient, numel: int, like: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return like.new_zeros(numel)
    return grad if grad.ndim else grad.reshape(1)


def _part(
    grad: Gradient, split: Split | FlatSplit, numel: int, num_ranks: int, like: torch.Tensor
) -> torch.Tensor:
    """A gradient as rows that `_chunk_cat` cuts into one chunk per rank."""
    assert isinstance(split, Split)
    if grad is None:
        return like.new_zeros(num_ranks, numel)
    if split.dim == 0:
        return grad
    if split.dim is None:
        return grad.reshape(1, -1).expand(num_ranks, -1).contiguous()
    return grad.reshape(split.num_rows, split.inner)

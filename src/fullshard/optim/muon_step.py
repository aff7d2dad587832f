"""The step of `Muon` on one rank: what it does as long as its parameters stay what they are.

Every matrix goes to its owner (`owners.py`) in bf16, is orthogonalized there in a batch of matrices
of its shape (`newton_schulz.py`), and returns:

    momentum, on the shards
    group           pack -> all-to-all -> unpack, orthogonalize, pack -> all-to-all -> apply
    next group                   pack  -> all-to-all -> ...

While a group is orthogonalized, the next one travels to its owners and the last one back. What
travels and when does not depend on gradients: a rank without elements of a matrix cannot know
whether the others have a gradient. A matrix without one travels as zeros, and nothing is done with
the result.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from fullshard._torch import foreach_copy_, to_local
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Collectives, collectives_for
from fullshard.comm.mesh import Axis, MeshInfo
from fullshard.comm.work import CollectiveWork
from fullshard.device import simulation
from fullshard.errors import DisagreementError
from fullshard.layout.split import Box, slices
from fullshard.optim.matrices import HeldTensor, require_matrices
from fullshard.optim.muon_options import State, names_of, ns_options, require_options
from fullshard.optim.muon_values import Part, Values
from fullshard.optim.newton_schulz import cost, orthogonalize_
from fullshard.optim.owners import Matrix, OwnedMatrix, OwnerPlan, Owners, plan_owners

Exchange = Literal["all_to_all", "all_gather"]

_SENT = torch.bfloat16


class Work:
    """What an optimizer does in each step, as long as its parameters stay what they are.

    `held` are the tensors of its parameters; `group_of` has the number of the group of each, and
    `own_boxes` what this rank has of it.
    """

    def __init__(
        self, groups: list[State], exchange: Exchange, *, is_compared: bool = True
    ) -> None:
        self._params = _params(groups)
        self._options = ns_options(groups)
        self._views: dict[tuple[int, bool], tuple[torch.Tensor, int, list[torch.Tensor]]] = {}
        self.held: list[HeldTensor] = []
        self.group_of: list[int] = []
        for number, group in enumerate(groups):
            require_options(group)
            for param, name in zip(group["params"], names_of(group), strict=True):
                for each in require_matrices(param, name) if param.requires_grad else ():
                    self.held.append(each)
                    self.group_of.append(number)
        by_place: defaultdict[MeshInfo | torch.device, list[int]] = defaultdict(list)
        for number, each in enumerate(self.held):
            by_place[each.mesh_info or each.device].append(number)
        kinds = list(dict.fromkeys(self._options))
        self.meshes = [_MeshWork(self, each, kinds, exchange) for each in by_place.values()]
        self.own_boxes = {number: boxes for mesh in self.meshes for number, boxes in mesh.own_boxes}
        self._divided = {
            number for mesh in self.meshes for number, _ in mesh.own_boxes if mesh.is_divided
        }
        for mesh in self.meshes if is_compared else ():
            mesh.compare()

    def fits(self, groups: list[State]) -> bool:
        """Whether it is still the work of these groups."""
        found = _params(groups)
        return (
            len(found) == len(self._params)
            and all(a is b and c == d for (a, c), (b, d) in zip(found, self._params, strict=True))
            and ns_options(groups) == self._options
            and all(each.is_current for each in self.held)
        )

    def kept_boxes(self, number: int, value: torch.Tensor) -> list[torch.Tensor]:
        """This rank's boxes of a parameter or its momentum: the same views in every step."""
        local, is_param = to_local(value), value is self.held[number].param
        known = self._views.get((number, is_param))
        if known is None or known[0] is not local or known[1] != local.data_ptr():
            boxes = self.held[number].parts_of(value, self.own_boxes[number])
            known = self._views[number, is_param] = (local, local.data_ptr(), boxes)
        return known[2]

    def is_divided(self, number: int) -> bool:
        """Whether replicas divide the matrices of a parameter among them."""
        return number in self._divided

    def kind_of(self, number: int) -> tuple[Any, ...]:
        return self._options[self.group_of[number]]

    def owners(self) -> Owners:
        matrices = [each for mesh in self.meshes for each in mesh.owned_matrices()]
        loads = [mesh.plan.loads() for mesh in self.meshes]
        busiest = sum(max(each) for each in loads)
        mean = sum(sum(each) / len(each) for each in loads)
        sent_bytes = sum(mesh.sent_bytes for mesh in self.meshes)
        return Owners(tuple(matrices), busiest / mean if mean else 1.0, sent_bytes)

    def step(self, groups: list[State], states: Any, found_inf: torch.Tensor | None) -> None:
        values = Values(self, groups, states, found_inf)
        for mesh in self.meshes:
            mesh.step(values)


def _params(groups: list[State]) -> list[tuple[torch.Tensor, bool]]:
    return [(param, param.requires_grad) for group in groups for param in group["params"]]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Matrices of one shape that are orthogonalized together, with the same options."""

    numbers: tuple[int, ...]
    shape: tuple[int, int]
    options: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class _Group:
    """This rank's share of a group of matrices that are exchanged.

    Attributes:
        parts: For each replica, the parts that this rank sends there and gets back, by owner.
        sent_numel: The elements of these by owner, in this replica.
        received: The parts of the matrices that this rank owns, by sender.
        received_numel: The elements of these by sender.
        batches: The matrices that this rank owns.
        sent_size: The elements to allocate for what is sent: the most of all replicas.
        segment_numel: The most elements that any rank sends to another, for the fallback.
    """

    parts: tuple[tuple[Part, ...], ...]
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    sent_numel: tuple[int, ...]
    received: tuple[tuple[int, Box], ...]
    received_numel: tuple[int, ...]
    batches: tuple[_Batch, ...]
    sent_size: int
    segment_numel: int


@dataclass(slots=True)
class _InFlight:
    """A group under way: its work, and the memory that it is sent from and received in."""

    group: _Group
    sent: torch.Tensor
    received: torch.Tensor
    work: CollectiveWork
    parts: list[torch.Tensor] = field(default_factory=list)


class _MeshWork:
    """The matrices on one mesh: the plan of owners, and this rank's share of it."""

    def __init__(
        self,
        work: Work,
        numbers: list[int],
        kinds: list[tuple[Any, ...]],
        exchange: Exchange,
    ) -> None:
        mesh, self.device = work.held[numbers[0]].mesh_info, work.held[numbers[0]].device
        self.shard, self.replicate = (mesh.shard, mesh.replicate) if mesh else (Axis(), Axis())
        self.is_divided = self.replicate.size > 1
        self._held, self._exchange = work.held, exchange
        self._kinds = kinds
        boxes = {
            number: [work.held[number].boxes(rank) for rank in range(self.shard.size)]
            for number in numbers
        }
        self.own_boxes = [(number, boxes[number][self.shard.rank]) for number in numbers]
        matrices = []
        for number in numbers:
            size, rows, cols = work.held[number].stack_shape
            steps: int = work.kind_of(number)[-1]
            kind = kinds.index(work.kind_of(number))
            matrices += [
                Matrix(number, index, rows, cols, cost(rows, cols, steps), kind)
                for index in range(size)
                if rows and cols
            ]
        self.plan = plan_owners(matrices, boxes, self.replicate.size)
        self.rank = self.replicate.rank * self.shard.size + self.shard.rank
        self._local = [
            [(number, part, box) for number in group for part, box in self._parts(number)]
            for group in self.plan.local[self.rank]
        ]
        self._groups = [self._group(index) for index in range(len(self.plan.groups))]

    @cached_property
    def _collectives(self) -> Collectives:
        return collectives_for(self.shard.group, self.device)

    def compare(self) -> None:
        """Raise if the plan of another rank differs."""
        if simulation() is not None:
            return
        plan = self.plan
        facts = plan.matrices, plan.owners, plan.groups
        digest = hashlib.sha256(repr(facts).encode()).digest()
        for axis in (self.shard, self.replicate):
            rows = Agreement.exchanged([int.from_bytes(digest[:7], "big")], axis, self.device)
            if any(row != rows[0] for row in rows):
                raise DisagreementError(
                    f"Muon: ranks {axis.global_ranks()} do not train the same matrices, in the "
                    "same order and with the same options; build the same optimizer on every "
                    "rank."
                )

    def _parts(self, number: int) -> list[tuple[Part, Box]]:
        """This rank's parts of a matrix, each with its place in the matrix."""
        matrix = self.plan.matrices[number]
        found = []
        for place, box in enumerate(self.plan.boxes[matrix.param][self.shard.rank]):
            if len(box.sizes) == 2:
                found.append(Part(matrix.param, place, None, matrix))
            elif 0 <= matrix.index - box.offsets[0] < box.sizes[0]:
                index = matrix.index - box.offsets[0]
                found.append(Part(matrix.param, place, index, matrix))
        return list(zip(found, self.plan.boxes_of(number, self.shard.rank), strict=True))

    def _group(self, index: int) -> _Group:
        plan, rank = self.plan, self.shard.rank
        parts, sizes, numel = [], [], []
        for replica in range(self.replicate.size):
            by_owner = plan.sent(index, replica, rank)
            numbers = dict.fromkeys(number for some in by_owner for number, _ in some)
            parts.append(tuple(part for number in numbers for part, _ in self._parts(number)))
            sizes.append(tuple(box.sizes for some in by_owner for _, box in some))
            numel.append(tuple(sum(box.numel for _, box in some) for some in by_owner))
        by_sender = plan.received(index, self.rank)
        segment = 0
        if self._exchange == "all_gather":
            every = (plan.sent(index, self.replicate.rank, each) for each in range(self.shard.size))
            segment = max(sum(box.numel for _, box in some) for sent in every for some in sent)
        return _Group(
            parts=tuple(parts),
            sizes=tuple(sizes),
            sent_numel=numel[self.replicate.rank],
            received=tuple(part for some in by_sender for part in some),
            received_numel=tuple(sum(box.numel for _, box in some) for some in by_sender),
            batches=_batches(plan, plan.owned(index, self.rank), self._kinds),
            sent_size=self._most_sent(index),
            segment_numel=segment,
        )

    def _most_sent(self, index: int) -> int:
        """What ranks at the same place of all replicas allocate: they gather it in the end."""
        sent = (self.plan.sent(index, each, self.shard.rank) for each in range(self.replicate.size))
        return max(sum(box.numel for some in by_owner for _, box in some) for by_owner in sent)

    @property
    def sent_bytes(self) -> int:
        """What this rank sends to others in a step, where all-to-alls are used."""
        sent = self.plan.sent_numel(self.replicate.rank, self.shard.rank)
        gathered = sum(group.sent_size for group in self._groups) * (self.replicate.size - 1)
        return (sent + gathered) * _SENT.itemsize

    def owned_matrices(self) -> Iterator[OwnedMatrix]:
        plan, total = self.plan, sum(self.plan.loads()) or 1
        group_of = {number: n for n, group in enumerate(plan.groups) for number in group}
        for number, (matrix, owner) in enumerate(zip(plan.matrices, plan.owners, strict=True)):
            held = self._held[matrix.param]
            name = held.full_name + (f"[{matrix.index}]" if len(held.shape) > 2 else "")
            replica, shard = divmod(owner, plan.num_shards)
            said = f"replica {replica}, shard {shard}"
            if plan.num_replicas == 1:
                said = f"rank {self.shard.global_ranks()[shard] if self.shard.group else 0}"
            shape = matrix.rows, matrix.cols
            yield OwnedMatrix(name, shape, said, matrix.cost / total, group_of.get(number))

    # A step

    def step(self, values: Values) -> None:
        """Update the parameters of the mesh. Of three groups under way, two only travel."""
        flights: list[_InFlight] = []
        try:
            self._step_groups(flights, values)
        finally:
            for flight in flights:  # after an error, too (rule 10: wait before raising)
                with suppress(Exception):
                    flight.work.wait()

    def _step_groups(self, flights: list[_InFlight], values: Values) -> None:
        local, number = list(self._local), len(self._groups)
        for turn in range(number + 2 if number else 0):
            if turn < number:
                flights.append(self._send(self._groups[turn], values))
                for _ in range(-(-len(local) // (number - turn))):
                    self._step_local(local.pop(0), values)
            if 0 < turn <= number:
                self._orthogonalize(flights[0 if turn == 1 else 1])
            if turn > 1:
                self._finish(flights[0], values)
                del flights[0]
        for some in local:
            self._step_local(some, values)

    def _step_local(self, parts: list[tuple[int, Part, Box]], values: Values) -> None:
        """Orthogonalize matrices that this rank has alone: those with gradients."""
        parts = [each for each in parts if values.grads[each[1].held]]
        numbers = dict.fromkeys(number for number, _, _ in parts)
        batches = _batches(self.plan, list(numbers), self._kinds)
        by_number, matrices = self._allocate(batches)
        places = [_within(by_number[number], box) for number, _, box in parts]
        own = [part for _, part, _ in parts]
        values.fill(places, own)
        self._run(batches, matrices)
        values.apply(own, places)

    def _send(self, group: _Group, values: Values) -> _InFlight:
        replica = self.replicate.rank
        sent = torch.empty(group.sent_size, dtype=_SENT, device=self.device)
        own = sent[: sum(group.sent_numel)]
        parts = _views(own, group.sizes[replica])
        values.fill(parts, group.parts[replica])
        if self.shard.group is None or self.shard.is_single:
            return _InFlight(group, sent, own, CollectiveWork(), parts)
        received = torch.empty(sum(group.received_numel), dtype=_SENT, device=self.device)
        work = self._transfer(received, own, group.received_numel, group.sent_numel, group)
        return _InFlight(group, sent, received, work, parts)

    def _orthogonalize(self, flight: _InFlight) -> None:
        group = flight.group
        flight.work.wait()
        by_number, batches = self._allocate(group.batches)
        parts = _views(flight.received, [box.sizes for _, box in group.received])
        places = [_within(by_number[number], box) for number, box in group.received]
        _copy(places, parts)
        self._run(group.batches, batches)
        _copy(parts, places)
        if self.shard.group is not None and not self.shard.is_single:
            own = flight.sent[: sum(group.sent_numel)]
            flight.work = self._transfer(
                own, flight.received, group.sent_numel, group.received_numel, group
            )

    def _finish(self, flight: _InFlight, values: Values) -> None:
        group = flight.group
        flight.work.wait()
        if self.replicate.group is None or self.replicate.is_single:
            values.apply(group.parts[0], flight.parts)
            return
        size = self.replicate.size
        gathered = flight.sent.new_empty(size * group.sent_size)
        collectives = collectives_for(self.replicate.group, self.device)
        collectives.all_gather([gathered], [flight.sent], self.replicate.group).wait()
        for parts, sizes, found in zip(
            group.parts, group.sizes, gathered.view(size, -1).unbind(), strict=True
        ):
            values.apply(parts, _views(found, sizes))

    def _transfer(
        self,
        out: torch.Tensor,
        inp: torch.Tensor,
        out_numel: Sequence[int],
        in_numel: Sequence[int],
        group: _Group,
    ) -> CollectiveWork:
        """Send segments of `inp` to all ranks, and receive theirs in `out`."""
        axis = self.shard
        assert axis.group is not None
        if self._exchange == "all_to_all":
            return self._collectives.all_to_all(out, inp, out_numel, in_numel, axis.group)
        numel = group.segment_numel
        sent = inp.new_zeros(axis.size, numel)
        for row, segment in zip(sent, inp.split(list(in_numel)), strict=True):
            row[: segment.numel()].copy_(segment)
        gathered = sent.new_empty(axis.size, axis.size, numel)
        work = self._collectives.all_gather([gathered.view(-1)], [sent.view(-1)], axis.group)

        def take() -> None:
            work.wait()
            segments = out.split(list(out_numel))
            for source, segment in zip(gathered[:, axis.rank], segments, strict=True):
                segment.copy_(source[: segment.numel()])

        return CollectiveWork(buffers=[sent, gathered], then=take)

    def _allocate(
        self, batches: Sequence[_Batch]
    ) -> tuple[dict[int, torch.Tensor], list[torch.Tensor]]:
        """Memory for batches of matrices: each matrix by its number, and the batches."""
        shapes = [(len(batch.numbers), *batch.shape) for batch in batches]
        numel = sum(number * rows * cols for number, rows, cols in shapes)
        found = _views(torch.empty(numel, dtype=_SENT, device=self.device), shapes)
        pairs = zip(batches, found, strict=True)
        by_number = {n: m for each, made in pairs for n, m in zip(each.numbers, made, strict=True)}
        return by_number, found

    def _run(self, batches: Sequence[_Batch], matrices: Sequence[torch.Tensor]) -> None:
        for batch, values in zip(batches, matrices, strict=True):
            coefficients, eps, steps = batch.options
            orthogonalize_(values, coefficients, steps, eps)


def _within(matrix: torch.Tensor, box: Box) -> torch.Tensor:
    """A box of a matrix."""
    if tuple(matrix.shape) == box.sizes:
        return matrix
    return matrix[slices(box, Box.whole(matrix.shape))]


def _batches(
    plan: OwnerPlan, numbers: Sequence[int], kinds: Sequence[tuple[Any, ...]]
) -> tuple[_Batch, ...]:
    alike: defaultdict[Any, list[int]] = defaultdict(list)
    for number in numbers:
        alike[plan.matrices[number].alike].append(number)
    return tuple(
        _Batch(tuple(some), (rows, cols), kinds[kind]) for (kind, rows, cols), some in alike.items()
    )


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """Tensors of these shapes, one after another in a flat one."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = flat[: sum(sizes)].split(sizes) if sizes else ()
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _copy(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    if targets:
        foreach_copy_(targets, sources)

"""Which rank orthogonalizes which matrix, and what ranks send for it. Pure planning.

Ranks hold parts of matrices, as boxes. A matrix has one **owner**, which gets all parts and sends
the results back. A rank's number as an owner is `replica * num_shards + shard`: where replicas hold
the same parts, they divide the work. A matrix that one rank holds alone needs no exchange, unless
there are replicas that wait for it.

All ranks make the same plan from the same facts, so a plan needs no communication.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fullshard.formatting import readable, table
from fullshard.layout.split import Box

# The elements that an owner orthogonalizes at a time. Fewer would leave a large GPU waiting for
# launches; more would take memory, and leave nothing to send meanwhile.
GROUP_NUMEL = 32 << 20


@dataclass(frozen=True, slots=True)
class Matrix:
    """A matrix to orthogonalize: a parameter, or the one at `index` of a stack of them.

    `param` is the number of its parameter, `kind` that of the options it is orthogonalized with.
    """

    param: int
    index: int
    rows: int
    cols: int
    cost: int
    kind: int = 0

    @property
    def numel(self) -> int:
        return self.rows * self.cols

    @property
    def alike(self) -> tuple[int, int, int]:
        """What matrices of one batch have in common."""
        return self.kind, self.rows, self.cols


def boxes_in(matrix: Matrix, boxes: Sequence[Box]) -> list[Box]:
    """The parts of a matrix, given a rank's boxes of its parameter."""
    found = []
    for box in boxes:
        if len(box.sizes) == 2:
            found.append(box)
        elif 0 <= matrix.index - box.offsets[0] < box.sizes[0]:
            found.append(Box(box.offsets[1:], box.sizes[1:]))
    return found


def assign(costs: Sequence[int], allowed: Sequence[range], num_owners: int) -> list[int]:
    """Choose an owner for each cost, longest first: the least loaded one of those allowed.

    Those that are not free to go anywhere come first, so that the others make up for them.
    """
    loads = [0] * num_owners
    owners = [0] * len(costs)
    longest_first = sorted(range(len(costs)), key=lambda number: -costs[number])
    for number in longest_first:
        if len(allowed[number]) < num_owners:
            owner = min(allowed[number], key=lambda each: (loads[each], each))
            owners[number] = owner
            loads[owner] += costs[number]
    queue = [(load, owner) for owner, load in enumerate(loads)]
    heapq.heapify(queue)
    for number in longest_first:
        if len(allowed[number]) == num_owners:
            load, owners[number] = queue[0]
            heapq.heapreplace(queue, (load + costs[number], owners[number]))
    return owners


@dataclass(frozen=True, slots=True)
class OwnerPlan:
    """Who orthogonalizes what, over the ranks that share parameters.

    Attributes:
        matrices: All of them.
        owners: The owner of each.
        groups: The matrices that are exchanged together, in the order of groups.
        local: For each owner, what it holds alone and nobody waits for, in groups.
        boxes: For each parameter and each rank of the shard axis, what the rank holds of it.
    """

    matrices: tuple[Matrix, ...]
    owners: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]
    local: tuple[tuple[tuple[int, ...], ...], ...]
    num_replicas: int
    num_shards: int
    boxes: Mapping[int, Sequence[Sequence[Box]]] = field(compare=False, repr=False)

    @property
    def num_owners(self) -> int:
        return self.num_replicas * self.num_shards

    def boxes_of(self, number: int, shard: int) -> list[Box]:
        """The parts of a matrix that a rank of the shard axis holds."""
        matrix = self.matrices[number]
        return boxes_in(matrix, self.boxes[matrix.param][shard])

    def sent(self, group: int, replica: int, shard: int) -> list[list[tuple[int, Box]]]:
        """What a rank sends to each owner in its replica: parts of matrices, in order.

        Owners send the results in the same order.
        """
        found: list[list[tuple[int, Box]]] = [[] for _ in range(self.num_shards)]
        for number in self.groups[group]:
            owner_replica, owner = divmod(self.owners[number], self.num_shards)
            if owner_replica == replica:
                found[owner] += ((number, box) for box in self.boxes_of(number, shard))
        return found

    def received(self, group: int, owner: int) -> list[list[tuple[int, Box]]]:
        """What an owner receives from each rank of its replica."""
        own = self.owned(group, owner)
        return [
            [(number, box) for number in own for box in self.boxes_of(number, shard)]
            for shard in range(self.num_shards)
        ]

    def owned(self, group: int, owner: int) -> list[int]:
        return [number for number in self.groups[group] if self.owners[number] == owner]

    def loads(self) -> list[int]:
        """The cost of what each owner has."""
        loads = [0] * self.num_owners
        for matrix, owner in zip(self.matrices, self.owners, strict=True):
            loads[owner] += matrix.cost
        return loads

    def sent_numel(self, replica: int, shard: int) -> int:
        """How many elements a rank sends to others of its replica in a step: parts, and results."""
        own = replica * self.num_shards + shard
        found = 0
        for group in range(len(self.groups)):
            for sent in (self.sent(group, replica, shard), self.received(group, own)):
                others = (parts for other, parts in enumerate(sent) if other != shard)
                found += sum(box.numel for parts in others for _, box in parts)
        return found


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix, its owner, its share of the work on its mesh, and the group it is sent in."""

    name: str
    shape: tuple[int, int]
    owner: str
    share: float
    group: int | None


@dataclass(frozen=True, slots=True, repr=False)
class Owners:
    """Which rank orthogonalizes which matrix. Prints as a table.

    `imbalance` is the work of the busiest rank over the mean, and `sent_bytes` what this rank sends
    to others in a step.
    """

    matrices: tuple[OwnedMatrix, ...]
    imbalance: float
    sent_bytes: int

    def __repr__(self) -> str:
        rows = [("matrix", "shape", "owner", "% of work", "group")]
        for each in self.matrices:
            group = "-" if each.group is None else str(each.group)
            shape = f"{each.shape[0]} x {each.shape[1]}"
            rows.append((each.name, shape, each.owner, f"{100 * each.share:.1f}", group))
        busiest = f"busiest rank {self.imbalance:.2f} of the mean"
        sent = f"{readable(self.sent_bytes)} sent"
        rows.append((f"{len(self.matrices)} matrices", "", busiest, "", sent))
        return "\n".join(table(rows, numbers=(3,)))


def plan_owners(
    matrices: Sequence[Matrix],
    boxes: Mapping[int, Sequence[Sequence[Box]]],
    num_replicas: int = 1,
    group_numel: int = GROUP_NUMEL,
) -> OwnerPlan:
    """Plan who orthogonalizes what; `boxes` has those of each parameter, by rank."""
    num_shards = len(next(iter(boxes.values()))) if boxes else 1
    num_owners = num_replicas * num_shards
    holders = [_only_holder(matrix, boxes[matrix.param]) for matrix in matrices]
    allowed = [
        range(num_owners) if holder is None else range(holder, num_owners, num_shards)
        for holder in holders
    ]
    owners = assign([matrix.cost for matrix in matrices], allowed, num_owners)
    order = sorted(
        range(len(matrices)),
        key=lambda each: (-matrices[each].cost, matrices[each].alike, each),
    )
    is_local = [holder is not None and num_replicas == 1 for holder in holders]
    exchanged = [number for number in order if not is_local[number]]
    limit = 2 * group_numel  # nothing travels meanwhile, and larger batches need fewer launches
    local = [
        tuple(
            _grouped([n for n in order if is_local[n] and owners[n] == owner], 1, limit, matrices)
        )
        for owner in range(num_owners)
    ]
    limit = group_numel * num_owners
    return OwnerPlan(
        tuple(matrices),
        tuple(owners),
        tuple(_grouped(exchanged, num_owners, limit, matrices)),
        tuple(local),
        num_replicas,
        num_shards,
        boxes,
    )


def _only_holder(matrix: Matrix, boxes: Sequence[Sequence[Box]]) -> int | None:
    """The rank that holds all of a matrix."""
    for shard, own in enumerate(boxes):
        numel = sum(box.numel for box in boxes_in(matrix, own))
        if numel:
            return shard if numel == matrix.numel else None
    return None


def _grouped(
    numbers: Sequence[int], num_owners: int, limit: int, matrices: Sequence[Matrix]
) -> Iterator[tuple[int, ...]]:
    """Neighbors in groups of at most `limit` elements, or else as many as there are owners.

    A group has a multiple of that number: matrices of one size are spread evenly in each group.
    """
    group: list[int] = []
    numel = 0
    for first in range(0, len(numbers), num_owners):
        some = numbers[first : first + num_owners]
        more = sum(matrices[number].numel for number in some)
        if group and numel + more > limit:
            yield tuple(group)
            group, numel = [], 0
        group += some
        numel += more
    if group:
        yield tuple(group)

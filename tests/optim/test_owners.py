"""The plan of owners: every element travels once each way, and the work is spread evenly."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fullshard.layout.split import Box, FlatSplit, RowSplit, Split, tiles
from fullshard.optim.matrices import boxes_of
from fullshard.optim.newton_schulz import cost
from fullshard.optim.owners import Matrix, OwnerPlan, assign, plan_owners

SIZES = st.integers(1, 9)
SHAPES = st.lists(
    st.one_of(st.tuples(SIZES, SIZES), st.tuples(st.integers(1, 4), SIZES, SIZES)),
    min_size=1,
    max_size=9,
)


def planned(
    shapes: list[tuple[int, ...]],
    num_shards: int,
    num_replicas: int = 1,
    how: str = "rows",
    group_numel: int = 64,
) -> OwnerPlan:
    matrices, boxes, start = [], {}, 0
    total = sum(Box.whole(shape).numel for shape in shapes)
    for param, shape in enumerate(shapes):
        split: Split
        if how == "flat":
            split = FlatSplit(shape, start, -(-total // num_shards), num_shards)
            start += split.numel
        else:
            split = RowSplit(shape, 0 if how == "rows" else len(shape) - 1, num_shards)
        boxes[param] = [boxes_of(shape, split, rank) for rank in range(num_shards)]
        rows, cols = shape[-2:]
        number = shape[0] if len(shape) == 3 else 1
        matrices += [Matrix(param, i, rows, cols, cost(rows, cols, 5)) for i in range(number)]
    return plan_owners(matrices, boxes, num_replicas, group_numel)


PLANS = {
    "num_shards": st.integers(1, 5),
    "num_replicas": st.integers(1, 3),
    "how": st.sampled_from(["rows", "columns", "flat"]),
}


@given(shapes=SHAPES, group_numel=st.integers(1, 200), **PLANS)
def test_an_owner_receives_every_element_once_and_in_the_order_in_which_it_is_sent(
    shapes, num_shards, num_replicas, how, group_numel
):
    plan = planned(shapes, num_shards, num_replicas, how, group_numel)
    done: Counter[int] = Counter(number for groups in plan.local for g in groups for number in g)
    for index in range(len(plan.groups)):
        for owner in range(plan.num_owners):
            replica, shard = divmod(owner, num_shards)
            parts: dict[int, list[Box]] = {number: [] for number in plan.owned(index, owner)}
            for sender, received in enumerate(plan.received(index, owner)):
                assert received == plan.sent(index, replica, sender)[shard]
                for number, box in received:
                    parts[number].append(box)
            for number, found in parts.items():
                matrix = plan.matrices[number]
                assert tiles((matrix.rows, matrix.cols), found)
            done.update(list(parts))
    assert done == Counter(range(len(plan.matrices)))


@given(shapes=SHAPES, **PLANS)
def test_what_a_rank_holds_alone_stays_there_unless_replicas_wait_for_it(
    shapes, num_shards, num_replicas, how
):
    plan = planned(shapes, num_shards, num_replicas, how)
    for number, matrix in enumerate(plan.matrices):
        holders = [rank for rank in range(num_shards) if plan.boxes_of(number, rank)]
        if len(holders) == 1:
            assert plan.owners[number] % num_shards == holders[0]
        is_local = any(number in group for groups in plan.local for group in groups)
        assert is_local == (len(holders) == 1 and num_replicas == 1), matrix
    if num_shards == 1:
        assert plan.sent_numel(0, 0) == 0


@given(
    costs=st.lists(st.integers(1, 1000), min_size=1, max_size=60),
    fixed=st.lists(st.tuples(st.integers(1, 1000), st.integers(0, 7)), max_size=20),
    num_owners=st.integers(1, 8),
)
def test_the_busiest_owner_has_the_mean_and_less_than_one_more_matrix(costs, fixed, num_owners):
    allowed = [range(num_owners) for _ in costs]
    allowed += [range(owner % num_owners, owner % num_owners + 1) for _, owner in fixed]
    every = [*costs, *(each for each, _ in fixed)]
    owners = assign(every, allowed, num_owners)
    loads, forced = [0] * num_owners, [0] * num_owners
    for number, owner in enumerate(owners):
        assert owner in allowed[number]
        loads[owner] += every[number]
        forced[owner] += every[number] if number >= len(costs) else 0
    bound = sum(every) / num_owners + max(costs) * (1 - 1 / num_owners)
    assert max(loads) <= max(bound, *forced)


def test_matrices_of_one_size_are_spread_evenly_in_every_group():
    plan = planned([(8, 8)] * 12 + [(4, 4)] * 8, num_shards=4, group_numel=128)
    assert [len(group) for group in plan.groups] == [8, 12]
    for index, group in enumerate(plan.groups):
        numbers = [len(plan.owned(index, owner)) for owner in range(4)]
        assert numbers == [len(group) // 4] * 4
    assert len(set(plan.loads())) == 1
    # Each rank sends three quarters of what it has, and as much of results.
    assert plan.sent_numel(0, 0) == 2 * (12 * 64 + 8 * 16) // 4 * 3 // 4

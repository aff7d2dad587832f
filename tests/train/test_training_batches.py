"""Which sequences each rank is given, and at what learning rate."""

import itertools
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import ConfigError
from fullshard_train.batches import Batches
from fullshard_train.config import KEYS, OptimizerSection
from fullshard_train.corpus import Corpus, Shard, Window
from fullshard_train.optimizer import learning_rate
from fullshard_train.permutation import Permutation

SEQUENCE = 3
SCHEDULES = KEYS["optimizer", "schedule"].choices


class MadeUp(Corpus):
    """Has tokens of its own; sequence i begins with the token SEQUENCE * i."""

    def __init__(self, num_sequences: int, fingerprint: str, num_windows: int) -> None:
        self.fingerprint = fingerprint
        starts = [num_sequences * n // num_windows * SEQUENCE for n in range(num_windows + 1)]
        self._parts = [
            torch.arange(start, stop + 1, dtype=torch.int32)
            for start, stop in itertools.pairwise(starts)
        ]
        self.windows = tuple((number,) for number in range(num_windows))

    @property
    def has_chats(self) -> bool:
        return False

    def window(self, index: int, sequence: int) -> Window:
        return Window((Shard(self._parts[index]),), sequence)


def corpus_of(num_sequences: int, fingerprint: str = "corpus", num_windows: int = 1) -> Corpus:
    return MadeUp(num_sequences, fingerprint, num_windows)


def batches_of(
    corpus: Corpus, *, batch: int, rank: int = 0, num_ranks: int = 1, seed: int = 0
) -> Batches:
    return Batches(
        (corpus,), sequence=SEQUENCE, batch=batch, rank=rank, num_ranks=num_ranks, seed=seed
    )


def world(corpus: Corpus, batch: int, num_ranks: int, seed: int = 0) -> list[Batches]:
    return [
        batches_of(corpus, batch=batch, rank=rank, num_ranks=num_ranks, seed=seed)
        for rank in range(num_ranks)
    ]


def step(ranks: list[Batches]) -> list[int]:
    """The sequences of a micro-batch, of all ranks in their order."""
    found = []
    for rank in ranks:
        inputs, _ = rank.next()
        found += [first // SEQUENCE for first in inputs[:, 0].tolist()]
    return found


@given(size=st.integers(1, 300), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_a_permutation_has_every_number_once(size, seed, epoch):
    order = Permutation.of(size, seed, epoch)
    assert sorted(order(index) for index in range(size)) == list(range(size))


def test_permutations_take_no_memory_and_differ_between_epochs_and_seeds():
    order = Permutation.of(10**12, 0, 0)
    found = [order(index) for index in range(1000)]
    assert len(set(found)) == 1000
    # Spread over the whole range, not along it.
    assert 0 <= min(found) < 0.05 * 10**12
    assert 0.95 * 10**12 < max(found) < 10**12
    orders = {
        tuple(map(Permutation.of(50, seed, epoch), range(50)))
        for seed in range(5)
        for epoch in range(5)
    }
    assert len(orders) == 25
    small = Counter(tuple(map(Permutation.of(3, seed, 0), range(3))) for seed in range(600))
    assert len(small) == 6
    assert min(small.values()) > 50


def test_targets_are_the_next_tokens():
    inputs, targets = batches_of(corpus_of(5), batch=2).next()
    assert inputs.shape == targets.shape == (2, SEQUENCE)
    assert inputs.dtype is targets.dtype is torch.int64
    assert inputs.is_contiguous()
    assert targets.is_contiguous()
    assert torch.equal(targets, inputs + 1)


@settings(deadline=None)
@given(
    num_sequences=st.integers(1, 40),
    batch=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    seed=st.integers(0, 1000),
    num_windows=st.integers(1, 5),
)
def test_every_sequence_comes_once_an_epoch(num_sequences, batch, num_ranks, seed, num_windows):
    corpus = corpus_of(num_sequences, num_windows=num_windows)
    ranks = world(corpus, batch, num_ranks, seed)
    found: list[int] = []
    while len(found) < 3 * num_sequences:
        found += step(ranks)
    for epoch in range(3):
        part = found[epoch * num_sequences : (epoch + 1) * num_sequences]
        assert sorted(part) == list(range(num_sequences))


@settings(deadline=None)
@given(
    num_sequences=st.integers(2, 40),
    batch=st.integers(1, 5),
    num_ranks=st.integers(1, 4),
    share=st.floats(0.5, 0.99),
)
def test_what_is_held_out_is_never_trained_on_and_counts_once(
    num_sequences, batch, num_ranks, share
):
    corpus, held_out, trained = corpus_of(num_sequences), Counter(), set()
    for is_eval in (True, False):
        for rank in range(num_ranks):
            batches = Batches(
                (corpus,),
                sequence=SEQUENCE,
                batch=batch,
                rank=rank,
                num_ranks=num_ranks,
                seed=7,
                held_out=share,
                is_eval=is_eval,
            )
            while batches.position < 2 * num_sequences:
                _, targets = batches.next()
                if is_eval:
                    held_out.update(targets[targets >= 0].tolist())
                else:
                    trained |= set(targets.flatten().tolist())
    assert set(held_out.values()) == {1}
    assert len(held_out) == int(num_sequences * share) * SEQUENCE
    assert not held_out.keys() & trained
    assert len(held_out) + len(trained) == num_sequences * SEQUENCE


def test_a_share_of_no_sequence_is_refused():
    whole = {"sequence": SEQUENCE, "batch": 1, "rank": 0, "num_ranks": 1, "seed": 0}
    with pytest.raises(ConfigError, match="this share of the sequences is not even one"):
        Batches((corpus_of(5),), **whole, held_out=0.1, is_eval=True).begin()


@settings(deadline=None)
@given(
    num_sequences=st.integers(1, 40),
    sizes=st.sampled_from([(1, 6), (2, 3), (3, 2), (6, 1)]),
    seed=st.integers(0, 1000),
)
def test_the_order_does_not_depend_on_the_number_of_ranks(num_sequences, sizes, seed):
    corpus = corpus_of(num_sequences)
    alone, many = world(corpus, 6, 1, seed), world(corpus, *sizes, seed)
    for _ in range(8):
        assert step(many) == step(alone)


@settings(deadline=None)
@given(
    num_sequences=st.integers(1, 60),
    worlds=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=5
    ),
    seed=st.integers(0, 1000),
    num_windows=st.integers(1, 5),
)
def test_a_run_that_is_resumed_on_other_ranks_repeats_and_skips_nothing(
    num_sequences, worlds, seed, num_windows
):
    corpus = corpus_of(num_sequences, num_windows=num_windows)
    found: list[int] = []
    state = None
    for batch, num_ranks, num_steps in worlds:
        ranks = world(corpus, batch, num_ranks, seed)
        for rank in ranks:
            if state is not None:
                rank.load_state_dict(state)
        for _ in range(num_steps):
            found += step(ranks)
        states = [rank.state_dict() for rank in ranks]
        assert all(each == states[0] for each in states)
        state = states[0]
    uninterrupted = world(corpus, 1, 1, seed)
    assert found == [step(uninterrupted)[0] for _ in found]
    assert state is not None
    assert state["position"] == len(found)


def test_another_corpus_seed_or_length_cannot_go_on():
    corpus = corpus_of(8)
    state = batches_of(corpus, batch=1).state_dict()
    with pytest.raises(ConfigError, match="is 'o', but the run was started with 'corpus'"):
        batches_of(corpus_of(8, "o"), batch=1).load_state_dict(state)
    with pytest.raises(ConfigError, match="--seed"):
        batches_of(corpus, batch=1, seed=1).load_state_dict(state)
    longer = Batches((corpus,), sequence=4, batch=1, rank=0, num_ranks=1, seed=0)
    with pytest.raises(ConfigError, match="--sequence"):
        longer.load_state_dict(state)


# Learning rate


def rates(**keys: float) -> list[float]:
    section = OptimizerSection(**keys)
    return [learning_rate(step, section) for step in range(section.steps)]


def test_the_learning_rate_rises_in_a_line_and_falls_along_a_cosine():
    found = rates(steps=9, warmup=4, lr=1.0, lr_end=0.2)
    assert found[:4] == [0.25, 0.5, 0.75, 1.0]
    assert found[-1] == 0.2
    assert found[3:] == sorted(found[3:], reverse=True)
    middle = rates(steps=8, warmup=4, lr=1.0, lr_end=0.2)[5]
    assert middle == pytest.approx(0.6)
    # Without a warm-up, with one that is longer than the run, and after the last step.
    assert rates(steps=3, warmup=0, lr=1.0, lr_end=0.0) == [1.0, pytest.approx(0.5), 0.0]
    assert rates(steps=4, warmup=10, lr=1.0, lr_end=0.1) == [0.25, 0.5, 0.75, 1.0]
    section = OptimizerSection(steps=5, warmup=1, lr=1.0, lr_end=0.1)
    assert learning_rate(100, section) == 0.1


def test_other_schedules_end_where_they_should():
    shape = {"steps": 10, "warmup": 2, "lr": 1.0, "lr_end": 0.2}
    found = {name: rates(**shape, schedule=name) for name in SCHEDULES}
    assert {tuple(each[:2]) for each in found.values()} == {(0.5, 1.0)}
    assert found["constant"][2:] == [1.0] * 8
    assert found["linear"][2:] == pytest.approx([1 - 0.1 * n for n in range(1, 9)])
    assert rates(**shape, schedule="wsd", decay=0.3)[2:] == pytest.approx(
        [1, 1, 1, 1, 1, 1 - 0.8 / 3, 1 - 1.6 / 3, 0.2]
    )
    assert rates(**shape, schedule="wsd", decay=0.0)[-2:] == [1.0, 0.2]


@given(
    steps=st.integers(1, 200),
    warmup=st.integers(0, 300),
    step=st.integers(0, 400),
    share=st.floats(0, 1),
)
def test_a_rate_is_positive_and_never_above_the_largest(steps, warmup, step, share):
    for name in SCHEDULES:
        section = OptimizerSection(
            steps=steps, warmup=warmup, lr=1.0, lr_end=share, schedule=name, decay=share
        )
        found = learning_rate(step, section)
        assert 0 <= found <= 1 + 1e-12
        assert found > 0 or share == 0

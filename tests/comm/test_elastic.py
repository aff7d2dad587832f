"""Replicas that die and join while the others train: decisions, and gradients."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import HashStore, PrefixStore

from fullshard.resilience.elastic import Ballot, Member, ReplicaGroup
from tests.support.elastic_replicas import Scenario, build, loss_of, optimizer_of

NUM_REPLICAS, NUM_SHARDS, NUM_STEPS = 3, 2, 12


class KilledError(Exception):
    """The process of a rank ends between two messages to the store."""


class DeadlyStore:
    """A store whose user may be killed before any message to it."""

    def __init__(self, store: HashStore, random: Random) -> None:
        self.store, self.random, self.is_deadly = store, random, True

    def __getattr__(self, name: str) -> Any:
        if self.is_deadly and self.random.random() < 0.01:
            raise KilledError
        return getattr(self.store, name)


class VotingRun:
    """Ranks that only vote, in random turns; any of them may be killed at any message."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.store = HashStore()
        self.ranks: dict[Member, list[Iterator[None]]] = {}
        self.stores: dict[Member, DeadlyStore] = {}
        self.members: dict[int, tuple[Member, ...]] = {}  # of each step
        self.sent: dict[int, int] = {}  # what the first member sends in a decision: its step
        self.ended: dict[Member, int] = {}
        self.with_state = {(replica, 0) for replica in range(NUM_REPLICAS)}
        for replica in range(NUM_REPLICAS):
            self.begin((replica, 0))

    def begin(self, own: Member) -> None:
        self.stores[own] = DeadlyStore(PrefixStore("fullshard/replicas", self.store), self.random)
        self.ranks[own] = [self.rank(own) for _ in range(NUM_SHARDS)]

    def rank(self, own: Member) -> Iterator[None]:
        ballot = Ballot(self.stores[own], own, NUM_REPLICAS, NUM_SHARDS)
        step = 0
        if own[1]:
            step = -1
            ballot.ask()
            while not ballot.is_let_in():
                yield
        while step < NUM_STEPS or ballot.view.fresh:
            view = ballot.view
            if view.fresh and view.members[0] == own:
                assert self.sent.setdefault(view.number, step) == step
            yield
            ballot.vote(lets_in=not view.fresh)
            while ballot.decision() is None:
                yield
            if not ballot.follow():
                continue
            if own in view.fresh:
                step = self.sent[view.number]
                self.with_state.add(own)
            elif not view.fresh:
                step += 1
                assert self.members.setdefault(step, view.members) == view.members
        self.ended[own] = self.ended.get(own, 0) + 1

    def turn(self) -> None:
        """Let a rank go on; if it is killed, so is all of its replica, which then starts again."""
        own = self.random.choice([*self.ranks])
        rank = self.random.choice(self.ranks[own])
        is_needed = self.with_state == {own}
        self.stores[own].is_deadly = not is_needed and not self.ended
        try:
            next(rank)
        except StopIteration:
            self.ranks[own].remove(rank)
            if not self.ranks[own]:
                del self.ranks[own]
        except KilledError:
            self.with_state.discard(own)
            del self.ranks[own]
            ReplicaGroup.mark_dead(self.store, *own)
            self.begin((own[0], own[1] + 1))


@given(st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_all_ranks_follow_one_decision_whoever_is_killed_between_two_messages(seed):
    run = VotingRun(Random(seed))
    for _ in range(20_000):
        if NUM_SHARDS in run.ended.values():
            break
        run.turn()
    assert NUM_SHARDS in run.ended.values()
    assert [*run.members] == [*range(1, NUM_STEPS + 1)]
    # The keys of two decisions, four per replica, and those that a decider has no time to delete.
    assert run.store.num_keys() <= 20 + 2 * (len(run.stores) - NUM_REPLICAS)


# Each is killed in the step, and back before the second step after it.
SCENARIOS = [
    Scenario(
        3,
        1,
        "fully_shard",
        {
            "2": (1, "before"),
            "4": (0, "reducing"),
            "6": (2, "stopped"),
            "8": (1, "reduced"),
            "10": (0, "voted"),
            "12": (2, "averaged"),
        },
        num_steps=14,
    ),
    Scenario(
        2,
        2,
        "wrapper",
        {"2": (0, "before"), "4": (1, "reduced"), "6": (0, "averaged")},
        num_steps=8,
    ),
    # Replica 0 dies as it gives its state to the first others, and twice while it is let in again;
    # then replica 1 as it gives its state to replica 0.
    Scenario(
        3,
        1,
        "fully_shard",
        {"3": (1, "giving")},
        num_steps=5,
        asked={"1": 1, "2": 2, "3": 3, "4": 4},
        early_kills={"0.0": "giving", "0.1": "before", "0.2": "taking"},
    ),
]


def said_by(scenarios: list[Scenario]) -> list[list[dict[str, Any]]]:
    """What the ranks of each scenario say."""
    texts = [json.dumps(asdict(each)) for each in scenarios]
    command = [sys.executable, "-m", "tests.support.elastic_replicas", *texts]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def unsharded(steps: list[Any], num_shards: int) -> tuple[list[float], torch.Tensor]:
    """The losses and parameters of steps, given which replicas were present in each, and kept."""
    model = build()
    optimizer, losses = optimizer_of(model), []
    for step, (present, kept) in enumerate(steps, 1):
        places = [present.index(replica) * num_shards for replica in kept]
        parts = [place + shard for place in places for shard in range(num_shards)]
        loss = torch.stack([loss_of(model, step, part) for part in parts]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, torch.cat([each.detach().flatten() for each in model.parameters()])


@pytest.mark.soak
def test_replicas_killed_in_any_phase_leave_the_losses_of_those_that_are_left():
    for scenario, lines in zip(SCENARIOS, said_by(SCENARIOS), strict=True):
        check(scenario, lines)


def check(scenario: Scenario, lines: list[dict[str, Any]]) -> None:
    """Each rank reports every step once, with the same replicas and the loss of their parts."""
    everyone = [*range(scenario.num_replicas)]
    steps, losses = [], []
    for step in range(1, scenario.num_steps + 1):
        own = [line for line in lines if line.get("step") == step]
        (present,) = {tuple(line["present"]) for line in own}
        (kept,) = {tuple(line["replicas"]) for line in own}
        assert len({tuple(line["rank"]) for line in own}) == len(own)  # each reports it once
        found = {(line["rank"][1], line["loss"]) for line in own}
        assert len(found) == scenario.num_shards  # the same in all replicas
        steps.append((present, kept))
        losses.append(sum(loss for _, loss in found) / len(found))
        victim, phase = scenario.kills.get(str(step), (None, ""))
        if phase != "voted":  # where it depends on timing
            assert (victim in kept) is (phase in ("averaged", "giving"))
        # Back in the second step after, and at the end.
        is_back = str(step - 2) in scenario.kills and not scenario.asked
        if is_back or step == scenario.num_steps:
            assert [*present] == everyone
    expected, params = unsharded(steps, scenario.num_shards)
    torch.testing.assert_close(losses, expected)
    ends = [line for line in lines if "params" in line]
    assert sorted(line["rank"] for line in ends) == [
        [replica, shard] for replica in everyone for shard in range(scenario.num_shards)
    ]
    for line in ends:
        torch.testing.assert_close(torch.tensor(line["params"]), params)
    assert sum(line["leads"] for line in ends) == scenario.num_shards

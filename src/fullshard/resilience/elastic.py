"""Replicas that come and go while the others train: hybrid sharding with a world for each replica.

A rank that dies ends every process group that it is in. So each replica has a world of its own, in
which the model is sharded. After backward, rank s of each replica averages its gradients with the
ranks s of the others, over a group that is made anew when the replicas change (a generation). They
travel through host memory over gloo, also from GPUs: a rank that waits in NCCL for one that died
cannot tell whether the device still writes.

A step counts on all replicas or on none. Every rank votes when it has the mean, and the last to do
so proposes to commit. A rank that sees a dead replica proposes to do the step again without it,
from gradients that are still intact. The store takes the first decision, and all follow it.
"""

from __future__ import annotations

import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import foreach_copy_, to_local
from fullshard.comm.collectives import pause_at_exit
from fullshard.errors import UnsupportedError
from fullshard.resilience.watcher import RankFailedError

_SLICE_S = 0.2
_POLL_S = 0.0005
_PATIENCE_S = 10.0  # until a rank whose collective failed proposes to repeat it, if none is dead
_MAX_REPEATS = 3
_PREFIX = "fullshard/replicas"

# A replica, and which of its starts.
Member = tuple[int, int]


@dataclass(frozen=True, slots=True)
class View:
    """Who takes part, after `number` decisions; `members` are in the order in which they joined.

    The first member leads. Those in `fresh` wait for parameters and state, which it gives them.
    """

    number: int
    generation: int
    members: tuple[Member, ...]
    fresh: tuple[Member, ...] = ()
    is_started: bool = True
    num_repeats: int = 0  # reforms in a row in which nobody was dead

    @classmethod
    def from_json(cls, text: bytes) -> View:
        found = json.loads(text)
        members, fresh = (tuple(map(tuple, found[key])) for key in ("members", "fresh"))
        return cls(**{**found, "members": members, "fresh": fresh})

    def after(self, decision: Mapping[str, Any]) -> View:
        """The view after a decision: a step was done and others join, or some are dead."""
        if "dead" not in decision:
            joined = tuple(map(tuple, decision["joined"]))
            generation = self.generation + bool(joined)
            return View(self.number + 1, generation, self.members + joined, joined)
        dead = [*map(tuple, decision["dead"])]
        members = tuple(each for each in self.members if each not in dead)
        fresh = tuple(each for each in self.fresh if each not in dead)
        return replace(
            self,
            number=self.number + 1,
            generation=self.generation + 1,
            members=members,
            # The first replicas all begin with the same state, so that any of them can give it.
            fresh=fresh if self.is_started else members[1:],
            num_repeats=0 if dead else self.num_repeats + 1,
        )


class Ballot:
    """The decisions of the ranks of all replicas, in a store that outlives them.

    The store has a few keys for each replica, and those of decisions since the last commit.
    """

    def __init__(self, store: Any, own: Member, num_replicas: int, num_shards: int) -> None:
        self._store = store
        self._own = own
        self._num_replicas = num_replicas
        self._num_shards = num_shards
        self._num_asked = 0  # how many requests to be let in this rank has looked at
        self._oldest = 0  # the oldest decision whose keys may be in the store
        first = tuple((replica, 0) for replica in range(num_replicas))
        self.view = View(0, 0, first, first[1:], is_started=False)

    def ask(self) -> None:
        """Ask to be let in, once all ranks of this replica do."""
        replica, start = self._own
        if self._store.add(f"ready/{replica}", 1) == self._num_shards:
            self._store.set(f"asks/{replica}", str(start))
            self._store.add("asked", 1)

    def is_let_in(self) -> bool:
        """Whether a decision has let this replica in."""
        key = f"view/{self._own[0]}"
        view = View.from_json(self._store.get(key)) if self._store.check([key]) else self.view
        if self._own in view.members:
            self.view, self._oldest = view, view.number
        return self._own in view.members

    def vote(self, *, lets_in: bool) -> None:
        """Vote that this rank has what it needs to go on; the last one to vote decides."""
        view = self.view
        num_voters = len(view.members) * self._num_shards
        if self._store.add(f"votes/{view.number}", 1) < num_voters:
            return
        if self._propose({"joined": self._asking() if lets_in else []}):
            # All have voted, so all know the decisions before.
            for number in range(self._oldest, view.number):
                self._store.delete_key(f"votes/{number}")
                self._store.delete_key(f"decision/{number}")
        else:
            self._num_asked = -1  # those that asked are not in: look again

    def decision(self, *, is_failing: bool = False) -> Mapping[str, Any] | None:
        """The decision, if there is one; proposes one if a replica is dead."""
        key = f"decision/{self.view.number}"
        if not self._store.check([key]):
            dead = [each for each in self.view.members if self._is_dead(each)]
            if not dead and not is_failing:
                return None
            self._propose({"dead": dead})
        found: Mapping[str, Any] = json.loads(self._store.get(key))
        return found

    def follow(self, *, has_failed: bool = False) -> bool:
        """Wait for the decision; return whether it is to commit."""
        deadline = time.monotonic() + _PATIENCE_S if has_failed else float("inf")
        key, pause_s = f"decision/{self.view.number}", _POLL_S
        # Not `wait`, which logs that it has timed out.
        while not self._store.check([key]) and pause_s < _SLICE_S:
            time.sleep(pause_s)
            pause_s *= 1.5
        while (decision := self.decision(is_failing=time.monotonic() > deadline)) is None:
            time.sleep(_SLICE_S / 4)
        before, self.view = self.view, self.view.after(decision)
        is_commit = "dead" not in decision
        if is_commit:
            self._oldest = before.number
            for replica, _ in self.view.fresh:
                self._store.set(f"view/{replica}", json.dumps(asdict(self.view)))
        self._require_possible()
        return is_commit

    def _require_possible(self) -> None:
        members, fresh = self.view.members, self.view.fresh
        found = ""
        if self._own not in members:
            found = "it was declared dead"
        elif members[0] in fresh:
            found = "those that had the state are dead"
        elif self.view.num_repeats > _MAX_REPEATS:
            found = f"collectives failed {_MAX_REPEATS} times, though no replica is dead"
        if found:
            raise RankFailedError(
                f"replica {self._own[0]} cannot continue: {found}; look at the output of the "
                "others, and start it again."
            )

    def _propose(self, decision: Mapping[str, Any]) -> bool:
        text = json.dumps(decision)
        won = self._store.compare_set(f"decision/{self.view.number}", "", text)
        return bool(won == text.encode())

    def _is_dead(self, member: Member) -> bool:
        return self._start_in(f"dead/{member[0]}") >= member[1]

    def _asking(self) -> list[Member]:
        """Replicas that ask to be let in; one message to the store unless more ask than before."""
        before, self._num_asked = self._num_asked, int(self._store.add("asked", 0))
        found: list[Member] = []
        for replica in range(self._num_replicas if self._num_asked != before else 0):
            start, present = self._start_in(f"asks/{replica}"), dict(self.view.members)
            if start < 1 or present.get(replica) == start or self._is_dead((replica, start)):
                continue
            if replica in present:
                self._num_asked = -1  # its dead predecessor has to leave first: look again
            else:
                found.append((replica, start))
        return found

    def _start_in(self, key: str) -> int:
        return int(self._store.get(key)) if self._store.check([key]) else -1


class _DecidedError(Exception):
    """There is a decision already, so there is no use in what this rank is doing."""


class _FailedError(Exception):
    """A collective between replicas has failed."""


@dataclass(frozen=True, slots=True)
class AveragedStep:
    """The replicas whose gradients are in a mean, and the mean of `extra` if it was given."""

    replicas: tuple[int, ...]
    extra: torch.Tensor | None


class ReplicaGroup:
    """Averages gradients over replicas, any of which may die or join between steps.

        replicas = fullshard.ReplicaGroup(store, 0, 4, model=model, optimizer=optimizer, extra=...)
        while state.step < num_steps:
            present = replicas.begin_step()
            model(batch_of(present, replicas.index)).backward()
            replicas.average()
            optimizer.step()
            optimizer.zero_grad()

    The model is sharded in the world of its replica, the default process group; all worlds have the
    same size. `store` must outlive every replica, as a launcher's TCPStore does. `replica` is the
    number of this one out of `num_replicas`, and `start` how often it was started before: the first
    ones begin together and with the same state, later ones get it. `extra` has what else belongs to
    the state by name: objects with `state_dict` and `load_state_dict`, such as a counter of steps.

    Something must watch the processes: `mark_dead` tells the others that a replica is gone. Until
    then they wait for it.
    """

    def __init__(
        self,
        store: Any,
        replica: int,
        num_replicas: int,
        *,
        model: nn.Module,
        optimizer: Optimizer | None = None,
        extra: Mapping[str, Any] | None = None,
        start: int = 0,
    ) -> None:
        is_distributed = dist.is_initialized()
        self._shard = dist.get_rank() if is_distributed else 0
        num_shards = dist.get_world_size() if is_distributed else 1
        self._store: Any = PrefixStore(_PREFIX, store)
        self._own = (replica, start)
        self._ballot = Ballot(self._store, self._own, num_replicas, num_shards)
        self._is_in = start == 0
        self._model = model
        self._optimizer = optimizer
        self._extra = extra or {}
        # The group of a generation. One that failed is kept until its works are completed.
        self._group: tuple[int, Any] = (-1, None)
        self._works: list[Any] = []
        self._abandoned: list[tuple[Any, list[Any]]] = []
        self._staged: torch.Tensor | None = None
        pause_at_exit()

    @staticmethod
    def mark_dead(store: Any, replica: int, start: int) -> None:
        """Tell all replicas that every process of a start of one has ended."""
        own = PrefixStore(_PREFIX, store)
        own.delete_key(f"ready/{replica}")
        own.set(f"dead/{replica}", str(start))

    @staticmethod
    def is_in(store: Any, replica: int, start: int) -> bool:
        """Whether a start of a replica was one of the first, or has been let in."""
        return start == 0 or Ballot(PrefixStore(_PREFIX, store), (replica, start), 1, 1).is_let_in()

    @property
    def present(self) -> tuple[int, ...]:
        """The replicas that take part in this step, in ascending order."""
        return tuple(sorted(replica for replica, _ in self._ballot.view.members))

    @property
    def index(self) -> int:
        """Which of the present replicas this one is."""
        return self.present.index(self._own[0])

    @property
    def is_leader(self) -> bool:
        """Whether this replica has been there longest, and may write checkpoints, for example."""
        return self._is_in and self._ballot.view.members[0] == self._own

    # Called by all ranks of all replicas

    def begin_step(self) -> tuple[int, ...]:
        """Give the state to replicas that were let in; return those that are present.

        A replica that was started later waits to be let in.
        """
        if not self._is_in:
            self._ballot.ask()
            while not self._ballot.is_let_in():
                time.sleep(_SLICE_S / 4)
            self._is_in = True
        while self._ballot.view.fresh:
            self._attempt(self._send_state, lets_in=False)
        return self.present

    @torch.no_grad()
    def average(self, extra: torch.Tensor | None = None) -> AveragedStep:
        """Average gradients over replicas, without those that die meanwhile.

        `extra`, such as losses, is averaged as well. The optimizer may step afterwards.
        """
        while True:
            present, size = self.present, len(self.present)
            if self._attempt(lambda: self._reduce(extra), lets_in=True):
                break
        assert self._staged is not None
        params, staged = self._trained(), self._staged.div_(size)
        *parts, has_grad, averaged = staged.split(self._sizes(params, extra))
        pairs = []
        for param, part, number in zip(params, parts, has_grad.tolist(), strict=True):
            if number > 0:
                if param.grad is None:
                    param.grad = torch.zeros_like(param)
                local = to_local(param.grad)
                pairs.append((local, part.view_as(local)))
        _copy(pairs)
        return AveragedStep(present, None if extra is None else averaged.to(extra).view_as(extra))

    def barrier(self) -> bool:
        """Wait for all replicas; return False if one has died meanwhile, so that another may lead.

        No replica is let in here. Replicas end after it:

            while True:
                if replicas.is_leader:
                    save(model)
                if replicas.barrier():
                    break
        """
        return self._attempt(lambda: None, lets_in=False)

    # Attempts

    def _attempt(self, action: Callable[[], None], *, lets_in: bool) -> bool:
        """Do something together; return whether all replicas did, or some must be left out."""
        has_failed = False
        try:
            action()
            self._works.clear()
            self._ballot.vote(lets_in=lets_in)
        except _DecidedError:
            pass
        except _FailedError:
            has_failed = True
        is_done = self._ballot.follow(has_failed=has_failed)
        if self._ballot.view.generation != self._group[0]:
            self._drop_group()
        return is_done

    def _drop_group(self) -> None:
        """Leave a group whose members have changed; its last collective may never end."""
        (_, group), works, self._works = self._group, self._works, []
        self._group = (-1, None)
        self._abandoned = [
            each for each in self._abandoned if not all(work.is_completed() for work in each[1])
        ]
        if group is not None:
            self._abandoned.append((group, works))
        if works:
            self._staged = None  # the last collective may still write there

    def _connected(self) -> Any:
        """The group of this generation; None if this replica is alone."""
        view = self._ballot.view
        if self._group[0] == view.generation or len(view.members) == 1:
            return self._group[1]
        name = f"generation{view.generation}/shard{self._shard}"
        # A store blocks all its users while one waits for a key: the group has its own.
        store = PrefixStore(name, self._store.clone())
        rank, size = view.members.index(self._own), len(view.members)
        gloo: Any = dist.ProcessGroupGloo
        made: list[Any] = []
        is_over = threading.Event()

        def make() -> None:
            try:
                made.append(gloo(store, rank, size, default_pg_timeout))
            except RuntimeError as error:
                made.append(error)
            is_over.set()

        # In a thread, because the call cannot be left while a member is missing.
        threading.Thread(target=make, name="replicas", daemon=True).start()
        while not is_over.wait(_SLICE_S):
            self._leave_if_decided()
        if isinstance(made[0], Exception):
            raise _FailedError from made[0]
        self._group = (view.generation, made[0])
        return made[0]

    def _leave_if_decided(self) -> None:
        if self._ballot.decision() is not None:
            raise _DecidedError

    def _wait_for(self, start: Callable[[], Any]) -> None:
        """Start a collective and wait for it, until it fails or there is a decision."""
        try:
            work = start()
            self._works = [work]
            while not _is_over(work):
                self._leave_if_decided()
        except RuntimeError as error:
            raise _FailedError from error

    # What they do together

    def _trained(self) -> list[torch.Tensor]:
        return [param for param in self._model.parameters() if param.requires_grad]

    def _sizes(self, params: Sequence[torch.Tensor], extra: torch.Tensor | None) -> list[int]:
        own = [to_local(param).numel() for param in params]
        return [*own, len(params), 0 if extra is None else extra.numel()]

    def _reduce(self, extra: torch.Tensor | None) -> None:
        """Sum gradients, how many replicas have each, and `extra`, in a copy of the gradients."""
        params = self._trained()
        sizes = self._sizes(params, extra)
        if self._staged is None or self._staged.numel() != sum(sizes):
            wide = torch.float64 if any(p.dtype == torch.float64 for p in params) else torch.float32
            is_pinned = any(param.is_cuda for param in params)
            self._staged = torch.empty(sum(sizes), dtype=wide, pin_memory=is_pinned)
        self._staged.zero_()
        *parts, has_grad, tail = self._staged.split(sizes)
        grads = [None if param.grad is None else to_local(param.grad) for param in params]
        pairs = [(p.view_as(g), g) for p, g in zip(parts, grads, strict=True) if g is not None]
        _copy(pairs)
        has_grad.copy_(torch.tensor([grad is not None for grad in grads]))
        if extra is not None:
            tail.copy_(extra.reshape(-1))
        group, staged = self._connected(), self._staged
        if group is not None:
            self._wait_for(lambda: group.allreduce([staged]))

    @torch.no_grad()
    def _send_state(self) -> None:
        """The first member gives parameters, buffers, optimizer state and `extra` to fresh ones."""
        group, view = self._connected(), self._ballot.view
        is_giver, is_fresh = view.members[0] == self._own, self._own in view.fresh
        payload = bytearray(pickle.dumps(self._described()) if is_giver else b"")
        size = torch.tensor([len(payload)])
        self._broadcast(group, size)
        payload = payload if is_giver else bytearray(int(size.item()))
        self._broadcast(group, torch.frombuffer(payload, dtype=torch.uint8))
        if is_fresh:
            self._take(pickle.loads(payload))
        for tensor in map(to_local, self._tensors()):
            sent = tensor.detach().to("cpu", copy=True).contiguous()
            self._broadcast(group, sent)
            if is_fresh:
                tensor.detach().copy_(sent)

    def _broadcast(self, group: Any, tensor: torch.Tensor) -> None:
        if tensor.numel():
            # As bytes: not every backend knows every dtype.
            sent = tensor.reshape(-1).view(torch.uint8)
            self._wait_for(lambda: group.broadcast(sent, 0))

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from (*self._model.parameters(), *self._model.buffers())
        for _, state in self._states():
            yield from (state[k] for k in sorted(state) if isinstance(state[k], torch.Tensor))

    def _states(self) -> list[tuple[torch.Tensor, dict[str, Any]]]:
        found = self._optimizer.state if self._optimizer is not None else {}
        return [
            (param, found.get(param, {})) for group in self._groups for param in group["params"]
        ]

    @property
    def _groups(self) -> list[dict[str, Any]]:
        return [] if self._optimizer is None else self._optimizer.param_groups

    def _described(self) -> dict[str, Any]:
        """All that is not a tensor, and the form of tensors another replica may not have yet."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._groups]
        states = [{k: _form(v) for k, v in state.items()} for _, state in self._states()]
        extra = {name: value.state_dict() for name, value in self._extra.items()}
        return {"groups": groups, "states": states, "extra": extra}

    def _take(self, described: Mapping[str, Any]) -> None:
        """Take all that is not a tensor, and allocate what is."""
        for name, value in self._extra.items():
            value.load_state_dict(described["extra"][name])
        for group, given in zip(self._groups, described["groups"], strict=True):
            group.update(given)
        for (param, _), given in zip(self._states(), described["states"], strict=True):
            assert self._optimizer is not None
            self._optimizer.state[param] = {k: _made(v, param) for k, v in given.items()}


@dataclass(frozen=True, slots=True)
class _Form:
    """The form of a tensor in an optimizer's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    is_dtensor: bool


def _form(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    local = to_local(value)
    if type(local) is not torch.Tensor:
        raise UnsupportedError(
            f"ReplicaGroup: the optimizer state has a {type(local).__name__}, not only plain "
            "tensors; choose another optimizer."
        )
    return _Form(tuple(value.shape), value.dtype, value.device, isinstance(value, DTensor))


def _made(value: Any, param: torch.Tensor) -> Any:
    if not isinstance(value, _Form):
        return value
    if value.is_dtensor:
        return torch.empty_like(param, dtype=value.dtype, requires_grad=False)
    # The giver's device may have another index.
    device = param.device if value.device.type == param.device.type else value.device
    return torch.empty(value.shape, dtype=value.dtype, device=device)


def _copy(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy from the second of each pair to the first; all of it is done on return."""
    if pairs:
        foreach_copy_([to for to, _ in pairs], [source for _, source in pairs], non_blocking=True)
        if any(each.is_cuda for each in pairs[0]):
            torch.cuda.current_stream().synchronize()


def _is_over(work: Any) -> bool:
    """Wait for a while; return whether a collective has ended, or raise how it failed."""
    # The timeout of a slice says nothing about the work, which may have ended since.
    with suppress(RuntimeError):
        work.wait(timedelta(seconds=_SLICE_S))
    if not work.is_completed():
        return False
    work.wait()
    return True

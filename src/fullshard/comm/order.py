"""The order in which the ranks of a mesh do what needs all of them.

[Note: order of passes] A pass is a forward, a backward, or another call that issues collectives.
What comes next is predicted from what came before, which is the same on all ranks, and so is the
prediction. A rank that does what is predicted asks nobody. A rank that is about to do something
else first asks the others through the store. Its collective would otherwise meet a different one
of the ranks that keep to the order. (On gloo, a process that receives more than it expects dies.)
Ranks that leave the order in the same way go on, and remember it for the next time.
"""

from __future__ import annotations

import json
import socket
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore  # type: ignore[attr-defined]
from torch.optim import Optimizer

from fullshard._torch import default_store, lifetime_of
from fullshard.comm import guard
from fullshard.comm.mesh import MeshInfo
from fullshard.errors import DisagreementError

# Keys of the store: what the first rank does, and whether all do the same. Two detours in a row use
# different ones.
_PER_DETOUR = ("said", "verdict")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-4, 0.2
_NUM_RECENT = 16  # passes that a prediction looks at
_MAX_NUMBER = 64  # of a pass: programs that update parameters on their own repeat this one
_MAX_KNOWN = 4096  # then all predictions are made anew: on all ranks, since all have known the same


# What a collective does, on which unit, and perhaps of how many bytes and how many parameters.
Collective: TypeAlias = tuple[Any, ...]
_SCALARS = (bool, int, float, str, type(None))


class Pass(NamedTuple):
    """A pass of a model, which is numbered by the order in which models were made.

    `number` counts passes for training since the last step of an optimizer, and `num_steps` are the
    steps of the model's optimizers since its last pass.
    """

    model: int
    kind: str
    name: str
    takes_grad: bool = False
    number: int = 0
    num_steps: int = 0

    def __str__(self) -> str:
        text = f"{self.kind} of {self.name}" if self.name else self.kind
        if self.kind == "forward" and not self.takes_grad:
            text += " without gradients"
        if self.num_steps:
            return f"{text} after {self.num_steps} optimizer step{'s' * (self.num_steps > 1)}"
        return f"{text} (pass {self.number + 1} of a step)" if self.takes_grad else text

    @property
    def usual_next(self) -> Pass | None:
        """What follows unless a program is special: backward, then a step and the next forward."""
        if not self.takes_grad:
            return None
        if self.kind == "forward":
            number = min(self.number + 1, _MAX_NUMBER)
            return self._replace(kind="backward", number=number, num_steps=0)
        return self._replace(kind="forward", number=0, num_steps=1)


class PassOrder:
    """Follows the passes of all models on a mesh, and asks the other ranks where they change.

    `_after` has what came after some passes, the most recent ones or only the last one.
    `_is_sure` says that the next pass has been compared already, `_is_lost` that this rank left one
    before its end: others may have gone on with it.
    """

    def __init__(self, num_ranks: int) -> None:
        self.num_models = 0
        self._num_ranks = num_ranks
        self._path = ""
        self._num_detours = 0
        self._after: dict[Any, Pass] = {}
        self._recent: tuple[Pass, ...] = ()
        self._last: Pass | None = None
        self._is_sure = self._is_lost = False
        self._is_learning = self._is_alone = False

    @property
    def is_learning(self) -> bool:
        """Whether all ranks have given up a step, and accept what comes until the next one."""
        return self._is_learning

    def begin(self, path: str, *, is_first: bool) -> int:
        """All ranks have compared a new model: return its number, and predict anew.

        `path` is a place in the store that nobody else knows. The first rank deletes the last one.
        """
        self._is_alone = is_simulated()
        if is_first and self._path and not self._is_alone:
            store, ends = default_store(), (f"{each}/{n}" for each in _PER_DETOUR for n in (0, 1))
            for end in (*ends, "odd", "arrived"):
                store.delete_key(f"{self._path}/{end}")
        self._path, self._num_detours = path, 0
        self.learn()
        self._is_sure, self._is_learning = True, False
        self.num_models += 1
        return self.num_models

    def enter(self, found: Pass, settings: Mapping[str, str] | None = None) -> Pass | None:
        """Begin a pass, before its first collective; return the one before.

        `settings` must be the same on all ranks: they are compared if there are any.
        """
        last = self._last
        expected = self._after.get(self._recent) or self._after.get(last)
        if expected is None and last is not None:
            expected = last.usual_next
        is_expected = expected == found and not settings and not self._is_lost
        if not is_expected and not self._is_sure and not self._is_learning:
            before = "the pass that failed" if self._is_lost else str(expected or "nothing")
            self.compare(str(found), before, settings or {})
        if len(self._after) > _MAX_KNOWN:
            self._after.clear()
        self._after[self._recent] = self._after[last] = found
        if found != last:
            self._recent = (*self._recent[1 - _NUM_RECENT :], found)
        self._last = found
        self._is_sure = self._is_lost = False
        self._is_learning &= not found.num_steps
        return last

    def lose(self) -> None:
        """A pass has ended before its time on this rank, and perhaps on no other."""
        self._is_lost = True

    def learn(self) -> None:
        """All ranks have given up a step alike: accept what comes until the next optimizer step."""
        self._after.clear()
        self._recent, self._last = (), None
        self._is_lost, self._is_learning = False, True

    def compare(self, found: str, expected: str, settings: Mapping[str, str] | None = None) -> None:
        """Compare with the other ranks what each is about to do in the place of something else.

        The first rank to arrive says what it does, the others compare. The last one writes the
        verdict, which all wait for. Two detours in a row use different keys, and the last rank at
        one deletes those of the one before, which nothing reads any more: the store does not grow.
        """
        if not guard.may_ask() or self._is_alone:
            return
        own, store = dist.get_rank(), default_store()
        mine = [found, dict(settings or {})]
        card = json.dumps([own, socket.gethostname(), *mine])
        said, verdict = (f"{self._path}/{each}/{self._num_detours % 2}" for each in _PER_DETOUR)
        odd, arrived = f"{self._path}/odd", f"{self._path}/arrived"
        self._num_detours += 1
        first = json.loads(store.compare_set(said, "", card).decode())
        if first[2:] != mine:
            store.set(odd, card)
        if store.add(arrived, 1) == self._num_detours * self._num_ranks:
            difference = store.get(odd).decode() if store.check([odd]) else ""
            # All this before the verdict: after it, the others may be at the next detour.
            for each in _PER_DETOUR:
                store.delete_key(f"{self._path}/{each}/{self._num_detours % 2}")
            store.delete_key(odd)
            store.set(verdict, difference)
        try:
            # c10d would log a wait that ends without the key.
            have_all_come = wait_until(
                lambda: store.check([verdict]), limit_s=guard.patience_s(), doing=found
            )
        except BaseException:
            self._withdraw(said, arrived)
            raise
        if not have_all_come:
            num_here = self._withdraw(said, arrived)
            raise DisagreementError(
                f"{found}: rank {own} is about to do this where it did '{expected}' before, but "
                f"only {num_here} of {self._num_ranks} ranks have come to do it within "
                f"{guard.patience_s():g} s; all ranks must do the same in the same order. Make the "
                "program take the same path on every rank."
            )
        text = store.get(verdict).decode()
        other = first if first[2:] != mine else json.loads(text) if text else None
        if other is not None:
            raise _disagreement([own, socket.gethostname(), *mine], other, expected)

    def _withdraw(self, said: str, arrived: str) -> int:
        """Act as if a detour had not happened: the others know nothing of it."""
        store = default_store()
        num_here = store.add(arrived, -1) - (self._num_detours - 1) * self._num_ranks + 1
        self._num_detours -= 1
        store.delete_key(said)
        return int(num_here)


class ModelPasses:
    """The passes of one model, and the collectives in each of them.

    A collective is a tuple: what it does, the unit, and sizes that may change. `_known` has
    those of a pass, by what came before it, and `_latest` those of the last pass of a kind. In the
    pass under way `_expected` is compared with, until `_done` has another sequence instead. The
    pass is entered (`PassOrder.enter`) when its first collective is about to be issued: ranks may
    run what needs no collective on their own.
    """

    def __init__(self, order: PassOrder, model: int) -> None:
        self._order = order
        self._model = model
        self._known: dict[tuple[Pass | None, Pass], list[Collective]] = {}
        self._latest: dict[tuple[str, ...], list[Collective]] = {}
        self._what: tuple[str, str, bool] = ("", "", False)
        self._entered: tuple[Pass | None, Pass] | None = None
        self._expected: list[Collective] = []
        self._done: list[Collective] | None = None
        self._position = 0
        self._is_free = False  # after a forward on another way than before
        self._number = self._num_steps = self._num_new_steps = 0
        # How many of the new steps each optimizer has done, also those that have done none.
        self._steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        # The hyperparameters of new optimizers, as they were at their first step.
        self._settings: dict[str, set[str]] = {}

    @property
    def num_steps(self) -> int:
        """How many steps the model's optimizers have done: if there are several, each of them."""
        return self._num_steps + self._num_new_steps

    def count_step(self, optimizer: Optimizer) -> None:
        """An optimizer has written shards of this model."""
        if optimizer not in self._steps:
            _note_settings(optimizer, self._settings)
        done = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        self._num_new_steps = max(self._num_new_steps, done)

    def begin(self, kind: str, name: str, *, takes_grad: bool = False) -> None:
        self.end()
        self._what = kind, name, takes_grad

    def begin_backward(self) -> None:
        """A backward begins: of the last forward, as far as is known."""
        _, name, _ = self._what
        self.begin("backward", name, takes_grad=True)

    def enter(self) -> None:
        """Enter the pass that has begun, unless that was done."""
        if self._entered is not None:
            return
        kind, name, takes_grad = self._what
        num_steps = self._num_new_steps
        if num_steps:
            self._number = 0
        number = self._number if takes_grad else 0
        found = Pass(self._model, kind, name, takes_grad, number, num_steps)
        settings = {name: " and ".join(sorted(each)) for name, each in self._settings.items()}
        previous = self._order.enter(found, settings)
        self._take_steps()
        if takes_grad:
            self._number = min(number + 1, _MAX_NUMBER)
        self._settings.clear()
        self._entered = previous, found
        known = self._known.get(self._entered) or self._latest.get(self._what[:2])
        is_free = known is None or self._order.is_learning
        is_free |= self._is_free and kind == "backward"
        self._is_free = False
        self._expected, self._done = known or [], [] if is_free else None
        self._position = 0

    def follow(self, doing: Collective) -> None:
        """Before a collective: raise if the other ranks are not about to issue the same one."""
        if self._entered is None:
            self.enter()
        at = self._position
        self._position = at + 1
        if self._done is None:
            if at < len(self._expected) and self._expected[at] == doing:
                return
            self._position = at
            self.leave(_named(doing), self._before(at))
            self._position = at + 1
        assert self._done is not None
        self._done.append(doing)

    def leave(self, found: str, before: str) -> None:
        """Leave the expected way of this pass, if all ranks do; the rest of it is not expected."""
        self.enter()
        if self._done is None:
            self._order.compare(found, before)
            self._done = self._expected[: self._position]

    def end(self) -> None:
        """The pass has ended."""
        if self._entered is None:
            return
        if self._done is None and self._position < len(self._expected):
            kind, name, _ = self._what
            self.leave(f"{name}: end of {kind}", self._before(self._position))
        self._is_free = self._done is not None and self._what[0] == "forward"
        if len(self._known) > _MAX_KNOWN:
            self._known.clear()
        done = self._expected if self._done is None else self._done
        self._known[self._entered] = self._latest[self._what[:2]] = done
        self._entered = None

    def abort(self) -> None:
        """A pass may have ended before its time."""
        if self._entered is not None:
            self._entered = None
            self._order.lose()

    def forget(self) -> None:
        """All ranks have given up a step alike, which some of them have not done."""
        self._known.clear()
        self._latest.clear()
        self._entered, self._number = None, 0
        self._take_steps()
        self._order.learn()

    def _take_steps(self) -> None:
        self._num_steps, self._num_new_steps = self.num_steps, 0
        for optimizer in self._steps:
            self._steps[optimizer] = 0

    def _before(self, at: int) -> str:
        kind, name, _ = self._what
        return _named(self._expected[at]) if at < len(self._expected) else f"{name}: end of {kind}"


def _named(doing: Collective) -> str:
    what, unit, *size = doing
    return f"{unit.name}: {what}" + (f" ({size[0]} bytes of {size[1]} tensors)" if size else "")


def _note_settings(optimizer: Optimizer, found: dict[str, set[str]]) -> None:
    """Add the class of an optimizer and its hyperparameters, by group and name."""
    kind = type(optimizer).__name__
    found.setdefault("class", set()).add(kind)
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            values = value if isinstance(value, (list, tuple)) else (value,)
            if name != "params" and all(isinstance(each, _SCALARS) for each in values):
                found.setdefault(f"{kind}, group {index}, {name}", set()).add(repr(value))


def difference(one: Mapping[str, str], other: Mapping[str, str]) -> tuple[str, str, str]:
    """The name of the first setting that differs, and its two values."""
    names = dict.fromkeys((*one, *other))
    name = next(each for each in names if one.get(each) != other.get(each))
    return name, one.get(name, "nothing"), other.get(name, "nothing")


def is_simulated() -> bool:
    """Whether this process plays all ranks, so that nobody would answer."""
    store: Any = default_store()
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, HashStore) or dist.get_backend() == "fake"


def wait_until(is_done: Callable[[], bool], *, limit_s: float, doing: str = "") -> bool:
    """Wait for other ranks, as long as there is hope; return whether it is done.

    The watcher knows whether others may still come. Without it, only time tells.
    """
    since = time.monotonic()
    with guard.waiting(doing) as keep_waiting:
        pause_s = _SHORTEST_PAUSE_S
        while not is_done():
            keep_waiting()
            if guard.current() is None and time.monotonic() - since > limit_s:
                return False
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return True


def _disagreement(mine: list[Any], other: list[Any], expected: str) -> DisagreementError:
    """What two ranks do differently: each is a rank, its host, what it does, and settings."""
    rank, host, found, settings = mine
    other_rank, other_host, others, other_settings = other
    if found == others:
        key, value, others = difference(settings, other_settings)
        return DisagreementError(
            f"optimizer: {key} is {value} on rank {rank} ({host}), but {others} on rank "
            f"{other_rank} ({other_host}); all ranks must have the same settings."
        )
    return DisagreementError(
        f"{found}: rank {rank} is about to do this where it did '{expected}' before, while rank "
        f"{other_rank} does {others}; all ranks must do the same in the same order. Make the "
        "program take the same path on every rank."
    )


# By the lifetime of the main group of a mesh and the name of the other one: models come and go, and
# several meshes may have the same groups. It cannot live on the group, which takes no attributes.
_orders: weakref.WeakKeyDictionary[object, dict[str, PassOrder]] = weakref.WeakKeyDictionary()


def order_of(mesh_info: MeshInfo) -> PassOrder:
    """The order of passes on a mesh of several ranks."""
    group, others = mesh_info.main.group, mesh_info.replicate
    assert group is not None
    has_others = others is not mesh_info.main and others.group is not None and not others.is_single
    name = others.group.group_name if has_others and others.group is not None else ""
    orders = _orders.setdefault(lifetime_of(group), {})
    if name not in orders:
        orders[name] = PassOrder(mesh_info.num_ranks)
    return orders[name]


def enter_call(group: dist.ProcessGroup | None, what: str) -> None:
    """All ranks of a group are about to do this, outside of forward and backward."""
    orders = _orders.get(lifetime_of(group), {}) if _orders and group is not None else {}
    if "" in orders:  # with replicas, one of them may do this alone
        orders[""].enter(Pass(0, what, ""))

"""Being told of gradients one by one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence

import torch

from fullshard.unit.member import Member


class Listener:
    """Hears of every gradient of a unit's members, once it was told to.

    Most units need none: when the gradients of their inputs are there, so are those of their
    parameters. One whose inputs take no gradient has nothing else to go by. `tell` is called with
    the member, and whether it is the last that was missing.
    """

    def __init__(self, tell: Callable[[Member, bool], None]) -> None:
        self._tell = tell
        self._is_on = False
        self._num_expected = 0
        self._arrived: set[Member] = set()

    def listen(self, members: Sequence[Member]) -> None:
        if not self._is_on:
            self._is_on = True
            self.follow(members)

    def follow(self, members: Sequence[Member]) -> None:
        """Full parameters may be new, or trained unlike before."""
        if not self._is_on:
            return
        trained = [m for m in members if m.full is not None and m.full.requires_grad]
        self._num_expected = len(trained)
        for member in trained:
            if not member.is_hooked:
                assert member.full is not None
                member.full.register_post_accumulate_grad_hook(_hook(self, member))
                member.is_hooked = True

    def begin_anew(self) -> None:
        self._arrived.clear()

    def hear(self, member: Member) -> None:
        self._arrived.add(member)
        self._tell(member, len(self._arrived) == self._num_expected)


def _hook(listener: Listener, member: Member) -> Callable[[torch.Tensor], None]:
    """Weakly: the garbage collector does not see through the hooks of a tensor."""
    listener_ref, member_ref = weakref.ref(listener), weakref.ref(member)

    def arrived(_: torch.Tensor) -> None:
        listener, member = listener_ref(), member_ref()
        if listener is not None and member is not None:
            listener.hear(member)

    return arrived

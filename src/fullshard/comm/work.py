"""A collective that was issued: how it is waited for, and how it is issued again.

Every collective of the engine goes through `issue`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any

import torch
import torch.distributed as dist

from fullshard._torch import backend_name, devices_of
from fullshard.comm import guard
from fullshard.comm.link import Link

Tensors = Sequence[torch.Tensor]
Group = dist.ProcessGroup


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective that was issued, with the shapes, dtypes and devices of its tensors."""

    call: Callable[..., Any]
    group: Any
    outs: Any
    ins: Any
    options: tuple[Any, ...] = field(compare=False)

    def issue_again(self) -> None:
        """Issue it with zeros, and wait for it."""
        outs, ins = _zeros(self.outs), _zeros(self.ins)
        work = self.call(self.group, outs, ins, *self.options)
        is_on_host = isinstance(self.group, Link)
        one = outs[0] if isinstance(outs, list) else outs
        wait = methodcaller("wait") if is_on_host else wait_of(self.group, one.device)
        CollectiveWork([work], wait=wait).wait()


def issue(call: Callable[..., Any], group: Any, outs: Any, ins: Any, *options: Any) -> Any:
    """Issue one collective on tensors or lists of them: as a whole, or it raises."""
    work = call(group, outs, ins, *options)
    guard.note_issued(lambda: Issued(call, group, _form(outs), _form(ins), options))
    return work


def issue_each(
    call: Callable[..., Any], group: Any, outs: Iterable[Any], ins: Iterable[Any], *options: Any
) -> Iterator[Any]:
    """Issue a collective for each output and input, each when its work is asked for."""
    return (issue(call, group, *pair, *options) for pair in zip(outs, ins, strict=True))


def _form(given: Any) -> Any:
    if isinstance(given, list):
        return [_form(each) for each in given]
    return given.shape, given.dtype, given.device


def _zeros(form: Any) -> Any:
    if isinstance(form, list):
        return [_zeros(each) for each in form]
    return torch.zeros(form[0], dtype=form[1], device=form[2])


class CollectiveWork:
    """A collective in flight. It holds its works and buffers until `wait` (rule 10: wait first).

    A work is a `dist.Work`, or has its methods `wait` and `get_future`. `works` may be an iterator
    that starts them one by one: if one cannot be started, those before it are waited for. The
    argument `wait` says how to wait for a single work, and `then` is called once all have
    succeeded.
    """

    def __init__(
        self,
        works: Iterable[Any] = (),
        buffers: Tensors = (),
        then: Callable[[], None] | None = None,
        wait: Callable[[Any], None] = methodcaller("wait"),
    ) -> None:
        self._works: list[Any] = []
        self._buffers = list(buffers)
        self._then = then
        self._wait = wait
        try:
            for work in works:
                if work is not None:
                    self._works.append(work)
        except BaseException:
            self._then = None
            with suppress(Exception):
                self.wait()
            raise

    @property
    def futures(self) -> list[torch.futures.Future[Any]]:
        """Done when the bytes have arrived; on a backend with streams, when that is enqueued."""
        return [work.get_future() for work in self._works]

    def wait(self) -> None:
        """Wait for all works, then raise the first error. A second call does nothing."""
        works, self._works = self._works, []
        then, self._then = self._then, None
        first: BaseException | None = None
        for work in works:
            try:
                self._wait(work)
            except BaseException as error:
                first = first or error
        self._buffers.clear()
        if first is not None:
            raise first
        if then is not None:
            then()


def is_gloo(group: Group, device: torch.device) -> bool:
    has_backend = any(each.type == device.type for each in devices_of(group))
    return has_backend and backend_name(group, device) == "gloo"


def wait_of(group: Group, device: torch.device) -> Callable[[Any], None]:
    """How to wait for a work of a group: on gloo the program waits, elsewhere the device does."""
    return guard.wait_for if is_gloo(group, device) else methodcaller("wait")

"""All ranks leave out a step in which one of them runs out of memory, and none hangs.

A rank that cannot go on leaves the others in collectives that they cannot leave: on NCCL, not
without losing their communicators. So it finishes the step: it frees what the step held, and issues
the collectives that are left as in the block before, with zeros. The others complete their step. At
the end of the block all ranks learn of it, and drop their gradients.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.optim import Optimizer

from fullshard._torch import post_accumulate_grad_hooks
from fullshard.comm import collectives, watcher
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import Issued, all_reduce, bytes_of, issue_again
from fullshard.errors import FullshardError, LifecycleError, UnsupportedError
from fullshard.formatting import readable
from fullshard.runtime.hooks import hooks_below
from fullshard.runtime.unit_facts import memory_by_kind

_REMEDY = "use smaller batches, recompute activations in backward, or shard over more ranks"


class OutOfMemoryError(FullshardError, torch.OutOfMemoryError):
    """A rank has run out of memory: which one, and what its memory was taken by."""


def oom_guard(
    model: nn.Module, *, optimizer: Optimizer | None = None, micro_batches: int = 1
) -> OomGuard:
    """Guard a step, forward and backward, against ranks that run out of memory in it.

        with fullshard.oom_guard(model) as guard:
            model(batch).sum().backward()
        if guard.ran_out:
            ...  # the same on all ranks: gradients are dropped, and the step can be repeated

    All ranks must enter the block, which must issue the same collectives each time. The first two
    blocks of a model show which: who runs out of memory in them raises an `OutOfMemoryError`.

    `micro_batches` says of how many equal ones a block consists, so that another one may have more.
    With an `optimizer`, `guard.error` tells the memory of its state from that of activations.
    """
    return OomGuard(model, optimizer, micro_batches)


class _History:
    """The collectives of the last block of a model, and whether the one before had the same."""

    def __init__(self) -> None:
        self._issued: list[Issued] = []
        self._micro_batches = 1
        self._is_confirmed = False

    def expected(self, micro_batches: int) -> list[Issued] | None:
        """What a block of so many micro-batches issues; None if that is not known."""
        return self._scaled(micro_batches) if self._is_confirmed else None

    def add(self, micro_batches: int, issued: list[Issued]) -> None:
        self._is_confirmed = self._scaled(micro_batches) == issued
        self._issued, self._micro_batches = issued, micro_batches

    def _scaled(self, micro_batches: int) -> list[Issued] | None:
        if micro_batches == self._micro_batches:
            return self._issued
        one = self._issued[: len(self._issued) // self._micro_batches]
        return one * micro_batches if one * self._micro_batches == self._issued else None


# Weak, because a model may be any module, and copies of it must not share this.
_histories: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


class OomGuard:
    """A guarded block, from `oom_guard`. What it says is the same on all ranks.

    `ranks` ran out of memory in it, and `error` says so, for who wants to raise it.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, micro_batches: int) -> None:
        self.ranks: tuple[int, ...] = ()
        self.error: OutOfMemoryError | None = None
        self._model = model
        self._optimizer = optimizer
        self._micro_batches = micro_batches
        self._memory: dict[str, int] = {}

    @property
    def ran_out(self) -> bool:
        return bool(self.ranks)

    def __enter__(self) -> OomGuard:
        self._members = hooks_below(self._model)
        self._require_usable()
        self._device = self._members[0].device
        self._history = _histories.setdefault(self._model, _History())
        collectives.issued = []
        self._before, watcher.on_failure = watcher.on_failure, self._can_finish
        return self

    def __exit__(self, _: object, error: BaseException | None, frames: object) -> bool:
        can_finish = error is not None and self._can_finish(error)
        issued, collectives.issued = collectives.issued or [], None
        watcher.on_failure = self._before
        if error is not None and not can_finish:
            if not is_out_of_memory(error):
                return False
            raise _described(
                {dist.get_rank(): self._memory},
                "The step cannot be left out: it is one of the first two blocks of the model, or "
                "took another path than the one before.",
            ) from error
        try:
            if error is not None:
                self._finish(error, len(issued))
            if self._any(error is not None):
                self._leave_out(error)
            else:
                self._history.add(self._micro_batches, issued)
        except dist.DistError as failure:
            watcher.raise_explained(failure)
        return error is not None

    def _require_usable(self) -> None:
        units = [unit for member in self._members for unit in member.units]
        model = type(self._model).__name__
        if collectives.issued is not None or not units:
            found = f"no unit in {model}" if collectives.issued is None else "one in another"
            raise LifecycleError(
                f"oom_guard: one block around a step of a sharded model is expected, found {found}."
            )
        params = [param for unit in units for param in unit.params]
        has_grads = any(param.grad is not None for param in self._model.parameters())
        if has_grads or any(each.accumulated is not None for each in params):
            raise LifecycleError(
                f"oom_guard: {model} must have no gradients before the block, found some, which "
                "would be dropped with those of the block; guard all micro-batches of a step "
                "together, and call zero_grad() before."
            )
        found = ""
        for comm in (unit.comm for unit in units):
            if comm.current.custom_all_gather or comm.current.custom_reduce_scatter:
                found = "custom collectives"
            elif comm.comm_hook or comm.all_reduce_hook:
                found = "a comm hook"
        if any(post_accumulate_grad_hooks(param) for param in self._model.parameters()):
            found = "hooks that use gradients in backward"
        elif get_debug_level() == DebugLevel.DETAIL:
            found = "TORCH_DISTRIBUTED_DEBUG=DETAIL"
        if found:
            raise UnsupportedError(
                f"oom_guard: steps that a rank can finish and others can drop are expected, found "
                f"{found}; remove it."
            )

    # After an error

    def _can_finish(self, error: BaseException) -> bool:
        """Whether this rank can finish the block after an error; asked before memory is freed."""
        if not is_out_of_memory(error):
            return False
        self._memory = self._memory or self._memory_now()
        issued, expected = collectives.issued or [], self._history.expected(self._micro_batches)
        return expected is not None and expected[: len(issued)] == issued

    def _finish(self, error: BaseException, num_issued: int) -> None:
        """Free what the step holds, and issue the collectives that are left."""
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)  # they hold activations
            cause = cause.__cause__ or cause.__context__
        self._abort()
        rest = (self._history.expected(self._micro_batches) or [])[num_issued:]
        sizes = [(bytes_of(each.outs), bytes_of(each.ins)) for each in rest]
        outs, zeros = (
            torch.zeros(max(some, default=0), dtype=torch.uint8, device=self._device)
            for some in ([size[0] for size in sizes], [size[1] for size in sizes])
        )
        for each in rest:
            issue_again(each, outs, zeros)

    def _leave_out(self, error: BaseException | None) -> None:
        """Leave nothing of the block, on any rank."""
        memory = self._memory or self._memory_now()
        agreement = Agreement(self._members[0].request.mesh_info, self._device)
        rows = agreement.exchange(int(error is not None), *memory.values())
        failed = {row[0]: dict(zip(memory, row[2:], strict=True)) for row in rows if row[1]}
        self.ranks, self.error = tuple(failed), _described(failed)
        self.error.__cause__ = error
        self._abort()
        self._model.zero_grad()

    def _abort(self) -> None:
        for scheduler in {member.scheduler for member in self._members}:
            if scheduler is not None:
                scheduler.give_up_step()
        gc.collect()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def _any(self, flag: bool) -> bool:
        """Whether any rank says so; the host waits for it."""
        info = self._members[0].request.mesh_info
        said = torch.tensor([flag], dtype=torch.int32, device=self._device)
        for axis in (info.shard, info.replicate):
            if axis.group is not None and not axis.is_single:
                all_reduce(said, axis.group, average=False)
        return bool(said.item())

    def _memory_now(self) -> dict[str, int]:
        return memory_by_kind(self._model, self._optimizer, None, self._device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on an accelerator or in torch's allocator of a CPU."""
    is_told = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_told or (isinstance(error, RuntimeError) and "can't allocate memory" in str(error))


def _described(failed: Mapping[int, Mapping[str, int]], more: str = "") -> OutOfMemoryError:
    """The error of ranks, with what the memory of the first one was taken by."""
    (rank, memory), *others = failed.items()
    taken = ", ".join(f"{kind} {readable(size)}" for kind, size in memory.items() if size)
    also = f" (also on rank {', '.join(str(each[0]) for each in others)})" if others else ""
    text = (
        f"rank {rank}: memory for a step is expected, found it used up{also}: {taken}; {_REMEDY}."
    )
    return OutOfMemoryError(f"{text} {more}".strip())


@contextmanager
def explained(
    model: nn.Module, optimizer: Optimizer, device: torch.device, more: Callable[[], str]
) -> Iterator[None]:
    """Make out-of-memory errors of a block say what the memory was taken by, and more."""
    memory: dict[str, int] = {}

    def note(error: BaseException) -> bool:
        if is_out_of_memory(error) and not memory:
            memory.update(memory_by_kind(model, optimizer, None, device))
        return False

    before, watcher.on_failure = watcher.on_failure, note
    try:
        yield
    except Exception as error:
        note(error)
        if not memory:
            raise
        is_known = isinstance(error, OutOfMemoryError)
        known = error if is_known else _described({dist.get_rank(): memory})
        raise OutOfMemoryError(f"{known} {more()}") from error
    finally:
        watcher.on_failure = before

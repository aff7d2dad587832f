"""A step in which a rank runs out of memory is left out by all ranks, instead of hanging.

A rank that cannot go on leaves the others in collectives that they cannot leave, on NCCL not
without their communicators. So it finishes the step's collectives: it frees what the step held, and
issues the collectives that are left, with zeros, as blocks before had them. The others complete
their step. At the end all ranks learn of it, and drop its gradients.
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
from fullshard.runtime.hooks import ModuleHooks, Scheduler, hooks_below
from fullshard.runtime.unit_facts import memory_now

_ON_CPU = "can't allocate memory"
_REMEDY = "use smaller batches, recompute activations in backward, or shard over more ranks"


class OutOfMemoryError(FullshardError, torch.OutOfMemoryError):
    """A rank has run out of memory: which one, and what its memory was taken by."""


def oom_guard(
    model: nn.Module, *, optimizer: Optimizer | None = None, micro_batches: int = 1
) -> OomGuard:
    """Guard a step, forward and backward, against ranks that run out of memory in it.

    All ranks must enter the block, which must issue the same collectives each time:

        with fullshard.oom_guard(model) as guard:
            model(batch).sum().backward()
        if guard.ran_out:
            ...  # the same on all ranks: gradients are dropped, and the step can be repeated

    Only out-of-memory errors end in it. The first two blocks of a model show which collectives a
    step has: a rank that runs out of memory in them raises an `OutOfMemoryError`.

    `micro_batches` says of how many equal ones a block consists, so that the next block may have
    another number of them. `optimizer` is for `guard.error`: its state is told apart then.
    """
    return OomGuard(model, optimizer, micro_batches)


class _History:
    """The collectives of the last block of a model, and whether the one before had the same."""

    def __init__(self, root: ModuleHooks) -> None:
        self.agreement = Agreement(root.request.mesh_info, root.device)
        self._issued: list[Issued] = []
        self._micro_batches = 1
        self._is_confirmed = False

    def expected(self, micro_batches: int) -> list[Issued] | None:
        """What a block of so many micro-batches will issue; None if that is not known."""
        return self._scaled(micro_batches) if self._is_confirmed else None

    def add(self, micro_batches: int, issued: list[Issued]) -> None:
        """Remember a block that all ranks have completed."""
        self._is_confirmed = self._scaled(micro_batches) == issued
        self._issued, self._micro_batches = issued, micro_batches

    def _scaled(self, micro_batches: int) -> list[Issued] | None:
        if micro_batches == self._micro_batches:
            return self._issued
        one = self._issued[: len(self._issued) // self._micro_batches]
        return one * micro_batches if one * self._micro_batches == self._issued else None


# A model cannot have another attribute: it may be any module.
_histories: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


class OomGuard:
    """One guarded block; see `oom_guard`.

    `ran_out` says whether any rank ran out of memory in it, `ranks` which ones, and `error` is what
    to raise if that must not be. They are the same on all ranks.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None, micro_batches: int) -> None:
        self.ranks: tuple[int, ...] = ()
        self.error: OutOfMemoryError | None = None
        self._model = model
        self._optimizer = optimizer
        self._micro_batches = micro_batches
        self._members = hooks_below(model)
        self._device = self._members[0].device if self._members else torch.device("cpu")
        self._memory: dict[str, int] = {}
        self._before: Callable[[BaseException], bool] | None = None

    @property
    def ran_out(self) -> bool:
        return bool(self.ranks)

    def __enter__(self) -> OomGuard:
        self._require_usable()
        if self._model not in _histories:
            self._require_engines_collectives()
            _histories[self._model] = _History(self._members[0])
        self._history = _histories[self._model]
        collectives.issued = []
        self._before, watcher.on_failure = watcher.on_failure, self._can_finish
        return self

    def __exit__(
        self, _: type[BaseException] | None, error: BaseException | None, frames: object
    ) -> bool:
        can_finish = error is not None and self._can_finish(error)
        issued, collectives.issued = collectives.issued or [], None
        watcher.on_failure = self._before
        if error is not None and not can_finish:
            if not is_out_of_memory(error):
                return False
            reason = "the first two blocks of a model show what a step has to issue"
            if self._history.expected(self._micro_batches) is not None:
                reason = "this one has issued other collectives than the block before"
            raise self._error_of({dist.get_rank(): self._memory}, reason) from error
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

    # Before the block

    def _require_usable(self) -> None:
        if collectives.issued is not None:
            raise LifecycleError(
                "oom_guard: one guarded block at a time is expected, found one inside of another; "
                "guard the whole step."
            )
        if not self._members:
            raise LifecycleError(
                "oom_guard: a sharded model is expected, found no sharded module in "
                f"{type(self._model).__name__}; shard it first."
            )
        kept = (p for each in self._members for unit in each.units for p in unit.params)
        if any(param.grad is not None for param in self._model.parameters()) or any(
            param.accumulated is not None or param.partial_grad is not None for param in kept
        ):
            raise LifecycleError(
                "oom_guard: no gradients are expected, found some from before the block, which "
                "would be lost with its own; guard all micro-batches of a step together, and call "
                "zero_grad() before it."
            )

    def _require_engines_collectives(self) -> None:
        units = [unit for each in self._members for unit in each.units]
        for comm in (unit.comm for unit in units):
            own = comm.current.custom_all_gather or comm.current.custom_reduce_scatter
            if own or comm.comm_hook or comm.all_reduce_hook:
                raise UnsupportedError(
                    "oom_guard: collectives of the engine are expected, found custom ones or a "
                    "comm hook, which a rank cannot finish for others; remove them."
                )
        if any(post_accumulate_grad_hooks(param) for param in self._model.parameters()):
            raise UnsupportedError(
                "oom_guard: gradients that can be dropped are expected, found hooks that use them "
                "in backward (register_post_accumulate_grad_hook); step the optimizer after it."
            )
        if get_debug_level() == DebugLevel.DETAIL:
            raise UnsupportedError(
                "oom_guard: steps without checks between ranks are expected, found "
                "TORCH_DISTRIBUTED_DEBUG=DETAIL; unset it."
            )

    @property
    def _schedulers(self) -> list[Scheduler]:
        found = (each.scheduler for each in self._members)
        return list(dict.fromkeys(each for each in found if each is not None))

    # After an error

    def _can_finish(self, error: BaseException) -> bool:
        """Whether this rank can finish the block for the others after an error."""
        if not is_out_of_memory(error):
            return False
        if not self._memory:  # in forward this is asked before anything is freed
            self._memory = self._memory_now()
        issued = collectives.issued or []
        expected = self._history.expected(self._micro_batches)
        return expected is not None and expected[: len(issued)] == issued

    def _finish(self, error: BaseException, num_issued: int) -> None:
        """Free what the step holds, and issue the collectives that are left."""
        _clear_frames(error)
        for scheduler in self._schedulers:
            scheduler.abort()
        self._free_caches()
        rest = (self._history.expected(self._micro_batches) or [])[num_issued:]
        try:
            outs, zeros = (
                torch.zeros(max(sizes, default=0), dtype=torch.uint8, device=self._device)
                for sizes in (
                    [bytes_of(each.outs) for each in rest],
                    [bytes_of(each.ins) for each in rest],
                )
            )
        except Exception as again:
            if not is_out_of_memory(again):
                raise
            reason = "there is no room even for the collectives of the step"
            raise self._error_of({dist.get_rank(): self._memory}, reason) from again
        for each in rest:
            issue_again(each, outs, zeros)

    def _leave_out(self, error: BaseException | None) -> None:
        """Leave nothing of the block, on any rank."""
        memory = self._memory or self._memory_now()
        rows = self._history.agreement.exchange(int(error is not None), *memory.values())
        failed = {row[0]: dict(zip(memory, row[2:], strict=True)) for row in rows if row[1]}
        self.ranks, self.error = tuple(failed), self._error_of(failed)
        self.error.__cause__ = error
        for scheduler in self._schedulers:
            scheduler.give_up_step()
        self._model.zero_grad()
        self._free_caches()

    def _any(self, flag: bool) -> bool:
        """Whether any rank says so; the host waits for it."""
        info = self._members[0].request.mesh_info
        said = torch.tensor([flag], dtype=torch.int32, device=self._device)
        for axis in (info.shard, info.replicate):
            if axis.group is not None and not axis.is_single:
                all_reduce(said, axis.group, average=False)
        return bool(said.item())

    def _free_caches(self) -> None:
        gc.collect()
        if self._device.type != "cpu":
            torch.get_device_module(self._device).empty_cache()

    def _memory_now(self) -> dict[str, int]:
        return memory_now(self._model, self._optimizer, self._device)

    def _error_of(self, failed: dict[int, dict[str, int]], reason: str = "") -> OutOfMemoryError:
        remedy = f"{reason}, so the step cannot be left out; {_REMEDY}" if reason else _REMEDY
        return out_of_memory(failed, remedy)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed."""
    is_told = isinstance(error, torch.OutOfMemoryError | MemoryError)
    return is_told or (isinstance(error, RuntimeError) and _ON_CPU in str(error))


def out_of_memory(failed: Mapping[int, Mapping[str, int]], remedy: str) -> OutOfMemoryError:
    """The error of ranks, with what the memory of the first one was taken by."""
    first, memory = next(iter(failed.items()))
    taken = ", ".join(f"{kind} {readable(size)}" for kind, size in memory.items() if size)
    others = f" (as are ranks {', '.join(map(str, [*failed][1:]))})" if len(failed) > 1 else ""
    return OutOfMemoryError(
        f"rank {first}: memory for a whole step is expected, found it used up{others} by {taken}; "
        f"{remedy}."
    )


@contextmanager
def explained(
    model: nn.Module, optimizer: Optimizer, device: torch.device, remedy: Callable[[], str]
) -> Iterator[None]:
    """Raise out-of-memory errors of a block as those that say what the memory was taken by."""
    memory: dict[str, int] = {}

    def note(error: BaseException) -> bool:
        if is_out_of_memory(error):
            memory.update(memory_now(model, optimizer, device))
        return False

    before, watcher.on_failure = watcher.on_failure, note
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error) or isinstance(error, FullshardError):
            raise
        if not memory:
            note(error)
        raise out_of_memory({dist.get_rank(): memory}, remedy()) from error
    finally:
        watcher.on_failure = before


def _clear_frames(error: BaseException | None) -> None:
    """Let go of the activations that the frames of an error hold."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

"""All ranks skip a step in which one of them runs out of memory, and none hangs.

If a rank does not go on, the others are stuck in collectives: on NCCL, they cannot leave these
without losing their communicators. So it frees what the step held, and issues the collectives that
are left, as in the block before, with zeros. The others complete their step. At the end of the
block, all ranks learn of it and drop their gradients.
"""

from __future__ import annotations

import gc
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DebugLevel, get_debug_level  # type: ignore[attr-defined]
from torch.optim import Optimizer

from fullshard._torch import post_accumulate_grad_hooks
from fullshard.comm import guard
from fullshard.comm.agreement import Agreement
from fullshard.comm.collectives import CustomCollectives, all_reduce
from fullshard.comm.work import Issued
from fullshard.errors import FullshardError, LifecycleError
from fullshard.facts import memory_by_kind
from fullshard.formatting import readable
from fullshard.runtime.hooks import hooks_below

_REMEDY = "use smaller batches, recompute activations in backward, or shard over more ranks"


class OutOfMemoryError(FullshardError, torch.OutOfMemoryError):
    """A rank has run out of memory; says which one, and what used its memory."""


class _History:
    """The collectives of the last block of a model, and whether the one before had the same."""

    issued: list[Issued]
    micro_batches = 0
    is_confirmed = False

    def expected(self, micro_batches: int) -> list[Issued] | None:
        """What a block of so many micro-batches should issue; None if that is not known."""
        if micro_batches == self.micro_batches or not self.micro_batches:
            return self.issued if self.micro_batches else None
        one = self.issued[: len(self.issued) // self.micro_batches]
        return one * micro_batches if one * self.micro_batches == self.issued else None

    def add(self, micro_batches: int, issued: list[Issued]) -> None:
        self.is_confirmed = self.expected(micro_batches) == issued
        self.issued, self.micro_batches = issued, micro_batches


# Weak, because a model may be any module, and copies of it must not share this.
_histories: weakref.WeakKeyDictionary[nn.Module, _History] = weakref.WeakKeyDictionary()


class oom_guard:  # noqa: N801 (used like a function)
    """Guards a step, forward and backward, against ranks that run out of memory in it.

        with fullshard.oom_guard(model) as guard:
            model(batch).sum().backward()
        if guard.ran_out:
            ...  # the same on all ranks: gradients are dropped, and the step can be repeated

    All ranks must enter the block, which must issue the same collectives each time. The first two
    blocks of a model show which: a rank out of memory in them raises an `OutOfMemoryError`.
    `micro_batches` is how many equal ones a block consists of, so that another one may have more.

    After the block, `ranks` are those that ran out of memory, and `error` is what to raise if that
    must not happen. It lists the state of `optimizer`, if given, apart from activations.
    """

    def __init__(
        self, model: nn.Module, *, optimizer: Optimizer | None = None, micro_batches: int = 1
    ) -> None:
        self.ran_out = False
        self.ranks: tuple[int, ...] = ()
        self.error: OutOfMemoryError | None = None
        self._model = model
        self._optimizer = optimizer
        self._micro_batches = micro_batches
        self.may_ask = True
        self._issued: list[Issued] = []
        self._rest: list[Issued] = []
        self._guarding = ExitStack()

    def __enter__(self) -> oom_guard:
        self._members = hooks_below(self._model)
        self._require_usable()
        self._device = self._members[0].request.device
        self._history = _histories.setdefault(self._model, _History())
        self._issued = []
        self.may_ask = not self._is_known
        self._guarding.enter_context(guard.guarding(self))
        return self

    def __exit__(self, _: object, error: BaseException | None, frames: object) -> bool:
        can_finish = error is None or self.can_finish(error)
        self._guarding.close()
        if error is not None and not is_out_of_memory(error):
            return False
        memory = {} if error is None else self._memory(error)
        if not can_finish:
            more = "The step cannot be left out: it is one of the first two, or took another path."
            raise _described({dist.get_rank(): memory}, more) from error
        try:
            if error is not None:
                self._finish(error)
            if self._any(error is not None):
                self._leave_out(error, memory or self._memory(error))
            else:
                self._history.add(self._micro_batches, self._issued)
        except dist.DistError as failure:
            guard.raise_explained(failure)
        return error is not None

    def _require_usable(self) -> None:
        units = [unit for member in self._members for unit in member.units]
        params = list(self._model.parameters())
        grads = [param.grad for param in params]
        grads += [param.accumulated for unit in units for param in unit.params]
        problems = {
            "another block around it; leave one out": guard.is_guarded(),
            f"no unit in {type(self._model).__name__}; shard the model": not units,
            "gradients from before, which would be dropped as well; guard all micro-batches of a "
            "step together, and call zero_grad() before": any(each is not None for each in grads),
            "hooks that use gradients in backward; step the optimizer after it": any(
                map(post_accumulate_grad_hooks, params)
            ),
            "custom collectives or comm hooks; remove them": any(
                isinstance(comm.current, CustomCollectives)
                or comm.comm_hook
                or comm.all_reduce_hook
                for comm in (unit.comm for unit in units)
            ),
            "TORCH_DISTRIBUTED_DEBUG=DETAIL; unset it": get_debug_level() == DebugLevel.DETAIL,
        }
        for found in (words for words, is_there in problems.items() if is_there):
            raise LifecycleError(f"oom_guard: cannot guard a step with {found}.")

    @property
    def _is_known(self) -> bool:
        """Whether the collectives of the block are known, on all ranks alike."""
        history = self._history
        return history.is_confirmed and history.expected(self._micro_batches) is not None

    def issued(self, collective: Issued) -> None:
        self._issued.append(collective)

    def can_finish(self, error: BaseException) -> bool:
        """Whether this rank can finish the block after an error."""
        issued, expected = self._issued, self._history.expected(self._micro_batches)
        if not is_out_of_memory(error) or not self._history.is_confirmed or expected is None:
            return False
        self._rest = expected[len(issued) :]
        return expected[: len(issued)] == issued

    def _finish(self, error: BaseException | None) -> None:
        """Free what the step holds, and issue the collectives that are left."""
        while error is not None:
            traceback.clear_frames(error.__traceback__)  # they hold activations
            error = error.__cause__ or error.__context__
        self._abort()
        for each in self._rest:
            each.issue_again()

    def _leave_out(self, error: BaseException | None, memory: dict[str, int]) -> None:
        """Drop everything of the block, on all ranks."""
        agreement = Agreement(self._members[0].request.mesh_info, self._device)
        rows = agreement.exchange(int(error is not None), *memory.values())
        failed = {row[0]: dict(zip(memory, row[2:], strict=True)) for row in rows if row[1]}
        self.ran_out, self.ranks, self.error = True, tuple(failed), _described(failed)
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
        """Whether the flag is set on any rank; the host waits for the result."""
        info = self._members[0].request.mesh_info
        said = torch.tensor([flag], dtype=torch.int32, device=self._device)
        for axis in (info.shard, info.replicate):
            if axis.group is not None and not axis.is_single:
                all_reduce(said, axis.group, average=False)
        return bool(said.item())

    def _memory(self, error: BaseException | None) -> dict[str, int]:
        return memory_by_kind(self._model, self._optimizer, error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on an accelerator or in torch's allocator of a CPU."""
    is_told = isinstance(error, torch.OutOfMemoryError | MemoryError)
    # Not a subclass: its message may be about the same error on another rank.
    return is_told or (type(error) is RuntimeError and "can't allocate memory" in str(error))


def _described(failed: Mapping[int, Mapping[str, int]], more: str = "") -> OutOfMemoryError:
    """The error for ranks out of memory, with what used the memory of the first one."""
    (rank, memory), *others = failed.items()
    taken = ", ".join(f"{kind} {readable(size)}" for kind, size in memory.items() if size)
    also = f" (also on rank {', '.join(str(each[0]) for each in others)})" if others else ""
    found = f"a step ran out of memory{also}: {taken}"
    return OutOfMemoryError(f"rank {rank}: {found}; {_REMEDY}. {more}".rstrip())


@contextmanager
def explain_out_of_memory(
    model: nn.Module, optimizer: Optimizer | None = None, more: str = ""
) -> Iterator[None]:
    """Let out-of-memory errors of a block say what used the memory of this rank, and `more`.

    They are raised as an `OutOfMemoryError`.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        memory = memory_by_kind(model, optimizer, error)
        is_known = isinstance(error, OutOfMemoryError)
        known = error if is_known else _described({dist.get_rank(): memory})
        raise OutOfMemoryError(f"{known} {more}".rstrip()) from error

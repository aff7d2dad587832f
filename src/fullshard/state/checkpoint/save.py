"""`save` and `save_async`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import nn
from torch.optim import Optimizer

from fullshard.comm import guard
from fullshard.errors import CheckpointError
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.manifest import Manifest
from fullshard.state.checkpoint.writer import Writer


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    only: str | Callable[[str], bool] | None = None,
    shards: int = 1,
    keep: int | None = None,
    pinned: str | None = None,
) -> Path:
    """Write a checkpoint. All ranks call it, and the checkpoint is complete when it returns.

    The model may be sharded through either API, in part, or not at all. Nothing is gathered: each
    rank writes what it has, in the format of `torch.distributed.checkpoint`.

    Args:
        path: The folder of the checkpoint. It appears under this name once it is complete.
        model: The model whose parameters and persistent buffers are saved.
        optimizer: The optimizer whose state is saved, by the names of the parameters.
        extra: Anything with a `state_dict` (scheduler, scaler, data loader), or plain data; each
            rank saves its own. The state of random generators is always saved.
        step: Recorded in the manifest; `latest` orders checkpoints by it.
        only: "trainable" to save only what is trained (adapters), or a function of a name.
        shards: How many files each rank writes, in parallel.
        keep: How many checkpoints in the same folder to keep; older ones are removed.
        pinned: The name of a checkpoint that is kept as well, such as the best so far.
    """
    ranks = ranks_after_saves(wait=True)
    writer = Writer(Path(path), Manifest(step=step), num_threads=shards, keep=keep, pinned=pinned)
    writer.add_model(model, optimizer, extra or {}, only, ranks)
    writer.write(ranks)
    return Path(path)


def save_async(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    extra: Mapping[str, Any] | None = None,
    step: int | None = None,
    only: str | Callable[[str], bool] | None = None,
    shards: int = 1,
    keep: int | None = None,
    pinned: str | None = None,
) -> Handle:
    """Copy everything to host memory, then write it in the background while training goes on.

    Takes the arguments of `save`. A later save queues behind this one. An error is raised by the
    handle's `wait`, and by the next save, on all ranks.
    """
    ranks = ranks_after_saves(wait=False)
    writer = Writer(Path(path), Manifest(step=step), num_threads=shards, keep=keep, pinned=pinned)
    writer.add_model(model, optimizer, extra or {}, only, ranks)
    ranks.run(f"save {path}", writer.copy_to_host)
    Handle._last = Handle(writer, RankGroup.world(in_background=True), Handle._last)
    return Handle._last


class Handle:
    """A save in the background."""

    # The last handle, on all ranks or on none, and an error that no later save has raised yet.
    _last: ClassVar[Handle | None] = None
    _failure: ClassVar[BaseException | None] = None

    def __init__(self, writer: Writer, ranks: RankGroup, before: Handle | None) -> None:
        self.path = writer.path
        self._error: BaseException | None = None
        # Not a daemon: the program must not end before the checkpoint is whole.
        self._thread = threading.Thread(
            target=self._write, args=(writer, ranks, before), name="fullshard-save"
        )
        self._thread.start()

    def _write(self, writer: Writer, ranks: RankGroup, before: Handle | None) -> None:
        guard.work_in_background()
        if before is not None:
            before._thread.join()
        try:
            writer.write(ranks)
        except BaseException as error:
            self._error = Handle._failure = error

    def done(self) -> bool:
        """Whether the save has ended, with or without an error."""
        return not self._thread.is_alive()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait until the checkpoint is complete; raise the error if the save failed."""
        guard.join(self._thread, timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: not written within {timeout_s} s; it goes on.")
        if self._error is not None:
            raise self._error
        return self.path


def ranks_after_saves(*, wait: bool) -> RankGroup:
    """Return all ranks. Raises on all of them if a background save failed on any of them.

    Without `wait`, saves that are still running are left alone.
    """
    ranks, last = RankGroup.world(), Handle._last
    if last is None:
        return ranks
    if wait:
        guard.join(last._thread)
    known = Handle._failure
    failed = [text for text in ranks.all_gather("" if known is None else str(known)) if text]
    if wait or failed:
        guard.join(last._thread)  # a rank that does not know of the failure yet is about to
        Handle._last, Handle._failure = None, None
    if failed:
        text = f"save_async: the save before this one failed: {failed[0]}"
        raise CheckpointError(text) from known
    return ranks

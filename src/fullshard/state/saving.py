"""Saving a checkpoint: at once, or in the background."""

from __future__ import annotations

import copy
import datetime
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box, tiles
from fullshard.state.checksum import as_text, checksum, joined
from fullshard.state.crew import Crew
from fullshard.state.dcp_format import HeldSavePlanner, HeldTensor
from fullshard.state.extras import packed, random_state, rank_file, state_of
from fullshard.state.folder import begin, commit, discard, prune, staging_folder, write_synced
from fullshard.state.inventory import (
    Inventory,
    Selection,
    inventory_of,
    merged_small,
    scalar_entries,
)
from fullshard.state.manifest import MANIFEST, Manifest, StoredBlock, StoredTensor, versions_here
from fullshard.state.plain_values import plain_groups, plain_values
from fullshard.state.sites import Block


@dataclass(frozen=True, slots=True)
class Options:
    """How a checkpoint is to be saved."""

    step: int | None = None
    only: str | Callable[[str], bool] | None = None
    shards: int = 1
    keep: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("shards", self.shards), ("keep", self.keep)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"save: {name} must be a number of at least 1, found {value!r}; pass 1 or more."
                )


@dataclass(frozen=True, slots=True)
class _Task:
    """A save, ready to be written: nothing in it changes when training goes on."""

    path: Path
    inventory: Inventory
    selection: str
    extra: Mapping[str, Any]
    random: Mapping[str, Any]
    options: Options
    crew: Crew


@dataclass(slots=True)
class _Facts:
    """What the first rank learns from all of them before anything is written."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    small: dict[str, dict[str, Any]] = field(default_factory=dict)


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
) -> Path:
    """Write a checkpoint; all ranks call it, and it is there, whole, when it returns.

    The model may be sharded by either door, in part, or not at all. Nothing is gathered: each rank
    writes what it has, in the format of `torch.distributed.checkpoint`.

    Args:
        path: The folder that the checkpoint becomes. It appears under this name when it is whole.
        model: Its parameters and persistent buffers.
        optimizer: Its state, by the names of the parameters.
        extra: Anything with a `state_dict` (scheduler, scaler, data loader), or plain data; each
            rank's own. The state of random generators is always saved.
        step: Noted in the manifest; `latest` goes by it.
        only: "trainable" for what is trained alone (adapters), or a function of a name.
        shards: How many files each rank writes, in parallel.
        keep: How many checkpoints beside each other to keep; older ones are removed.
    """
    BACKGROUND.wait()
    task = _task(path, model, optimizer, extra, Options(step, only, shards, keep))
    _write(task)
    return task.path


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
) -> Handle:
    """Copy everything to host memory, then write it in the background while training goes on.

    Takes what `save` takes. A further save queues behind this one. An error is raised by the
    handle's `wait`, and by the next save.
    """
    BACKGROUND.raise_failure()
    task = _staged(_task(path, model, optimizer, extra, Options(step, only, shards, keep)))
    return BACKGROUND.submit(task)


class Handle:
    """A save in the background."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._done = threading.Event()
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> Path:
        """Wait for the checkpoint to be whole; raise what went wrong."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"{self.path}: not written within {timeout_s} s; it goes on.")
        if self._error is not None:
            raise self._error
        return self.path

    def finish(self, error: BaseException | None) -> None:
        self._error = error
        self._done.set()


class _Background:
    """Writes one save after another, in threads that wait for each other."""

    def __init__(self) -> None:
        self._last: threading.Thread | None = None
        self._failure: BaseException | None = None

    def submit(self, task: _Task) -> Handle:
        handle = Handle(task.path)
        # Not a daemon: the program must not end before the checkpoint is whole.
        thread = threading.Thread(
            target=self._run, args=(self._last, task, handle), name="fullshard-save"
        )
        self._last = thread
        thread.start()
        return handle

    def wait(self) -> None:
        """Wait until nothing is being written; raise what went wrong since the last save."""
        if self._last is not None:
            self._last.join()
            self._last = None
        self.raise_failure()

    def raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise CheckpointError(
                f"save_async: the save before this one failed: {failure}"
            ) from failure

    def _run(self, before: threading.Thread | None, task: _Task, handle: Handle) -> None:
        if before is not None:
            before.join()
        try:
            _write(task)
        except BaseException as error:
            self._failure = error
            handle.finish(error)
        else:
            handle.finish(None)


BACKGROUND = _Background()


# What is saved


def _task(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any] | None,
    options: Options,
) -> _Task:
    crew = Crew()
    selection = Selection.of(options.only)
    inventory = crew.do(f"save {path}", lambda: inventory_of(model, optimizer, selection))
    return _Task(
        Path(path), inventory, selection.words, dict(extra or {}), random_state(), options, crew
    )


def _staged(task: _Task) -> _Task:
    """The same save, of copies in host memory."""
    found = task.inventory
    is_cuda = any(b.values.is_cuda for held in found.held.values() for b in held.blocks)
    copies = {
        key: HeldTensor(held.shape, held.dtype, [_on_host(block) for block in held.blocks])
        for key, held in found.held.items()
    }
    if is_cuda:
        torch.cuda.synchronize()
    extra = {name: copy.deepcopy(state_of(value)) for name, value in task.extra.items()}
    crew = Crew(in_background=True)
    return replace(task, inventory=replace(found, held=copies), extra=extra, crew=crew)


def _on_host(block: Block) -> Block:
    values = block.values
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=values.is_cuda)
    return Block(block.where, host.copy_(values, non_blocking=values.is_cuda))


# Writing


def _write(task: _Task) -> None:
    """Write one checkpoint: all of it under another name, then the manifest, then the name."""
    crew, subject = task.crew, f"save {task.path}"
    checkpoint_id = crew.first_does(subject, lambda: uuid.uuid4().hex)
    staging = staging_folder(task.path, checkpoint_id)
    facts = _facts(task, subject)
    try:
        crew.first_does(subject, lambda: begin(task.path, checkpoint_id))
        _write_tensors(task, facts, staging)
        crew.do(subject, lambda: _write_rank_file(task, staging, checkpoint_id))
        crew.first_does(subject, lambda: _finish(task, facts, staging, checkpoint_id))
    except BaseException:
        if crew.is_first:
            discard(staging)
        raise


def _facts(task: _Task, subject: str) -> _Facts:
    """What all ranks have, put together and checked before a byte is written."""
    own = {
        key: (tuple(held.shape), held.dtype, _stored_blocks(held))
        for key, held in task.inventory.held.items()
    }
    everyone = task.crew.told((own, task.inventory.small))
    facts = _Facts(small=merged_small(small for _, small in everyone))
    for key, _, held in scalar_entries(facts.small):
        facts.tensors[key] = _stored(key, [(tuple(held.shape), held.dtype, _stored_blocks(held))])
    for key in dict.fromkeys(key for blocks, _ in everyone for key in blocks):
        facts.tensors[key] = _stored(key, [blocks[key] for blocks, _ in everyone if key in blocks])
    return facts


def _stored_blocks(held: HeldTensor) -> list[StoredBlock]:
    return [
        StoredBlock(
            block.where.offsets,
            block.where.sizes,
            as_text(checksum(held.shape, block.where, block.values)),
        )
        for block in held.blocks
    ]


def _stored(
    key: str, said: Sequence[tuple[tuple[int, ...], torch.dtype, list[StoredBlock]]]
) -> StoredTensor:
    shape, dtype, _ = said[0]
    blocks = [block for _, _, some in said for block in some]
    if any((s, d) != (shape, dtype) for s, d, _ in said):
        raise CheckpointError(
            f"{key}: all ranks must have the same tensor, found {[(s, d) for s, d, _ in said]}; "
            "build the same model on every rank."
        )
    if not tiles(shape, [Box(block.offsets, block.sizes) for block in blocks]):
        found = [(block.offsets, block.sizes) for block in blocks]
        raise CheckpointError(
            f"{key}: the parts of all ranks must cover shape {shape} once, found {found}; nothing "
            "was written. Save on all ranks of the model's mesh."
        )
    total = as_text(joined(int(block.checksum, 16) for block in blocks))
    return StoredTensor(shape, str(dtype).removeprefix("torch."), total, tuple(blocks))


def _write_tensors(task: _Task, facts: _Facts, staging: Path) -> None:
    held, paths = dict(task.inventory.held), dict(task.inventory.paths)
    for key, path, whole in scalar_entries(facts.small):
        paths[key] = path
        if task.crew.is_first:
            held[key] = whole
    writer = FileSystemWriter(
        staging,
        thread_count=task.options.shards,
        per_thread_copy_ahead=0,  # see HeldSavePlanner.staged
        overwrite=False,
    )
    with task.crew.at_work(f"save {task.path}", "nothing appears under this name."):
        dcp_save(
            held,
            storage_writer=writer,
            planner=HeldSavePlanner(paths),
            process_group=task.crew.group,
            no_dist=task.crew.size == 1,
        )


def _write_rank_file(task: _Task, staging: Path, checkpoint_id: str) -> None:
    data = packed(task.extra, checkpoint_id, random_state=task.random)
    write_synced(staging / rank_file(task.crew.rank), data)


def _finish(task: _Task, facts: _Facts, staging: Path, checkpoint_id: str) -> None:
    """On the first rank, once all have written: the manifest, and the name."""
    groups = task.inventory.groups
    manifest = Manifest(
        id=checkpoint_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(),
        step=task.options.step,
        num_ranks=task.crew.size,
        versions=versions_here(),
        tensors=facts.tensors,
        aliases=task.inventory.aliases,
        optimizer=(
            None
            if groups is None
            else {"param_groups": plain_groups(groups), "values": plain_values(facts.small)}
        ),
        files={file.name: file.stat().st_size for file in sorted(staging.iterdir())},
        selection=task.selection,
        extra=tuple(task.extra),
    )
    write_synced(staging / MANIFEST, manifest.to_json().encode())
    commit(staging, task.path)
    if task.options.keep is not None:
        prune(task.path.parent, task.options.keep)

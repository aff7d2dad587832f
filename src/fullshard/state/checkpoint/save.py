"""`save` and `save_async`: first what there is, then what it is called, then bytes.

Nothing is gathered: each rank writes the boxes of tensors that it holds, and the first rank the
index and the manifest.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer

from fullshard.comm import guard
from fullshard.errors import CheckpointError, ConfigError, FullshardError
from fullshard.layout.split import Box, row_chunks
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.folder import (
    begin,
    commit,
    discard,
    prune,
    write_synced,
)
from fullshard.state.checkpoint.index import (
    INDEX,
    MODEL,
    OPTIMIZER,
    Written,
    encode_index,
    merged,
    write_tensors,
)
from fullshard.state.checkpoint.manifest import MANIFEST, Manifest, StoredOptimizer, StoredTensor
from fullshard.state.optim_params import OptimState, optim_state
from fullshard.state.plain import RANDOM, packed, random_state, rank_file
from fullshard.state.shards import LocalPart, require_values, selection, tensor_shards
from fullshard.state.stored import TensorSource


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
    writer = Writer(Path(path), shards, keep, pinned)
    writer.add_model(model, optimizer, extra or {}, only, step, ranks)
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
    writer = Writer(Path(path), shards, keep, pinned)
    writer.add_model(model, optimizer, extra or {}, only, step, ranks)
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


def write_checkpoint(
    path: Path,
    tensors: Mapping[str, TensorSource],
    like: Manifest | None = None,
    *,
    num_files: int = 1,
    rank_states: Sequence[Mapping[str, Any]] = (),
) -> None:
    """Write a checkpoint from this process alone, without a model, one box in memory at a time.

    `tensors` are by key, as in "model.layers.0.weight", and are spread over `num_files` files.
    `rank_states` holds what each rank of a run saved for itself. The step, aliases, optimizer and
    selection are those of the manifest `like`. Nothing appears under the name if the checksum of a
    tensor that it lists differs.
    """
    like = like or Manifest()
    states = [{"extra": {}, **state} for state in rank_states] or [{"extra": {}}]
    writer = Writer(path)
    writer.draft = Manifest(
        step=like.step,
        num_ranks=len(states),
        tensors=like.tensors,
        aliases=like.aliases,
        optimizer=like.optimizer,
        selection=like.selection,
        extra=tuple(states[0]["extra"]),
    )
    for key, source in tensors.items():
        boxes = source.boxes or tuple(row_chunks(source.shape, num_files))
        writer.sources[key] = replace(source, boxes=boxes)
    for rank, state in enumerate(states):
        own = {**state, "id": writer.draft.id, "rank": rank}
        writer.rank_files[rank_file(rank)] = packed(own)
    writer.file_names = [f"__{number}_0.distcp" for number in range(num_files)]
    writer.write(RankGroup())


@dataclass(slots=True)
class Writer:
    """A checkpoint that is to be written.

    Attributes:
        num_threads: How many files are written at a time.
        keep, pinned: How many checkpoints in the folder to keep, and one to keep as well.
        sources: Tensors, with the boxes that this rank writes: views of the memory that is trained.
        file_names: The files that those boxes are spread over.
        rank_files: What this rank saves for itself, or all ranks, if this process is alone.
        draft: The manifest, without what is known only after everything is written. Tensors that
            it lists must have their checksums.
    """

    path: Path
    num_threads: int = 1
    keep: int | None = None
    pinned: str | None = None
    sources: dict[str, TensorSource] = field(default_factory=dict)
    file_names: Sequence[str] = ()
    rank_files: dict[str, bytes] = field(default_factory=dict)
    draft: Manifest = field(init=False)

    def add_model(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        only: str | Callable[[str], bool] | None,
        step: int | None,
        ranks: RankGroup,
    ) -> None:
        """Add what this rank writes of a model and its optimizer; all ranks call it."""
        for name, number in (("shards", self.num_threads), ("keep", self.keep)):
            if number is not None and (type(number) is not int or number < 1):
                raise ConfigError(f"save: {name} must be a number of at least 1, not {number!r}.")
        subject = f"save {self.path}"
        with _lost_ranks_explained(subject):
            checkpoint_id = ranks.run_first(subject, lambda: uuid.uuid4().hex)

        def added() -> tuple[str, dict[str, str], OptimState]:
            choose, words = selection(only)
            shards = tensor_shards(model)
            chosen = [shard for shard in shards if choose(shard)]
            for shard in chosen:
                require_values(shard, "saved")
                key, parts = MODEL + shard.name, shard.written_parts(shard.tensor)
                self.sources[key] = TensorSource.of_parts(shard.shape, shard.dtype, parts)
            held = OptimState() if optimizer is None else optim_state(optimizer, shards, choose)
            for shard, state, value in held.sharded:
                key, parts = f"{OPTIMIZER}{shard.name}.{state}", shard.written_parts(value)
                self.sources[key] = TensorSource.of_parts(shard.shape, value.dtype, parts)
            own = {RANDOM: random_state(), "extra": extra, "id": checkpoint_id, "rank": ranks.rank}
            self.rank_files[rank_file(ranks.rank)] = packed(own)
            aliases = {name: shard.name for shard in chosen for name in shard.names[1:]}
            return words, aliases, held

        words, aliases, held = ranks.run(subject, added)
        # For state that is not sharded, ranks that train it provide the value: others may be stale.
        everyone = [each for own in reversed(ranks.gather_to_first(held.values)) for each in own]
        plain: dict[str, dict[str, Any]] = {}
        for name, state, value, _ in sorted(everyone, key=lambda each: each.is_trained):
            if not isinstance(value, torch.Tensor):
                plain.setdefault(name, {})[state] = value
                continue
            # Written whole, so that torch's tools find it.
            whole = [LocalPart(Box.whole(value.shape), value)]
            source = TensorSource.of_parts(value.shape, value.dtype, whole)
            self.sources[f"{OPTIMIZER}{name}.{state}"] = source
        saved: StoredOptimizer = {"param_groups": held.groups, "values": plain}
        self.draft = Manifest(
            id=checkpoint_id,
            step=step,
            num_ranks=ranks.size,
            aliases=aliases,
            optimizer=None if optimizer is None else saved,
            selection=words,
            extra=tuple(extra),
        )
        self.file_names = [f"__{ranks.rank}_{n}.distcp" for n in range(self.num_threads)]

    def copy_to_host(self) -> None:
        """Copy everything, so that training can go on without changing it."""
        is_cuda = False
        for key, source in self.sources.items():
            parts = []
            for box in source.boxes:
                values = source.read(box)
                host = torch.empty(box.sizes, dtype=source.dtype, pin_memory=values.is_cuda)
                parts.append(LocalPart(box, host.copy_(values, non_blocking=values.is_cuda)))
                is_cuda |= values.is_cuda
            self.sources[key] = TensorSource.of_parts(source.shape, source.dtype, parts)
        if is_cuda:
            torch.cuda.synchronize()

    def write(self, ranks: RankGroup) -> None:
        """Write everything into a staging folder, then the manifest, then rename the folder."""
        subject = f"save {self.path}"
        boxes = [(each.dtype, box) for each in self.sources.values() for box in each.boxes]
        total = sum(ranks.all_gather(sum(box.numel * dtype.itemsize for dtype, box in boxes)))
        made: list[Path] = []

        def begun() -> Path:
            made.append(begin(self.path, total))
            return made[0]

        try:
            with _lost_ranks_explained(subject):
                staging = ranks.run_first(subject, begun)
                ranks.require_seen(subject, staging)
                written = ranks.run(
                    subject, lambda: self._write_files(staging), "nothing appears under this name."
                )
                everyone = ranks.gather_to_first(written)
                ranks.run_first(subject, lambda: self._finish(staging, everyone))
        except BaseException:
            for each in made:  # by the first rank, which may not have learned that others have it
                discard(each)
            raise

    def _write_files(self, staging: Path) -> dict[str, Written]:
        for name, content in self.rank_files.items():
            write_synced(staging / name, content)
        paths = [staging / name for name in self.file_names]
        return write_tensors(paths, self.draft.id, self.sources, self.num_threads)

    def _finish(self, staging: Path, everyone: Sequence[Mapping[str, Written]]) -> None:
        """Write the index and the manifest once all ranks have written, then rename the folder."""
        written = merged(everyone)
        write_synced(staging / INDEX, encode_index(self.draft.id, written))
        tensors = {key: StoredTensor.of(each) for key, each in written.items()}
        expected = self.draft.tensors.items()
        wrong = [key for key, each in expected if tensors[key].checksum != each.checksum]
        if wrong:
            raise CheckpointError(
                f"{', '.join(wrong[:5])}: the content is not what the manifest describes; "
                "nothing was written. The checkpoint it came from is damaged."
            )
        files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        manifest = replace(self.draft, tensors=tensors, files=files)
        write_synced(staging / MANIFEST, manifest.to_json().encode())
        commit(staging, self.path)
        if self.keep is not None:
            prune(self.path.parent, self.keep, self.pinned)


@contextmanager
def _lost_ranks_explained(subject: str) -> Iterator[None]:
    """Say what it means for a save that a collective has failed."""
    try:
        yield
    except FullshardError:
        raise
    except RuntimeError as error:
        raise CheckpointError(
            f"{subject}: another rank was lost while all saved ({error}); look at its output. "
            "`latest` finds the newest whole checkpoint."
        ) from error

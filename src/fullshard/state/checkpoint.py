"""Saving and loading checkpoints of models that are sharded in any way, or not at all.

Nothing is gathered: each rank writes the boxes of tensors that it holds, and reads those that it
needs, whoever wrote them. `store.py` says what a checkpoint is on disk, `dcp.py` how its tensors
are written, and `shards.py` which boxes a rank holds.
"""

from __future__ import annotations

import copy
import io
import os
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import to_local
from fullshard.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.layout.split import Box, row_chunks, tiles
from fullshard.state import store
from fullshard.state.dcp import (
    INDEX,
    MODEL,
    OPTIMIZER,
    Entry,
    TensorInfo,
    append_entry,
    encode_index,
)
from fullshard.state.optim_state import OptimParam, optim_params, saved_options
from fullshard.state.rank_group import RankGroup
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards
from fullshard.state.store import Manifest, StoredBlock, StoredCheckpoint, StoredTensor

_RANDOM = "random state"


# Saving


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

    The model may be sharded through either API, in part, or not at all. Nothing is gathered: each
    rank writes what it has, in the format of `torch.distributed.checkpoint`.

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
    options = _Options(step, only, shards, keep)
    ranks = RankGroup.world()
    BACKGROUND.require_success(ranks, wait=True)
    _writer(Path(path), model, optimizer, extra or {}, options, ranks).write(ranks)
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
) -> Handle:
    """Copy everything to host memory, then write it in the background while training goes on.

    Takes what `save` takes. A further save queues behind this one. An error is raised by the
    handle's `wait`, and by the next save, on all ranks.
    """
    options = _Options(step, only, shards, keep)
    ranks = RankGroup.world()
    BACKGROUND.require_success(ranks, wait=False)
    writer = _writer(Path(path), model, optimizer, extra or {}, options, ranks)
    staged = ranks.run(f"save {path}", writer.staged)
    return BACKGROUND.submit(staged, RankGroup.world(in_background=True))


@dataclass(frozen=True, slots=True)
class _Options:
    """How a checkpoint is to be saved."""

    step: int | None
    only: str | Callable[[str], bool] | None
    shards: int
    keep: int | None

    def __post_init__(self) -> None:
        for name, value in (("shards", self.shards), ("keep", self.keep)):
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(
                    f"save: {name} must be a number of at least 1, found {value!r}; pass 1 or more."
                )


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
        self._last: threading.Thread | None = None  # None on all ranks, or on none of them
        self._failure: BaseException | None = None

    def submit(self, writer: _Writer, ranks: RankGroup) -> Handle:
        handle = Handle(writer.path)
        # Not a daemon: the program must not end before the checkpoint is whole.
        thread = threading.Thread(
            target=self._run, args=(self._last, writer, ranks, handle), name="fullshard-save"
        )
        self._last = thread
        thread.start()
        return handle

    def require_success(self, ranks: RankGroup, *, wait: bool) -> None:
        """Raise, on all ranks, what went wrong on any of them since the last save.

        All ranks call it. Without `wait`, saves that still go on are left alone.
        """
        if self._last is None:
            return
        if wait:
            self._last.join()
        known = self._failure
        failed = [text for text in ranks.all_gather("" if known is None else str(known)) if text]
        if wait or failed:
            self._last.join()  # where the failure is not known yet, it is about to be
            self._last, self._failure = None, None
        if failed:
            raise CheckpointError(
                f"save_async: the save before this one failed: {failed[0]}"
            ) from known

    def _run(
        self, before: threading.Thread | None, writer: _Writer, ranks: RankGroup, handle: Handle
    ) -> None:
        if before is not None:
            before.join()
        error: BaseException | None = None
        try:
            writer.write(ranks)
        except BaseException as caught:
            self._failure = error = caught
        handle.finish(error)


BACKGROUND = _Background()


# What is saved


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A tensor to be written, of which `read` gives one box at a time, on any device.

    `boxes` are those that this process writes; by default, rows are dealt out to its files evenly.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]
    boxes: tuple[Box, ...] | None = None

    @classmethod
    def of_parts(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[LocalPart]
    ) -> TensorSource:
        values = {part.box: part.values for part in parts}
        return cls(tuple(shape), dtype, values.__getitem__, tuple(values))

    @classmethod
    def of_stored(cls, stored: StoredCheckpoint, key: str) -> TensorSource:
        return cls(stored.shape(key), stored.dtype(key), lambda box: stored.read(key, box))


@dataclass(slots=True)
class _Content:
    """What this rank writes of a model and its optimizer: views of the memory that is trained.

    `values` are optimizer state that is not sharded (a count of steps, a number, a string) by
    parameter and name, and whether this rank trains a part of the parameter: others may be out of
    date.
    """

    sources: dict[str, TensorSource] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    groups: list[dict[str, Any]] | None = None
    values: dict[tuple[str, str], tuple[Any, bool]] = field(default_factory=dict)


def selection(
    only: str | Callable[[str], bool] | None,
) -> tuple[Callable[[TensorShard], bool], str]:
    """Whether a parameter or buffer was chosen, as a function, and what was chosen in words."""
    if only is None:
        return lambda _: True, "all"
    if only == "trainable":
        return lambda shard: shard.is_trainable, "trainable parameters"
    if callable(only):
        name = getattr(only, "__name__", type(only).__name__)
        return lambda shard: bool(only(shard.name)), f"names that {name} accepts"
    raise ConfigError(
        f"only: 'trainable' or a function of a name is expected, found {only!r}; leave it out to "
        "save everything."
    )


def require_values(shard: TensorShard, purpose: str) -> None:
    if shard.tensor.is_meta:
        raise LifecycleError(
            f"{shard.name}: parameters and buffers must have values to be {purpose}, found it on "
            "meta; load or initialise the model first, or call model.to_empty(device=...)."
        )


def _writer(
    path: Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Any],
    options: _Options,
    ranks: RankGroup,
) -> _Writer:
    subject = f"save {path}"
    choose, words = selection(options.only)
    content = ranks.run(subject, lambda: _content_of(model, optimizer, choose, ranks))
    values = _merged(ranks.all_gather(content.values))
    sources = dict(content.sources)
    if ranks.is_first:
        for (name, state), value in values.items():
            if isinstance(value, torch.Tensor):  # written whole, so that torch's tools find it
                whole = [LocalPart(Box.whole(value.shape), value)]
                key = f"{OPTIMIZER}{name}.{state}"
                sources[key] = TensorSource.of_parts(value.shape, value.dtype, whole)
    groups = content.groups
    optimizer_state = ranks.run(
        subject, lambda: None if groups is None else _plain_optimizer(groups, values)
    )
    draft = Manifest(
        step=options.step,
        num_ranks=ranks.size,
        aliases=content.aliases,
        optimizer=optimizer_state,
        selection=words,
        extra=tuple(extra),
    )
    boxes = [(key, box) for key, source in sources.items() for box in source.boxes or ()]
    if options.shards > 1:
        boxes.sort(key=lambda each: -each[1].numel)  # dealt out to files of about the same size
    files = {
        f"__{ranks.rank}_{n}.distcp": boxes[n :: options.shards] for n in range(options.shards)
    }
    return _Writer(
        path,
        draft,
        sources,
        files,
        {ranks.rank: {_RANDOM: random_state(), "extra": dict(extra)}},
        keep=options.keep,
        num_threads=options.shards,
    )


def _content_of(
    model: nn.Module,
    optimizer: Optimizer | None,
    choose: Callable[[TensorShard], bool],
    ranks: RankGroup,
) -> _Content:
    shards = tensor_shards(model)
    found = _Content()
    for shard in filter(choose, shards):
        require_values(shard, "saved")
        found.aliases.update(dict.fromkeys(shard.names[1:], shard.name))
        found.sources[MODEL + shard.name] = _source(shard, shard.tensor, ranks)
    if optimizer is None:
        return found
    found.groups = []
    groups = optim_params([group["params"] for group in optimizer.param_groups], shards)
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        for each in params:
            if not each.shards:
                raise ConfigError(
                    f"optimizer: its parameters must be the model's, found one of shape "
                    f"{tuple(each.param.shape)} that is not; pass the optimizer of this model."
                )
            for shard in filter(choose, each.shards):
                _add_state(found, shard, each.param, optimizer.state.get(each.param, {}), ranks)
        names = [s.name for each in params for s in each.shards if choose(s)]
        found.groups.append({**group, "params": names})
    return found


def _source(shard: TensorShard, tensor: torch.Tensor, ranks: RankGroup) -> TensorSource:
    parts = shard.local_parts(tensor) if shard.is_writer else []
    if shard.shape.numel() == 0:
        # No rank has a part; the first one writes that it exists.
        empty = torch.empty(shard.shape, dtype=tensor.dtype)
        parts = [LocalPart(Box.whole(shard.shape), empty)] if ranks.is_first else []
    return TensorSource.of_parts(shard.shape, tensor.dtype, parts)


def _add_state(
    found: _Content,
    shard: TensorShard,
    param: torch.Tensor,
    state: Mapping[str, Any],
    ranks: RankGroup,
) -> None:
    for name, value in state.items():
        is_tensor = isinstance(value, torch.Tensor) and value.dim() > 0
        is_alike = isinstance(value, DTensor) == isinstance(param, DTensor)
        if is_tensor and is_alike and value.shape == param.shape:  # sharded as the parameter is
            found.sources[f"{OPTIMIZER}{shard.name}.{name}"] = _source(shard, value, ranks)
            continue
        if isinstance(value, torch.Tensor):
            # A DTensor without dims is replicated. An optimizer counts on in place: copy.
            value = to_local(value).detach().to("cpu", copy=True)
        found.values[shard.name, name] = (value, bool(shard.local_parts(shard.tensor)))


def _merged(
    everyone: Iterable[Mapping[tuple[str, str], tuple[Any, bool]]],
) -> dict[tuple[str, str], Any]:
    """State that is not sharded, of all ranks: values of ranks that train it come first."""
    merged: dict[tuple[str, str], tuple[Any, bool]] = {}
    for values in everyone:
        for key, (value, is_trained) in values.items():
            if key not in merged or (is_trained and not merged[key][1]):
                merged[key] = (value, is_trained)
    return {key: value for key, (value, _) in merged.items()}


def _plain_optimizer(
    groups: Sequence[Mapping[str, Any]], values: Mapping[tuple[str, str], Any]
) -> dict[str, Any]:
    """What a manifest has of an optimizer: parameter groups, and state that is no tensor."""
    plain: dict[str, dict[str, Any]] = {}
    for (name, state), value in values.items():
        if not isinstance(value, torch.Tensor):
            plain.setdefault(name, {})[state] = _as_json(f"{name}.{state}", value)
    return {
        "param_groups": [
            {key: _as_json(f"param_groups[{index}].{key}", value) for key, value in group.items()}
            for index, group in enumerate(groups)
        ],
        "values": plain,
    }


def _as_json(subject: str, value: Any) -> Any:
    """A value that JSON can hold and `_from_json` gives back as it was."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"kind": "tensor", "dtype": dtype, "value": value.item()}
    if isinstance(value, (list, tuple)):
        items = [_as_json(subject, item) for item in value]
        return items if isinstance(value, list) else {"kind": "tuple", "value": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        inner = {key: _as_json(f"{subject}.{key}", item) for key, item in value.items()}
        return {"kind": "dict", "value": inner}
    raise ConfigError(
        f"optimizer: {subject} must be plain data (numbers, strings, lists, dicts) to be saved, "
        f"found {type(value).__name__}; give the optimizer a plain value."
    )


def _from_json(value: Any) -> Any:
    """What `_as_json` was given."""
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, inner = value.get("kind"), value.get("value")
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_from_json(item) for item in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: _from_json(item) for key, item in inner.items()}
    dtype = getattr(torch, str(value.get("dtype")), None)
    if kind == "tensor" and isinstance(dtype, torch.dtype):
        return torch.tensor(inner, dtype=dtype)
    return value


# Writing


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, TensorSource],
    described_by: Manifest | None = None,
    *,
    num_files: int = 1,
    rank_states: Sequence[Mapping[str, Any]] = (),
    checksums: Mapping[str, str] | None = None,
) -> Manifest:
    """Write a checkpoint from this process alone, without a model, one box in memory at a time.

    Args:
        path: The folder that it becomes; one that has the name is replaced once this one is whole.
        tensors: By key, as in "model.layers.0.weight".
        described_by: A manifest with the same step, aliases, optimizer and selection.
        num_files: How many files the tensors are dealt out to.
        rank_states: What the ranks' own files hold; for each rank of the run one, however many
            files there are: random state belongs to one rank only.
        checksums: What tensors must have; nothing appears under the name if one has another.

    Returns:
        The manifest that was written.
    """
    if type(num_files) is not int or num_files < 1:
        raise ConfigError(f"num_files: a number of at least 1 is expected, found {num_files!r}.")
    states = [{"extra": {}, **state} for state in rank_states] or [{"extra": {}}]
    fresh = Manifest(num_ranks=len(states))
    draft = replace(
        described_by or fresh,
        id=fresh.id,
        created=fresh.created,
        num_ranks=fresh.num_ranks,
        versions=fresh.versions,
        extra=tuple(states[0]["extra"]),
    )
    sources = {
        key: replace(each, boxes=tuple(row_chunks(each.shape, num_files)))
        if each.boxes is None
        else each
        for key, each in tensors.items()
    }
    files = {
        f"__{number}_0.distcp": [
            (key, box)
            for key, source in sources.items()
            for box in (source.boxes or ())[number::num_files]
        ]
        for number in range(num_files)
    }
    writer = _Writer(
        Path(path), draft, sources, files, dict(enumerate(states)), checksums=checksums or {}
    )
    writer.write(RankGroup())
    return store.read_manifest(Path(path))


@dataclass(frozen=True, slots=True)
class _Written:
    """A box that is on disk."""

    key: str
    box: Box
    checksum: int
    entry: Entry


@dataclass(frozen=True, slots=True)
class _Writer:
    """A checkpoint that is ready to be written.

    Attributes:
        path: The folder that it becomes.
        draft: Its manifest, without what is known only when everything is written.
        sources: Tensors, with the boxes that this rank writes.
        files: Those boxes, by the file that they go to.
        states: What the files of ranks hold: of this rank, or of all if this process is alone.
        keep: How many checkpoints beside each other to keep.
        checksums: What tensors must have.
        num_threads: How many files are written in parallel.
    """

    path: Path
    draft: Manifest
    sources: Mapping[str, TensorSource]
    files: Mapping[str, Sequence[tuple[str, Box]]]
    states: Mapping[int, Mapping[str, Any]]
    keep: int | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)
    num_threads: int = 1

    def staged(self) -> _Writer:
        """The same checkpoint, of copies in host memory: nothing changes when training goes on."""
        copies = {}
        is_cuda = False
        for key, source in self.sources.items():
            parts = []
            for box in source.boxes or ():
                values = source.read(box)
                host = torch.empty(box.sizes, dtype=source.dtype, pin_memory=values.is_cuda)
                parts.append(LocalPart(box, host.copy_(values, non_blocking=values.is_cuda)))
                is_cuda |= values.is_cuda
            copies[key] = TensorSource.of_parts(source.shape, source.dtype, parts)
        if is_cuda:
            torch.cuda.synchronize()
        states = {
            rank: {**state, "extra": copy.deepcopy(_plain_extra(state["extra"]))}
            for rank, state in self.states.items()
        }
        return replace(self, sources=copies, states=states)

    def write(self, ranks: RankGroup) -> None:
        """Write everything under another name, then the manifest, then give it its name."""
        subject = f"save {self.path}"
        own = {k: TensorInfo(s.shape, s.dtype, s.boxes or ()) for k, s in self.sources.items()}
        everyone = ranks.all_gather((self.draft.id, own))
        checkpoint_id, infos = everyone[0][0], _joined_infos([infos for _, infos in everyone])
        staging = store.staging_folder(self.path, checkpoint_id)
        try:
            ranks.run_first(subject, lambda: store.begin(self.path, checkpoint_id))
            written = ranks.gather(
                subject,
                lambda: self._write_files(staging, checkpoint_id),
                "nothing appears under this name.",
            )
            boxes = [each for some in written for each in some]
            ranks.run_first(subject, lambda: self._finish(staging, infos, boxes))
        except BaseException:
            if ranks.is_first:
                store.discard(staging)
            raise

    def _write_files(self, staging: Path, checkpoint_id: str) -> list[_Written]:
        def write_file(name: str) -> list[_Written]:
            with (staging / name).open("xb") as file:
                written = [
                    self._write_box(file, staging / name, *each) for each in self.files[name]
                ]
                file.flush()
                os.fsync(file.fileno())
            return written

        if self.num_threads == 1:
            written = list(map(write_file, self.files))
        else:
            with ThreadPoolExecutor(self.num_threads) as threads:
                written = list(threads.map(write_file, self.files))
        for rank, state in self.states.items():
            store.write_synced(staging / store.rank_file(rank), _packed(state, checkpoint_id))
        return [each for some in written for each in some]

    def _write_box(self, file: Any, path: Path, key: str, box: Box) -> _Written:
        source = self.sources[key]
        values = source.read(box)
        if tuple(values.shape) != box.sizes or values.dtype != source.dtype:
            raise CheckpointError(
                f"{key}: a block of {box.sizes} in {source.dtype} is expected, found "
                f"{tuple(values.shape)} in {values.dtype}; nothing appears under the name."
            )
        total = store.checksum(source.shape, box, values)
        return _Written(key, box, total, append_entry(file, path, values))

    def _finish(
        self, staging: Path, infos: Mapping[str, TensorInfo], written: Sequence[_Written]
    ) -> None:
        """Write the index and the manifest, once all ranks have written, and give it its name."""
        sums = {(each.key, each.box): each.checksum for each in written}
        tensors = {
            key: StoredTensor(
                info.shape,
                str(info.dtype).removeprefix("torch."),
                store.as_text(store.joined(sums[key, box] for box in info.boxes)),
                tuple(
                    StoredBlock(box.offsets, box.sizes, store.as_text(sums[key, box]))
                    for box in info.boxes
                ),
            )
            for key, info in infos.items()
        }
        wrong = [key for key, value in self.checksums.items() if tensors[key].checksum != value]
        if wrong:
            raise CheckpointError(
                f"{wrong[0]}: the content that the manifest describes is expected, found other "
                f"content (of {len(wrong)} tensors: {', '.join(wrong[:5])}); nothing was written. "
                "The checkpoint it came from is damaged."
            )
        entries = [(each.key, each.box, each.entry) for each in written]
        store.write_synced(staging / INDEX, encode_index(self.draft.id, infos, entries))
        files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        manifest = replace(self.draft, tensors=tensors, files=files)
        store.write_synced(staging / store.MANIFEST, manifest.to_json().encode())
        store.commit(staging, self.path)
        if self.keep is not None:
            store.prune(self.path.parent, self.keep)


def _joined_infos(everyone: Sequence[Mapping[str, TensorInfo]]) -> dict[str, TensorInfo]:
    """The tensors of a checkpoint, of which each rank writes some boxes."""
    found: dict[str, TensorInfo] = {}
    for key in dict.fromkeys(key for infos in everyone for key in infos):
        some = [infos[key] for infos in everyone if key in infos]
        shape, dtype = some[0].shape, some[0].dtype
        if any((info.shape, info.dtype) != (shape, dtype) for info in some):
            raise CheckpointError(
                f"{key}: all ranks must have the same tensor, found "
                f"{[(info.shape, info.dtype) for info in some]}; build the same model on every "
                "rank."
            )
        boxes = tuple(box for info in some for box in info.boxes)
        if not tiles(shape, boxes):
            raise CheckpointError(
                f"{key}: the parts of all ranks must cover shape {shape} once, found {boxes}; "
                "nothing was written. Save on all ranks of the model's mesh."
            )
        found[key] = TensorInfo(shape, dtype, boxes)
    return found


# What a run consists of beside its tensors. Each rank writes its own, as plain data in a file that
# is read without running anything.


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of each object that has one; everything else as it is."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in extra.items()
    }


def _packed(state: Mapping[str, Any], checkpoint_id: str) -> bytes:
    """The content of one rank's file."""
    extra = _plain_extra(state["extra"])
    try:
        return _saved({**state, "id": checkpoint_id, "extra": extra})
    except Exception as error:
        names = [name for name, value in extra.items() if not _is_plain(value)] or list(extra)
        raise ConfigError(
            f"extra: {', '.join(map(repr, names))} must be plain data (numbers, strings, tensors, "
            f"lists, dicts) to be loaded without running code, found something else ({error}); "
            "give it a state_dict method that returns plain data."
        ) from error


def _saved(value: Any) -> bytes:
    """What `torch.save` makes of a value that can be loaded without running code."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    return buffer.getvalue()


def _is_plain(value: Any) -> bool:
    try:
        _saved(value)
    except Exception:
        return False
    return True


def random_state() -> dict[str, Any]:
    """The state of all generators that this process draws from."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")  # torch alone does not need it
    if numpy is not None:
        kind, keys, *others = numpy.random.get_state(legacy=True)
        state["numpy"] = [kind, [int(key) for key in keys], *others]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


# Loading

_MODEL_PREFIXES = (MODEL, "", "app.model.", "state_dict.", "module.")
_OPTIMIZER_PREFIXES = (OPTIMIZER, "optim.state.", "optimizer.", "optim.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d+)\.(\w+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the step, what was saved beside tensors, and what did not fit.

    `missing` are names of the model that the checkpoint does not have, `unexpected` names of the
    checkpoint that the model does not have.
    """

    path: Path
    step: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    strict: bool = True,
    extra: Mapping[str, Any] | None = None,
    verified: bool = True,
    random_state: bool = True,
) -> Loaded:
    """Load a checkpoint; all ranks call it. Each rank reads the blocks that it has.

    Nothing is written before everything is checked: what is missing, unexpected or of another
    shape is one error that names it, on all ranks.

    Args:
        path: The folder of a checkpoint of ours, or of `torch.distributed.checkpoint`.
        model: Sharded in any way, or not at all; on any number of ranks.
        optimizer: Takes over state by the names of parameters; groups may be in another order.
        strict: Whether names that only one side has are an error. What a partial checkpoint left
            out on purpose never is.
        extra: Objects with `load_state_dict` to restore, by the names that they were saved under.
        verified: Whether to compare all content with the manifest's checksums first; ranks share
            the work.
        random_state: Whether to restore random generators, on a world of the same size.
    """
    ranks = RankGroup.world()
    BACKGROUND.require_success(ranks, wait=True)
    objects, subject = extra or {}, f"load {store.located(Path(path))}"
    stored = ranks.run(subject, lambda: store.open_checkpoint(path, check_files=False))
    manifest = stored.manifest
    plan = ranks.run(subject, lambda: _LoadPlan.of(stored, model, optimizer, strict))
    own = ranks.run(subject, lambda: _restorable_state(stored, ranks.rank, objects))
    if verified and manifest is not None:
        share = (ranks.rank, ranks.size)
        everyone = ranks.gather(subject, lambda: store.verify(stored.path, share=share))
        problems = dict.fromkeys(f"{p.subject}: {p.what}" for some in everyone for p in some)
        if problems:
            raise CheckpointError(
                f"{subject}: its content must be what was saved, found otherwise; nothing was "
                f"loaded: {'; '.join(problems)}. Load an older checkpoint (`latest` finds whole "
                "ones)."
            )
    consequence = "the model may hold some of it: load again, or another checkpoint."
    with torch.no_grad():
        ranks.run(subject, lambda: stored.read_into(plan.wanted), consequence)
    if plan.optimizer is not None:
        plan.optimizer.install()
    saved = own.get("extra", {})
    for name, value in objects.items():
        value.load_state_dict(saved[name])
    is_same_world = manifest is not None and manifest.num_ranks == ranks.size
    # What was imported has no random state.
    if random_state and is_same_world and _RANDOM in own:
        restore_random_state(own[_RANDOM])
    step = None if manifest is None else manifest.step
    return Loaded(stored.path, step, saved, tuple(plan.missing), tuple(plan.unexpected))


def _restorable_state(
    stored: StoredCheckpoint, rank: int, objects: Mapping[str, Any]
) -> dict[str, Any]:
    """A rank's own state, from which all `objects` can be restored."""
    own = stored.rank_state(rank)
    saved = own.get("extra", {})
    missing = sorted(set(objects) - set(saved))
    if missing:
        raise CheckpointError(
            f"extra: {missing} must be in the checkpoint to be restored, found {sorted(saved)}; "
            "leave out what was not saved."
        )
    for name, value in objects.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"extra: {name!r} must have a load_state_dict method to be restored, found a "
                f"{type(value).__name__}; read it from what load returns."
            )
    return own


@dataclass(slots=True)
class _LoadPlan:
    """What is read into which memory of this rank, and what only one side has."""

    stored: StoredCheckpoint
    shards: list[TensorShard]
    prefix: str
    wanted: dict[str, list[LocalPart]] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    optimizer: _OptimizerLoad | None = None

    @classmethod
    def of(
        cls, stored: StoredCheckpoint, model: nn.Module, optimizer: Optimizer | None, strict: bool
    ) -> _LoadPlan:
        """Match names and shapes; raise what does not fit."""
        shards = tensor_shards(model)
        names = [name for shard in shards for name in shard.names]
        # Programs of others nest their state dicts as they like.
        prefix = max(_MODEL_PREFIXES, key=lambda p: sum(p + name in stored for name in names))
        plan = cls(stored, shards, prefix)
        plan._match_model(strict)
        if optimizer is not None:
            plan.optimizer = _OptimizerLoad.of(plan, optimizer, strict)
        return plan

    def key_of(self, shard: TensorShard) -> str | None:
        """The key that a parameter is stored under, by one of its names."""
        keys = (self.prefix + name for name in shard.names)
        return next((key for key in keys if key in self.stored), None)

    def _match_model(self, strict: bool) -> None:
        problems: list[str] = []
        known: set[str] = set()
        for shard in self.shards:
            if shard.tensor.is_meta:
                raise CheckpointError(
                    f"{shard.name}: parameters must have memory to be loaded into, found it on "
                    "meta; call model.to_empty(device=...) first."
                )
            known.update(self.prefix + name for name in shard.names)
            key = self.key_of(shard)
            if key is None:
                self.missing.append(shard.name)
            elif self.stored.shape(key) != tuple(shard.shape):
                found = list(self.stored.shape(key))
                problems.append(f"{shard.name}: {list(shard.shape)} is expected, found {found}")
            else:
                self.wanted[key] = shard.local_parts(shard.tensor)
        others = ("optimizer.", "optim.", "optimizers.")
        self.unexpected = [
            key.removeprefix(self.prefix)
            for key in self.stored.keys
            if key.startswith(self.prefix) and not key.startswith(others) and key not in known
        ]
        manifest = self.stored.manifest
        is_partial = manifest is not None and manifest.selection != "all"
        if strict and self.missing and not is_partial:
            problems.append(f"missing in the checkpoint: {self.missing}")
        if strict and self.unexpected:
            problems.append(f"not in the model: {self.unexpected}")
        if not self.wanted:
            problems.append("nothing in the checkpoint has the name of a parameter of the model")
        if problems:
            raise CheckpointError(
                f"load {self.stored.path}: the model and the checkpoint must have the same "
                f"parameters; nothing was loaded: {'; '.join(problems)}. Pass strict=False to load "
                "what fits."
            )


@dataclass(slots=True)
class _OptimizerLoad:
    """Optimizer state in new tensors, which the optimizer is given when all of it is read."""

    optimizer: Optimizer
    groups: list[list[OptimParam]]
    options: list[dict[str, Any] | None]
    states: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of(cls, plan: _LoadPlan, optimizer: Optimizer, strict: bool) -> _OptimizerLoad:
        """Match parameters and groups with what is stored; raise what does not fit."""
        stored, manifest = plan.stored, plan.stored.manifest
        starts = _OPTIMIZER_PREFIXES
        prefix = max(starts, key=lambda p: sum(key.startswith(p) for key in stored.keys))
        has_state = any(key.startswith(prefix) for key in stored.keys)
        if not has_state if manifest is None else manifest.optimizer is None:
            raise CheckpointError(
                "optimizer: the checkpoint must hold optimizer state to load it, found a model "
                "only; leave the optimizer out."
            )
        by_name: dict[str, dict[str, str]] = {}
        for key in stored.keys:
            name, _, state = key.removeprefix(prefix).rpartition(".")
            if key.startswith(prefix) and name and not name.startswith("param_groups"):
                by_name.setdefault(name, {})[state] = key
        groups = optim_params([group["params"] for group in optimizer.param_groups], plan.shards)
        saved = _saved_groups(stored)
        if strict:
            _require_same_params(groups, by_name, saved)
        found = cls(optimizer, groups, saved_options(groups, saved or [], CheckpointError))
        found._want_tensors(plan, by_name)
        values = {} if manifest is None or not manifest.optimizer else manifest.optimizer["values"]
        for each in found._params():
            for name, value in values.get(each.names[0] if each.shards else "", {}).items():
                found.states.setdefault(each.param, {})[name] = _from_json(value)
        return found

    def _params(self) -> Iterable[OptimParam]:
        return (each for group in self.groups for each in group)

    def _want_tensors(self, plan: _LoadPlan, by_name: Mapping[str, Mapping[str, str]]) -> None:
        """Make the tensors to read into."""
        stored = plan.stored
        keys: dict[OptimParam, dict[str, list[tuple[TensorShard, str]]]] = {}
        for each in self._params():
            for shard in each.shards:
                known = next((by_name[name] for name in shard.names if name in by_name), {})
                for state, key in known.items():
                    # Where a shard of a flat parameter has no such state, it stays zero.
                    keys.setdefault(each, {}).setdefault(state, []).append((shard, key))
        per_element = _per_element_states(stored, keys.values())
        for each, states in keys.items():
            for state, pairs in states.items():
                shard, key = pairs[0]
                dtype = stored.dtype(key)
                if state in per_element:
                    param_key = plan.key_of(shard)
                    if param_key is not None and dtype == stored.dtype(param_key):
                        dtype = each.param.dtype  # it was in the parameter's dtype: so again
                    tensor = torch.zeros_like(each.param, dtype=dtype, requires_grad=False)
                    for shard, key in pairs:
                        _require_shape(stored, key, shard)
                        plan.wanted[key] = shard.local_parts(tensor)
                else:
                    # One count stands for all shards of a flat parameter.
                    tensor = torch.zeros(stored.shape(key), dtype=dtype)
                    plan.wanted[key] = [LocalPart(Box.whole(tensor.shape), tensor)]
                self.states.setdefault(each.param, {})[state] = tensor

    def install(self) -> None:
        """Give everything to the optimizer."""
        for group, params, options in zip(
            self.optimizer.param_groups, self.groups, self.options, strict=True
        ):
            group.update(options or {})
            on_device = bool(group.get("fused") or group.get("capturable"))
            for each in params:
                if each.param in self.states:
                    self.optimizer.state[each.param] = {
                        name: value.to(each.param.device)
                        if on_device and isinstance(value, torch.Tensor)
                        else value
                        for name, value in self.states[each.param].items()
                    }


def _require_same_params(
    groups: Sequence[Sequence[OptimParam]],
    by_name: Mapping[str, Any],
    saved: Sequence[Mapping[str, Any]] | None,
) -> None:
    shards = [shard for group in groups for each in group for shard in each.shards]
    names = {name for shard in shards for name in shard.names}
    unknown = sorted(set(by_name) - names)
    if unknown:
        raise CheckpointError(
            f"optimizer: state must be of parameters that it trains, found state of {unknown}; "
            "nothing was loaded. Pass strict=False to leave it."
        )
    if saved is None:
        return
    trained = {name for group in saved for name in group["params"]}
    added = sorted(shard.name for shard in shards if not trained & set(shard.names))
    removed = sorted(trained - names)
    if added or removed:
        raise CheckpointError(
            f"optimizer: it must train the parameters that were saved, found {added} added and "
            f"{removed} removed; nothing was loaded. Pass strict=False to load the others."
        )


def _require_shape(stored: StoredCheckpoint, key: str, shard: TensorShard) -> None:
    if stored.shape(key) != tuple(shard.shape):
        raise CheckpointError(
            f"{key}: {list(shard.shape)} is expected, found {list(stored.shape(key))}; the "
            "optimizer state is of another model."
        )


def _per_element_states(
    stored: StoredCheckpoint, keys: Iterable[Mapping[str, Sequence[tuple[TensorShard, str]]]]
) -> set[str]:
    """The names of state that has one value per element of its parameter.

    For a parameter without dims every state looks so; the others tell.
    """
    triples = [(n, shard, key) for each in keys for n, its in each.items() for shard, key in its]
    if not any(shard.shape for _, shard, _ in triples):
        return {name for name, _, _ in triples if name != "step"}
    return {n for n, s, key in triples if s.shape and stored.shape(key) == tuple(s.shape)}


def _saved_groups(stored: StoredCheckpoint) -> list[dict[str, Any]] | None:
    """The parameter groups of a checkpoint, if it says which parameters they had."""
    manifest = stored.manifest
    if manifest is not None:
        groups = [] if manifest.optimizer is None else manifest.optimizer["param_groups"]
        return [_from_json({"kind": "dict", "value": group}) for group in groups]
    # torch wrote an entry for each option, and for each item of a list.
    options: dict[int, dict[str, Any]] = {}
    items: dict[tuple[int, str], dict[int, Any]] = {}
    for key in stored.object_keys:
        match = _OPTION_KEY.fullmatch(key)
        if match is not None:
            index, option, item = int(match[1]), match[2], match[3]
            if item is None:
                options.setdefault(index, {})[option] = stored.read_object(key)
            else:
                items.setdefault((index, option), {})[int(item)] = stored.read_object(key)
    for (index, option), found in items.items():
        options.setdefault(index, {})[option] = tuple(found[number] for number in sorted(found))
    listed = [options[index] for index in sorted(options)]
    return listed if listed and all("params" in group for group in listed) else None

"""Writing a checkpoint from one process, without a model: what resharding and importing end in."""

from __future__ import annotations

import datetime
import io
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from fullshard.errors import CheckpointError, ConfigError
from fullshard.layout.split import Box, tiles
from fullshard.state.checksum import as_text, checksum, joined
from fullshard.state.dcp_format import HeldSavePlanner, HeldTensor
from fullshard.state.extras import rank_file
from fullshard.state.folder import begin, commit, discard, write_synced
from fullshard.state.inventory import MODEL, OPTIMIZER
from fullshard.state.manifest import MANIFEST, Manifest, StoredBlock, StoredTensor, versions_here
from fullshard.state.opened import Opened
from fullshard.state.sites import Block


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensor:
    """A tensor that is read while it is written, block by block.

    `read` gives a block, on any device. `places` are the blocks to write; by default, rows are
    dealt out to the files evenly.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[Box], torch.Tensor]
    places: tuple[Box, ...] | None = None

    @classmethod
    def of(cls, opened: Opened, key: str) -> LazyTensor:
        """A tensor of a checkpoint on disk."""
        return cls(opened.shape(key), opened.dtype(key), lambda at: opened.read_block(key, at))

    @classmethod
    def of_held(cls, held: HeldTensor) -> LazyTensor:
        """What is in memory; its blocks stay as they are."""
        values = {block.where: block.values for block in held.blocks}
        return cls(tuple(held.shape), held.dtype, values.__getitem__, tuple(values))


@dataclass(frozen=True, slots=True)
class Description:
    """What a manifest says beside tensors and files."""

    step: int | None = None
    aliases: Mapping[str, str] = field(default_factory=dict)
    optimizer: Mapping[str, Any] | None = None
    selection: str = "all"

    @classmethod
    def of(cls, manifest: Manifest) -> Description:
        return cls(manifest.step, manifest.aliases, manifest.optimizer, manifest.selection)


def write_checkpoint(
    path: str | Path,
    tensors: Mapping[str, LazyTensor | HeldTensor],
    description: Description | None = None,
    *,
    num_files: int = 1,
    rank_states: Sequence[Mapping[str, Any]] = (),
    checksums: Mapping[str, str] | None = None,
) -> Manifest:
    """Write a checkpoint with its tensors in `num_files` files, one block in memory at a time.

    Args:
        path: Its folder; a checkpoint of that name is replaced once this one is whole.
        tensors: By key, as in "model.layers.0.weight".
        description: What the manifest says beside tensors and files.
        num_files: How many files the tensors are dealt out to.
        rank_states: What the ranks' own files hold, beside the checkpoint's id; for each rank of
            the run one, however many files there are: random state belongs to one rank only.
        checksums: What tensors must have; nothing appears under the name if one has another.

    Returns:
        The manifest that was written.
    """
    if type(num_files) is not int or num_files < 1:
        raise ConfigError(f"num_files: a number of at least 1 is expected, found {num_files!r}.")
    path, checkpoint_id = Path(path), uuid.uuid4().hex
    lazy = {
        key: LazyTensor.of_held(each) if isinstance(each, HeldTensor) else each
        for key, each in tensors.items()
    }
    places = {key: _places(key, tensor, num_files) for key, tensor in lazy.items()}
    states = [{"extra": {}, **state} for state in rank_states] or [{"extra": {}}]
    staging = begin(path, checkpoint_id)
    try:
        stored = _write_tensors(staging, lazy, places, num_files)
        _require(stored, checksums or {})
        for rank, state in enumerate(states):
            packed = _packed({**state, "id": checkpoint_id})
            write_synced(staging / rank_file(rank), packed)
        said = description or Description()
        manifest = Manifest(
            id=checkpoint_id,
            created=datetime.datetime.now(datetime.UTC).isoformat(),
            step=said.step,
            num_ranks=len(states),
            versions=versions_here(),
            tensors=stored,
            aliases=said.aliases,
            optimizer=said.optimizer,
            files={file.name: file.stat().st_size for file in sorted(staging.iterdir())},
            selection=said.selection,
            extra=tuple(states[0]["extra"]),
        )
        write_synced(staging / MANIFEST, manifest.to_json().encode())
        commit(staging, path)
    except BaseException:
        discard(staging)
        raise
    return manifest


def _places(key: str, tensor: LazyTensor, num_files: int) -> tuple[Box, ...]:
    """The blocks of a tensor, in the order of the files that they go to."""
    if tensor.places is None:
        return _rows(tensor.shape, num_files)
    if not tiles(tensor.shape, tensor.places):
        raise CheckpointError(
            f"{key}: its blocks must cover shape {tensor.shape} once, found {tensor.places}; "
            "nothing was written."
        )
    return tensor.places


def _rows(shape: tuple[int, ...], num_parts: int) -> tuple[Box, ...]:
    """A tensor cut along its first dim, as `torch.chunk` does it."""
    inner = (0,) * (len(shape) - 1)
    if not shape or not shape[0]:
        return (Box((0,) * len(shape), shape),)
    num_rows = -(-shape[0] // num_parts)
    return tuple(
        Box((row, *inner), (min(num_rows, shape[0] - row), *shape[1:]))
        for row in range(0, shape[0], num_rows)
    )


def _write_tensors(
    staging: Path,
    tensors: Mapping[str, LazyTensor],
    places: Mapping[str, Sequence[Box]],
    num_files: int,
) -> dict[str, StoredTensor]:
    """Have torch write the files and their index, one rank after the other."""
    # Copying ahead would read a block before the one before it is written.
    writer = FileSystemWriter(staging, thread_count=1, per_thread_copy_ahead=0, overwrite=False)
    planner = _LazySavePlanner(tensors)
    writer.set_up_storage_writer(is_coordinator=True)
    plans: list[SavePlan] = []
    for index in range(num_files):
        planner.set_up_planner(_outlines(tensors, places, index, num_files))
        plans.append(writer.prepare_local_plan(planner.create_local_plan()))
    plans, metadata = planner.create_global_plan(plans)
    results = [
        writer.write_data(plan, planner).wait() for plan in writer.prepare_global_plan(plans)
    ]
    writer.finish(metadata, results)
    stored = {}
    for key, tensor in tensors.items():
        blocks = tuple(
            StoredBlock(at.offsets, at.sizes, as_text(planner.checksums[key, at]))
            for at in places[key]
        )
        total = as_text(joined(planner.checksums[key, at] for at in places[key]))
        dtype = str(tensor.dtype).removeprefix("torch.")
        stored[key] = StoredTensor(tensor.shape, dtype, total, blocks)
    return stored


def _outlines(
    tensors: Mapping[str, LazyTensor],
    places: Mapping[str, Sequence[Box]],
    index: int,
    num_files: int,
) -> dict[str, HeldTensor]:
    """The blocks that go to one file, without their values."""
    return {
        key: HeldTensor(
            tensor.shape,
            tensor.dtype,
            [
                Block(at, torch.empty(at.sizes, dtype=tensor.dtype, device="meta"))
                for at in places[key][index::num_files]
            ],
        )
        for key, tensor in tensors.items()
    }


class _LazySavePlanner(HeldSavePlanner):
    """Reads a block when its turn has come, and notes its checksum."""

    def __init__(self, tensors: Mapping[str, LazyTensor]) -> None:
        super().__init__({key: _path_of(key) for key in tensors})
        self._tensors = tensors
        self.checksums: dict[tuple[str, Box], int] = {}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        key, part = write_item.index.fqn, write_item.tensor_data
        assert part is not None
        where = Box(tuple(part.chunk.offsets), tuple(part.chunk.sizes))
        tensor = self._tensors[key]
        values = tensor.read(where)
        if tuple(values.shape) != where.sizes or values.dtype != tensor.dtype:
            raise CheckpointError(
                f"{key}: a block of {where.sizes} in {tensor.dtype} is expected, found "
                f"{tuple(values.shape)} in {values.dtype}; nothing appears under the name."
            )
        self.checksums[key, where] = checksum(tensor.shape, where, values)
        return self.staged(values)


def _path_of(key: str) -> tuple[str, ...]:
    """Where a key belongs in nested dicts, for torch's own tools."""
    if key.startswith(OPTIMIZER):
        name, _, state = key.removeprefix(OPTIMIZER).rpartition(".")
        return ("optimizer", "state", name, state)
    if key.startswith(MODEL):
        return ("model", key.removeprefix(MODEL))
    return (key,)


def _require(stored: Mapping[str, StoredTensor], checksums: Mapping[str, str]) -> None:
    wrong = [key for key, value in checksums.items() if stored[key].checksum != value]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]}: the content that the manifest describes is expected, found other content "
            f"(of {len(wrong)} tensors: {', '.join(wrong[:5])}); nothing was written. The "
            "checkpoint it came from is damaged."
        )


def _packed(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    torch.save(dict(state), buffer)
    return buffer.getvalue()

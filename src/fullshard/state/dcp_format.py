"""Tensors of any arrangement in the format of `torch.distributed.checkpoint`.

What is written is what torch writes: any program can read it with `dcp.load`. What is read may
come from a stranger: the index is a pickle, of which only the classes of the format are made, and
entries are loaded with `weights_only`.
"""

from __future__ import annotations

import io
import pickle
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from fullshard.errors import CheckpointError
from fullshard.state.pickled import require_bounded
from fullshard.state.sites import Block


class HeldTensor:
    """A tensor's whole shape and dtype, and the blocks of it that this rank writes or reads."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, blocks: Sequence[Block]) -> None:
        self.shape = torch.Size(shape)
        self.dtype = dtype
        self.blocks = tuple(blocks)

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def chunks(self) -> list[ChunkStorageMetadata]:
        return [_chunk(block) for block in self.blocks]

    def write_items(self, key: str) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(key, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.shape),
            )
            for chunk in self.chunks()
        ]

    def values_at(self, index: MetadataIndex) -> torch.Tensor:
        """This rank's memory of a block."""
        for block in self.blocks:
            if index.offset is None or tuple(index.offset) == block.where.offsets:
                return block.values
        raise CheckpointError(
            f"{index.fqn}: one of this rank's blocks is expected, found offsets {index.offset}; "
            "this is a mistake in fullshard, please report it."
        )


def _chunk(block: Block) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(block.where.offsets), torch.Size(block.where.sizes))


class HeldSavePlanner(SavePlanner):
    """Plans the writing of `HeldTensor`s by key, such as "model.layers.0.weight".

    For a writer that copies nothing ahead: one block per thread is in memory at a time.
    """

    def __init__(self, paths: Mapping[str, tuple[str, ...]]) -> None:
        self._paths = dict(paths)
        self._held: dict[str, HeldTensor] = {}
        self._written = threading.local()

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: StorageMeta | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._held = state_dict

    def create_local_plan(self) -> SavePlan:
        items = [item for key, held in self._held.items() for item in held.write_items(key)]
        return SavePlan(items, planner_data=self._paths)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        # Where in nested dicts a key belongs: what torch's tools unflatten by.
        paths = {key: path for plan in all_plans for key, path in plan.planner_data.items()}
        return plans, replace(metadata, planner_data=paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self.staged(self._held[write_item.index.fqn].values_at(write_item.index))

    def staged(self, values: torch.Tensor) -> torch.Tensor:
        """A block in host memory, to be written; the one that this thread wrote before goes.

        The writer holds on to all tensors of a file until it closes it, and needs none of them.
        """
        before = getattr(self._written, "block", None)
        if before is not None:
            before.untyped_storage().resize_(0)
        block = torch.empty(values.shape, dtype=values.dtype).copy_(values.detach())
        self._written.block = block
        return block


class HeldLoadPlanner(LoadPlanner):
    """Plans the reading of this rank's blocks, whoever wrote them and in whatever blocks."""

    def __init__(self) -> None:
        self._held: dict[str, HeldTensor] = {}
        self._metadata: Metadata | None = None

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        self._held, self._metadata = state_dict, metadata

    def create_local_plan(self) -> LoadPlan:
        assert self._metadata is not None
        items: list[ReadItem] = []
        for key, held in self._held.items():
            stored = self._metadata.state_dict_metadata[key]
            assert isinstance(stored, TensorStorageMetadata)  # checked by the caller
            items += create_read_items_for_chunk_list(key, stored, held.chunks())
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise CheckpointError(
            f"{read_item.dest_index.fqn}: a tensor is expected, found other data; open it with "
            "the program that wrote it."
        )

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        values = self._held[read_item.dest_index.fqn].values_at(read_item.dest_index)
        for dim, (offset, length) in enumerate(
            zip(read_item.dest_offsets, read_item.lengths, strict=True)
        ):
            values = values.narrow(dim, offset, length)
        return values

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: what was resolved is the memory itself."""


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: which tensors there are, and in which files."""
    path = folder / ".metadata"
    try:
        content = path.read_bytes()
        require_bounded(content)
        found = _FormatUnpickler(io.BytesIO(content)).load()
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder}: a checkpoint has an index, found no .metadata in it; it was not written to "
            "its end, or it is not a checkpoint."
        ) from None
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path}: an index of torch.distributed.checkpoint is expected, found one that cannot "
            f"be read ({error}); the file is damaged."
        ) from error
    # A damaged pickle can leave out any attribute.
    tensors = getattr(found, "state_dict_metadata", None)
    entries = getattr(found, "storage_data", None)
    has_names = isinstance(tensors, dict) and all(isinstance(key, str) for key in tensors)
    if not isinstance(found, Metadata) or not has_names or not isinstance(entries, dict):
        raise CheckpointError(
            f"{path}: an index of torch.distributed.checkpoint is expected, found "
            f"{type(found).__name__}; the file is damaged, or something else."
        )
    for info in entries.values():
        require_inside(folder, getattr(info, "relative_path", None))
    return found


def require_inside(folder: Path, relative: Any) -> Path:
    """The path of a file of a checkpoint, which must not lead out of its folder."""
    if not isinstance(relative, str) or not relative:
        raise CheckpointError(f"{folder}: file names are expected, found {relative!r}.")
    path = PurePath(relative)
    if path.is_absolute() or ".." in path.parts:
        raise CheckpointError(
            f"{folder}: its files must be inside of it, found {relative!r}; do not trust it."
        )
    return folder / path


# What an index consists of. Everything else that a pickle could name is refused.
_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "PurePath", "WindowsPath", "PureWindowsPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},
    "collections": {"OrderedDict"},
}


class _FormatUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise CheckpointError(
            f"index: only the classes of the checkpoint format are expected, found "
            f"{module}.{name}; do not open this file with anything that runs what it holds."
        )

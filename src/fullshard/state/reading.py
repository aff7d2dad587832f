"""Reads tensors out of a checkpoint without running what it may contain."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from fullshard.errors import CheckpointError
from fullshard.state.dcp_format import read_index, require_inside
from fullshard.state.opened import StoredEntry, load_entry


class SafeReader(FileSystemReader):
    """Torch's reader with an index that is only data, and entries that are what they claim.

    One stored block is in memory at a time.
    """

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        loaded: tuple[MetadataIndex, torch.Tensor] | None = None
        # In the order of the files, so that what several blocks are cut from is read once.
        for item in sorted(plan.items, key=lambda item: self._place(item.storage_index)):
            if loaded is None or loaded[0] != item.storage_index:
                loaded = None  # before the next one is read
                loaded = (item.storage_index, self._load(item.storage_index))
            values = loaded[1]
            pairs = zip(item.storage_offsets, item.lengths, strict=True)
            for dim, (offset, length) in enumerate(pairs):
                values = values.narrow(dim, offset, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(values)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, index: MetadataIndex) -> tuple[str, int]:
        found = self.storage_data[index]
        return found.relative_path, found.offset

    def _load(self, index: MetadataIndex) -> torch.Tensor:
        found = self.storage_data[index]
        if found.transform_descriptors:
            raise CheckpointError(
                f"{index.fqn}: plain entries are expected, found {found.transform_descriptors}; "
                "open it with the program that wrote it."
            )
        path = require_inside(Path(self.path), found.relative_path)
        value = load_entry(index.fqn, StoredEntry(path, found.offset, found.length))
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{index.fqn}: a tensor is expected, found {type(value).__name__}; the checkpoint "
                "is damaged."
            )
        return value

"""`export_safetensors`: a model's shards as safetensors files."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import CheckpointError, ConfigError, DisagreementError
from fullshard.layout.split import Box, intersection, pieces, slices, tiles
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.folder import discard, staging_folder, sync, write_synced
from fullshard.state.safetensors.files import (
    INDEX_FILE,
    ONE_FILE,
    FilePlan,
    FileWriter,
    as_bytes,
    plan_files,
)
from fullshard.state.shards import LocalPart, require_values, selection, tensor_shards
from fullshard.state.stored import TensorInfo

# How much one rank sends another at a time, which is all the memory that an export takes.
_PIECE_BYTES = 8 * 2**20

_WEIGHTS = re.compile(r"model(-\d+-of-\d+)?\.safetensors|model\.safetensors\.index\.json")


@contextmanager
def staged(folder: Path, plans: Sequence[FilePlan], ranks: RankGroup) -> Iterator[Path]:
    """Make a folder for files that then appear in another one, all of them or none.

    It is inside the other folder if that exists: this may be a link or a disk of its own, with no
    room beside it.
    """
    subject = f"export {folder}"
    beside = folder / "model" if folder.is_dir() else folder
    staging = ranks.run_first(subject, lambda: staging_folder(beside))
    try:
        ranks.run_first(subject, lambda: staging.mkdir(parents=True))
        yield staging
        ranks.run_first(subject, lambda: _install(staging, folder, plans))
    except BaseException:
        if ranks.is_first:
            discard(staging)
        raise


def _install(staging: Path, folder: Path, plans: Sequence[FilePlan]) -> None:
    """Move complete files into a folder, which may have others, such as a configuration.

    A folder that does not exist appears in one step. In others, older weights are replaced.
    """
    for plan in plans:
        path = staging / plan.name
        found = path.stat().st_size if path.is_file() else None
        if found != plan.nbytes:
            raise CheckpointError(
                f"{plan.name}: the first rank sees {found or 'no file'} instead of {plan.nbytes} "
                "bytes; the folder must be on a file system that all ranks share."
            )
    if len(plans) > 1:
        total = sum(plan.num_data_bytes for plan in plans)
        weight_map = {name: plan.name for plan in plans for name in plan.entries}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
        write_synced(staging / INDEX_FILE, text.encode())
    sync(staging)
    try:
        os.rename(staging, folder)
    except OSError:
        if not folder.is_dir():
            raise
        _replace_weights(staging, folder)
        discard(staging)
        sync(folder)
    sync(folder.parent)


def _replace_weights(staging: Path, folder: Path) -> None:
    """Replace older weights, so that old and new files are never read together as one model."""
    new = sorted((p.name for p in staging.iterdir()), key=lambda name: name == INDEX_FILE)
    old = [p for p in folder.iterdir() if _WEIGHTS.fullmatch(p.name) and p.name not in new]
    if new != [ONE_FILE]:
        # Without these, the files are not taken for a whole model; the new index comes last.
        for name in (INDEX_FILE, ONE_FILE):
            (folder / name).unlink(missing_ok=True)
    for name in new:
        os.replace(staging / name, folder / name)
    for path in old:
        path.unlink(missing_ok=True)


def export_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    only: str | Callable[[str], bool] | None = None,
) -> Path:
    """Write the parameters and persistent buffers of a model as safetensors; all ranks call it.

    The files have the layout of `transformers`. The names are those of the model before it was
    sharded; tied parameters are written once. Each tensor is sent in small pieces to the rank that
    writes its file, so no rank has more of it in memory than before. Several ranks write files at
    a time.

    Args:
        path: A folder, on a file system that all ranks share. It may have other files, such as the
            configuration of the model; older weights in it are replaced. The files appear when
            all of them are complete.
        model: Sharded through either API, in part, or not at all.
        dtype: What floating point tensors are converted to; others keep their dtypes.
        max_shard_bytes: The maximum size of a file that has more than one tensor.
        only: "trainable" to export only what is trained (adapters), or a function of a name.
    """
    path, ranks = Path(path), RankGroup.world()
    subject = f"export {path}"

    def planned() -> tuple[dict[str, TensorInfo], dict[str, list[LocalPart]], list[FilePlan]]:
        require_export(path, dtype, max_shard_bytes)
        choose, words = selection(only)
        infos, own = dict[str, TensorInfo](), dict[str, list[LocalPart]]()
        for shard in filter(choose, tensor_shards(model)):
            require_values(shard, "exported")
            parts = shard.written_parts(shard.tensor)
            boxes, own[shard.name] = tuple(part.box for part in parts), parts
            kept = exported_dtype(shard.dtype, dtype)
            infos[shard.name] = TensorInfo(tuple(shard.shape), kept, boxes)
        if not own:
            raise ConfigError(
                f"{subject}: there is nothing to write: none of the model's parameters and "
                f"buffers was chosen ({words})."
            )
        return infos, own, plan_files(infos, max_shard_bytes)

    infos, own, plans = ranks.run(subject, planned)
    everyone = ranks.all_gather((max_shard_bytes, infos))
    _require_same(subject, everyone)
    with staged(path, plans, ranks) as staging:
        _Transfer(ranks, own, [found for _, found in everyone]).run(subject, staging, plans)
    return path


def require_export(path: Path, dtype: torch.dtype | None, max_bytes: int) -> None:
    """Raise if the arguments of an export are invalid."""
    if path.suffix == ".safetensors" or path.is_file():
        raise ConfigError(f"export {path}: this is the name of a file; pass a folder.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"export {path}: dtype must be one of real numbers, not {dtype!r}.")
    if type(max_bytes) is not int or max_bytes < 1:
        raise ConfigError(f"export {path}: max_shard_bytes must be at least 1, not {max_bytes!r}.")


def exported_dtype(kept: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and kept.is_floating_point else kept


def _require_same(subject: str, everyone: Sequence[tuple[int, dict[str, TensorInfo]]]) -> None:
    """Raise, on all ranks alike, if they export different tensors or do not cover all of one."""
    asked = [
        [f"max_shard_bytes={limit}", *((name, i.dtype, i.shape) for name, i in infos.items())]
        for limit, infos in everyone
    ]
    for rank, others in enumerate(asked):
        for one, other in zip_longest(asked[0], others):
            if one != other:
                raise DisagreementError(
                    f"{subject}: ranks export different tensors: {one} on rank 0 and {other} on "
                    f"rank {rank}; call it with the same model and arguments."
                )
    for name, info in everyone[0][1].items():
        boxes = [box for _, found in everyone for box in found[name].boxes]
        if not tiles(info.shape, boxes):
            raise CheckpointError(
                f"{subject}: the parts of all ranks do not cover the shape {info.shape} of "
                f"{name!r} once: {boxes}; nothing was written. Export on all ranks of the model's "
                "mesh."
            )


@dataclass(frozen=True, slots=True)
class _Transfer:
    """Sends all pieces of tensors to the ranks that write their files; `infos` are by rank.

    Files are written in rounds, one by each rank. In each step of a round, every file takes one
    piece, if possible each from another rank, so that few pieces are in memory and all ranks work.
    """

    ranks: RankGroup
    own: Mapping[str, Sequence[LocalPart]]
    infos: Sequence[Mapping[str, TensorInfo]]

    def run(self, subject: str, staging: Path, plans: Sequence[FilePlan]) -> None:
        rank, size = self.ranks.rank, self.ranks.size
        for first in range(0, len(plans), size):
            some = plans[first : first + size]
            writer = FileWriter(staging, some[rank]) if rank < len(some) else None
            try:
                for step in zip_longest(*map(self._pieces, some, range(size))):
                    self._take(step, writer)
            except RuntimeError as error:  # because a rank is gone
                raise CheckpointError(
                    f"{subject}: an exchange between the ranks failed ({error}); nothing appears "
                    "under this name."
                ) from error
            self.ranks.run(subject, writer.finish if writer is not None else lambda: None)

    def _pieces(self, plan: FilePlan, owner: int) -> Iterator[tuple[int, str, Box]]:
        for source in ((owner + shift) % self.ranks.size for shift in range(self.ranks.size)):
            for name in plan.entries:
                info = self.infos[source][name]
                for box in info.boxes:
                    for piece in pieces(box, _PIECE_BYTES // info.dtype.itemsize):
                        yield source, name, piece

    def _take(self, step: Sequence[tuple[int, str, Box] | None], writer: FileWriter | None) -> None:
        rank, group = self.ranks.rank, self.ranks.group
        works, received = [], None
        for owner, item in enumerate(step):
            if item is None or rank not in (owner, item[0]):
                continue
            source, name, piece = item
            dtype = self.infos[rank][name].dtype
            if rank == source:
                part = next(part for part in self.own[name] if intersection(part.box, piece))
                values = part.values[slices(piece, part.box)]
                values = values.to("cpu", dtype).contiguous()
            else:
                values = torch.empty(piece.sizes, dtype=dtype)
            if source != owner:
                exchange, other = (dist.isend, owner) if rank == source else (dist.irecv, source)
                works.append((exchange(as_bytes(values), other, group=group), values))
            if rank == owner:
                received = (name, piece, values)
        for work, _ in works:
            assert work is not None  # this rank is in the group
            work.wait()
        if received is not None and writer is not None:
            writer.write(*received)

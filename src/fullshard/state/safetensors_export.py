"""Exporting a model as safetensors files, the way `transformers` lays them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fullshard.errors import CheckpointError, ConfigError, DisagreementError, LifecycleError
from fullshard.layout.split import Box, tiles
from fullshard.state.crew import Crew
from fullshard.state.folder import discard
from fullshard.state.inventory import Selection
from fullshard.state.safetensors_files import (
    FilePlan,
    FileWriter,
    complete,
    install,
    new_staging,
    plan_files,
)
from fullshard.state.safetensors_format import Described, cut_out, pieces
from fullshard.state.saving import BACKGROUND
from fullshard.state.sites import Block, Site, sites_of

# What is on its way from one rank to another at a time: all the memory that an export takes.
PIECE_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class _Part:
    """What one rank has of a tensor, and takes it for."""

    described: Described
    blocks: tuple[Box, ...]


@dataclass(frozen=True, slots=True)
class _Held:
    """What this rank has to say, and to give."""

    parts: tuple[_Part, ...]
    blocks: Mapping[str, Sequence[Block]]
    max_shard_bytes: int


def export_safetensors(
    path: str | Path,
    model: nn.Module,
    *,
    dtype: torch.dtype | None = None,
    max_shard_bytes: int = 5_000_000_000,
    only: str | Callable[[str], bool] | None = None,
) -> Path:
    """Write the parameters and persistent buffers of a model as safetensors; all ranks call it.

    The names are those of the model before it was sharded; tied parameters are written once. Each
    tensor travels to the rank that writes its file in small pieces, so no rank has more of it in
    memory than before; files are written by several ranks at a time.

    Args:
        path: A folder, on a file system that all ranks share. It may have other files, such as the
            configuration of the model; older weights in it are replaced. The files appear when
            all of them are whole.
        model: Sharded by either door, in part, or not at all.
        dtype: What floating point numbers are converted to; others stay what they are.
        max_shard_bytes: How large a file may become, if it has more than one tensor.
        only: "trainable" for what is trained alone (adapters), or a function of a name.
    """
    BACKGROUND.wait()
    path, crew = Path(path), Crew()
    subject = f"export {path}"
    held = crew.do(subject, lambda: _held(path, model, dtype, max_shard_bytes, only))
    said = crew.told((held.parts, held.max_shard_bytes))
    everyone = [parts for parts, _ in said]
    _require_same(subject, said)
    plans = plan_files([part.described for part in held.parts], max_shard_bytes)
    _require_whole(subject, everyone)
    staging = crew.first_does(subject, lambda: new_staging(path))
    try:
        crew.first_does(subject, lambda: staging.mkdir(parents=True))
        boxes_of_range = [{p.described.name: p.blocks for p in parts} for parts in everyone]
        _Transfer(crew, staging, plans, held, boxes_of_range).run(subject)
        crew.first_does(subject, lambda: complete(staging, plans))
        crew.first_does(subject, lambda: install(staging, path))
    except BaseException:
        if crew.is_first:
            discard(staging)
        raise
    return path


def _held(
    path: Path,
    model: nn.Module,
    dtype: torch.dtype | None,
    max_shard_bytes: int,
    only: str | Callable[[str], bool] | None,
) -> _Held:
    if path.suffix == ".safetensors" or path.is_file():
        raise ConfigError(
            f"export {path}: a folder is expected, found the name of a file; give its folder: the "
            "file in it is called model.safetensors."
        )
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(
            f"export {path}: dtype must be one of floating point numbers, found {dtype!r}; leave "
            "it out to keep what the model has."
        )
    if type(max_shard_bytes) is not int or max_shard_bytes < 1:
        raise ConfigError(
            f"export {path}: max_shard_bytes must be at least 1, found {max_shard_bytes!r}."
        )
    selection = Selection.of(only)
    sites = [site for site in sites_of(model) if selection.choose(site)]
    if not sites:
        raise ConfigError(
            f"export {path}: something to write is expected, found none of the model's parameters "
            f"and buffers chosen ({selection.words})."
        )
    parts, blocks = [], {}
    for site in sites:
        _require_values(site)
        kept = site.dtype
        target = dtype if dtype is not None and kept.is_floating_point else kept
        own = site.blocks(site.tensor) if site.is_writer else []
        described = Described(site.name, target, tuple(site.shape))
        parts.append(_Part(described, tuple(block.where for block in own)))
        blocks[site.name] = own
    plan_files([part.described for part in parts], max_shard_bytes)  # raises what cannot be
    return _Held(tuple(parts), blocks, max_shard_bytes)


def _require_values(site: Site) -> None:
    if site.tensor.is_meta:
        raise LifecycleError(
            f"{site.name}: parameters and buffers must have values to be exported, found it on "
            "meta; load or initialise the model first."
        )


def _require_same(subject: str, said: Sequence[tuple[tuple[_Part, ...], int]]) -> None:
    """Raise, on all ranks alike, if they do not export the same."""
    parts, max_bytes = said[0]
    for rank, (others, other_max_bytes) in enumerate(said):
        for one, other in zip_longest(parts, others):
            if one is None or other is None or one.described != other.described:
                found = [part and part.described for part in (one, other)]
                raise DisagreementError(
                    f"{subject}: all ranks must export the same tensors, found {found[0]} on rank "
                    f"0 and {found[1]} on rank {rank}; call it with the same model and arguments."
                )
        if other_max_bytes != max_bytes:
            raise DisagreementError(
                f"{subject}: all ranks must be given the same max_shard_bytes, found {max_bytes} "
                f"on rank 0 and {other_max_bytes} on rank {rank}."
            )


def _require_whole(subject: str, everyone: Sequence[tuple[_Part, ...]]) -> None:
    for parts in zip(*everyone, strict=True):
        described = parts[0].described
        blocks = [block for part in parts for block in part.blocks]
        if not tiles(described.shape, blocks):
            raise CheckpointError(
                f"{subject}: the parts of all ranks must cover {described.name!r} of shape "
                f"{described.shape} once, found {blocks}; nothing was written. Export on all ranks "
                "of the model's mesh."
            )


@dataclass(frozen=True, slots=True)
class _Piece:
    """A part of a tensor that travels in one message."""

    name: str
    dtype: torch.dtype
    where: Box


class _Transfer:
    """Brings every piece to the rank that writes its file.

    Files are written in rounds, one by each rank. In a round the ranks exchange pieces in shifts:
    each sends to one rank and receives from one other, a piece at a time, so that nobody waits for
    somebody who waits, and nobody keeps more than the pieces under way.
    """

    def __init__(
        self,
        crew: Crew,
        staging: Path,
        plans: Sequence[FilePlan],
        held: _Held,
        everyone: Sequence[Mapping[str, Sequence[Box]]],
    ) -> None:
        self._crew = crew
        self._staging = staging
        self._plans = plans
        self._held = held
        self._everyone = everyone
        self._dtypes = {part.described.name: part.described.dtype for part in held.parts}

    def run(self, subject: str) -> None:
        crew = self._crew
        for first in range(0, len(self._plans), crew.size):
            own = first + crew.rank
            is_writer = own < len(self._plans)
            writer = FileWriter(self._staging, self._plans[own]) if is_writer else None
            try:
                for shift in range(crew.size):
                    self._exchange(first, shift, writer)
            except RuntimeError as error:  # of a rank that is gone
                if writer is not None:
                    writer.close()
                raise CheckpointError(
                    f"{subject}: an exchange between the ranks failed ({error}); nothing appears "
                    "under this name."
                ) from error
            crew.do(subject, writer.finish if writer is not None else _nothing)

    def _exchange(self, first: int, shift: int, writer: FileWriter | None) -> None:
        rank, size = self._crew.rank, self._crew.size
        target, source = (rank + shift) % size, (rank - shift) % size
        sending, receiving = self._pieces(first, target, rank), self._pieces(first, rank, source)
        if shift == 0:
            for piece in receiving:
                assert writer is not None
                writer.write(piece.name, piece.where, self._values(piece))
            return
        for outgoing, incoming in zip_longest(sending, receiving):
            works, sent = [], None
            if outgoing is not None:
                sent = _as_bytes(self._values(outgoing))
                works.append(dist.isend(sent, target, group=self._crew.group))
            if incoming is not None:
                values = torch.empty(incoming.where.sizes, dtype=incoming.dtype)
                works.append(dist.irecv(_as_bytes(values), source, group=self._crew.group))
            for work in works:
                assert work is not None  # this rank is in the group
                work.wait()
            if incoming is not None:
                assert writer is not None
                writer.write(incoming.name, incoming.where, values)

    def _pieces(self, first: int, target: int, source: int) -> Iterator[_Piece]:
        """What `source` has of the file that `target` writes in a round."""
        if first + target >= len(self._plans):
            return
        for name in self._plans[first + target].entries:
            dtype = self._dtypes[name]
            for block in self._everyone[source][name]:
                for where in pieces(block, PIECE_BYTES // dtype.itemsize):
                    yield _Piece(name, dtype, where)

    def _values(self, piece: _Piece) -> torch.Tensor:
        """This rank's values of a piece; a view of what is trained, if that is possible."""
        block = next(
            block for block in self._held.blocks[piece.name] if _is_inside(piece.where, block.where)
        )
        values = cut_out(block.values, block.where, piece.where)
        return values.to("cpu", piece.dtype).contiguous()


def _is_inside(inner: Box, outer: Box) -> bool:
    return all(
        begin <= offset and offset + size <= begin + length
        for offset, size, begin, length in zip(
            inner.offsets, inner.sizes, outer.offsets, outer.sizes, strict=True
        )
    )


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """Of any dtype: not every one of them can be sent."""
    return values.reshape(-1).view(torch.uint8)


def _nothing() -> None:
    """Some ranks have no file to write in the last round."""

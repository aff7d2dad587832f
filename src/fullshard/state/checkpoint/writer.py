"""Writing a checkpoint: the boxes that each rank holds, then the index and the manifest.

Nothing is gathered: each rank writes the boxes of tensors that it holds.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import to_local
from fullshard.errors import CheckpointError, ConfigError, FullshardError
from fullshard.layout.split import Box, row_chunks, tiles
from fullshard.ranks import RankGroup
from fullshard.state.checkpoint.checksum import as_text, checksum, joined
from fullshard.state.checkpoint.folder import (
    begin,
    commit,
    discard,
    prune,
    rank_file,
    sync,
    write_synced,
)
from fullshard.state.checkpoint.index import (
    INDEX,
    MODEL,
    OPTIMIZER,
    Entry,
    append_entry,
    encode_index,
)
from fullshard.state.checkpoint.manifest import (
    MANIFEST,
    Manifest,
    StoredBlock,
    StoredTensor,
    read_manifest,
)
from fullshard.state.checkpoint.reader import seal
from fullshard.state.matching import require_values, selection
from fullshard.state.optim_params import optim_params
from fullshard.state.plain import RANDOM, as_json, dequantized, packed, plain_extra, random_state
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards
from fullshard.state.stored import TensorSource


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

    `tensors` are by key, as in "model.layers.0.weight", and are spread over `num_files` files.
    `rank_states` holds what each rank of a run saved for itself. `described_by` is a manifest with
    the same step, aliases, optimizer and selection. With `checksums`, nothing appears under the
    name if the checksum of a tensor differs.
    """
    if type(num_files) is not int or num_files < 1:
        raise ConfigError(f"num_files must be at least 1, not {num_files!r}.")
    states = [{"extra": {}, **state} for state in rank_states] or [{"extra": {}}]
    fresh = Manifest()
    draft = replace(
        described_by or fresh,
        id=fresh.id,
        created=fresh.created,
        versions=fresh.versions,
        format_version=fresh.format_version,
        num_ranks=len(states),
        extra=tuple(states[0]["extra"]),
    )
    writer = Writer(Path(path), draft, dict(enumerate(states)), checksums=checksums or {})
    for key, source in tensors.items():
        boxes = row_chunks(source.shape, num_files) if source.boxes is None else source.boxes
        writer.sources[key] = replace(source, boxes=tuple(boxes))
    writer.file_names = [f"__{number}_0.distcp" for number in range(num_files)]
    writer.write(RankGroup())
    return read_manifest(Path(path))


@dataclass(slots=True)
class Writer:
    """A checkpoint that is to be written.

    Attributes:
        draft: The manifest, without what is known only after everything is written.
        states: The content of ranks' files: this rank's, or all if this process is alone.
        sources: Tensors, with the boxes that this rank writes: views of the memory that is trained.
        file_names: The files that those boxes are spread over, `num_threads` at a time.
        keep, pinned: How many checkpoints in the folder to keep, and one to keep as well.
        checksums: The checksums that tensors must have.
    """

    path: Path
    draft: Manifest
    states: dict[int, Mapping[str, Any]] = field(default_factory=dict)
    sources: dict[str, TensorSource] = field(default_factory=dict)
    file_names: Sequence[str] = ()
    num_threads: int = 1
    keep: int | None = None
    pinned: str | None = None
    checksums: Mapping[str, str] = field(default_factory=dict)

    def add_model(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        extra: Mapping[str, Any],
        only: str | Callable[[str], bool] | None,
        ranks: RankGroup,
    ) -> None:
        """Add what this rank writes of a model and its optimizer; all ranks call it."""
        for name, number in (("shards", self.num_threads), ("keep", self.keep)):
            if number is not None and (type(number) is not int or number < 1):
                raise ConfigError(f"save: {name} must be a number of at least 1, not {number!r}.")
        choose, words = selection(only)

        def added() -> tuple[dict[str, str], list[Any] | None, _Values]:
            shards = tensor_shards(model)
            chosen = [shard for shard in shards if choose(shard)]
            for shard in chosen:
                require_values(shard, "saved")
                self._add(MODEL + shard.name, shard, shard.tensor, ranks)
            aliases = {name: shard.name for shard in chosen for name in shard.names[1:]}
            if optimizer is None:
                return aliases, None, {}
            return aliases, *self._add_optimizer(optimizer, shards, choose, ranks)

        subject = f"save {self.path}"
        aliases, groups, own = ranks.run(subject, added)
        # For state that is not sharded, ranks that train it provide the value: others may be stale.
        everyone = ranks.all_gather(own)
        values = {
            key: value
            for wanted in (False, True)
            for some in reversed(everyone)
            for key, (value, is_trained) in some.items()
            if is_trained == wanted
        }
        plain: dict[str, dict[str, Any]] = {}
        for (name, state), value in values.items():
            if not isinstance(value, torch.Tensor):
                plain.setdefault(name, {})[state] = value
            elif ranks.is_first:  # written whole, so that torch's tools find it
                whole = [LocalPart(Box.whole(value.shape), value)]
                source = TensorSource.of_parts(value.shape, value.dtype, whole)
                self.sources[f"{OPTIMIZER}{name}.{state}"] = source
        self.draft = replace(
            self.draft,
            num_ranks=ranks.size,
            aliases=aliases,
            optimizer=None if groups is None else {"param_groups": groups, "values": plain},
            selection=words,
            extra=tuple(extra),
        )
        self.states[ranks.rank] = {RANDOM: random_state(), "extra": dict(extra)}
        self.file_names = [f"__{ranks.rank}_{n}.distcp" for n in range(self.num_threads)]

    def _add(self, key: str, shard: TensorShard, tensor: torch.Tensor, ranks: RankGroup) -> None:
        parts = shard.local_parts(tensor) if shard.is_writer else []
        if shard.shape.numel() == 0:
            # No rank has a part; the first rank records that the tensor exists.
            empty = torch.empty(shard.shape, dtype=tensor.dtype)
            parts = [LocalPart(Box.whole(shard.shape), empty)] if ranks.is_first else []
        self.sources[key] = TensorSource.of_parts(shard.shape, tensor.dtype, parts)

    def _add_optimizer(
        self,
        optimizer: Optimizer,
        shards: Sequence[TensorShard],
        choose: Callable[[TensorShard], bool],
        ranks: RankGroup,
    ) -> tuple[list[Any], _Values]:
        """Add state that is sharded; return parameter groups, and state that is not sharded.

        Values that are not tensors are returned in the form that JSON holds.
        """
        values: _Values = {}
        groups: list[Any] = []
        params = optim_params([group["params"] for group in optimizer.param_groups], shards)
        for group, its_params in zip(optimizer.param_groups, params, strict=True):
            names = []
            for each in its_params:
                if not each.shards:
                    raise ConfigError(
                        f"optimizer: it has a parameter of shape {tuple(each.param.shape)} that "
                        "is not the model's; pass the optimizer of this model."
                    )
                for shard in filter(choose, each.shards):
                    names.append(shard.name)
                    for state, value in optimizer.state.get(each.param, {}).items():
                        if _is_like(value, each.param):
                            key = f"{OPTIMIZER}{shard.name}.{state}"
                            self._add(key, shard, dequantized(value), ranks)
                            continue
                        if isinstance(value, torch.Tensor):
                            # A DTensor without dims is replicated. Copy: optimizers count in place.
                            value = to_local(value).detach().to("cpu", copy=True)
                        else:
                            value = as_json(f"{shard.name}.{state}", value)
                        is_trained = bool(shard.local_parts(shard.tensor))
                        values[shard.name, state] = (value, is_trained)
            subject = f"param_groups[{len(groups)}]"
            groups.append(as_json(subject, {**group, "params": names})["value"])
        return groups, values

    def copy_to_host(self) -> None:
        """Copy everything, so that training can go on without changing it."""
        is_cuda = False
        for key, source in self.sources.items():
            parts = []
            for box in source.boxes or ():
                values = source.read(box)
                host = torch.empty(box.sizes, dtype=source.dtype, pin_memory=values.is_cuda)
                parts.append(LocalPart(box, host.copy_(values, non_blocking=values.is_cuda)))
                is_cuda |= values.is_cuda
            self.sources[key] = TensorSource.of_parts(source.shape, source.dtype, parts)
        if is_cuda:
            torch.cuda.synchronize()
        for rank, state in self.states.items():
            self.states[rank] = copy.deepcopy({**state, "extra": plain_extra(state["extra"])})

    def write(self, ranks: RankGroup) -> None:
        """Write everything into a staging folder, then the manifest, then rename the folder."""
        subject = f"save {self.path}"
        boxes = [(b, each) for each in self.sources.values() for b in each.boxes or ()]
        total = sum(ranks.all_gather(sum(b.numel * each.dtype.itemsize for b, each in boxes)))
        made: list[Path] = []

        def begun() -> tuple[Path, Manifest]:
            made.append(begin(self.path, total))
            return made[0], self.draft

        try:
            staging, self.draft = ranks.run_first(subject, begun)
            ranks.require_seen(subject, staging)
            written = ranks.run(
                subject, lambda: self._write_files(staging), "nothing appears under this name."
            )
            everyone = ranks.gather_to_first(written)
            ranks.run_first(subject, lambda: self._finish(staging, everyone))
        except BaseException as error:
            for each in made:  # by the first rank, which may not have learned that others have it
                discard(each)
            if isinstance(error, RuntimeError) and not isinstance(error, FullshardError):
                raise CheckpointError(
                    f"{subject}: another rank was lost while all saved ({error}); look at its "
                    "output. `latest` finds the newest whole checkpoint."
                ) from error
            raise

    def _write_files(self, staging: Path) -> dict[str, _Written]:
        boxes = [(key, box) for key, source in self.sources.items() for box in source.boxes or ()]
        if self.num_threads > 1:
            boxes.sort(key=lambda each: -each[1].numel)  # so that files get about the same size
        found = {key: _Written(source.shape, source.dtype) for key, source in self.sources.items()}

        def write_file(number: int) -> None:
            path = staging / self.file_names[number]
            with path.open("xb") as file:
                for key, box in boxes[number :: len(self.file_names)]:
                    found[key].add(box, self.sources[key].read(box), file, path)
                file.write(seal(self.draft.id, path.name))
            sync(path)

        numbers, under_way = range(len(self.file_names)), list[Future[None]]()
        with ThreadPoolExecutor(self.num_threads) as threads:
            try:
                for number in numbers if self.num_threads > 1 else ():
                    under_way.append(threads.submit(write_file, number))
            except RuntimeError:
                pass  # the program is ending: it waits for this thread, which cannot start others
            for number in numbers[len(under_way) :]:
                write_file(number)
            for each in under_way:
                each.result()
        for rank, state in self.states.items():
            content = packed({**state, "id": self.draft.id, "rank": rank})
            write_synced(staging / rank_file(rank), content)
        return found

    def _finish(self, staging: Path, everyone: Sequence[Mapping[str, _Written]]) -> None:
        """Write the index and the manifest once all ranks have written, then rename the folder."""
        written: dict[str, _Written] = {}
        for own in everyone:
            for key, each in own.items():
                known = written.setdefault(key, _Written(each.shape, each.dtype))
                if (known.shape, known.dtype) != (each.shape, each.dtype):
                    raise CheckpointError(
                        f"{key} is {each.shape} in {each.dtype} on one rank and {known.shape} in "
                        f"{known.dtype} on another; build the same model on all ranks."
                    )
                known.boxes.extend(each.boxes)
        tensors = {key: each.stored(key) for key, each in written.items()}
        wrong = [key for key, value in self.checksums.items() if tensors[key].checksum != value]
        if wrong:
            raise CheckpointError(
                f"{', '.join(wrong[:5])}: the content is not what the manifest describes; "
                "nothing was written. The checkpoint it came from is damaged."
            )
        about = {
            key: (each.shape, each.dtype, [(box, entry) for box, _, entry in each.boxes])
            for key, each in written.items()
        }
        write_synced(staging / INDEX, encode_index(self.draft.id, about))
        files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        manifest = replace(self.draft, tensors=tensors, files=files)
        write_synced(staging / MANIFEST, manifest.to_json().encode())
        commit(staging, self.path)
        if self.keep is not None:
            prune(self.path.parent, self.keep, self.pinned)


# State that is not sharded, by parameter and name, and whether this rank trains the parameter.
_Values = dict[tuple[str, str], tuple[Any, bool]]


@dataclass(slots=True)
class _Written:
    """A tensor and its boxes on disk, each with its checksum and its place."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: list[tuple[Box, int, Entry]] = field(default_factory=list)

    def add(self, box: Box, values: torch.Tensor, file: BinaryIO, path: Path) -> None:
        if tuple(values.shape) != box.sizes or values.dtype != self.dtype:
            raise CheckpointError(
                f"{path.name}: a block is {tuple(values.shape)} in {values.dtype}, not "
                f"{box.sizes} in {self.dtype}; nothing appears under the name."
            )
        total = checksum(self.shape, box, values)
        self.boxes.append((box, total, append_entry(file, path, values)))

    def stored(self, key: str) -> StoredTensor:
        """The tensor's entry in the manifest; all ranks have written their boxes."""
        self.boxes.sort(key=lambda each: each[0].offsets)
        boxes = [box for box, _, _ in self.boxes]
        if not tiles(self.shape, boxes):
            is_alive = dist.is_initialized()
            raise CheckpointError(
                f"{key}: the parts of all ranks do not cover its shape {self.shape} once: "
                f"{boxes}; nothing was written. Save on all ranks of the model's "
                f"mesh{'' if is_alive else ', and before the process group is destroyed'}."
            )
        blocks = tuple(
            StoredBlock(b.offsets, b.sizes, as_text(total)) for b, total, _ in self.boxes
        )
        whole = as_text(joined(total for _, total, _ in self.boxes))
        dtype = str(self.dtype).removeprefix("torch.")
        return StoredTensor(self.shape, dtype, whole, blocks)


def _is_like(value: Any, param: torch.Tensor) -> bool:
    """Whether optimizer state is sharded like its parameter."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and isinstance(value, DTensor) == isinstance(param, DTensor)
        and value.shape == param.shape
    )

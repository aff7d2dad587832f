"""Saving and loading checkpoints of models that are sharded in any way, or not at all.

Nothing is gathered: each rank writes the boxes of tensors that it holds, and reads those that it
needs, whichever rank wrote them. `store.py` says what a checkpoint is on disk, `dcp.py` how its
tensors are written, and `shards.py` which boxes a rank holds.
"""

from __future__ import annotations

import copy
import io
import random
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fullshard._torch import new_dtensor, spec_of, to_local
from fullshard.comm import guard
from fullshard.errors import CheckpointError, ConfigError, FullshardError, LifecycleError
from fullshard.layout.split import Box, row_chunks, tiles
from fullshard.state import store
from fullshard.state.dcp import INDEX, MODEL, OPTIMIZER, Entry, append_entry, encode_index
from fullshard.state.optim_state import OptimParam, optim_params, saved_options
from fullshard.state.rank_group import RankGroup
from fullshard.state.shards import LocalPart, TensorShard, tensor_shards
from fullshard.state.store import Manifest, StoredCheckpoint

_RANDOM = "random state"


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
    ranks = _ranks_after_saves(wait=True)
    writer = _Writer(Path(path), Manifest(step=step), num_threads=shards, keep=keep, pinned=pinned)
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
    ranks = _ranks_after_saves(wait=False)
    writer = _Writer(Path(path), Manifest(step=step), num_threads=shards, keep=keep, pinned=pinned)
    writer.add_model(model, optimizer, extra or {}, only, ranks)
    ranks.run(f"save {path}", writer.copy_to_host)
    Handle._last = Handle(writer, RankGroup.world(in_background=True), Handle._last)
    return Handle._last


class Handle:
    """A save in the background."""

    # The last handle, on all ranks or on none, and an error that no later save has raised yet.
    _last: ClassVar[Handle | None] = None
    _failure: ClassVar[BaseException | None] = None

    def __init__(self, writer: _Writer, ranks: RankGroup, before: Handle | None) -> None:
        self.path = writer.path
        self._error: BaseException | None = None
        # Not a daemon: the program must not end before the checkpoint is whole.
        self._thread = threading.Thread(
            target=self._write, args=(writer, ranks, before), name="fullshard-save"
        )
        self._thread.start()

    def _write(self, writer: _Writer, ranks: RankGroup, before: Handle | None) -> None:
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


def _ranks_after_saves(*, wait: bool) -> RankGroup:
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


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource:
    """A tensor to be written. `read` returns one box of it at a time, on any device.

    `boxes` are those that this process writes; by default, its files share the rows evenly.
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


def selection(
    only: str | Callable[[str], bool] | None,
) -> tuple[Callable[[TensorShard], bool], str]:
    """Return a function that tells whether a tensor was chosen, and what was chosen in words."""
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
        raise ConfigError(f"num_files: a number of at least 1 is expected, found {num_files!r}.")
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
    writer = _Writer(Path(path), draft, dict(enumerate(states)), checksums=checksums or {})
    for key, source in tensors.items():
        boxes = row_chunks(source.shape, num_files) if source.boxes is None else source.boxes
        writer.sources[key] = replace(source, boxes=tuple(boxes))
    writer.file_names = [f"__{number}_0.distcp" for number in range(num_files)]
    writer.write(RankGroup())
    return store.read_manifest(Path(path))


@dataclass(slots=True)
class _Writer:
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
                raise ConfigError(f"save: {name} must be a number of at least 1, found {number!r}.")
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
        self.states[ranks.rank] = {_RANDOM: random_state(), "extra": dict(extra)}
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
                        f"optimizer: its parameters must be the model's, found one of shape "
                        f"{tuple(each.param.shape)} that is not; pass the optimizer of this model."
                    )
                for shard in filter(choose, each.shards):
                    names.append(shard.name)
                    for state, value in optimizer.state.get(each.param, {}).items():
                        if _is_like(value, each.param):
                            key = f"{OPTIMIZER}{shard.name}.{state}"
                            self._add(key, shard, _dequantized(value), ranks)
                            continue
                        if isinstance(value, torch.Tensor):
                            # A DTensor without dims is replicated. Copy: optimizers count in place.
                            value = to_local(value).detach().to("cpu", copy=True)
                        else:
                            value = _as_json(f"{shard.name}.{state}", value)
                        is_trained = bool(shard.local_parts(shard.tensor))
                        values[shard.name, state] = (value, is_trained)
            subject = f"param_groups[{len(groups)}]"
            groups.append(_as_json(subject, {**group, "params": names})["value"])
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
            self.states[rank] = copy.deepcopy({**state, "extra": _plain_extra(state["extra"])})

    def write(self, ranks: RankGroup) -> None:
        """Write everything into a staging folder, then the manifest, then rename the folder."""
        subject = f"save {self.path}"
        boxes = [(b, each) for each in self.sources.values() for b in each.boxes or ()]
        total = sum(ranks.all_gather(sum(b.numel * each.dtype.itemsize for b, each in boxes)))
        made: list[Path] = []

        def begin() -> tuple[Path, Manifest]:
            made.append(store.begin(self.path, total))
            return made[0], self.draft

        try:
            staging, self.draft = ranks.run_first(subject, begin)
            ranks.require_seen(subject, staging)
            everyone = ranks.gather(
                subject, lambda: self._write_files(staging), "nothing appears under this name."
            )
            ranks.run_first(subject, lambda: self._finish(staging, everyone))
        except BaseException as error:
            for each in made:  # by the first rank, which may not have learnt that others have it
                store.discard(each)
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
                file.write(store.seal(self.draft.id, path.name))
            store.sync(path)

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
            content = _packed({**state, "id": self.draft.id, "rank": rank})
            store.write_synced(staging / store.rank_file(rank), content)
        return found

    def _finish(self, staging: Path, everyone: Sequence[Mapping[str, _Written]]) -> None:
        """Write the index and the manifest once all ranks have written, then rename the folder."""
        written: dict[str, _Written] = {}
        for own in everyone:
            for key, each in own.items():
                known = written.setdefault(key, _Written(each.shape, each.dtype))
                if (known.shape, known.dtype) != (each.shape, each.dtype):
                    raise CheckpointError(
                        f"{key}: all ranks must have the same tensor, found {each.shape} in "
                        f"{each.dtype} and {known.shape} in {known.dtype}; build the same model."
                    )
                known.boxes.extend(each.boxes)
        tensors = {key: each.stored(key) for key, each in written.items()}
        wrong = [key for key, value in self.checksums.items() if tensors[key].checksum != value]
        if wrong:
            raise CheckpointError(
                f"{', '.join(wrong[:5])}: the content that the manifest describes is expected, "
                "found other content; nothing was written. The checkpoint it came from is damaged."
            )
        about = {
            key: (each.shape, each.dtype, [(box, entry) for box, _, entry in each.boxes])
            for key, each in written.items()
        }
        store.write_synced(staging / INDEX, encode_index(self.draft.id, about))
        files = {file.name: file.stat().st_size for file in sorted(staging.iterdir())}
        manifest = replace(self.draft, tensors=tensors, files=files)
        store.write_synced(staging / store.MANIFEST, manifest.to_json().encode())
        store.commit(staging, self.path)
        if self.keep is not None:
            store.prune(self.path.parent, self.keep, self.pinned)


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
                f"{path.name}: a block of {box.sizes} in {self.dtype} is expected, found "
                f"{tuple(values.shape)} in {values.dtype}; nothing appears under the name."
            )
        total = store.checksum(self.shape, box, values)
        self.boxes.append((box, total, append_entry(file, path, values)))

    def stored(self, key: str) -> store.StoredTensor:
        """The tensor's entry in the manifest; all ranks have written their boxes."""
        self.boxes.sort(key=lambda each: each[0].offsets)
        boxes = [box for box, _, _ in self.boxes]
        if not tiles(self.shape, boxes):
            is_alive = dist.is_initialized()
            raise CheckpointError(
                f"{key}: the parts of all ranks must cover shape {self.shape} once, found {boxes}; "
                "nothing was written. Save on all ranks of the model's mesh"
                f"{'' if is_alive else '; found no process group: save before it is destroyed'}."
            )
        blocks = tuple(
            store.StoredBlock(b.offsets, b.sizes, store.as_text(total))
            for b, total, _ in self.boxes
        )
        whole = store.as_text(store.joined(total for _, total, _ in self.boxes))
        dtype = str(self.dtype).removeprefix("torch.")
        return store.StoredTensor(self.shape, dtype, whole, blocks)


def _is_like(value: Any, param: torch.Tensor) -> bool:
    """Whether optimizer state is sharded like its parameter."""
    return (
        isinstance(value, torch.Tensor)
        and value.dim() > 0
        and isinstance(value, DTensor) == isinstance(param, DTensor)
        and value.shape == param.shape
    )


def _is_quantized(value: Any) -> bool:
    """Whether this is state of a torchao optimizer."""
    return isinstance(value, torch.Tensor) and hasattr(to_local(value), "codes")


def _dequantized(value: torch.Tensor) -> torch.Tensor:
    """State as a checkpoint stores it: in float32, for any optimizer and number of ranks."""
    if not _is_quantized(value):
        return value
    local = to_local(value).dequantize().cpu()
    return new_dtensor(local, spec_of(value)) if isinstance(value, DTensor) else local


def _as_json(subject: str, value: Any) -> Any:
    """Convert a value to one that JSON can hold and that `_from_json` restores."""
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
    """Restore the value that `_as_json` was given."""
    match value:
        case list():
            return [_from_json(item) for item in value]
        case {"kind": "tuple", "value": list(inner)}:
            return tuple(_from_json(item) for item in inner)
        case {"kind": "dict", "value": dict(inner)}:
            return {key: _from_json(item) for key, item in inner.items()}
        case {"kind": "tensor", "value": inner, "dtype": str(name)}:
            dtype = getattr(torch, name, None)
            return torch.tensor(inner, dtype=dtype) if isinstance(dtype, torch.dtype) else value
    return value


# The state of a run besides its tensors. Each rank writes its own, as plain data in a file that is
# read without running any code.


def _plain_extra(extra: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict of each object that has one; everything else as it is."""
    return {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in extra.items()
    }


def _packed(state: Mapping[str, Any]) -> bytes:
    """The content of one rank's file."""
    extra = _plain_extra(state["extra"])
    buffer = io.BytesIO()
    try:
        torch.save({**state, "extra": extra}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"extra: {', '.join(map(repr, extra))} must be plain data (numbers, strings, tensors, "
            f"lists, dicts) to be loaded without running code, found something else ({error}); "
            "give it a state_dict method that returns plain data."
        ) from error
    return buffer.getvalue()


def random_state() -> dict[str, Any]:
    """The state of all generators that this process draws from."""
    version, internal, gauss = random.getstate()
    python = [version, list(internal), gauss]
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")  # torch alone does not need it
    if numpy is not None:
        kind, keys, *others = numpy.random.get_state(legacy=True)
        state["numpy"] = [kind, keys.tolist(), *others]
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


_MODEL_PREFIXES = (MODEL, "", "app.model.", "state_dict.", "module.")
_OPTIMIZER_PREFIXES = (OPTIMIZER, "optim.state.", "optimizer.", "optim.")
_NOT_MODEL = ("optimizer.", "optim.", "optimizers.")
_OPTION_KEY = re.compile(r"optim(?:izer)?\.param_groups\.(\d+)\.(\w+)(?:\.(\d+))?")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a load found: the step, what was saved besides tensors, and what did not fit.

    `missing` are names of the model that the checkpoint does not have, and `unexpected` are names
    of the checkpoint that the model does not have.
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
    """Load a checkpoint. All ranks call it, and each rank reads the blocks that its shards need.

    Everything is checked before anything is written: names that are missing, unexpected or of
    another shape are listed in one error, on all ranks.

    Args:
        path: The folder of a checkpoint that fullshard or `torch.distributed.checkpoint` wrote.
        model: The model, sharded in any way or not at all, on any number of ranks.
        optimizer: Receives the saved state by parameter name; groups may be in another order.
        strict: Whether names that only the model or only the checkpoint has are an error. What a
            partial checkpoint left out on purpose never is.
        extra: Objects with `load_state_dict` to restore, by the names that they were saved under.
        verified: Whether to compare all content with the manifest's checksums first; ranks share
            the work.
        random_state: Whether to restore random generators, on a world of the same size.
    """
    ranks = _ranks_after_saves(wait=True)
    objects, subject = extra or {}, f"load {store.located(Path(path))}"
    wanted: dict[str, list[LocalPart]] = {}

    def planned() -> tuple[StoredCheckpoint, NameMatch, Callable[[], None] | None, dict[str, Any]]:
        stored = store.open_checkpoint(path, check_files=False)
        shards = tensor_shards(model)
        match = _match_model(stored, shards, strict)
        for shard in shards:
            if shard.name in match.sources:
                wanted[match.sources[shard.name]] = shard.local_parts(shard.tensor)
        install = None
        with stored.unchanged():
            if optimizer is not None:
                install = _plan_optimizer(stored, shards, match, optimizer, strict, wanted)
            return stored, match, install, _restorable_state(stored, ranks.rank, objects)

    stored, match, install, own = ranks.run(subject, planned)
    manifest = stored.manifest
    if verified and manifest is not None:
        share = (ranks.rank, ranks.size)
        everyone = ranks.gather(subject, lambda: store.verify(stored.path, share=share))
        problems = dict.fromkeys(f"{p.subject}: {p.what}" for some in everyone for p in some)
        if problems:
            ranks.run_first(subject, stored.require_unchanged)
            raise CheckpointError(
                f"{subject}: its content must be what was saved, found otherwise; nothing was "
                f"loaded: {'; '.join(problems)}. Load an older checkpoint."
            )
    consequence = "the model may hold some of it: load again, or another checkpoint."

    def read() -> None:
        with stored.unchanged(), torch.no_grad():
            stored.read_into(wanted)

    ranks.run(subject, read, consequence)
    if install is not None:
        install()
    saved = own.get("extra", {})
    for name, value in objects.items():
        value.load_state_dict(saved[name])
    is_same_world = manifest is not None and manifest.num_ranks == ranks.size
    # An imported checkpoint has no random state.
    if random_state and is_same_world and _RANDOM in own:
        restore_random_state(own[_RANDOM])
    step = None if manifest is None else manifest.step
    return Loaded(stored.path, step, saved, tuple(match.missing), tuple(match.unexpected))


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


class NameMatch:
    """Which stored tensor each parameter and buffer is read from.

    `key_of` maps a name of the model to its key among the stored `keys`, and `misfit` returns why a
    stored tensor does not fit. `sources` and `mismatched` are keyed by canonical names.
    """

    def __init__(
        self,
        shards: Sequence[TensorShard],
        keys: Iterable[str],
        key_of: Callable[[str], str],
        misfit: Callable[[str, TensorShard], str],
    ) -> None:
        self.sources: dict[str, str] = {}
        self.missing: list[str] = []
        self.mismatched: dict[str, str] = {}
        stored, known = dict.fromkeys(keys), set[str]()
        for shard in shards:
            names = [key_of(name) for name in shard.names]
            known.update(names)
            source = next((name for name in names if name in stored), None)
            if source is None:
                self.missing.append(shard.name)
            elif reason := misfit(source, shard):
                self.mismatched[shard.name] = reason
            else:
                self.sources[shard.name] = source
        self.unexpected = [key for key in stored if key not in known]

    def require(
        self, subject: str, where: str, *, missing: bool, unexpected: bool, mismatched: bool
    ) -> None:
        """Raise for names of the given kinds, if there are any."""
        problems = []
        if missing and self.missing:
            problems.append(f"missing in the {where}: {self.missing}")
        if unexpected and self.unexpected:
            problems.append(f"not in the model: {self.unexpected}")
        if mismatched:
            problems += [f"{name}: {reason}" for name, reason in self.mismatched.items()]
        if not self.sources:
            problems.append(f"nothing in the {where} fits a parameter of the model")
        if problems:
            raise CheckpointError(
                f"{subject}: the model and the {where} must have the same parameters; nothing was "
                f"loaded: {'; '.join(problems)}. Pass strict=False to load what fits."
            )


def _match_model(
    stored: StoredCheckpoint, shards: Sequence[TensorShard], strict: bool
) -> NameMatch:
    def misfit(key: str, shard: TensorShard) -> str:
        if shard.tensor.is_meta:
            raise CheckpointError(
                f"{shard.name}: parameters must have memory to be loaded into, found it on meta; "
                "call model.to_empty(device=...) first."
            )
        found, expected = list(stored.shape(key)), list(shard.shape)
        return "" if found == expected else f"{expected} is expected, found {found}"

    # Other programs nest their state dicts in various ways.
    names = [name for shard in shards for name in shard.names]
    prefix = max(_MODEL_PREFIXES, key=lambda p: sum(p + name in stored for name in names))
    keys = [k for k in stored.keys if k.startswith(prefix) and not k.startswith(_NOT_MODEL)]
    match = NameMatch(shards, keys, lambda name: prefix + name, misfit)
    match.unexpected = [key.removeprefix(prefix) for key in match.unexpected]
    is_partial = stored.manifest is not None and stored.manifest.selection != "all"
    match.require(
        f"load {stored.path}",
        "checkpoint",
        missing=strict and not is_partial,
        unexpected=strict,
        mismatched=True,
    )
    return match


def _plan_optimizer(
    stored: StoredCheckpoint,
    shards: Sequence[TensorShard],
    match: NameMatch,
    optimizer: Optimizer,
    strict: bool,
    wanted: dict[str, list[LocalPart]],
) -> Callable[[], None]:
    """Add an optimizer's state to `wanted`, in new tensors; return a function that installs it."""
    manifest = stored.manifest
    prefix = max(_OPTIMIZER_PREFIXES, key=lambda p: sum(k.startswith(p) for k in stored.keys))
    by_name: dict[str, dict[str, str]] = {}
    for key in stored.keys:
        name, _, state = key.removeprefix(prefix).rpartition(".")
        if key.startswith(prefix) and name and not name.startswith("param_groups"):
            by_name.setdefault(name, {})[state] = key
    if not by_name if manifest is None else manifest.optimizer is None:
        raise CheckpointError(
            "optimizer: the checkpoint must hold optimizer state to load it, found a model only; "
            "leave the optimizer out."
        )
    groups = optim_params([group["params"] for group in optimizer.param_groups], shards)
    saved = _saved_groups(stored)
    trained = {name for group in saved or () for name in group["params"]} | set(by_name)
    if strict:
        _require_same_params(groups, trained, are_all=bool(saved))
    options = saved_options(groups, saved or [], CheckpointError)
    params = [each for group in groups for each in group]
    states = _wanted_states(stored, params, match, by_name, wanted)
    values = {} if manifest is None or not manifest.optimizer else manifest.optimizer["values"]
    for each in params:
        if not trained.isdisjoint(name for shard in each.shards for name in shard.names):
            own = states.setdefault(each.param, {})  # stays empty if saved before its first step
            own |= {n: _from_json(value) for n, value in values.get(each.names[0], {}).items()}

    def install() -> None:
        for group, changed in zip(optimizer.param_groups, options, strict=True):
            group.update(changed or {})
            on_device = bool(group.get("fused") or group.get("capturable"))
            for param in group["params"]:
                for name, value in states.get(param, {}).items():
                    there = optimizer.state.get(param, {}).get(name)
                    if _is_quantized(there):
                        states[param][name] = there.copy_(value)
                    elif on_device and isinstance(value, torch.Tensor):
                        states[param][name] = value.to(param.device)
                if states.get(param):
                    optimizer.state[param] = states[param]
                elif param in states:
                    optimizer.state.pop(param, None)

    return install


def _wanted_states(
    stored: StoredCheckpoint,
    params: Sequence[OptimParam],
    match: NameMatch,
    by_name: Mapping[str, Mapping[str, str]],
    wanted: dict[str, list[LocalPart]],
) -> dict[torch.Tensor, dict[str, Any]]:
    """Make tensors to read the state of parameters into."""
    found = [
        (each, shard, state, key)
        for each in params
        for shard in each.shards
        for state, key in next((by_name[n] for n in shard.names if n in by_name), {}).items()
    ]
    # State with one value per element. For parameters without dims, only other parameters tell.
    per_element = {
        state
        for _, shard, state, key in found
        if shard.shape and stored.shape(key) == tuple(shard.shape)
    }
    if not any(shard.shape for _, shard, _, _ in found):
        per_element = {state for _, _, state, _ in found if state != "step"}
    states: dict[torch.Tensor, dict[str, Any]] = {}
    for each, shard, state, key in found:
        own, shape, dtype = states.setdefault(each.param, {}), stored.shape(key), stored.dtype(key)
        if state not in per_element:
            if state not in own:  # one count stands for all shards of a flat parameter
                own[state] = torch.zeros(shape, dtype=dtype)
                wanted[key] = [LocalPart(Box.whole(shape), own[state])]
            continue
        if shape != tuple(shard.shape):
            raise CheckpointError(
                f"{key}: {list(shard.shape)} is expected, found {list(shape)}; the optimizer state "
                "is of another model."
            )
        if state not in own:  # stays zero where a shard of a flat parameter has no such state
            source = match.sources.get(shard.name)
            if source is not None and dtype == stored.dtype(source):
                dtype = each.param.dtype  # it was saved in the parameter's dtype
            own[state] = torch.zeros_like(each.param, dtype=dtype, requires_grad=False)
        wanted[key] = shard.local_parts(own[state])
    return states


def _require_same_params(
    groups: Sequence[Sequence[OptimParam]], trained: set[str], *, are_all: bool
) -> None:
    shards = [shard for group in groups for each in group for shard in each.shards]
    removed = sorted(trained - {name for shard in shards for name in shard.names})
    added = sorted(shard.name for shard in shards if are_all and not trained & set(shard.names))
    if added or removed:
        raise CheckpointError(
            f"optimizer: it must train the parameters that were saved, found {added} added and "
            f"{removed} removed; nothing was loaded. Pass strict=False to load the others."
        )


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
    if not listed or not all("params" in group for group in listed):
        return None
    for names in (group["params"] for group in listed):
        if not isinstance(names, list | tuple) or not all(isinstance(each, str) for each in names):
            raise CheckpointError(
                f"{stored.path}: the parameters of an optimizer's group must be names, found "
                f"{type(names).__name__}; the checkpoint is damaged. `latest` finds whole ones."
            )
    return listed

"""A stored tensor, in whichever format: who reads it, who writes it, and which one is a model's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Protocol

import torch

from fullshard.errors import CheckpointError
from fullshard.layout.split import Box
from fullshard.state.shards import LocalPart, TensorShard


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor; `boxes` are the parts that it is stored in."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    @property
    def dtype_name(self) -> str:
        """As in "float32"."""
        return str(self.dtype).removeprefix("torch.")


class TensorReader(Protocol):
    """Reads stored tensors by their keys, in whichever format: the index of
    `torch.distributed.checkpoint`, or safetensors.
    """

    @property
    def keys(self) -> Sequence[str]: ...

    def info(self, key: str) -> TensorInfo:
        """What is known of a tensor. Raises if there is none, or torch has no such dtype."""

    def read(self, key: str, box: Box) -> torch.Tensor:
        """One box of a tensor."""

    def read_into(self, wanted: Mapping[str, Sequence[LocalPart]]) -> None:
        """Fill parts of tensors, with bounded memory besides them."""


@dataclass(frozen=True, slots=True, eq=False)
class TensorSource(TensorInfo):
    """A tensor to be written, in these boxes. `read` returns one of them, on any device.

    Without boxes, the files of a checkpoint share its rows evenly.
    """

    read: Callable[[Box], torch.Tensor]

    @classmethod
    def of_parts(
        cls, shape: Sequence[int], dtype: torch.dtype, parts: Iterable[LocalPart]
    ) -> TensorSource:
        values = {part.box: part.values for part in parts}
        return cls(tuple(shape), dtype, tuple(values), values.__getitem__)

    @classmethod
    def of_stored(cls, stored: TensorReader, key: str) -> TensorSource:
        info = stored.info(key)
        return cls(info.shape, info.dtype, info.boxes, partial(stored.read, key))


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
                f"{subject}: the {where} and the model do not have the same parameters; nothing "
                f"was loaded: {'; '.join(problems)}. Pass strict=False to load what fits."
            )

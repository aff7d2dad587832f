"""Tensors that define their own all-gather.

A tensor with `fsdp_pre_all_gather` and `fsdp_post_all_gather` (a float8 weight with its scale, for
example) turns its shard into tensors to gather, and what was gathered into the full parameter.
Usually a tensor subclass defines them; they may also be set on the local tensor of a shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard.device import ResizableBuffer
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.layout import RowSplit, Split


class Extension:
    """The all-gather of one parameter whose tensor defines it.

    Gathered tensors live in resizable `buffers`, since the full parameter may be a view of them
    (rule 1: storage outlives memory). `outs` is where the tensors of all ranks arrive.
    """

    def __init__(self, name: str) -> None:
        self.outs: list[torch.Tensor] = []
        self.buffers: list[ResizableBuffer] = []
        self._name = name
        self._inner: Sequence[torch.Tensor] = ()
        self._sizes: list[torch.Size] = []
        self._metadata: Any = None

    @classmethod
    def of(cls, name: str, local: Any) -> Extension | None:
        has_pre = hasattr(local, "fsdp_pre_all_gather")
        if has_pre != hasattr(local, "fsdp_post_all_gather"):
            raise UnsupportedError(
                f"{name}: Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if "
                f"using all-gather extensions, but {type(local).__name__} has only one; define "
                "the other."
            )
        if not has_pre:
            return None
        signature = inspect.signature(local.fsdp_pre_all_gather)
        if len(signature.parameters) not in (1, 5):
            raise UnsupportedError(
                f"{name}: Invalid fsdp_pre_all_gather: {signature} found in "
                f"{type(local).__name__}; it must take (mesh) or (mesh, outer_size, outer_stride, "
                "module, mp_policy)."
            )
        return cls(name)

    def prepare(
        self, local: Any, mesh: DeviceMesh, module: nn.Module, policy: Any, split: Split
    ) -> list[torch.Tensor]:
        """Allocate memory for what arrives, and return what this rank sends, flattened."""
        hook = local.fsdp_pre_all_gather
        if len(inspect.signature(hook).parameters) == 1:
            tensors, self._metadata = hook(mesh)
        else:
            outer = torch.empty(split.shape, device="meta")
            tensors, self._metadata = hook(mesh, outer.size(), outer.stride(), module, policy)
        self._sizes = [tensor.size() for tensor in tensors]
        if not self.outs:
            for tensor in tensors:
                buffer = ResizableBuffer(tensor.nbytes * split.num_ranks, tensor.device)
                self.buffers.append(buffer)
                shape = (tensor.numel() * split.num_ranks,)
                self.outs.append(buffer.view(0, shape, tensor.dtype))
        found = [tensor.numel() * split.num_ranks for tensor in tensors]
        expected = [out.numel() for out in self.outs]
        if found != expected:
            raise ConfigError(
                f"{self._name}: fsdp_pre_all_gather must return all-gather inputs with the padded "
                f"sharded size, the same each time and on every rank: {expected}, not {found}; "
                "pad an uneven shard."
            )
        for buffer in self.buffers:
            buffer.allocate()
        return [tensor.contiguous().view(-1) for tensor in tensors]

    def make_full(
        self, local: Any, dtype: torch.dtype, full: nn.Parameter | None, split: Split
    ) -> torch.Tensor | None:
        """Make the full tensor of what arrived; None if it was written into an existing `full`."""
        pairs = zip(self.outs, self._sizes, strict=True)
        arrived = tuple(_join(out, size, split) for out, size in pairs)
        metadata, self._metadata = self._metadata, None
        if full is not None:
            for tensor in self._inner:
                storage = tensor.untyped_storage()
                if storage.size() != tensor.nbytes:
                    storage.resize_(tensor.nbytes)
            local.fsdp_post_all_gather(arrived, metadata, dtype, out=full)
            return None
        made, self._inner = local.fsdp_post_all_gather(arrived, metadata, dtype)
        result: torch.Tensor = made
        if isinstance(split, RowSplit) and result.size(split.dim) > split.num_rows:
            result = result.narrow(split.dim, 0, split.num_rows)  # without the padding
        return result

    @staticmethod
    def is_independent(local: Any) -> bool:
        """Whether the full parameter that a tensor makes does not need what was gathered."""
        says = getattr(local, "fsdp_should_release_all_gather_outputs_after_post_all_gather", None)
        return says is not None and bool(says())

    @staticmethod
    def view_of(
        local: Any, mesh: DeviceMesh, module: nn.Module, policy: Any
    ) -> torch.Tensor | None:
        """The full parameter over the shard's own memory, where the shard is the whole."""
        view = getattr(local, "fsdp_get_unsharded_view", None)
        made: torch.Tensor | None = None if view is None else view(mesh, module, policy)
        return made

    def free(self, keep_storage: bool) -> list[tuple[int, int]]:
        """Free what was gathered, unless it is kept; return its address ranges."""
        ranges = [buffer.address_range for buffer in self.buffers]
        if not keep_storage:
            for buffer in self.buffers:
                buffer.free()
            for tensor in self._inner:
                tensor.untyped_storage().resize_(0)
        return ranges


def _join(out: torch.Tensor, size: torch.Size, split: Split) -> torch.Tensor:
    """Join what arrived from all ranks along the dim that the parameter is sharded on."""
    if not isinstance(split, RowSplit) or not 0 < split.dim < len(size):
        return out.view(-1, *size[1:])
    whole = torch.cat(list(out.view(split.num_ranks, *size)), dim=split.dim)
    return out.copy_(whole.view(-1)).view(whole.size())

"""Attention that does not cross documents, which share the sequences of a batch.

On a GPU, flash attention takes the offsets of documents and computes nothing between them. There is
a mask elsewhere, in float32, and while a step is captured, which cannot wait for their number.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

# torch 2.11 has no grouped queries there.
_HAS_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters
_LEAST_CAPABILITY = (8, 0)


def documents_of(positions: Tensor | None) -> Tensor | None:
    """Return a mask [batch, 1, length, length], or where documents begin in a flattened batch.

    `positions` are [batch, length], and 0 where a document or a sequence begins. The offsets end
    with the number of all tokens.
    """
    if positions is None:
        return None
    begins = positions.eq(0)
    if not _has_kernel(positions.device):
        return _mask(begins.cumsum(-1))
    return F.pad(begins.flatten().nonzero().flatten(), (0, 1), value=positions.numel()).int()


def attend(queries: Tensor, keys: Tensor, values: Tensor, documents: Tensor | None) -> Tensor:
    """Return causal attention of [batch, heads, length, width], or attention with a mask."""
    if documents is None or documents.dim() > 1:
        is_causal = documents is None
        return F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=documents, is_causal=is_causal, enable_gqa=True
        )
    batch, _, length, _ = queries.shape
    if queries.dtype == torch.float32:
        mask = mask_of_offsets(documents, batch, length)
        return attend(queries, keys, values, mask)
    options: dict[str, Any] = {"enable_gqa": True} if _HAS_GROUPS else {}
    if not _HAS_GROUPS:
        number = queries.shape[1] // keys.shape[1]
        keys, values = (each.repeat_interleave(number, dim=1) for each in (keys, values))
    q, k, v = (each.transpose(1, 2).flatten(0, 1) for each in (queries, keys, values))
    ends = (documents, documents, length, length)
    found: Any = varlen_attn(q, k, v, *ends, window_size=(-1, 0), **options)
    out: Tensor = found.unflatten(0, (batch, length)).transpose(1, 2)
    return out


def mask_of_offsets(offsets: Tensor, batch: int, length: int) -> Tensor:
    """Return the mask of documents that begin at these offsets of a flattened batch."""
    places = torch.arange(batch * length, device=offsets.device, dtype=offsets.dtype)
    return _mask(torch.bucketize(places, offsets, right=True).view(batch, length))


def _mask(document: Tensor) -> Tensor:
    return document[:, None, :, None].eq(document[:, None, None, :]).tril()


def _has_kernel(device: torch.device) -> bool:
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    is_capturing = torch.cuda.is_current_stream_capturing()
    return not is_capturing and torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY

"""Frozen linear layers whose weights are stored, sharded and gathered in few bits: `--lora-base`.

A row of a weight is a row of bytes: the scales of its blocks in bfloat16, then its codes. Bytes are
sharded like any parameter, by either API, and no precision policy casts them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullshard.errors import ConfigError
from fullshard.state import TensorShard

ReadRows = Callable[[str, range], Tensor]
"""Returns rows of the weight of this name, as the model without adapters names it."""

_PACKED = "packed"
_SCALE_BYTES = 2
_SMALLEST = torch.finfo(torch.bfloat16).tiny
# How many bytes are packed at once: what they are made of takes some ten times as much.
_PIECE_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Format:
    """How rows are stored.

    Attributes:
        block: Elements that share a scale; 0 for those of a row.
        per_byte: Elements in a byte.
        largest: The absolute value of the largest code.
        encode: Makes bytes of values between -largest and largest.
        decode: Makes values of a dtype of bytes.
    """

    block: int
    per_byte: int
    largest: float
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor, torch.dtype], Tensor]

    def fits(self, columns: int) -> bool:
        return columns > 0 and columns % max(self.block, 1) == 0

    def scale_bytes(self, columns: int) -> int:
        """The bytes of a row before its codes."""
        return _SCALE_BYTES * (columns // self.block if self.block else 1)

    def row_bytes(self, columns: int) -> int:
        return self.scale_bytes(columns) + columns // self.per_byte

    def pack(self, rows: Tensor) -> Tensor:
        blocks = rows.float().unflatten(1, (-1, self.block or rows.shape[1]))
        # Codes are for the scale as it is stored, so that its rounding is no error of its own.
        scales = (blocks.abs().amax(-1, keepdim=True) / self.largest).bfloat16()
        codes = self.encode(blocks / scales.float().clamp(min=_SMALLEST))
        return torch.cat([scales.flatten(1).view(torch.uint8), codes.flatten(1)], 1)

    def unpack(self, packed: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
        num_bytes = self.scale_bytes(columns)
        scales = packed[:, :num_bytes].clone(memory_format=torch.contiguous_format)
        scales = scales.view(torch.bfloat16).to(dtype).unsqueeze(-1)
        values = self.decode(packed[:, num_bytes:], dtype).view(*scales.shape[:2], -1)
        return values.mul_(scales).flatten(1)


def _encode_int8(values: Tensor) -> Tensor:
    return values.round_().clamp_(-127, 127).to(torch.int8).view(torch.uint8)


def _decode_int8(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return codes.view(torch.int8).to(dtype, memory_format=torch.contiguous_format)


def _levels() -> Tensor:
    """The 16 values of NF4: quantiles of a normal distribution, from -1 to 1, and 0.

    See section 3 of "QLoRA: Efficient Finetuning of Quantized LLMs" (arXiv:2305.14314).
    """
    last = 0.9677083  # between the outermost quantiles and 1, as the paper's implementation has it
    above, below = (
        torch.special.ndtri(torch.linspace(last, 0.5, number, dtype=torch.float64)[:-1])
        for number in (9, 8)
    )
    both = torch.cat([above, torch.zeros(1, dtype=torch.float64), -below]).sort().values
    return (both / both[-1]).float()


def _encode_nf4(values: Tensor) -> Tensor:
    levels = _levels()
    between = ((levels[1:] + levels[:-1]) / 2).to(values.device)
    codes = torch.bucketize(values, between, out_int32=True).to(torch.uint8).unflatten(-1, (-1, 2))
    packed: Tensor = codes[..., 0] << 4 | codes[..., 1]
    return packed


def _decode_nf4(codes: Tensor, dtype: torch.dtype) -> Tensor:
    return F.embedding(codes.int(), _pairs(codes.device, dtype)).flatten(1)


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    """The two values of each byte."""
    return _made_pairs(device, dtype)


@cache  # a step that is captured cannot copy them to the device
def _made_pairs(device: torch.device, dtype: torch.dtype) -> Tensor:
    levels = _levels()
    first, second = levels.repeat_interleave(16), levels.repeat(16)
    return torch.stack([first, second], 1).to(device, dtype)


FORMATS = {
    "int8": Format(0, 1, 127.0, _encode_int8, _decode_int8),
    "nf4": Format(64, 2, 1.0, _encode_nf4, _decode_nf4),
}


class QuantizedLinear(nn.Module):
    """A frozen linear layer, or one of GPT-2, whose weight is transposed.

    Its weight has `num_more` elements more than `packed` has bytes.
    """

    def __init__(self, layer: Any, base: str) -> None:
        super().__init__()
        rows, self.columns = layer.weight.shape
        self.base, self.is_transposed = base, not isinstance(layer, nn.Linear)
        shape = rows, FORMATS[base].row_bytes(self.columns)
        packed = torch.empty(shape, dtype=torch.uint8, device=layer.weight.device)
        self.packed = nn.Parameter(packed, requires_grad=False)
        self.num_more = rows * self.columns - packed.numel()
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        arguments = x, self.packed, self.base, self.columns, self.is_transposed
        product: Tensor = _Product.apply(*arguments)  # type: ignore[no-untyped-call]
        return product if self.bias is None else product + self.bias


class _Product(torch.autograd.Function):
    """A product with a packed weight, which backward unpacks again: only its bytes are kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, packed: Tensor, base: str, columns: int, is_transposed: bool
    ) -> Tensor:
        ctx.save_for_backward(packed)
        ctx.stored = base, columns, is_transposed
        weight = FORMATS[base].unpack(packed, columns, x.dtype)
        return x @ (weight if is_transposed else weight.T)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        base, columns, is_transposed = ctx.stored
        (packed,) = ctx.saved_tensors
        weight = FORMATS[base].unpack(packed, columns, grad.dtype)
        return grad @ (weight.T if is_transposed else weight), None, None, None, None


def quantize_base(model: nn.Module, blocks: tuple[type[nn.Module], ...], base: str) -> None:
    """Replace the frozen linear layers of blocks; the head, embeddings and norms stay."""
    number = 0
    for block in [module for module in model.modules() if isinstance(module, blocks)]:
        for name, layer in list(block.named_modules()):
            is_linear = type(layer) is nn.Linear or type(layer).__name__ == "Conv1D"
            if is_linear and not layer.weight.requires_grad and _fits(layer, base):
                block.set_submodule(name, QuantizedLinear(layer, base))
                number += 1
    if not number:
        raise ConfigError(
            f"--lora-base {base}: no block has a linear layer whose rows are multiples of "
            f"{max(1, FORMATS[base].block)} elements; choose another, or plain."
        )


def _fits(layer: Any, base: str) -> bool:
    return FORMATS[base].fits(layer.weight.shape[1])


def fill_quantized(
    shards: Iterable[TensorShard], base: str, name_of: Callable[[str], str], read: ReadRows
) -> list[TensorShard]:
    """Quantize this rank's rows of packed weights, a piece at a time.

    Returns the shards of other parameters.
    """
    others = []
    for shard in shards:
        if not is_quantized(shard.name):
            others.append(shard)
            continue
        name = weight_name(name_of(shard.name))
        num_rows = max(1, _PIECE_BYTES // shard.shape[1])
        for part in shard.local_parts(shard.tensor):
            (first, begin), (number, width) = part.box.offsets, part.box.sizes
            for row in range(0, number, num_rows):
                out = part.values[row : row + num_rows]
                rows = read(name, range(first + row, first + row + out.shape[0]))
                out.copy_(FORMATS[base].pack(rows.to(out.device))[:, begin : begin + width])
    return others


def is_quantized(name: str) -> bool:
    """Return whether a parameter is a packed weight."""
    return name.rpartition(".")[2] == _PACKED


def weight_name(name: str) -> str:
    """Return the name of the weight that a packed weight was made of."""
    return f"{name.removesuffix(_PACKED)}weight"

"""The cross-entropy of a linear head, chunk by chunk: logits never exist as a whole.

[Note: gradients in forward] Logits are made once. While those of a chunk of tokens are there, so
are the gradients that they lead to: they become the gradient of the logits in place, and two
products later those of the hidden states and of the weight. Backward multiplies these by the
gradient of the loss, and does not read the weight: a sharded head need not be gathered again
(`runtime/readers.py`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import register_flop_formula

from fullshard.device import type_of
from fullshard.errors import ConfigError, UnsupportedError

Reduction = Literal["mean", "sum"]

# What the logits of a chunk may take. Products of fewer tokens leave parts of a GPU idle; with
# 128,256 words in bf16, these are 2,048 tokens.
_CHUNK_BYTES = 512 << 20
_MULTIPLE = 128  # of tokens in a chunk, as tiles of products
_HALVES = (torch.bfloat16, torch.float16)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Tensor:
    """Return `F.cross_entropy(F.linear(hidden, weight, bias), target)` without making the logits.

    Softmax and the sums of gradients are float32. Gradients are computed in forward, so backward
    takes almost no time and reads no weight; a forward without gradients computes none.

    Call it where the weight is whole: in the forward of the module whose unit has it. See
    `LinearCrossEntropyHead` for a head that is a unit of its own.

    Args:
        hidden: [.., width], the inputs of the head.
        weight: [words, width], the weight of the head; it may also be that of an embedding.
        target: [..], the index of the right word, or `ignore_index` for none.
        bias: [words].
        ignore_index: The target of tokens that have no loss.
        reduction: "mean" over the tokens that have a loss, or "sum". The mean of none is nan.
        chunk: The number of tokens whose logits exist at a time; by default, as many as are
            512 MiB.

    Raises:
        ConfigError: If shapes do not fit, as those of a weight that is sharded.
        UnsupportedError: If the weight is sharded over words by tensor parallelism.
    """
    _require_whole(hidden, weight, target, bias)
    if reduction not in ("mean", "sum"):
        raise ConfigError(
            f"linear_cross_entropy: reduction={reduction!r} must be 'mean' or 'sum'; take the "
            "losses of single tokens from F.cross_entropy."
        )
    if chunk is not None and chunk < 1:
        raise ConfigError(f"linear_cross_entropy: chunk={chunk} must be 1 or more.")
    kind = hidden.device.type
    is_autocast = kind != "meta" and torch.is_autocast_enabled(kind)
    if is_autocast:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    rows, words = hidden.reshape(-1, hidden.shape[-1]), target.reshape(-1)
    if chunk is None:
        chunk = _chunk_of(rows.shape[0], weight.shape[0] * hidden.itemsize)
    with torch.autocast(kind, enabled=False) if is_autocast else nullcontext():
        total = _apply(rows, weight, bias, words, ignore_index, chunk)
    if reduction == "sum":
        return total
    return total / words.ne(ignore_index).sum()


class LinearCrossEntropyHead(nn.Linear):
    """The linear head of a language model: logits, or with a target the loss without them.

    Because the loss is computed by the head's own forward, it works wherever the weight is: in
    the unit of the model, in a unit of its own, or tied to an embedding.
    """

    def forward(
        self,
        input: Tensor,
        target: Tensor | None = None,
        *,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        chunk: int | None = None,
    ) -> Tensor:
        """Return the logits of the hidden states, or their `linear_cross_entropy` to a target."""
        if target is None:
            return F.linear(input, self.weight, self.bias)
        return linear_cross_entropy(
            input,
            self.weight,
            target,
            self.bias,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
        )


@contextmanager
def head_loss(
    head: nn.Module,
    target: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Reduction = "mean",
    chunk: int | None = None,
) -> Iterator[None]:
    """Have a linear head return its `linear_cross_entropy` in this context, instead of logits.

        with head_loss(model.lm_head, targets):
            loss = model(input_ids=tokens).logits

    It is for models that were written by others and return what their head returns, as most of
    Hugging Face's do. The head may be sharded in any way. The whole model must not be recomputed
    in backward, which comes after this context.

    Raises:
        ConfigError: If the head is not an `nn.Linear`.
    """
    inner = getattr(head, "module", head)  # a wrapper has it
    if not isinstance(inner, nn.Linear):
        raise ConfigError(
            f"head_loss: the head is a {type(inner).__name__} and must be an nn.Linear; compute "
            "the loss of other heads with F.cross_entropy."
        )

    def forward(hidden: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            inner.weight,
            target,
            inner.bias,
            ignore_index=ignore_index,
            reduction=reduction,
            chunk=chunk,
        )

    own = inner.__dict__.get("forward")
    inner.forward = forward  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        if own is None:
            del inner.forward
        else:
            inner.forward = own  # type: ignore[method-assign]


def _require_whole(hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None) -> None:
    for name, tensor in (("hidden", hidden), ("weight", weight), ("bias", bias)):
        if isinstance(tensor, DTensor):
            raise UnsupportedError(
                f"linear_cross_entropy: {name} is a DTensor {list(tensor.placements)}, because it "
                "is tensor-parallel or because it is sharded and its unit is not gathered; call "
                "the loss in the forward of the module that has the head, and use torch's "
                "loss_parallel for tensor-parallel heads."
            )
    fits = weight.dim() == 2 and hidden.shape[-1:] == weight.shape[1:]
    if not fits or hidden.shape[:-1] != target.shape:
        raise ConfigError(
            f"linear_cross_entropy: hidden {list(hidden.shape)}, weight {list(weight.shape)} and "
            f"target {list(target.shape)} do not fit; they must be [.., width], [words, width] "
            "and [..]. A weight of one dimension is sharded: call the loss in the forward of the "
            "module that has the head."
        )


def _chunk_of(num_tokens: int, token_bytes: int) -> int:
    """Return the number of tokens in a chunk: chunks are alike and at most `_CHUNK_BYTES`."""
    most = max(_MULTIPLE, _CHUNK_BYTES // max(1, token_bytes))
    num_chunks = max(1, -(-num_tokens // most))
    each = max(1, -(-num_tokens // num_chunks))
    return -(-each // _MULTIPLE) * _MULTIPLE


# The sum of losses, and its gradients


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of the losses of tokens."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None, made: tuple[Any, ...]
    ) -> Tensor:
        total, *grads = _losses(rows, weight, bias, *made)
        ctx.save_for_backward(*grads)
        ctx.dtypes = [None if each is None else each.dtype for each in (rows, weight, bias)]
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [
            None if each is None else _scaled(each, grad, dtype)
            for each, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*scaled, None)


def _scaled(tensor: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the product in another dtype, without a copy in this one."""
    out = torch.empty_like(tensor, dtype=dtype)
    return torch.mul(tensor, factor, out=out)


def _apply(
    rows: Tensor, weight: Tensor, bias: Tensor | None, words: Tensor, ignore: int, chunk: int
) -> Tensor:
    needs = torch.is_grad_enabled()
    wants = tuple(
        needs and each is not None and each.requires_grad for each in (rows, weight, bias)
    )
    made = (words, ignore, chunk, wants)
    total: Tensor
    if torch.compiler.is_compiling():
        total, *_ = _as_operation(rows, weight, bias, *made)
    else:
        total = _LinearCrossEntropy.apply(rows, weight, bias, made)  # type: ignore[no-untyped-call]
    return total


@torch.library.custom_op(
    "fullshard::linear_cross_entropy",
    mutates_args=(),
    schema="(Tensor rows, Tensor weight, Tensor? bias, Tensor words, int ignore, int chunk, "
    "bool[] wants) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _as_operation(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    words: Tensor,
    ignore: int,
    chunk: int,
    wants: Any,
) -> tuple[Tensor, ...]:
    """As `_losses`, for torch.compile: one operation, whose chunks it does not look into."""
    found = _losses(rows, weight, bias, words, ignore, chunk, tuple(wants))
    return tuple([rows.new_empty(0) if each is None else each for each in found])


@_as_operation.register_fake
def _shapes(
    rows: Any, weight: Any, bias: Any, words: Any, ignore: Any, chunk: Any, wants: Any
) -> Any:
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    dtypes = (rows.dtype, dtype, dtype)
    grads = [
        torch.empty_like(each, dtype=kind) if want else rows.new_empty(0)
        for each, kind, want in zip((rows, weight, bias), dtypes, wants, strict=True)
    ]
    return rows.new_empty((), dtype=dtype), *grads


def _remember(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*output[1:])
    ctx.wants = inputs[-1]
    ctx.dtypes = [None if each is None else each.dtype for each in inputs[:3]]


def _scale(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    saved = zip(ctx.saved_tensors, ctx.wants, ctx.dtypes, strict=True)
    return (*((each * grad).to(kind) if want else None for each, want, kind in saved), *[None] * 4)


_as_operation.register_autograd(_scale, setup_context=_remember)


def _losses(
    rows: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    words: Tensor,
    ignore: int,
    chunk: int,
    wants: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the sum of losses, and its gradients by rows, weight and bias."""
    dtype = torch.float64 if rows.dtype is torch.float64 else torch.float32
    total = rows.new_zeros((), dtype=dtype)
    row_grads = torch.empty_like(rows) if wants[0] else None
    weight_grad = torch.empty_like(weight, dtype=dtype) if wants[1] else None
    bias_grad = torch.zeros_like(bias, dtype=dtype) if bias is not None and wants[2] else None
    if weight_grad is not None and not len(rows):
        weight_grad.zero_()
    for first in range(0, len(rows), chunk):
        part, part_words = rows[first : first + chunk], words[first : first + chunk]
        logits = F.linear(part, weight, bias)
        loss, grads = _softmax_loss(logits, part_words, ignore, any(wants))
        del logits
        total += loss
        if row_grads is not None:
            torch.mm(grads, weight, out=row_grads[first : first + chunk])
        if weight_grad is not None:
            _add_product(weight_grad, grads.t(), part, is_first=first == 0)
        if bias_grad is not None:
            bias_grad += grads.sum(0, dtype=dtype)
        del grads
    return total, row_grads, weight_grad, bias_grad


def _add_product(total: Tensor, left: Tensor, right: Tensor, *, is_first: bool) -> None:
    """Add the product of two matrices to a sum of higher precision, which is not read at first."""
    if left.dtype in _HALVES and left.is_cuda:
        _add_halves(total, left, right, is_first)
        return
    if not _has_kernels(left):
        left, right = left.to(total.dtype), right.to(total.dtype)
    torch.addmm(total, left, right, beta=0 if is_first else 1, out=total)


@torch.library.custom_op("fullshard::add_product", mutates_args=("total",))
def _add_halves(total: Tensor, left: Tensor, right: Tensor, is_first: bool) -> None:
    """Add a product of 16-bit matrices to a float32 sum, as counters of FLOPs understand it."""
    beta = 0 if is_first else 1
    torch.addmm(total, left, right, out_dtype=total.dtype, beta=beta, out=total)


@register_flop_formula(torch.ops.fullshard.add_product)
def _flops_of_add_halves(total: Any, left: Any, right: Any, *_: Any, **__: Any) -> int:
    return int(2 * left[0] * left[1] * right[1])


def _has_kernels(tensor: Tensor) -> bool:
    """Whether there are kernels for a tensor on its device, which may be simulated."""
    return type_of(tensor.device) == "cuda" and tensor.dtype is not torch.float64


def _softmax_loss(logits: Tensor, words: Tensor, ignore: int, wants_grad: bool) -> Any:
    """Return the sum of losses and its gradient by logits, which may be in their memory."""
    if not _has_kernels(logits) or not (logits.is_meta or _has_triton()):
        return _plain_softmax_loss(logits, words, ignore, wants_grad)
    counts = words.ne(ignore)
    # Out of the kernel, because it refuses words that do not exist.
    right = logits.gather(1, words.where(counts, 0)[:, None]).squeeze(1).float()
    norms = torch.empty_like(right)
    if logits.is_meta:
        logits.sub_(norms[:, None])  # takes as long as the kernel
    else:
        from fullshard.losses.cuda import softmax_grad

        softmax_grad(logits, words, norms, ignore, wants_grad)
    return (norms - right).where(counts, 0).sum(), logits


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _plain_softmax_loss(
    logits: Tensor, words: Tensor, ignore: int, wants_grad: bool
) -> tuple[Tensor, Tensor]:
    """Return the sum of losses and its gradient by logits, in their dtype."""
    dtype, counts = logits.dtype, words.ne(ignore)
    at = words.where(counts, 0)[:, None]
    if dtype in _HALVES:
        logits = logits.float()
    norms = logits.logsumexp(1, keepdim=True)
    losses = (norms - logits.gather(1, at)).squeeze(1)
    loss = losses.where(counts, 0).sum()
    if not wants_grad:
        return loss, logits
    grads = (logits - norms).exp_()
    grads.scatter_add_(1, at, grads.new_full((), -1).expand_as(at))
    return loss, grads.mul_(counts[:, None]).to(dtype)

"""Newton-Schulz: makes the singular values of matrices nearly equal, with matrix products alone."""

from __future__ import annotations

from types import ModuleType

import torch

from fullshard._torch import triton_kernels


def cost(rows: int, cols: int, num_steps: int) -> int:
    """The multiplications of a matrix: its Gram matrix, the square of that, and their product."""
    short, long = sorted((rows, cols))
    return num_steps * short * short * (2 * long + short)


def orthogonalize_(
    batch: torch.Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float
) -> None:
    """Orthogonalize a contiguous batch of matrices in place, as `torch.optim.Muon` does each.

    Tall matrices are multiplied from the other side instead of being transposed, so that no copy is
    transposed. One product at a time is in memory besides two batches.
    """
    a, b, c = coefficients
    rows, cols = batch.shape[-2:]
    is_tall = rows > cols
    norms = torch.linalg.vector_norm(batch, dim=(-2, -1), keepdim=True).clamp_(min=eps)
    old, new = batch, torch.empty_like(batch)
    if num_steps % 2:  # so that the last step writes into `batch`
        torch.div(old, norms, out=new)
        old, new = new, old
    else:
        old.div_(norms)
    by_halves = _symmetric_products(batch)
    # One matrix alone is multiplied as such: batched kernels have fewer variants.
    is_alone = len(batch) == 1 and by_halves is None
    multiply, add_product = (torch.mm, torch.addmm) if is_alone else (torch.bmm, torch.baddbmm)
    if is_alone:
        old, new = old[0], new[0]
    for _ in range(num_steps):
        if by_halves is None:
            gram = multiply(old.mT, old) if is_tall else multiply(old, old.mT)
            polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        else:
            gram = by_halves.product(old.mT if is_tall else old)
            polynomial = by_halves.product(gram, gram, alpha=c, beta=b)
        factors = (old, polynomial) if is_tall else (polynomial, old)
        add_product(old, *factors, beta=a, out=new)
        old, new = new, old


def _symmetric_products(batch: torch.Tensor) -> ModuleType | None:
    """The kernel for products that are symmetric, where it is faster than whole products."""
    if not batch.is_cuda or batch.dtype is not torch.bfloat16:
        return None
    kernel = triton_kernels("fullshard.optim.symmetric_products")
    return kernel if kernel and min(batch.shape[-2:]) >= kernel.SMALLEST_ROWS else None

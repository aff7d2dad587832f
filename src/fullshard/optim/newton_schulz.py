"""Newton-Schulz: makes the singular values of matrices nearly equal, with matrix products alone."""

from __future__ import annotations

import torch


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
    # One matrix alone is multiplied as such: batched kernels have fewer variants.
    is_alone = len(batch) == 1
    multiply, add_product = (torch.mm, torch.addmm) if is_alone else (torch.bmm, torch.baddbmm)
    if is_alone:
        old, new = old[0], new[0]
    for _ in range(num_steps):
        gram = multiply(old.mT, old) if is_tall else multiply(old, old.mT)
        polynomial = add_product(gram, gram, gram, beta=b, alpha=c)
        factors = (old, polynomial) if is_tall else (polynomial, old)
        add_product(old, *factors, beta=a, out=new)
        old, new = new, old

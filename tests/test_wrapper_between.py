"""What a program sees of a wrapper's original parameters between a forward and its backward, and
may do to them there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.testing import Rank, on_ranks
from tests.wrapped import OURS, TORCH, Package

BATCH = torch.arange(8.0).view(2, 4) / 8


class Net(nn.Module):
    """Its sizes are even, so that both packages cut parameters in the same places."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 8, bias=False)
        self.inner = nn.Linear(8, 8, bias=False)
        self.last = nn.Linear(8, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def wrapped(package: Package, strategy: str) -> Any:
    net, options = Net(), {"use_orig_params": True, "sharding_strategy": strategy}
    net.inner = package(net.inner, **options)
    return package(net, **options)


def grads(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


def read(param: Tensor) -> None:
    pass


def drop(param: Tensor) -> None:
    param.grad = None


def scale(param: Tensor) -> None:
    assert param.grad is not None
    param.grad.mul_(10)


def replace(param: Tensor) -> None:
    param.grad = torch.full_like(param, 7.0)


@pytest.mark.parametrize("change", [read, drop, scale, replace])
@on_ranks(2)
def test_gradients_may_be_read_and_changed_between_a_forward_and_its_backward(
    rank: Rank, change: Callable[[Tensor], None]
) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        seen = []
        for package in (TORCH, OURS):
            model = wrapped(package, strategy)
            model(BATCH).sum().backward()
            output = model(BATCH)
            between = grads(model)
            for param in model.parameters():
                if param.grad is not None:  # this rank has no part of some
                    change(param)
            output.sum().backward()
            seen.append([*between, *grads(model)])
        for theirs, ours in zip(*seen, strict=True):
            torch.testing.assert_close(ours, theirs)

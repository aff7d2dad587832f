"""What a program sees of a wrapper's original parameters between a forward and its backward, and
may do to them there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import MisuseError
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, Package

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


def assign_data(module: nn.Linear) -> None:
    module.weight.data = torch.ones_like(module.weight)


def assign_param(module: nn.Linear) -> None:
    module.weight = nn.Parameter(torch.ones_like(module.weight))


@on_ranks(2)
def test_a_parameter_replaced_between_a_forward_and_its_backward_is_refused(rank: Rank) -> None:
    for strategy, change, where in (
        ("SHARD_GRAD_OP", assign_data, "first"),
        ("SHARD_GRAD_OP", assign_data, "inner"),
        ("SHARD_GRAD_OP", assign_param, "first"),
        ("FULL_SHARD", assign_param, "first"),
        ("FULL_SHARD", assign_param, "inner"),
    ):
        for package in (TORCH, OURS):
            model = wrapped(package, strategy)
            output = model(BATCH)
            module = getattr(model.module, where)
            change(module.module if where == "inner" else module)

            def go_on(model: Any = model, output: Tensor = output) -> None:
                output.sum().backward()
                model(BATCH)  # torch notices some of them only here

            with pytest.raises((AssertionError, RuntimeError)) as error:
                go_on()
        assert isinstance(error.value, MisuseError)
        assert str(error.value).startswith("inner.weight: " if where == "inner" else "first.weight")
        if strategy == "SHARD_GRAD_OP":  # nothing of the change is left
            torch.testing.assert_close(model(BATCH), output)


@on_ranks(2)
def test_data_assigned_to_a_slice_between_a_forward_and_its_backward_is_used_next(
    rank: Rank,
) -> None:
    model, reference = wrapped(OURS, "FULL_SHARD"), Net()
    model(BATCH).sum().backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    output = model(BATCH)
    for module in (model.module.first, model.module.inner.module):
        assign_data(module)
    output.sum().backward()
    for found, grad in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(found, grad)
    for linear in (reference.first, reference.inner):
        assign_data(linear)
    torch.testing.assert_close(model(BATCH), reference(BATCH))

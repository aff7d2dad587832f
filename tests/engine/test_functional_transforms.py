"""Sharded models inside of torch.func's transforms, in their first forward or a later one."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, func, nn

from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import (
    APIS,
    OURS,
    TORCH,
    Lesson,
    assert_api_trains_alike,
    shard_parts,
    unit_sharder,
    unsynced,
)

X = torch.arange(8.0).view(2, 4) / 8

TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "grad": lambda model: func.grad(lambda x: model(x).sum())(X),
    "vjp": lambda model: func.vjp(model, X)[1](torch.ones(2, 2))[0],
    "jvp": lambda model: func.jvp(model, (X,), (torch.ones(2, 4),))[1],
    "jacrev": lambda model: func.jacrev(lambda x: model(x).sum(0))(X),
    "hessian": lambda model: func.hessian(lambda x: model(x).square().sum())(X),
    "vmap of grad": lambda model: func.vmap(func.grad(lambda x: model(x).square().sum()))(X),
    "functional_call": lambda model: func.functional_call(model, {}, (X,)),
}


def built() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_a_transform_may_contain_the_first_forward_or_a_later_one(rank: Rank, api: str) -> None:
    # torch compiles what jvp needs by its JIT.
    for kind in (DeprecationWarning, FutureWarning):
        warnings.simplefilter("ignore", kind)
    # torch's wrapper fails inside of transforms.
    packages = (OURS, TORCH) if api == "fully_shard" else (OURS,)
    for transform in TRANSFORMS.values():
        reference = built()
        expected = transform(reference)
        loss = reference(X).square().mean()
        loss.backward()
        for package in packages:
            model = shard_parts(unit_sharder(package, api), built(), "0", "2")
            for _ in range(2):
                torch.testing.assert_close(transform(model).detach(), expected.detach())
                found = model(X).square().mean()
                torch.testing.assert_close(found, loss)
                found.backward()
            if package is TORCH:
                continue  # it cannot freeze or thaw parameters inside of a transform
            frozen = next(model.parameters()).requires_grad_(False)
            torch.testing.assert_close(transform(model).detach(), expected.detach())
            frozen.requires_grad_()
            torch.testing.assert_close(transform(model).detach(), expected.detach())


def transformed_between(model: Any, batches: list[Tensor], scale: float) -> Tensor:
    """A transform between a micro-batch that is not reduced and one that is."""
    with unsynced(model):
        (scale * model(batches[0]).square().mean()).backward()
    found = func.grad(lambda x: model(x).square().sum())(batches[1])
    (scale * model(batches[1]).square().mean()).backward()
    return found


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_a_transform_may_follow_gradients_that_were_not_reduced(rank: Rank, api: str) -> None:
    lesson = Lesson(
        make_batch=lambda generator: torch.randn(2, 4, generator=generator),
        step=transformed_between,
        num_micro_batches=2,
    )
    assert_api_trains_alike(
        api,
        built,
        lambda shard_unit, model: shard_parts(shard_unit, model, "0", "2"),
        lesson,
        torch_too=False,
    )


@on_ranks(2)
def test_transforms_nest_around_units_that_stay_unsharded_after_backward(rank: Rank) -> None:
    def nested(model: Any) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return func.grad(lambda x: model(x).square().sum())(x).sum()

        return func.grad(inner)(X)

    for package in (TORCH, OURS):
        sharded = unit_sharder(package, "fully_shard", "SHARD_GRAD_OP")
        model = shard_parts(sharded, built(), "0", "2")
        model.set_reshard_after_backward(False)
        for _ in range(2):
            torch.testing.assert_close(nested(model), nested(built()))

"""The `grad_dtype` of parameters is followed as the installed torch's `fully_shard` follows it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard._torch import TORCH
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import full

BF16, FP32 = torch.bfloat16, torch.float32


class _WideGradients(torch.autograd.Function):
    """A scale whose gradient is computed in float32, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        return grad * scale, (grad.float() * x.float()).sum(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 7, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.tanh(self.first(x)))
        return _WideGradients.apply(x, self.scale)


def _set(model: nn.Module, dtypes: dict[str, torch.dtype | None]) -> None:
    params = dict(model.named_parameters())
    for name, dtype in dtypes.items():
        params[name].grad_dtype = dtype


def _shard(model: nn.Module, shard: Any, policy: Any) -> None:
    shard(model.first, mp_policy=policy)
    shard(model, mp_policy=policy)


Made = Callable[[Net, Any, Any], None]
"""Sets `grad_dtype`, shards with a function and a policy, in whatever order."""


def narrow_gradients(model: Net, shard: Any, policy: Any) -> None:
    _set(model, {"first.weight": BF16, "scale": BF16})
    _shard(model, shard, policy)


def wide_gradients(model: Net, shard: Any, policy: Any) -> None:
    model.to(BF16)
    _set(model, {"first.weight": FP32, "second.weight": FP32})
    _shard(model, shard, policy)


def any_gradients(model: Net, shard: Any, policy: Any) -> None:
    model.to(BF16)
    _set(model, {"first.bias": None, "second.weight": None, "scale": None})
    _shard(model, shard, policy)


def set_on_shards(model: Net, shard: Any, policy: Any) -> None:
    model.to(BF16)
    _shard(model, shard, policy)
    _set(model, {"first.weight": FP32, "scale": None})


def converted(model: Net, shard: Any, policy: Any) -> None:
    _set(model, {"first.weight": FP32, "second.weight": FP32})
    _shard(model, shard, policy)
    model.second.weight.grad = torch.ones_like(model.second.weight)
    model.to(BF16)
    assert model.second.weight.grad.dtype == FP32


def assigned(model: Net, shard: Any, policy: Any) -> None:
    model.to(BF16)
    _set(model, {"first.weight": FP32})
    _shard(model, shard, policy)
    state = {name: param.detach().clone() for name, param in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


MADE: dict[str, Made] = {"narrow": narrow_gradients, "wide": wide_gradients}
if TORCH >= (2, 15):  # before, what is set on originals is ignored, and shards do not have it
    MADE |= {"any": any_gradients, "on shards": set_on_shards}
    MADE |= {"converted": converted, "assigned": assigned}
POLICIES: dict[str, dict[str, Any]] = {
    "none": {},
    "computed in bf16": {"param_dtype": BF16},
    "reduced in fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("made", MADE)
@on_ranks(2)
def test_gradients_have_the_dtypes_and_values_of_torch(rank: Rank, made: str, policy: str) -> None:
    models = []
    for shard, policy_class in (
        (fully_shard, MixedPrecisionPolicy),
        (torch_fully_shard, TorchPolicy),
    ):
        torch.manual_seed(0)
        model = Net()
        MADE[made](model, shard, policy_class(**POLICIES[policy]))
        models.append(model)
    for step in range(2):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank.rank))
        for model in models:
            for micro in range(2):  # the first is accumulated unreduced
                model.set_requires_gradient_sync(micro == 1)
                model(x.to(next(model.parameters()).dtype)).float().square().sum().backward()
        ours, theirs = (dict(model.named_parameters()) for model in models)
        for name, expected in theirs.items():
            found = ours[name].grad
            assert found.dtype == expected.grad.dtype, (step, name)
            torch.testing.assert_close(
                full(found).float(), full(expected.grad).float(), rtol=2e-2, atol=2e-2
            )
        for model in models:
            model.zero_grad()

"""The kernels of the built-in transformer compute what it does without them."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fullshard_train.attention import attention_of
from fullshard_train.config import TrainConfig
from fullshard_train.models.elementwise import kernels_agree, rotated, swiglu
from fullshard_train.models.transformer import rotary_angles


def drawn(*shape: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    values = torch.randn(shape, generator=generator, device="cuda")
    return values.bfloat16().requires_grad_()


@pytest.mark.parametrize("width", [64, 96])
def test_the_kernels_of_the_transformer_find_values_and_gradients(width: int) -> None:
    assert kernels_agree(torch.device("cuda", 0))
    gate, up = drawn(3, 70, 301), drawn(3, 70, 301)
    x = drawn(2, 33, 5 * width)
    angles = rotary_angles(4, 33, width, 10_000.0, x.device)

    def heads(tensor: Tensor) -> Tensor:
        return tensor.unflatten(-1, (-1, width)).transpose(1, 2)

    def turned(tensor: Tensor) -> Tensor:
        first, second = heads(tensor).float().chunk(2, dim=-1)
        cos, sin = angles.cos(), angles.sin()
        both = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat(both, dim=-1).to(tensor.dtype)

    pairs = [
        (swiglu(gate, up), F.silu(gate) * up, (gate, up)),
        (rotated(heads(x), angles.cos(), angles.sin()), turned(x), (x,)),
    ]
    for found, expected, tensors in pairs:
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-3)
        weights = torch.randn_like(expected)
        torch.testing.assert_close(
            *(torch.autograd.grad(each, tensors, weights) for each in (found, expected)),
            rtol=2**-6,
            atol=2e-2,
        )


def test_attention_of_cudnn_is_that_of_flash_and_is_preferred_on_new_devices() -> None:
    device = torch.device("cuda", 0)
    config = TrainConfig()
    is_new = torch.cuda.get_device_capability(device)[0] >= 9
    assert isinstance(attention_of(device, config), nullcontext) is not is_new
    compiled = replace(config, sharding=replace(config.sharding, compile=True))
    assert isinstance(attention_of(device, compiled), nullcontext)

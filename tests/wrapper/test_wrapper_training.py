"""Where the wrapper trains, in which dtypes it computes, and when it gathers."""

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from tests.support.counted import CountedGather
from tests.support.wrapped import (
    OURS,
    TORCH,
    WIDTH,
    Lesson,
    Net,
    Package,
    assert_trains_alike,
    by_policy,
    flat,
)

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.mark.sampled(4)
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@pytest.mark.parametrize("shape", [(2, 2), (1, 4), (4, 1)], ids=str)
@on_ranks(4)
def test_a_hybrid_strategy_trains_on_a_mesh_or_a_pair_of_process_groups(
    rank: Rank, strategy: str, shape: tuple[int, int]
) -> None:
    mesh = rank.mesh(shape, ("replicate", "shard"))
    groups = (mesh.get_group("shard"), mesh.get_group("replicate"))
    for use_orig_params, place in (
        (False, {"process_group": groups}),
        (True, {"device_mesh": mesh}),
    ):
        options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params, **place}
        assert_trains_alike(
            Net,
            lambda package, model, o=options: by_policy(package, model, **o),
            # Torch's wrapper reduces over the shard axis only, of which (4, 1) has none.
            torch_shard=None if shape == (4, 1) else "same",
            cell=str(options),
        )


@on_ranks(4)
def test_a_hybrid_strategy_that_is_told_nothing_shards_inside_a_host(rank: Rank) -> None:
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    try:
        learner = assert_trains_alike(
            Net,
            lambda package, model: flat(package, model, sharding_strategy="HYBRID_SHARD"),
            torch_shard=None,  # torch asks CUDA how many ranks a host has
        )
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]
    (param,) = learner.model.parameters()
    num_elements = sum(value.numel() for value in learner.full_parameters().values())
    assert num_elements / 2 <= param.numel() < num_elements / 2 + 8


@on_ranks(2)
def test_a_process_group_or_a_mesh_of_one_axis_is_the_world_to_train_in(rank: Rank) -> None:
    mesh = rank.mesh()
    for place in (
        {"device_mesh": mesh, "sharding_strategy": "SHARD_GRAD_OP"},
        {"process_group": mesh.get_group(), "sharding_strategy": "NO_SHARD"},
    ):
        assert_trains_alike(Net, lambda package, model, p=place: by_policy(package, model, **p))


class Watched(nn.Module):
    """Notes the dtypes that it computes with: of its input, weight and buffer."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width_out, width_in) / width_in)
        self.register_buffer("shift", torch.ones(width_out))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.seen: list[tuple[torch.dtype, ...]] = []

    def forward(self, x: Tensor, *, gate: Tensor | None = None) -> Tensor:
        self.seen.append((x.dtype, self.weight.dtype, self.shift.dtype, self.count.dtype))
        x = x.to(self.weight.dtype) @ self.weight.t() + self.shift
        if gate is not None:
            self.seen.append((gate.dtype,))
            x = x * gate
        return x


class Watching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Watched(WIDTH, 5)
        self.second = Watched(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x)).float()
        return self.second(x, gate=torch.ones(3, dtype=torch.float64))


# Settings of the root, and of the wrappers inside it where they differ.
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    name: (settings, settings)
    for name, settings in {
        "default": {},
        "bf16": {"param_dtype": BF16},
        "fp16": {"param_dtype": FP16},
        "bf16_reduced_in_fp32": {"param_dtype": BF16, "reduce_dtype": FP32},
        "only_reduced_in_bf16": {"reduce_dtype": BF16},
        "only_buffers_bf16": {"buffer_dtype": BF16},
        "bf16_buffers_fp16": {"param_dtype": BF16, "buffer_dtype": FP16},
        "bf16_buffers_fp64": {"param_dtype": BF16, "buffer_dtype": torch.float64},
        "kept_low": {"param_dtype": BF16, "keep_low_precision_grads": True},
        "reduced_low_and_kept": {"reduce_dtype": BF16, "keep_low_precision_grads": True},
        "reduced_high_and_kept": {
            "param_dtype": BF16,
            "reduce_dtype": FP32,
            "keep_low_precision_grads": True,
        },
        "inputs_cast": {"param_dtype": BF16, "cast_forward_inputs": True},
        "no_inputs_cast": {"param_dtype": BF16, "cast_root_forward_inputs": False},
        "inputs_cast_but_the_roots": {
            "param_dtype": BF16,
            "cast_forward_inputs": True,
            "cast_root_forward_inputs": False,
        },
    }.items()
}
SETTINGS |= {
    "only_the_root_bf16": ({"param_dtype": BF16}, {}),
    "only_inside_bf16": ({}, {"param_dtype": BF16}),
    "only_inside_bf16_cast": ({}, {"param_dtype": BF16, "cast_forward_inputs": True}),
}


def dtypes_of_a_step(package: Package, settings: str, **options: Any) -> dict[str, Any]:
    """What the modules saw in one step of a model with these settings, and what is left."""
    torch.manual_seed(0)
    model, (outer, inner) = Watching(), SETTINGS[settings]
    watched = (model.first, model.second)
    model.first = package(model.first, mixed_precision=inner, **options)
    model.second = package(model.second, mixed_precision=inner, **options)
    wrapped = package(model, mixed_precision=outer, **options)
    output = wrapped(torch.randn(4, WIDTH))
    in_between = {name: buffer.dtype for name, buffer in wrapped.named_buffers()}
    output.float().square().mean().backward()
    return {
        "seen": [module.seen for module in watched],
        "output": output.dtype,
        "parameters": {param.dtype for param in wrapped.parameters()},
        "gradients": {p.grad.dtype for p in wrapped.parameters() if p.grad is not None},
        "buffers": in_between,
        "loss": round(output.float().square().mean().item(), 5),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("settings", SETTINGS)
@on_ranks(2)
def test_a_precision_computes_in_the_dtypes_that_it_does_in_torch(
    rank: Rank, settings: str
) -> None:
    for strategy, use_orig_params in (
        ("FULL_SHARD", False),
        ("FULL_SHARD", True),
        ("SHARD_GRAD_OP", True),
        ("NO_SHARD", False),
    ):
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        found = dtypes_of_a_step(OURS, settings, **options)
        assert found == dtypes_of_a_step(TORCH, settings, **options), options


@pytest.mark.parametrize("use_orig_params", [False, True])
@on_ranks(2)
def test_gradients_that_are_kept_low_are_added_up(rank: Rank, use_orig_params: bool) -> None:
    precision = {"param_dtype": BF16, "keep_low_precision_grads": True}

    def gradients(package: Package) -> list[Tensor]:
        torch.manual_seed(0)
        model = flat(package, Net(), mixed_precision=precision, use_orig_params=use_orig_params)
        for batch in Lesson(num_micro_batches=2).batches(0, rank.rank):
            model(batch).float().square().mean().backward()
        found = [param.grad for param in model.parameters() if param.grad is not None]
        assert {grad.dtype for grad in found} == {BF16}
        return [torch.linalg.vector_norm(grad.double()).square() for grad in found]

    found, expected = (torch.stack(gradients(package)).sum() for package in (OURS, TORCH))
    for norm in (found, expected):
        dist.all_reduce(norm)  # which elements a rank has is no promise
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-6)


# When gathers are issued.


class Mark(torch.autograd.Function):
    """Does nothing, and notes when backward comes by."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, log: list[str], name: str) -> Tensor:
        ctx.note = (log, name)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log, name = ctx.note
        log.append(name)
        return grad, None, None


class MarkedBlock(nn.Module):
    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.log, self.number = log, number

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(f"forward {self.number}")
        x = Mark.apply(x, self.log, f"done {self.number}")
        return Mark.apply(self.linear(x), self.log, f"backward {self.number}")


class MarkedNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.log: list[str] = []
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.blocks = nn.ModuleList(MarkedBlock(self.log, number) for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        for number, block in enumerate(self.blocks):
            x = Mark.apply(block(x), self.log, f"after {number}")
        return x


class NotedGather(CountedGather):
    def __init__(self, log: list[str], number: int) -> None:
        super().__init__()
        self.log, self.number = log, number

    def __call__(self, *args: Any, **kwargs: Any) -> dist.Work | None:
        self.log.append(f"gather {self.number}")
        return super().__call__(*args, **kwargs)


def order_of_a_step(**options: Any) -> str:
    net = MarkedNet()
    model = OURS(net, auto_wrap_policy={MarkedBlock}, **options)
    for number, block in enumerate(net.blocks):
        hooks = hooks_of(block)
        assert hooks is not None
        hooks.units[0].comm.customize(all_gather=NotedGather(net.log, number))
    for _ in range(2):  # the second step follows what the first recorded
        net.log.clear()
        model(torch.randn(2, WIDTH)).sum().backward()
    return ", ".join(net.log)


FORWARDS = {
    False: "gather 0, forward 0, gather 1, forward 1, gather 2, forward 2",
    True: "gather 0, gather 1, forward 0, gather 2, forward 1, forward 2",
}
# What forward gathered last is still there; the root ends backward, and gathers nothing more.
BACKWARDS = {
    "BACKWARD_PRE": "after 2, gather 1, backward 2, done 2, after 1, gather 0, "
    "backward 1, done 1, after 0, backward 0, done 0",
    "BACKWARD_POST": "after 2, backward 2, done 2, gather 1, after 1, backward 1, "
    "done 1, gather 0, after 0, backward 0, done 0",
    None: "after 2, backward 2, done 2, after 1, gather 1, backward 1, done 1, after 0, "
    "gather 0, backward 0, done 0",
}


@on_ranks(2)
def test_gathers_are_issued_when_the_prefetch_options_say(rank: Rank) -> None:
    for forward_prefetch, forward in FORWARDS.items():
        for backward_prefetch, backward in BACKWARDS.items():
            options = {"forward_prefetch": forward_prefetch, "backward_prefetch": backward_prefetch}
            assert order_of_a_step(**options) == f"{forward}, {backward}", options
            kept = order_of_a_step(sharding_strategy="SHARD_GRAD_OP", **options)
            assert kept.startswith(forward), options
            assert "gather" not in kept.removeprefix(forward), options
            assert "gather" not in order_of_a_step(sharding_strategy="NO_SHARD", **options), options

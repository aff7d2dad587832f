"""Small contracts of torch's two APIs, each held beside torch's own: ours does the same.

Those of optimizer state dicts are in `test_torch_semantics_optim_state.py`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard
from torch.optim import AdamW

from fullshard import fully_shard
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH, Package

PACKAGES = (TORCH, OURS)
BOTH = (False, True)
WIDTH = 5


def batch(rank: Rank) -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(rank.rank))


def linear(api: Package, **options: Any) -> Any:
    torch.manual_seed(0)
    return api(nn.Linear(WIDTH, WIDTH), **options)


# All-gathers of a parameter's own


def rounded_all_gather(called: list[str]) -> tuple[Any, Any]:
    """A pair of methods that gather a tensor in bf16."""

    def pre(self: Tensor, mesh: Any) -> Any:
        called.append("pre")
        return (self.to(torch.bfloat16),), None

    @torch.no_grad()
    def post(self: Tensor, arrived: Any, metadata: Any, dtype: Any, *, out: Any = None) -> Any:
        called.append("post")
        (tensor,) = arrived
        if out is not None:
            out.data.copy_(tensor)
            return None
        full = tensor.to(dtype)
        return full, (tensor, full)

    return pre, post


@on_ranks(2)
def test_an_all_gather_set_on_a_local_tensor_after_sharding_is_called(rank: Rank) -> None:
    outputs = []
    for shard in (torch_fully_shard, fully_shard):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, 6))
        shard(model[0], mesh=rank.mesh())
        shard(model, mesh=rank.mesh())
        model.to_empty(device="cpu")
        torch.manual_seed(rank.rank)
        for param in model.parameters():
            nn.init.normal_(param.to_local())
        called: list[str] = []
        pre, post = rounded_all_gather(called)
        for param in (model[0].weight, model[1].bias):
            local = param._local_tensor
            local.fsdp_pre_all_gather = pre.__get__(local)
            local.fsdp_post_all_gather = post.__get__(local)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            output = model(batch(rank))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(output)
        assert min(called.count("pre"), called.count("post")) >= 4
    torch.testing.assert_close(outputs[1], outputs[0])


# What is ignored


class Skipped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)


def with_skipped(number: int) -> nn.Sequential:
    torch.manual_seed(0)
    last = nn.Linear(WIDTH, WIDTH)
    return nn.Sequential(*(Skipped() for _ in range(number)), last)


def skipped(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Skipped)]


@on_ranks(2)
def test_one_list_of_what_is_ignored_serves_several_wrappers(rank: Rank) -> None:
    for api in PACKAGES:
        for key in ("ignored_modules", "ignored_states"):
            models = [with_skipped(1), with_skipped(2)]
            given: list[Any] = [each for model in models for each in skipped(model)]
            if key == "ignored_states":
                given = [param for each in given for param in each.parameters()]
            for model in models:
                shapes = [param.shape for param in model[0].parameters()]
                wrapper = api(model, **{key: given})
                wrapper(batch(rank)).sum().backward()
                assert [param.shape for param in model[0].parameters()] == shapes
                assert any("_flat_param" in name for name, _ in wrapper.named_parameters())


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(2)
def test_ranks_may_ignore_different_numbers_of_modules(rank: Rank, use_orig_params: bool) -> None:
    outputs = []
    for api in PACKAGES:
        model = nn.Sequential(with_skipped(1 + rank.rank), with_skipped(0))
        options: dict[str, Any] = {"use_orig_params": use_orig_params}
        model[0] = api(model[0], ignored_modules=skipped(model[0]), **options)
        model = api(model, ignored_modules=skipped(model), **options)
        optimizer = AdamW(model.parameters(), lr=0.01)
        for _ in range(3):
            output = model(batch(rank))
            output.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        outputs.append(output)
    torch.testing.assert_close(outputs[1], outputs[0])


@on_ranks(2)
def test_ignoring_the_wrapped_module_itself_warns(rank: Rank) -> None:
    for build in (TORCH.FSDP, OURS.FSDP):
        model = nn.Linear(WIDTH, WIDTH)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapper = build(model, ignored_modules=[model], device_id=torch.device("cpu"))
        assert any("itself" in str(warning.message) for warning in caught)
        wrapper(batch(rank))
        assert model.weight.shape == (WIDTH, WIDTH)


# Errors


@on_ranks(2)
def test_errors_are_of_the_types_that_torch_raises(rank: Rank) -> None:
    for shard in (torch_fully_shard, fully_shard):
        model = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(AssertionError):
            shard(model, mesh=rank.mesh(), shard_placement_fn=lambda _: Shard(2))
    for api in PACKAGES:
        model = nn.Linear(WIDTH, WIDTH)
        with pytest.raises(ValueError, match=r"ignored_modules.*Parameter"):
            api(model, ignored_modules=[model.weight])
        wrapper = linear(api)
        with (
            api.FSDP.summon_full_params(wrapper),
            pytest.raises(ValueError, match=r"SUMMON|summon"),
        ):
            wrapper.apply(lambda _: None)
        wrapper(batch(rank)).sum().backward()


# Summoning


@on_ranks(2)
def test_summoning_in_a_hook_of_backward_on_the_output_is_refused(rank: Rank) -> None:
    for api in PACKAGES:
        for use_orig_params in BOTH:
            model = linear(api, use_orig_params=use_orig_params)

            def summon(grad: Tensor, api: Package = api, model: nn.Module = model) -> None:
                with api.FSDP.summon_full_params(model):
                    pass

            output = model(batch(rank))
            output.register_hook(summon)
            with pytest.raises(AssertionError, match="backward"):
                output.sum().backward()
    model = linear(OURS)  # the last one trains on
    model(batch(rank)).sum().backward()
    with OURS.FSDP.summon_full_params(model):
        assert model.weight.shape == (WIDTH, WIDTH)


class Summoning(nn.Module):
    """Calls what it is given in its forward, and in the backward of its output."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.call: Callable[[], None] = lambda: None
        self.in_backward = False

    def forward(self, x: Tensor) -> Tensor:
        if not self.in_backward:
            self.call()
        result = self.linear(x)
        if self.in_backward:
            x.register_hook(lambda _: self.call())
        return result


@on_ranks(2)
def test_summoning_while_a_module_computes_names_what_was_called(rank: Rank) -> None:
    for in_backward in BOTH:
        for api in PACKAGES:
            inner = Summoning()
            model = api(inner)

            def summon(api: Package = api, model: nn.Module = model) -> None:
                with api.FSDP.summon_full_params(model):
                    pass

            inner.call, inner.in_backward = summon, in_backward
            words = "summon_full_params" if api is OURS else "forward/backward"
            with pytest.raises(AssertionError, match=words):
                model(batch(rank).requires_grad_()).sum().backward()


@on_ranks(2)
def test_values_of_another_shape_are_refused_in_words(rank: Rank) -> None:
    def summon(model: Any) -> None:
        with type(model).summon_full_params(model):
            pass

    for api in PACKAGES:
        for use in (summon, lambda model: model(batch(rank))):
            model = linear(api, use_orig_params=True)
            model(batch(rank)).sum().backward()
            model.module.weight = nn.Parameter(torch.ones(model.weight.numel() + 1))
            with pytest.raises(RuntimeError, match=r"parameter.*shape"):
                use(model)
    flat = linear(OURS)
    flat(batch(rank)).sum().backward()
    flat._flat_param.data = torch.ones(flat._flat_param.numel() + 1)
    with pytest.raises(RuntimeError, match=r"_flat_param.*shape"):
        flat(batch(rank))


# Accumulation


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_gradients_that_no_sync_keeps_are_shown_in_low_precision(rank: Rank, strategy: str) -> None:
    options = {
        "sharding_strategy": strategy,
        "mixed_precision": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    }

    def dtypes_after(model: Any, *, is_synced: bool) -> set[torch.dtype]:
        with nullcontext() if is_synced else model.no_sync():
            model(batch(rank)).sum().backward()
        return {param.grad.dtype for param in model.parameters() if param.grad is not None}

    for use_orig_params in BOTH:
        for api in PACKAGES:
            model = linear(api, use_orig_params=use_orig_params, **options)
            for _ in range(2):
                found = [dtypes_after(model, is_synced=each) for each in (False, False, True)]
                assert found == [{torch.bfloat16}, {torch.bfloat16}, {torch.float32}]
                model.zero_grad()
        # Gradients that were kept and then zeroed in place leave nothing behind.
        grads = []
        for is_kept in BOTH:
            model = linear(OURS, use_orig_params=use_orig_params, **options)
            if is_kept:
                dtypes_after(model, is_synced=False)
                model.zero_grad(set_to_none=False)
            assert dtypes_after(model, is_synced=True) == {torch.float32}
            grads.append([param.grad for param in model.parameters()])
        torch.testing.assert_close(grads[1], grads[0])

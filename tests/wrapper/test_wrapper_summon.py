"""`summon_full_params`: what is shown, what is kept of it, and what is put back."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim import SGD

from fullshard import LifecycleError, StateDictType
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import OURS, TORCH

WIDTH = 5


class Net(nn.Module):
    """Uneven sizes, a tie, and a part that wrappers leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.apart = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.tied(self.apart(self.inner(x) * self.gain)))


def built(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def wrapped(api: Any, seed: int = 0, **options: Any) -> Any:
    model = built(seed)
    model.inner = api(model.inner, **options)
    return api(model, ignored_modules=[model.apart], **options)


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def backward(model: nn.Module, rank: Rank) -> None:
    model(batch(rank.rank)).square().mean().backward()


def step(model: nn.Module, rank: Rank) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    backward(model, rank)
    optimizer.step()
    optimizer.zero_grad()


def shown(model: nn.Module) -> dict[str, Any]:
    """Names, kinds, values and gradients of what a model shows now."""
    return {
        name: (
            type(param),
            param.detach().clone(),
            param.requires_grad,
            None if param.grad is None else param.grad.clone(),
        )
        for name, param in model.named_parameters()
    }


def assert_same(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(actual) == list(expected)
    for name, (kind, value, requires_grad, grad) in expected.items():
        found_kind, found, found_requires_grad, found_grad = actual[name]
        assert found_kind is kind, name
        assert found_requires_grad == requires_grad, name
        torch.testing.assert_close(found, value, msg=lambda m, name=name: f"{name}: {m}")
        assert (found_grad is None) == (grad is None), name
        if grad is not None:
            torch.testing.assert_close(found_grad, grad)


def outside(model: nn.Module) -> list[tuple[str, nn.Parameter, torch.Size, int]]:
    """What a model shows outside: the very objects, and where they look."""
    return [(n, p, p.shape, p.data_ptr()) for n, p in model.named_parameters()]


@contextmanager
def summoned(api: Any, model: nn.Module, **options: Any) -> Iterator[None]:
    with api.FSDP.summon_full_params(model, **options):
        yield


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def full_grads(api: Any, model: nn.Module) -> list[torch.Tensor | None]:
    with summoned(api, model, with_grads=True):
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@on_ranks(4)
def test_what_is_shown_is_what_torchs_class_shows(rank: Rank) -> None:
    for use_orig_params in (False, True):
        for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"):
            options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
            ours, theirs = wrapped(OURS, **options), wrapped(TORCH, **options)
            for _ in range(2):
                for how in ({}, {"recurse": False}, {"writeback": False}):
                    before = outside(ours)
                    # A flat parameter of an inner wrapper is padded in another way.
                    if how == {"recurse": False} and not use_orig_params:
                        with summoned(OURS, ours, **how):
                            names = list(shown(ours))
                        with summoned(TORCH, theirs, **how):
                            assert names == list(shown(theirs))
                    elif how != {"recurse": False}:
                        with summoned(OURS, ours, **how), summoned(TORCH, theirs, **how):
                            assert_same(shown(ours), shown(theirs))
                    assert outside(ours) == before
                step(ours, rank)
                step(theirs, rank)


@on_ranks(2)
def test_inside_the_modules_have_the_parameters_of_the_unsharded_model(rank: Rank) -> None:
    expected = built()
    for use_orig_params in (False, True):
        model = wrapped(OURS, use_orig_params=use_orig_params)
        originals = dict(model.named_parameters())
        with summoned(OURS, model):
            assert [n for n, _ in model.named_parameters()] == [
                n for n, _ in expected.named_parameters()
            ]
            for name, param in expected.named_parameters():
                found = model.module.get_parameter(
                    name.replace("inner.", "inner._fsdp_wrapped_module.")
                )
                assert torch.equal(found, param)
            assert model.module.tied.weight is model.module.last.weight
            if use_orig_params:
                assert set(model.parameters()) == set(originals.values())


@on_ranks(2)
def test_each_rank_keeps_what_was_written_to_its_slice(rank: Rank) -> None:
    for use_orig_params in (False, True):
        for how in ("in place", "as data", "as another parameter"):
            model = wrapped(OURS, use_orig_params=use_orig_params)
            with summoned(OURS, model), torch.no_grad():
                layer = model.module.inner[1]
                if how == "in place":
                    layer.weight.fill_(2.0)
                elif how == "as data":
                    layer.weight.data = torch.full((WIDTH, WIDTH), 2.0)
                else:
                    layer.weight = nn.Parameter(torch.full((WIDTH, WIDTH), 2.0))
                model.module.last.weight.mul_(3)
            found = values(model)
            assert torch.equal(found["inner.1.weight"], torch.full((WIDTH, WIDTH), 2.0)), how
            assert torch.equal(found["tied.weight"], built().tied.weight * 3)
            reference = built()
            with torch.no_grad():
                reference.inner[1].weight.fill_(2.0)
                reference.tied.weight.mul_(3)
                torch.testing.assert_close(model(batch(0)), reference(batch(0)))


@on_ranks(2)
def test_writes_of_one_rank_stay_in_its_slice_and_without_writeback_as_in_torch(
    rank: Rank,
) -> None:
    def halve(module: nn.Module) -> None:
        with torch.no_grad():
            for param in module.parameters(recurse=False):
                param.mul_(0.5)

    for use_orig_params in (False, True):
        model = OURS(nn.Linear(8, 8, bias=False), use_orig_params=use_orig_params)
        with summoned(OURS, model), torch.no_grad():
            model.module.weight.fill_(rank.rank)
        expected = torch.arange(2.0).repeat_interleave(4)[:, None].expand(8, 8)
        assert torch.equal(values(model)["weight"], expected)
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
            ours, theirs = wrapped(OURS, **options), wrapped(TORCH, **options)
            for api, each in ((OURS, ours), (TORCH, theirs)):
                with summoned(api, each, writeback=False), torch.no_grad():
                    for param in each.parameters():
                        param.add_(1)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    assert each.apply(halve) is each  # which sees full parameters
            with summoned(OURS, ours), summoned(TORCH, theirs):
                assert_same(shown(ours), shown(theirs))


@on_ranks(2)
def test_changes_reach_a_unit_that_is_kept_whole(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = wrapped(OURS, use_orig_params=use_orig_params, sharding_strategy="SHARD_GRAD_OP")
        output = model(batch(0))
        with summoned(OURS, model), torch.no_grad():
            model.module.gain.zero_()
            model.module.apart.bias.zero_()
        with torch.no_grad():
            assert torch.equal(model(batch(0)), torch.zeros_like(output))


@on_ranks(4)
def test_gradients_are_shown_and_kept_with_the_parameters(rank: Rank) -> None:
    ours = wrapped(OURS, use_orig_params=True)
    theirs = wrapped(TORCH, use_orig_params=True)
    for model in (ours, theirs):
        backward(model, rank)
    with summoned(OURS, ours, with_grads=True), summoned(TORCH, theirs, with_grads=True):
        assert_same(shown(ours), shown(theirs))
        for model in (ours, theirs):
            for param in model.parameters():
                assert param.grad is not None
                param.grad.mul_(2)
    SGD(ours.parameters(), lr=0.1).step()
    SGD(theirs.parameters(), lr=0.1).step()
    with summoned(OURS, ours), summoned(TORCH, theirs):
        mine = {name: entry[1] for name, entry in shown(ours).items()}
        for name, entry in shown(theirs).items():
            torch.testing.assert_close(mine[name], entry[1])


@on_ranks(2)
def test_gradients_may_be_dropped_or_made_inside(rank: Rank) -> None:
    model = wrapped(OURS, use_orig_params=True)
    backward(model, rank)
    with summoned(OURS, model, with_grads=True):
        model.module.gain.grad = None
        model.module.tied.weight.grad = torch.ones(WIDTH, WIDTH)
    assert model.module.gain.grad is None
    tied = model.module.tied.weight
    assert torch.equal(tied.grad, torch.ones(tied.shape))
    with summoned(OURS, model, with_grads=True):
        assert model.module.gain.grad is None
        model.module.gain.grad = torch.ones(1)
    gain = model.module.gain
    assert (gain.grad is None) == (gain.numel() == 0)
    fresh = wrapped(OURS, use_orig_params=True)
    with summoned(OURS, fresh, with_grads=True):
        assert all(param.grad is None for param in fresh.parameters())


@on_ranks(2)
def test_rank0_only_shows_nothing_to_the_others(rank: Rank) -> None:
    for use_orig_params in (False, True):
        ours = wrapped(OURS, use_orig_params=use_orig_params)
        theirs = wrapped(TORCH, use_orig_params=use_orig_params)
        options = {"rank0_only": True, "writeback": False}
        before = outside(ours)
        with summoned(OURS, ours, **options), summoned(TORCH, theirs, **options):
            if rank.rank == 0:
                assert_same(shown(ours), shown(theirs))
            else:
                assert list(shown(ours)) == list(shown(theirs))
                assert [p.shape for p in ours.parameters()] == [shape for _, _, shape, _ in before]
        assert outside(ours) == before
        with summoned(OURS, ours, offload_to_cpu=True, **options):
            if rank.rank == 0:
                assert torch.equal(ours.module.tied.weight, built().tied.weight)
        assert outside(ours) == before


@on_ranks(2)
def test_what_torchs_class_refuses_is_refused(rank: Rank) -> None:
    refused: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({}, {"rank0_only": True}),
        ({}, {"with_grads": True}),
        ({"use_orig_params": True}, {"with_grads": True, "offload_to_cpu": True}),
        ({"sharding_strategy": "NO_SHARD"}, {"offload_to_cpu": True}),
    ]
    for options, how in refused:
        for api in (OURS, TORCH):
            model = wrapped(api, **options)
            with pytest.raises(NotImplementedError), summoned(api, model, **how):
                pass
    model = wrapped(OURS)
    before = outside(model)
    with (
        pytest.warns(UserWarning, match="rank0_only"),
        summoned(OURS, model, offload_to_cpu=True),
    ):
        assert model.module.gain.device.type == "cpu"
    assert outside(model) == before


@on_ranks(2)
def test_a_second_summons_inside_the_first_is_refused(rank: Rank) -> None:
    for use_orig_params in (False, True):
        for api in (OURS, TORCH):
            model = wrapped(api, use_orig_params=use_orig_params)
            inner = model.module.inner
            for summons in (model, inner):
                with (
                    summoned(api, model),
                    pytest.raises(AssertionError),
                    summoned(api, summons),
                ):
                    pass
            with summoned(api, model, recurse=False), summoned(api, inner):
                assert model.module.tied.weight.shape == (WIDTH, WIDTH)
                assert inner.module[1].weight.shape == (WIDTH, WIDTH)


@on_ranks(2)
def test_an_error_inside_leaves_everything_as_it_was(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = wrapped(OURS, use_orig_params=use_orig_params)
        before = outside(model)

        def fail(model: Any = model) -> None:
            with summoned(OURS, model), torch.no_grad():
                model.module.gain.fill_(4)
                raise ZeroDivisionError

        with pytest.raises(ZeroDivisionError):
            fail()
        assert outside(model) == before
        assert values(model)["gain"].item() == 4
        with pytest.raises(ValueError, match=r"tied\.weight"), summoned(OURS, model):
            model.module.tied.weight.data = torch.ones(WIDTH + 1, WIDTH)
        assert outside(model) == before
        assert torch.equal(values(model)["tied.weight"], built().tied.weight)
        step(model, rank)


@on_ranks(2)
def test_flat_params_are_not_trained_inside_and_a_summons_does_not_begin_in_forward(
    rank: Rank,
) -> None:
    for use_orig_params in (False, True):
        model = wrapped(OURS, use_orig_params=use_orig_params)
        how = {"with_grads": use_orig_params}  # nor is what shows its gradients
        loss = model(batch(rank.rank)).sum()
        with summoned(OURS, model, **how):
            with pytest.raises(LifecycleError, match="summon_full_params"):
                loss.backward()
            loss = model(batch(rank.rank)).sum()
        with pytest.raises(LifecycleError, match="summon_full_params"):
            loss.backward()
        failures: list[Exception] = []

        def begin(*_: Any, model: Any = model, failures: list[Exception] = failures) -> None:
            try:
                with summoned(OURS, model):
                    pass
            except AssertionError as error:
                failures.append(error)

        handle = model.module.apart.register_forward_hook(begin)
        model(batch(rank.rank))
        handle.remove()
        assert len(failures) == 1
        reference = built()
        torch.testing.assert_close(model(batch(0)), reference(batch(0)))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_a_forward_inside_computes_with_what_was_written_there(rank: Rank, strategy: str) -> None:
    x = batch(rank.rank)
    for use_orig_params, recurse, is_first in itertools.product((False, True), repeat=3):
        reference = built()
        options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
        model = wrapped(OURS, **options)
        if not is_first:
            model(x).sum().backward()
            model.zero_grad()
        for called in (model, model.module):
            with torch.no_grad(), summoned(OURS, model, recurse=recurse):
                for net in (model.module, reference):
                    net.gain.add_(1.0)
                torch.testing.assert_close(called(x), reference(x))
            torch.testing.assert_close(model(x), reference(x))
        with torch.no_grad(), summoned(OURS, model, recurse=recurse, writeback=False):
            model.module.gain.add_(1.0)
            model(x)
        step(model, rank)  # what it gathers is what it kept
        if use_orig_params:  # torch's gathers flat parameters only for its module
            theirs = wrapped(TORCH, **options)
            with torch.no_grad(), summoned(TORCH, theirs, recurse=recurse, writeback=False):
                torch.testing.assert_close(theirs(x), built()(x))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@on_ranks(2)
def test_original_parameters_may_be_trained_inside_as_with_torch(rank: Rank, strategy: str) -> None:
    x, options = batch(rank.rank), {"use_orig_params": True, "sharding_strategy": strategy}
    for recurse, is_inside in itertools.product((False, True), repeat=2):
        trained = []
        for api in (TORCH, OURS):
            model = wrapped(api, **options)
            model(x).square().sum().backward()
            with summoned(api, model, recurse=recurse, writeback=False):
                loss = model(x).square().sum()
                if is_inside:
                    loss.backward()
            if not is_inside:
                loss.backward()
            trained.append((loss, full_grads(api, model)))
        torch.testing.assert_close(trained[1], trained[0])
        reference = built()
        with summoned(OURS, model, recurse=recurse), torch.no_grad():
            for net in (model.module, reference):
                net.gain.add_(1.0)
            with torch.enable_grad():
                torch.testing.assert_close(model(x), reference(x))
            assert model.module.gain.shape == reference.gain.shape  # it is shown again
        torch.testing.assert_close(values(model)["gain"], reference.gain.detach())


@on_ranks(2)
def test_state_dicts_inside_hold_what_was_written(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = wrapped(OURS, use_orig_params=use_orig_params)
        expected = built().state_dict()
        with summoned(OURS, model), torch.no_grad():
            model.module.gain.fill_(7)
            state = model.state_dict()
            assert list(state) == list(expected)
            assert state["gain"].item() == 7
            assert torch.equal(state["inner.0.weight"], expected["inner.0.weight"])
            with OURS.FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
                sharded = model.state_dict()
            model.module.gain.fill_(8)
            assert state["gain"].item() == 7
        assert values(model)["gain"].item() == 8
        model.load_state_dict(sharded)
        assert values(model)["gain"].item() == 7
        other = built(1).state_dict()
        with summoned(OURS, model):
            result = model.load_state_dict(other)
            assert not result.missing_keys
            assert torch.equal(model.module.tied.weight, other["tied.weight"])
        for name, value in values(model).items():
            assert torch.equal(value, other[name]), name


@on_ranks(2)
def test_a_module_around_wrappers_is_summoned_and_others_are_left_alone(rank: Rank) -> None:
    outer = nn.ModuleDict({"a": wrapped(OURS), "b": wrapped(OURS, use_orig_params=True)})
    plain = nn.Linear(2, 2)
    with summoned(OURS, outer), summoned(OURS, plain):
        assert outer["a"].module.tied.weight.shape == (WIDTH, WIDTH)
        assert outer["b"].module.tied.weight.shape == (WIDTH, WIDTH)
    before = outside(outer)
    with summoned(OURS, outer, recurse=False):
        assert outside(outer) == before


@on_ranks(4)
def test_in_mixed_precision_on_a_hybrid_mesh_the_kept_dtype_is_shown(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    for use_orig_params in (False, True):
        model = built()
        model = OURS(
            model,
            sharding_strategy="HYBRID_SHARD",
            device_mesh=mesh,
            use_orig_params=use_orig_params,
            mixed_precision={"param_dtype": torch.bfloat16, "keep_low_precision_grads": True},
        )
        backward(model, rank)
        how = {"with_grads": True} if use_orig_params else {}
        with summoned(OURS, model, **how):
            for name, param in built().named_parameters():
                found = model.module.get_parameter(name)
                assert torch.equal(found, param), name
                assert (found.grad is not None) == use_orig_params, name
                if found.grad is not None:
                    assert found.grad.shape == param.shape
                    assert found.grad.dtype == torch.bfloat16


@on_ranks(2)
def test_summoned_names_keep_what_other_wrappers_add(rank: Rank) -> None:
    names = []
    for api in (OURS, TORCH):
        model = wrapped(api)
        model.module.inner.module[1] = checkpoint_wrapper(model.module.inner.module[1])
        with api.FSDP.summon_full_params(model):
            names.append([name for name, _ in model.named_parameters()])
    assert names[0] == names[1]
    assert "inner.1._checkpoint_wrapped_module.weight" in names[0]

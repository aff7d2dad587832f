"""Steps by runs: parameters and state are those of the same optimizer without `by_unit`."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    StateDictType,
    by_unit,
    fully_shard,
    state,
)
from fullshard.errors import ConfigError
from fullshard.optim.by_unit import is_exact
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy

FORMS = ["rows", "slices", "flat"]
STEPS = "_fullshard_by_unit"  # the attribute of an optimizer that is stepped by unit
Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: SGD(p, lr=0.1, weight_decay=0.1),
    "sgd_nesterov": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd_damped": lambda p: SGD(p, lr=0.1, momentum=0.9, dampening=0.1, foreach=True),
    "sgd_fused": lambda p: SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam_amsgrad": lambda p: optim.Adam(p, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda p: AdamW(p, lr=0.01),
    "adamw_foreach": lambda p: AdamW(p, lr=0.01, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, fused=True, amsgrad=True),
    "adamw_tensor_lr": lambda p: AdamW(p, lr=torch.tensor(0.01), fused=True),
    "adamax": lambda p: optim.Adamax(p, lr=0.01),
    "nadam": lambda p: optim.NAdam(p, lr=0.01),
    "radam": lambda p: optim.RAdam(p, lr=0.01),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "adagrad_fused": lambda p: optim.Adagrad(p, lr=0.05, fused=True),
    "adadelta": lambda p: optim.Adadelta(p, lr=0.5),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "asgd": lambda p: optim.ASGD(p, lr=0.01, t0=2),
    "rprop": lambda p: optim.Rprop(p, lr=0.01),
}


class Block(nn.Module):
    """No size is even, one parameter has fewer rows than there are ranks, one has no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 7)
        self.gate = nn.Linear(7, 1)
        self.spare = nn.Linear(3, 5, bias=False)
        self.down = nn.Linear(7, 5, bias=False)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: Tensor, use_spare: bool = False) -> Tensor:
        h = torch.tanh(self.up(x))
        x = x + self.gain * self.down(h * torch.sigmoid(self.gate(h)))
        return x + self.spare(x[..., :3]) if use_spare else x


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block()])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor, use_spare: bool = False) -> Tensor:
        for block in self.blocks:
            x = block(x, use_spare)
        return self.head(x)


def sharded(rank: Rank, form: str, build: Callable[[], nn.Module] = Net, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build()
    if form == "rows":
        for block in model.blocks:
            fully_shard(block, mesh=rank.mesh(), **options)
        return fully_shard(model, mesh=rank.mesh(), **options)
    return FullyShardedDataParallel(
        model,
        device_mesh=rank.mesh(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=form == "slices",
        **options,
    )


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups that decay and that do not, by name; without names, every second parameter."""
    params = list(model.named_parameters())
    is_flat = any("_flat_param" in name for name, _ in params)
    chosen = [n % 2 == 0 if is_flat else "weight" in name for n, (name, _) in enumerate(params)]
    return [
        {"params": [p for (_, p), is_one in zip(params, chosen, strict=True) if is_one]},
        {
            "params": [p for (_, p), is_one in zip(params, chosen, strict=True) if not is_one],
            "weight_decay": 0.0,
        },
    ]


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))


class Twins:
    """Two equal models, one with a plain optimizer and one with it by unit."""

    def __init__(
        self,
        rank: Rank,
        form: str,
        make: Make,
        of: Callable[[nn.Module], Any] = groups,
        **options: Any,
    ) -> None:
        self.rank = rank
        self.models = [sharded(rank, form, **options) for _ in range(2)]
        self.plain = make(of(self.models[0]))
        self.by_unit = by_unit(make(of(self.models[1])))
        self.check = check_for(self.plain)

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.plain, self.by_unit]

    def backward(self, step: int, *args: Any) -> None:
        for model in self.models:
            model(batch(step, self.rank.rank), *args).float().square().mean().backward()

    def step(self, step: int, *args: Any) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        self.backward(step, *args)
        for optimizer in self.optimizers:
            optimizer.step()
        self.assert_same()

    def assert_same(self) -> None:
        pairs = zip(self.models[0].parameters(), self.models[1].parameters(), strict=True)
        for expected, found in pairs:
            self.check(local(found), local(expected))
        assert_same_states(self.by_unit, self.plain, self.check)


def local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


Check = Callable[[Tensor, Tensor], None]


def same(found: Tensor, expected: Tensor) -> None:
    assert torch.equal(found, expected)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected)


def check_for(optimizer: Optimizer) -> Check:
    """torch's fused kernels on a CPU may round otherwise at the end of a tensor than inside."""
    return close if optimizer.defaults.get("fused") else same


def assert_same_states(found: Optimizer, expected: Optimizer, check: Check = same) -> None:
    assert len(found.state) == len(expected.state)
    pairs = zip(params_of(found), params_of(expected), strict=True)
    for param, other in pairs:
        assert (param in found.state) == (other in expected.state)
        if other not in expected.state:
            continue
        own, its = found.state[param], expected.state[other]
        assert own.keys() == its.keys()
        for name, value in its.items():
            assert type(own[name]) is type(value), name
            if isinstance(value, DTensor):
                assert own[name].placements == value.placements, name
                assert own[name].shape == value.shape, name
            if isinstance(value, Tensor):
                check(local(own[name]), local(value))
            else:
                assert own[name] == value, name


def params_of(optimizer: Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


# Alike

# Optimizers that torch cannot step on `DTensor`s: no fused kernel, or no way to write to elements.
NOT_ON_DTENSORS = ("sgd_fused", "adagrad_fused", "rprop")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_steps_are_those_of_the_optimizer(rank: Rank, form: str) -> None:
    for kind, make in OPTIMIZERS.items():
        if form == "rows" and kind in NOT_ON_DTENSORS:
            continue
        if form == "flat" and kind not in ("sgd_nesterov", "adamw_fused", "adagrad"):
            continue
        twins = Twins(rank, form, make)
        # Parameters get their first gradient late, then none again, and so count other steps.
        for step, use_spare in enumerate([False, False, True, True, False, True]):
            twins.step(step, use_spare)


@on_ranks(2)
def test_what_torch_cannot_step_on_dtensors_steps_as_on_their_shards(rank: Rank) -> None:
    for kind in NOT_ON_DTENSORS:
        model = sharded(rank, "rows")
        shards = [nn.Parameter(local(param).clone()) for param in model.parameters()]
        optimizer = by_unit(OPTIMIZERS[kind](model.parameters()))
        reference = OPTIMIZERS[kind](shards)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, rank.rank)).square().mean().backward()
            for param, shard in zip(model.parameters(), shards, strict=True):
                shard.grad = None if param.grad is None else local(param.grad).clone()
            optimizer.step()
            reference.step()
            for param, shard in zip(model.parameters(), shards, strict=True):
                check_for(reference)(local(param), shard.detach())


class Seeing(Optimizer):
    """A user's optimizer: subtracts signs, keeps a python number and a mean, sees what it steps."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.seen: list[int] = []
        self.addresses: set[int] = set()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, factor: float = 1.0) -> Any:
        loss = closure() if closure is not None else None
        params = [p for p in params_of(self) if p.grad is not None]
        self.seen.append(len(params))
        self.addresses = {local(p.grad).data_ptr() for p in params if p.grad.numel()}
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["num_steps"] = state.get("num_steps", 0) + 1000
                state["mean"] = 0.5 * state.get("mean", 0.0) + param.grad
                param.sub_(torch.sign(state["mean"]), alpha=group["lr"] * factor)
        return loss


@on_ranks(2)
def test_a_step_is_given_one_tensor_for_neighbors_of_one_kind(rank: Rank) -> None:
    for form in FORMS:
        model = sharded(rank, form)
        optimizer = by_unit(Seeing(model.parameters()), elementwise=True)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(step, rank.rank), True).square().mean().backward()
            optimizer.step()
            # Gradients lie as parameters do: nothing is copied.
            grads = [local(param.grad) for param in model.parameters() if param.grad is not None]
            assert optimizer.addresses <= {grad.data_ptr() for grad in grads}
        # One for each unit; without by_unit there are nine parameters.
        assert optimizer.seen == [2] * 3


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_an_optimizer_of_a_users_own_steps_as_it_would_by_itself(rank: Rank, form: str) -> None:
    models = [sharded(rank, form) for _ in range(2)]
    plain = Seeing(models[0].parameters())
    spanned = by_unit(Seeing(models[1].parameters()), elementwise=True)
    for step, use_spare in enumerate([False, True, False, True, True]):
        for model, optimizer in zip(models, (plain, spanned), strict=True):
            optimizer.zero_grad()
            model(batch(step, rank.rank), use_spare).square().mean().backward()
            optimizer.step(factor=0.5)
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(local(a), local(b))
        assert_same_states(spanned, plain)
    assert sum(spanned.seen) < sum(plain.seen)


class Signs(Optimizer):
    """A user's optimizer: looks for state, and makes none."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.seen: list[int] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        params = [param for param in params_of(self) if param.grad is not None]
        self.seen.append(len(params))
        for param in params:
            assert self.state[param] == {}
            param.sub_(torch.sign(param.grad), alpha=0.1)


class Tied(nn.Module):
    """Two blocks that share a parameter, which the root then holds."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.blocks[1].up.weight = self.blocks[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


@on_ranks(2)
def test_tied_parameters_and_a_model_from_meta_are_in_spans(rank: Rank) -> None:
    with torch.device("meta"):
        model = sharded(rank, "rows", Tied)
    optimizer = by_unit(Signs(model.parameters()), elementwise=True)
    model.to_empty(device="cpu")
    for param in model.parameters():
        nn.init.constant_(param, 0.3)
    before = [local(param).clone() for param in model.parameters()]
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank.rank)).square().mean().backward()
        optimizer.step()
    # One for the tied parameter, and two for each block, around the part without gradient.
    assert optimizer.seen == [5] * 3
    assert len(optimizer.state) == sum(param.grad is not None for param in model.parameters())
    for param, old in zip(model.parameters(), before, strict=True):
        moved = (local(param) - old).abs().round(decimals=3)
        allowed = [0.0, 0.1, 0.3] if param.grad is not None else [0.0]
        assert torch.isin(moved, torch.tensor(allowed)).all()


@on_ranks(2)
def test_parameters_that_no_unit_holds_are_stepped_too(rank: Rank) -> None:
    loose = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    numbers = iter(range(2))

    def of(model: nn.Module) -> list[Any]:
        return [*model.parameters(), loose[next(numbers)]]

    twins = Twins(rank, "rows", OPTIMIZERS["adamw"], of)
    for step in range(3):
        for param in loose:
            param.grad = torch.full((3,), float(step))
        twins.backward(step)
        for optimizer in twins.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        twins.assert_same()
        assert torch.equal(*loose)
    assert not torch.equal(loose[0], torch.ones(3))


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_units_that_are_kept_unsharded_see_the_step(rank: Rank, form: str) -> None:
    options: dict[str, Any] = {}
    if form == "rows":
        options = {"reshard_after_forward": False}
    twins = Twins(rank, form, OPTIMIZERS["adamw_fused"], **options)
    if form == "rows":
        for model in twins.models:
            model.set_reshard_after_backward(False)
    for step in range(3):
        twins.step(step)
    twins.check(*[model(batch(9, 0)) for model in twins.models])


@on_ranks(2)
def test_a_step_holds_no_gradient_and_a_dropped_optimizer_is_freed_at_once(rank: Rank) -> None:
    model = sharded(rank, "rows")
    optimizer = by_unit(AdamW(model.parameters(), fused=True))
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank.rank)).square().mean().backward()
        storage = model.head.weight.grad.to_local().untyped_storage()
        num_holders = torch._C._storage_Use_Count(storage._cdata)
        optimizer.step()
        assert torch._C._storage_Use_Count(storage._cdata) == num_holders
        del storage
    watched = [weakref.ref(optimizer), weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])]
    gc.disable()
    try:
        del optimizer
        assert [ref() for ref in watched] == [None, None]
    finally:
        gc.enable()


# Changes that others make to an optimizer


@on_ranks(2)
def test_a_scheduler_may_come_before(rank: Rank) -> None:
    models = [sharded(rank, "rows") for _ in range(2)]
    optimizers = [Seeing(model.parameters()) for model in models]
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers]
    by_unit(optimizers[1], elementwise=True)
    for step in range(3):
        for model, optimizer, scheduler in zip(models, optimizers, schedulers, strict=True):
            optimizer.zero_grad()
            model(batch(step, rank.rank)).square().mean().backward()
            optimizer.step()
            scheduler.step()
        for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
            assert torch.equal(local(a), local(b))
    assert optimizers[1].param_groups[0]["lr"] == 0.1 * 0.5**3
    assert max(optimizers[1].seen) < min(optimizers[0].seen)


@on_ranks(2)
def test_hooks_see_the_parameters_and_their_state(rank: Rank) -> None:
    counts: list[list[list[float]]] = []

    def make(params: Any) -> Optimizer:
        seen: list[list[float]] = []

        def note(optimizer: Optimizer, *_: Any) -> None:
            states = [optimizer.state.get(param, {}) for param in params_of(optimizer)]
            seen.append([float(each["step"]) if each else 0.0 for each in states])

        optimizer = AdamW(params, lr=0.01)
        optimizer.register_step_post_hook(note)  # before by_unit is called
        counts.append(seen)
        return optimizer

    def double(optimizer: Optimizer, *_: Any) -> None:
        for param in params_of(optimizer)[::2]:
            param.grad = None if param.grad is None else param.grad * 2

    twins = Twins(rank, "rows", make)
    for optimizer in twins.optimizers:
        optimizer.register_step_pre_hook(double)
    twins.step(0)
    twins.step(1, True)
    twins.step(2)
    assert counts[1] == counts[0]
    assert [max(each) for each in counts[1]] == [1.0, 2.0, 3.0]
    assert min(counts[1][-1]) == 1.0  # those that had a gradient in one step


class Decaying(AdamW):
    """A user's optimizer: calls the step of its base class, writes to its groups and to itself."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
            group["seen"] = [*group.get("seen", ()), len(group["params"])]
        self.num_steps += 1
        return super().step(closure)

    def __del__(self) -> None:
        deleted.append(type(self).__name__)


deleted: list[str] = []


@on_ranks(2)
def test_what_a_step_writes_to_groups_and_to_itself_is_kept(rank: Rank) -> None:
    AdamW([nn.Parameter(torch.ones(1))])  # from now on its step calls hooks
    models = [sharded(rank, "rows") for _ in range(2)]
    plain, spanned = (Decaying(groups(model), lr=0.1) for model in models)
    by_unit(spanned, elementwise=True)
    calls: list[str] = []
    spanned.register_step_pre_hook(lambda *_: calls.append("before"))
    for step in range(3):
        for model, optimizer in zip(models, (plain, spanned), strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, n: int = step) -> Tensor:
                calls.append("closure")
                optimizer.zero_grad()
                loss = model(batch(n, rank.rank)).square().mean()
                loss.backward()
                return loss

            calls.clear()
            optimizer.step(closure)
    assert calls == ["before", "closure", "before"]
    assert plain.num_steps == spanned.num_steps == vars(spanned)["num_steps"] == 3
    assert [group["lr"] for group in spanned.param_groups] == [0.1 / 8] * 2
    assert [len(group["seen"]) for group in spanned.param_groups] == [3, 3]
    assert sum(sum(group["seen"]) for group in spanned.param_groups) < 3 * len(params_of(spanned))
    assert_same_states(spanned, plain)
    assert not deleted


@on_ranks(2)
def test_steps_by_unit_can_be_turned_off_and_on(rank: Rank) -> None:
    models = [sharded(rank, "rows") for _ in range(2)]
    plain, optimizer = (Seeing(model.parameters()) for model in models)
    by_unit(optimizer, elementwise=True)
    for step, enabled in enumerate([True, True, False, False, True, True]):
        by_unit(optimizer, elementwise=True, enabled=enabled)
        for model, each in zip(models, (plain, optimizer), strict=True):
            each.zero_grad()
            model(batch(step, rank.rank), step == 3).square().mean().backward()
            each.step()
    assert_same_states(optimizer, plain)
    assert optimizer.seen[2:4] == plain.seen[2:4]
    assert max(optimizer.seen[:2] + optimizer.seen[4:]) < min(plain.seen)


# By itself


@pytest.mark.parametrize(
    "kind, options, devices, expected",
    [
        (AdamW, [{"fused": True}], ["cuda", "cuda"], True),
        (SGD, [{"foreach": True, "fused": None}], ["cuda"], True),
        (optim.Rprop, [{"foreach": True}], ["xpu"], True),
        (AdamW, [{"fused": True}, {"foreach": True}], ["cuda"], True),
        (AdamW, [{"fused": None, "foreach": None}], ["cuda"], False),
        (AdamW, [{"fused": True}, {"foreach": None}], ["cuda"], False),
        (AdamW, [{"foreach": True, "differentiable": True}], ["cuda"], False),
        (AdamW, [{"fused": True}], [], False),
        (AdamW, [{"fused": True}], ["cpu"], False),
        (AdamW, [{"fused": True}], ["meta"], False),
        (AdamW, [{"foreach": True}], ["cuda", "cpu"], False),
        (optim.Adafactor, [{"foreach": True}], ["cuda"], False),
        (Decaying, [{"fused": True}], ["cuda"], False),
    ],
)
def test_only_what_is_exact_is_stepped_by_unit_by_itself(kind, options, devices, expected):
    assert is_exact(kind, options, iter(devices)) == expected


@on_ranks(2)
def test_nothing_is_stepped_by_unit_by_itself_on_a_cpu(rank: Rank) -> None:
    for form in ("rows", "slices"):
        model = sharded(rank, form)
        optimizer = AdamW(model.parameters(), fused=True)
        model(batch(0, rank.rank)).square().mean().backward()
        optimizer.step()
        assert STEPS not in vars(optimizer)


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_schedulers_clipping_hooks_and_closures_work_as_before(rank: Rank, form: str) -> None:
    twins = Twins(rank, form, OPTIMIZERS["adamw_fused"])
    schedulers = [StepLR(optimizer, 1, gamma=0.5) for optimizer in twins.optimizers]
    calls: list[str] = []
    for optimizer in twins.optimizers:
        optimizer.register_step_pre_hook(lambda o, *_: calls.append(f"pre {len(params_of(o))}"))
        optimizer.register_step_post_hook(lambda o, *_: calls.append(f"post {len(o.state)}"))
    rates = []
    for step in range(3):
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True):

            def closure(model: Any = model, optimizer: Any = optimizer, n: int = step) -> Tensor:
                optimizer.zero_grad(set_to_none=n < 2)
                loss = model(batch(n, rank.rank)).square().mean()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
                return loss

            assert optimizer.step(closure).requires_grad
        for scheduler in schedulers:
            scheduler.step()
        twins.assert_same()
        rates.append(twins.by_unit.param_groups[0]["lr"])
    assert rates == [0.005, 0.0025, 0.00125]
    assert len(calls) == 12
    assert calls[0::4] == calls[2::4]
    assert calls[1::4] == calls[3::4]


@on_ranks(2)
def test_a_scaler_scales_and_skips_as_before(rank: Rank) -> None:
    for kind in ("adamw", "adamw_fused", "sgd_nesterov"):
        twins = Twins(rank, "rows", OPTIMIZERS[kind])
        scalers = [ShardedGradScaler("cpu", init_scale=64.0) for _ in range(2)]
        for step in range(4):
            pairs = zip(scalers, twins.models, twins.optimizers, strict=True)
            for scaler, model, optimizer in pairs:
                optimizer.zero_grad()
                scaler.scale(model(batch(step, rank.rank)).square().mean()).backward()
                if step == 2 and rank.rank == 1:
                    local(model.head.weight.grad)[0, 0] = float("inf")
                scaler.step(optimizer)
                scaler.update()
            twins.assert_same()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 32.0


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_gradients_that_a_user_replaced_are_used(rank: Rank, form: str) -> None:
    twins = Twins(rank, form, OPTIMIZERS["adamw"])
    for step in range(4):
        for optimizer in twins.optimizers:
            optimizer.zero_grad()
        twins.backward(step, True)
        for model in twins.models:
            for number, param in enumerate(model.parameters()):
                if param.grad is None or number % 2:
                    continue
                if step == 1:
                    param.grad = param.grad * 2
                elif step == 2:
                    param.grad = None
        for optimizer in twins.optimizers:
            optimizer.step()
        twins.assert_same()


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_shards_groups_and_memory_that_change_are_followed(rank: Rank, form: str) -> None:
    def some(model: nn.Module) -> list[Any]:
        return [param for name, param in model.named_parameters() if "head" not in name]

    twins = Twins(rank, form, OPTIMIZERS["adamw"], some)
    twins.step(0)
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        head = [param for name, param in model.named_parameters() if "head" in name]
        optimizer.add_param_group({"params": head, "lr": 0.5})
    twins.step(1)
    twins.step(2)
    for model in twins.models:
        frozen = next(param for name, param in model.named_parameters() if "up.weight" in name)
        frozen.requires_grad_(False)
    twins.step(3)
    twins.step(4)
    for model in twins.models:
        model.load_state_dict(copy.deepcopy(model.state_dict()), assign=form == "rows")
    twins.step(5)
    twins.backward(6)
    for model in twins.models if form == "rows" else ():
        for param in model.parameters():  # other memory between backward and step
            param._local_tensor = param._local_tensor.clone()
    for optimizer in twins.optimizers:
        optimizer.step()
    twins.assert_same()
    twins.step(7)


# State


def trained(rank: Rank, form: str, kind: str = "adamw_fused") -> Twins:
    twins = Twins(rank, form, OPTIMIZERS[kind])
    twins.step(0)
    twins.step(1, True)
    return twins


@pytest.mark.parametrize("form", FORMS)
@on_ranks(2)
def test_state_dicts_go_both_ways(rank: Rank, form: str) -> None:
    for kind in ("adamw_fused", "nadam", "sgd_nesterov"):
        twins = trained(rank, form, kind)
        taken = [copy.deepcopy(optimizer.state_dict()) for optimizer in twins.optimizers]
        assert taken[0].keys() == taken[1].keys()
        assert taken[0]["param_groups"] == taken[1]["param_groups"]
        for own in twins.by_unit.state.values():  # saved without its neighbors
            moments = [v for v in own.values() if isinstance(v, Tensor) and v.ndim]
            assert all(local(m).untyped_storage().nbytes() == local(m).nbytes for m in moments)
        twins.step(2)
        twins.plain.load_state_dict(taken[1])
        twins.by_unit.load_state_dict(taken[0])
        twins.assert_same()
        twins.step(3)
        twins.step(4, True)


@on_ranks(2)
def test_torchs_own_functions_read_and_write_the_state(rank: Rank) -> None:
    twins = trained(rank, "rows")
    taken = [
        copy.deepcopy(get_optimizer_state_dict(model, optimizer))
        for model, optimizer in zip(twins.models, twins.optimizers, strict=True)
    ]
    assert taken[0].keys() == taken[1].keys()
    twins.step(2)
    for model, optimizer, other in zip(twins.models, twins.optimizers, taken[::-1], strict=True):
        set_optimizer_state_dict(model, optimizer, other)
    twins.assert_same()
    twins.step(3)
    # A step that changes nothing gives an optimizer without state its state.
    fresh = sharded(rank, "rows")
    set_optimizer_state_dict(fresh, by_unit(AdamW(groups(fresh), lr=0.1, fused=True)), taken[0])


@pytest.mark.parametrize("form", ["slices", "flat"])
@on_ranks(2)
def test_the_wrapper_reads_and_writes_the_state(rank: Rank, form: str) -> None:
    twins = trained(rank, form, "adamw")
    wrapper = FullyShardedDataParallel
    taken = []
    for model, optimizer in zip(twins.models, twins.optimizers, strict=True):
        with wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            taken.append(wrapper.optim_state_dict(model, optimizer))
    assert taken[0]["state"].keys() == taken[1]["state"].keys()
    for name, its in taken[0]["state"].items():
        assert torch.equal(its["exp_avg"], taken[1]["state"][name]["exp_avg"])
    twins.step(2)
    for model, optimizer, other in zip(twins.models, twins.optimizers, taken[::-1], strict=True):
        with wrapper.state_dict_type(model, StateDictType.FULL_STATE_DICT):
            optimizer.load_state_dict(wrapper.optim_state_dict_to_load(model, optimizer, other))
    twins.step(3)


@pytest.mark.parametrize("form", ["rows", "slices"])
@on_ranks(2)
def test_a_checkpoint_is_resumed_exactly(rank: Rank, form: str, tmp_path: Path) -> None:
    twins = trained(rank, form, "adamw")
    state.save(tmp_path / "one", twins.models[1], twins.by_unit)
    twins.step(2)
    twins.step(3)
    resumed = Twins(rank, form, OPTIMIZERS["adamw"])
    for model, optimizer in zip(resumed.models, resumed.optimizers, strict=True):
        state.load(tmp_path / "one", model, optimizer)
    resumed.step(2)
    resumed.step(3)
    pairs = zip(resumed.models[1].parameters(), twins.models[0].parameters(), strict=True)
    assert all(torch.equal(local(a), local(b)) for a, b in pairs)


@on_ranks(2)
def test_the_class_is_the_same_and_copies_and_pickles_are_without_runs(rank: Rank) -> None:
    twins = trained(rank, "slices")
    assert type(twins.by_unit) is AdamW
    assert by_unit(twins.by_unit) is twins.by_unit
    for made in (copy.deepcopy(twins.by_unit), pickle.loads(pickle.dumps(twins.by_unit))):
        assert type(made) is AdamW
        assert STEPS not in vars(made)
        assert_same_states(made, twins.plain, twins.check)
        for param in params_of(made):
            param.grad = torch.ones_like(param)
        made.step()
    twins.assert_same()
    twins.step(2)


# Policies


POLICIES: dict[str, tuple[str, Callable[[], dict[str, Any]]]] = {
    "offload": ("rows", lambda: {"offload_policy": CPUOffloadPolicy()}),
    "bf16": ("rows", lambda: {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)}),
    "bf16_slices": ("slices", lambda: {"mixed_precision": MixedPrecision(torch.bfloat16)}),
    "low_gradients": (
        "slices",
        lambda: {"mixed_precision": MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)},
    ),
}


@on_ranks(2)
def test_policies_change_nothing(rank: Rank) -> None:
    for name, (form, options) in POLICIES.items():
        make = OPTIMIZERS["sgd" if name == "low_gradients" else "adamw_fused"]
        twins = Twins(rank, form, make, **options())
        for step in range(3):
            twins.step(step)


@on_ranks(2)
def test_gradients_that_always_change_end_automatic_use(rank: Rank) -> None:
    twins = Twins(rank, "rows", OPTIMIZERS["adamw_foreach"])
    steps = vars(twins.by_unit)["_fullshard_by_unit"]
    steps.is_automatic = True  # as it is on an accelerator
    for step in range(4):
        twins.step(step)
    assert steps.num_plans == 0
    for step in range(4, 12):
        twins.step(step, step % 2 == 0)
    assert vars(twins.by_unit)["_fullshard_by_unit"] is None
    twins.step(12)


# Bad input


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda p: optim.LBFGS(p), "LBFGS looks at whole tensors"),
        (lambda p: optim.Adafactor(p), "Adafactor looks at"),
        (lambda p: optim.SparseAdam(p), "SparseAdam looks at"),
        (lambda p: Seeing(p), r"Seeing is not one of .*; pass elementwise=True"),
        (lambda p: AdamW(p, differentiable=True), "has differentiable=True"),
        (lambda p: p, "list is not one of"),
    ],
)
def test_what_cannot_be_stepped_by_unit_is_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        by_unit(make([nn.Parameter(torch.ones(3, 3))]))


def test_a_wrong_promise_is_refused():
    with pytest.raises(ConfigError, match="whole tensors"):
        by_unit(optim.Adafactor([nn.Parameter(torch.ones(3, 3))]), elementwise=True)


class Normed(Optimizer):
    """Keeps one number per row, which no elementwise optimizer does."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for param in params_of(self):
            if param.grad is not None:
                self.state[param]["norms"] = param.grad.new_zeros(2, 1)


@on_ranks(2)
def test_state_of_another_shape_breaks_the_promise(rank: Rank) -> None:
    model = sharded(rank, "rows")
    optimizer = by_unit(Normed(model.parameters()), elementwise=True)
    held = params_of(optimizer)
    model(batch(0, rank.rank)).square().mean().backward()
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"state 'norms' of shape \(2, 1\)"):
            optimizer.step()
        assert all(a is b for a, b in zip(params_of(optimizer), held, strict=True))


@contextmanager
def failing(optimizer: Optimizer) -> Iterator[None]:
    """Let steps of AdamW fail after they have written counts and moments."""
    kept = [group["eps"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["eps"] = None
    with pytest.raises(TypeError):
        yield
    for group, eps in zip(optimizer.param_groups, kept, strict=True):
        group["eps"] = eps


@on_ranks(2)
def test_a_first_step_that_fails_leaves_no_state(rank: Rank) -> None:
    twins = Twins(rank, "rows", lambda p: AdamW(p, lr=0.1, weight_decay=0.0, foreach=True))
    twins.backward(0)
    with failing(twins.by_unit):
        twins.by_unit.step()
    assert not twins.by_unit.state
    twins.step(0)
    twins.step(1)


@on_ranks(2)
def test_steps_after_one_that_failed_are_those_of_the_optimizer(rank: Rank) -> None:
    twins = Twins(rank, "rows", OPTIMIZERS["adamw_foreach"])
    twins.step(0)
    twins.step(1)
    for optimizer in twins.optimizers:
        with failing(optimizer):
            optimizer.step()
    storage = local(twins.models[1].head.weight.grad).untyped_storage()
    twins.step(2)
    assert int(twins.by_unit.state[twins.models[1].head.weight]["step"]) == 4
    assert torch._C._storage_Use_Count(storage._cdata) == 1  # the failed step holds no gradient

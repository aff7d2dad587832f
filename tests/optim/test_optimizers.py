"""Optimizers: built before sharding or after it, with state, scalers, clipping, in backward."""

import copy
import gc
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LambdaLR, StepLR

from fullshard import LifecycleError, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.testing import Rank, Training, assert_same_training, on_ranks

OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "sgd": lambda p: SGD(p, lr=0.1),
    "sgd_momentum": lambda p: SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "sgd_foreach": lambda p: SGD(p, lr=0.1, momentum=0.9, foreach=True),
    "adam_amsgrad": lambda p: Adam(p, lr=0.01, amsgrad=True, eps=1e-4),
    "adamw": lambda p: AdamW(p, lr=0.01, eps=1e-4),
    "adamw_foreach": lambda p: AdamW(p, lr=0.01, eps=1e-4, foreach=True),
    "adamw_fused": lambda p: AdamW(p, lr=0.01, eps=1e-4, fused=True),
    "adagrad": lambda p: Adagrad(p, lr=0.05),
    "rmsprop": lambda p: RMSprop(p, lr=0.01, eps=1e-3),
}


class Net(nn.Module):
    """Two layers and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 9)
        self.second = nn.Linear(9, 3)
        self.gain = nn.Parameter(torch.tensor(0.8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.gain


def shard(rank: Rank, model: Net) -> None:
    fully_shard(model.first, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())


def make_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator)


def batch_of(step: int, rank: int) -> torch.Tensor:
    return make_batch(torch.Generator().manual_seed(10 * step + rank))


def two_models() -> tuple[Net, Net]:
    torch.manual_seed(0)
    model = Net()
    return model, copy.deepcopy(model)


def backward_both(rank: Rank, model: nn.Module, reference: nn.Module, step: int) -> None:
    """The model on this rank's batch, the unsharded reference on the mean of all batches."""
    model(batch_of(step, rank.rank)).square().mean().backward()
    for other in range(rank.size):
        (reference(batch_of(step, other)).square().mean() / rank.size).backward()


def step_alone(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    """Steps of an unsharded model on the same batch everywhere, to fill the optimizer's state."""
    for step in range(steps):
        optimizer.zero_grad()
        model(batch_of(step, 0)).square().mean().backward()
        optimizer.step()
    optimizer.zero_grad()


def full(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def assert_same_parameters(model: nn.Module, reference: nn.Module) -> None:
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        torch.testing.assert_close(
            full(param.detach()), expected[name].detach(), msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_same_state(optimizer: Optimizer, reference: Optimizer) -> None:
    pairs = zip(optimizer.param_groups, reference.param_groups, strict=True)
    for group, other_group in pairs:
        for param, other in zip(group["params"], other_group["params"], strict=True):
            state, expected = optimizer.state[param], reference.state[other]
            assert state.keys() == expected.keys()
            for name, value in expected.items():
                if isinstance(value, torch.Tensor):
                    torch.testing.assert_close(full(state[name]), value)
                else:
                    assert state[name] == value, name


def train_both(
    rank: Rank, models: tuple[Net, Net], optimizers: tuple[Optimizer, Optimizer], steps: int = 3
) -> None:
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_both(rank, *models, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_same_parameters(*models)
    assert_same_state(*optimizers)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_an_optimizer_built_after_sharding_trains_as_unsharded(rank: Rank, kind: str) -> None:
    training = Training(make_batch, optimizer=OPTIMIZERS[kind])
    trained = assert_same_training(Net, lambda m: shard(rank, m), training, rtol=1e-4, atol=1e-5)
    assert_same_state(trained.optimizer, trained.reference_optimizer)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@on_ranks(2)
def test_an_optimizer_built_before_sharding_trains_as_unsharded_also_with_state(
    rank: Rank, kind: str
) -> None:
    for num_steps in (0, 2):
        models = two_models()
        optimizers = tuple(OPTIMIZERS[kind](model.parameters()) for model in models)
        for model, optimizer in zip(models, optimizers, strict=True):
            step_alone(model, optimizer, num_steps)
        shard(rank, models[0])
        train_both(rank, models, optimizers)
        model, optimizer = models[0], optimizers[0]
        held = [param for group in optimizer.param_groups for param in group["params"]]
        assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
        assert len(optimizer.state) in (0, 5)  # nothing is kept for the originals
        for name, value in optimizer.state[model.first.weight].items():
            if isinstance(value, torch.Tensor) and value.ndim:
                assert isinstance(value, DTensor), name
                assert value.to_local().shape == model.first.weight.to_local().shape, name
                assert value.placements == model.first.weight.placements, name


@on_ranks(2)
def test_state_of_a_scalar_parameter_becomes_what_a_fresh_optimizer_would_make(rank: Rank) -> None:
    old, fresh = two_models()
    optimizer = AdamW(old.parameters(), lr=0.01)
    step_alone(old, optimizer, 1)
    shard(rank, old)
    shard(rank, fresh)
    fresh_optimizer = AdamW(fresh.parameters(), lr=0.01)
    for model, each in ((old, optimizer), (fresh, fresh_optimizer)):
        model(batch_of(0, rank.rank)).square().mean().backward()
        each.step()
    carried, expected = optimizer.state[old.gain], fresh_optimizer.state[fresh.gain]
    kinds = {name: type(value) for name, value in carried.items()}
    assert kinds == {name: type(value) for name, value in expected.items()}


@on_ranks(2)
def test_parameter_groups_keep_their_order_and_their_settings(rank: Rank) -> None:
    models = two_models()

    def groups(model: Net) -> list[dict[str, Any]]:
        return [
            {"params": [model.second.bias, model.gain], "lr": 0.5, "weight_decay": 0.0},
            {"params": [model.first.weight], "lr": 0.05},
            {"params": [model.second.weight, model.first.bias], "momentum": 0.0},
        ]

    optimizers = tuple(SGD(groups(m), lr=0.1, momentum=0.9, weight_decay=0.1) for m in models)
    for model, optimizer in zip(models, optimizers, strict=True):
        step_alone(model, optimizer, 1)
    shard(rank, models[0])
    train_both(rank, models, optimizers)
    model, optimizer = models[0], optimizers[0]
    expected = [[model.second.bias, model.gain], [model.first.weight]]
    for group, params in zip(optimizer.param_groups, expected, strict=False):
        assert all(a is b for a, b in zip(group["params"], params, strict=True))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.05, 0.1]


@on_ranks(2)
def test_an_optimizer_over_some_of_the_parameters_is_repointed_too(rank: Rank) -> None:
    models = two_models()
    optimizers = tuple(SGD([m.first.weight], lr=0.1, momentum=0.9) for m in models)
    more = tuple(AdamW([m.second.weight, m.gain], lr=0.1) for m in models)
    shard(rank, models[0])
    for step in range(3):
        backward_both(rank, *models, step)
        for each in (*optimizers, *more):
            each.step()
        for model in models:
            model.zero_grad()
        assert_same_parameters(*models)


@on_ranks(2)
def test_zero_grad_of_an_old_optimizer_clears_the_gradients_of_shards(rank: Rank) -> None:
    models = two_models()
    optimizers = tuple(SGD(model.parameters(), lr=0.1) for model in models)
    for model in models:
        model(batch_of(9, 0)).sum().backward()
    shard(rank, models[0])
    # Gradients of the original parameters do not belong to the next step.
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    backward_both(rank, *models, 0)
    optimizers[0].zero_grad()
    optimizers[1].zero_grad()
    assert all(param.grad is None for param in models[0].parameters())
    backward_both(rank, *models, 1)
    for optimizer in optimizers:
        optimizer.step()
    assert_same_parameters(*models)


@on_ranks(2)
def test_an_old_optimizer_is_repointed_without_any_forward(rank: Rank) -> None:
    model = Net()
    optimizer = SGD(model.parameters(), lr=0.5)
    shard(rank, model)
    before = [full(param.detach()).clone() for param in model.parameters()]
    for param in model.parameters():
        param.grad = DTensor.from_local(
            torch.ones_like(param.to_local()),
            param.device_mesh,
            param.placements,
            shape=param.shape,
            stride=param.stride(),
        )
    optimizer.step()
    for param, old in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(full(param.detach()), old - 0.5)


@on_ranks(2)
def test_a_scheduler_of_an_old_optimizer_goes_on(rank: Rank) -> None:
    models = two_models()
    optimizers = tuple(SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    schedulers = tuple(StepLR(optimizer, 1, gamma=0.5) for optimizer in optimizers)
    warmups = tuple(LambdaLR(optimizer, lambda n: 1 / (n + 1)) for optimizer in optimizers)
    shard(rank, models[0])
    rates = []
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_both(rank, *models, step)
        for optimizer, scheduler, warmup in zip(optimizers, schedulers, warmups, strict=True):
            optimizer.step()
            scheduler.step()
            warmup.step()
        assert_same_parameters(*models)
        rates.append(optimizers[0].param_groups[0]["lr"])
    assert rates == sorted(rates, reverse=True)
    assert len(set(rates)) == 3
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


@on_ranks(2)
def test_state_that_cannot_be_sharded_is_a_named_error_every_time(rank: Rank) -> None:
    model = Net()
    optimizer = Adafactor(model.parameters(), lr=0.01)
    step_alone(model, optimizer, 1)
    shard(rank, model)
    for _ in range(2):
        with pytest.raises(LifecycleError, match=r"first\.weight: Adafactor has.*row_var"):
            model(batch_of(0, rank.rank))
    with pytest.raises(LifecycleError, match="row_var"):
        optimizer.step()
    optimizer.state.clear()
    model(batch_of(0, rank.rank)).sum().backward()
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert all(isinstance(param, DTensor) for param in held)


@on_ranks(2)
def test_originals_are_freed_once_the_optimizer_is_repointed(rank: Rank) -> None:
    model = Net()
    optimizer = AdamW(model.parameters(), lr=0.01)
    step_alone(model, optimizer, 1)
    originals = [weakref.ref(param) for param in model.parameters()]
    storages = [weakref.ref(param.untyped_storage()) for param in model.parameters()]
    moments = [weakref.ref(state["exp_avg"]) for state in optimizer.state.values()]
    shard(rank, model)
    model(batch_of(0, rank.rank)).sum().backward()
    optimizer.step()
    gc.collect()
    assert [ref() for ref in originals] == [None] * len(originals)
    assert [ref() for ref in storages] == [None] * len(storages)
    # The scalar's state is kept whole, so it may stay the same tensor.
    assert sum(ref() is not None for ref in moments) <= 1


@on_ranks(2)
def test_originals_without_an_optimizer_are_freed_by_sharding(rank: Rank) -> None:
    model = Net()
    originals = [weakref.ref(param) for param in model.parameters()]
    shard(rank, model)
    gc.collect()
    assert [ref() for ref in originals] == [None] * len(originals)


@on_ranks(2)
def test_clipping_uses_the_norm_of_the_unsharded_gradients(rank: Rank) -> None:
    for norm_type in (2.0, 1.0, float("inf")):
        for foreach in (None, True):
            models = two_models()
            shard(rank, models[0])
            backward_both(rank, *models, 0)
            norm, expected = (
                nn.utils.clip_grad_norm_(m.parameters(), 0.05, norm_type, foreach=foreach)
                for m in models
            )
            torch.testing.assert_close(full(norm), expected)
            assert expected > 0.05
            for param, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(full(param.grad), other.grad)


@pytest.mark.parametrize("is_old", [False, True])
@on_ranks(2)
def test_torchs_gradient_scaler_unscales_and_skips_as_unsharded(rank: Rank, is_old: bool) -> None:
    models = two_models()
    if not is_old:
        shard(rank, models[0])
    optimizers = tuple(SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models)
    if is_old:
        shard(rank, models[0])
    scalers = tuple(torch.amp.GradScaler("cpu", init_scale=64.0) for _ in models)
    for step in range(4):
        batches = [batch_of(step, other) for other in range(rank.size)]
        if step == 2:
            batches[1][0, 0] = float("inf")  # on one rank: the step is skipped on all
        for optimizer in optimizers:
            optimizer.zero_grad()
        scalers[0].scale(models[0](batches[rank.rank]).square().mean()).backward()
        for each in batches:
            scalers[1].scale(models[1](each).square().mean() / rank.size).backward()
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.unscale_(optimizer)
        for param, other in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(full(param.grad), other.grad, equal_nan=True)
        for scaler, optimizer in zip(scalers, optimizers, strict=True):
            scaler.step(optimizer)
            scaler.update()
        assert_same_parameters(*models)
        assert scalers[0].get_scale() == scalers[1].get_scale() == (64 if step < 2 else 32)


@on_ranks(2)
def test_an_average_of_weights_is_kept_by_copying_shards(rank: Rank) -> None:
    models = two_models()
    shard(rank, models[0])
    averages = [
        {name: param.detach().clone() for name, param in model.named_parameters()}
        for model in models
    ]
    optimizers = tuple(SGD(model.parameters(), lr=0.1) for model in models)
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        backward_both(rank, *models, step)
        for model, average, optimizer in zip(models, averages, optimizers, strict=True):
            optimizer.step()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    average[name].lerp_(param, 0.3)
        with torch.no_grad():  # evaluations in between must not disturb the copies
            models[0](batch_of(7, rank.rank))
    for name, value in averages[1].items():
        torch.testing.assert_close(full(averages[0][name]), value)
    # Swap the average in, evaluate, swap it out again.
    outputs = []
    for model, average in zip(models, averages, strict=True):
        params = dict(model.named_parameters())
        kept = {name: param.detach().clone() for name, param in params.items()}
        with torch.no_grad():
            for name, param in params.items():
                param.copy_(average[name])
            outputs.append(model(batch_of(8, 0)))
            for name, param in params.items():
                param.copy_(kept[name])
            outputs.append(model(batch_of(8, 0)))
    torch.testing.assert_close(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[1], outputs[3])
    assert not torch.allclose(outputs[0], outputs[1])


@pytest.mark.parametrize("when", ["before", "after"])
@on_ranks(2)
def test_an_optimizer_inside_backward_steps_each_parameter_as_its_gradient_comes(
    rank: Rank, when: str
) -> None:
    models = two_models()
    stepped: list[str] = []

    def step_in_backward(model: Net) -> None:
        for name, param in model.named_parameters():
            optimizer = SGD([param], lr=0.1, momentum=0.9)

            def step(param: torch.Tensor, o: Optimizer = optimizer, n: str = name) -> None:
                stepped.append(n)
                o.step()
                o.zero_grad()

            param.register_post_accumulate_grad_hook(step)

    if when == "before":
        step_in_backward(models[0])
    shard(rank, models[0])
    if when == "after":
        step_in_backward(models[0])
    reference_optimizer = SGD(models[1].parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        stepped.clear()
        reference_optimizer.zero_grad()
        backward_both(rank, *models, step)
        assert sorted(stepped) == sorted(name for name, _ in models[0].named_parameters())
        assert all(param.grad is None for param in models[0].parameters())
        reference_optimizer.step()
        assert_same_parameters(*models)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_an_optimizer_step_reaches_units_that_stay_unsharded(rank: Rank, reshard: bool) -> None:
    def keep_unsharded(model: Net) -> None:
        fully_shard(model.first, mesh=rank.mesh(), reshard_after_forward=reshard)
        fully_shard(model, mesh=rank.mesh(), reshard_after_forward=reshard)
        model.set_reshard_after_backward(False)

    models = two_models()
    keep_unsharded(models[0])
    model, reference = models
    shards = list(model.parameters())
    optimizers = tuple(
        AdamW(params, lr=0.01, eps=1e-4, fused=True) for params in (shards, reference.parameters())
    )
    for step in range(3):
        backward_both(rank, *models, step)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for shard_, other in zip(shards, reference.parameters(), strict=True):
            torch.testing.assert_close(full(shard_.detach()), other.detach())


@on_ranks(2)
def test_an_optimizer_step_reaches_what_a_forward_kept_for_its_backward(rank: Rank) -> None:
    models = two_models()
    model, reference = models
    fully_shard(model.first, mesh=rank.mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=True)
    optimizers = [SGD(each.parameters(), lr=0.1) for each in models]
    batch = batch_of(1, rank.rank)
    backward_both(rank, *models, 0)
    model(batch)  # its backward never comes
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(model(batch), reference(batch))

"""Flat units whose plan changes: other dtypes, ties, frozen parts, optimizers that came first."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard import FlatParameter, FullyShardedDataParallel, ShardingStrategy
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import clean_name
from fullshard.testing import Rank, on_ranks

WIDTH = 5
FORMS = pytest.mark.parametrize("use_orig_params", [True, False])


class Tied(nn.Module):
    """A first and a last layer that share their weight, each in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.tie()

    def tie(self) -> None:
        self.last[0].weight = self.first[0].weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x)))


def whole(kind: type[nn.Module] = Tied) -> Any:
    torch.manual_seed(0)
    return kind()


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, WIDTH, generator=generator).to(dtype)


def train(rank: Rank, model: nn.Module, dtype: torch.dtype = torch.float32) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        if isinstance(model, FullyShardedDataParallel):
            loss = model(batch(rank.rank, step, dtype)).square().sum()
            loss.backward()
        else:
            each = [model(batch(r, step, dtype)).square().sum() for r in range(rank.size)]
            (torch.stack(each).sum() / rank.size).backward()
            loss = each[rank.rank]
        optimizer.step()
        losses.append(loss.item())
    return losses


def full(model: nn.Module) -> dict[str, Tensor]:
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return {clean_name(n): param.detach().clone() for n, param in model.named_parameters()}


def assert_same(model: nn.Module, expected: nn.Module) -> None:
    found = full(model)
    wanted = dict(expected.named_parameters())
    assert found.keys() == wanted.keys()
    for name, param in wanted.items():
        torch.testing.assert_close(found[name], param.detach(), msg=name)


@FORMS
@on_ranks(2, 3)
def test_a_tie_across_wrappers_moves_to_the_wrapper_around_both(
    rank: Rank, use_orig_params: bool
) -> None:
    model = whole()
    options = {"use_orig_params": use_orig_params}
    model.first = FullyShardedDataParallel(model.first, **options)
    model.last = FullyShardedDataParallel(model.last, **options)
    wrapped = FullyShardedDataParallel(model, **options)
    names = [member.name for member in hooks_of(wrapped).units[0].params]
    assert len(names) == 3  # the middle's two, and the shared weight
    assert len(hooks_of(model.first).units[0].params) == 1
    assert len(hooks_of(model.last).units[0].params) == 1
    assert_same(wrapped, whole())
    expected = whole()
    assert train(rank, wrapped) == pytest.approx(train(rank, expected))
    assert_same(wrapped, expected)


@FORMS
@on_ranks(2)
def test_a_tie_between_wrappers_without_one_around_them_trains(
    rank: Rank, use_orig_params: bool
) -> None:
    model = whole()
    options = {"use_orig_params": use_orig_params}
    model.first = FullyShardedDataParallel(model.first, **options)
    model.last = FullyShardedDataParallel(model.last, **options)
    model.middle = FullyShardedDataParallel(model.middle, **options)
    expected = whole()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, expected)]
    for step in range(2):
        for each in optimizers:
            each.zero_grad()
        loss = model(batch(rank.rank, step)).square().sum()
        loss.backward()
        losses = [expected(batch(r, step)).square().sum() for r in range(rank.size)]
        (torch.stack(losses).sum() / rank.size).backward()
        assert loss.item() == pytest.approx(losses[rank.rank].item())
        for each in optimizers:
            each.step()
    assert_same(model, expected)


@FORMS
@on_ranks(2)
def test_another_dtype_after_wrapping_is_trained_in(rank: Rank, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(whole(), use_orig_params=use_orig_params)
    train(rank, model)
    before = full(model)
    model.double()
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    after = full(model)
    for name, param in before.items():
        torch.testing.assert_close(after[name], param.double())
    expected = whole().double()
    expected.load_state_dict({**after, "last.0.weight": after["first.0.weight"]})
    found, wanted = train(rank, model, torch.float64), train(rank, expected, torch.float64)
    assert found == pytest.approx(wanted)
    assert_same(model, expected)


@FORMS
@on_ranks(2)
def test_half_of_a_unit_in_another_dtype_is_cut_anew(rank: Rank, use_orig_params: bool) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(WIDTH, WIDTH)
            self.b = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x.float()).double())

    model = FullyShardedDataParallel(whole(Mixed), use_orig_params=use_orig_params)
    if not use_orig_params:
        flat = [name for name, p in model.named_parameters() if isinstance(p, FlatParameter)]
        assert flat == ["_fsdp_wrapped_module._flat_param", "_fsdp_wrapped_module._flat_param_1"]
    expected = whole(Mixed)
    assert train(rank, model) == pytest.approx(train(rank, expected))
    assert_same(model, expected)


@FORMS
@on_ranks(2)
def test_what_is_frozen_after_wrapping_is_left_alone(rank: Rank, use_orig_params: bool) -> None:
    model = FullyShardedDataParallel(whole(), use_orig_params=use_orig_params)
    before = full(model)
    if use_orig_params:
        model.module.middle.weight.requires_grad_(False)
        changed = {name for name in before if name != "middle.weight"}
    else:
        model._flat_param.requires_grad_(False)
        changed = set()
    for step in range(2):
        loss = model(batch(rank.rank, step).requires_grad_()).square().sum()
        loss.backward()
        for param in model.parameters():
            if param.grad is not None:
                param.data.sub_(param.grad)
    after = full(model)
    assert {name for name in before if not torch.equal(before[name], after[name])} == changed


@FORMS
@on_ranks(2)
def test_an_optimizer_that_was_built_before_wrapping_trains(
    rank: Rank, use_orig_params: bool
) -> None:
    results = []
    for wraps in (True, False):
        model = whole()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if wraps:
            model = FullyShardedDataParallel(model, use_orig_params=use_orig_params)
        for step in range(2):
            optimizer.zero_grad()
            inputs = torch.cat([batch(r, step) for r in range(rank.size)])
            model(inputs).square().sum().backward()
            optimizer.step()
        results.append(model)
    assert_same(*results)


@FORMS
@on_ranks(2)
def test_what_is_not_sharded_computes_where_it_is_kept(rank: Rank, use_orig_params: bool) -> None:
    seen: list[tuple[int, torch.Size]] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.weight.data_ptr(), self.weight.shape))
            return super().forward(x)

    torch.manual_seed(0)
    model = FullyShardedDataParallel(
        Watched(WIDTH, WIDTH),
        sharding_strategy=ShardingStrategy.NO_SHARD,
        use_orig_params=use_orig_params,
    )
    model(torch.ones(1, WIDTH)).sum().backward()
    shard_buffers = hooks_of(model).units[0].shard_buffers.lanes
    assert len(shard_buffers) == 1
    begin = shard_buffers[0].data_ptr()
    end = begin + shard_buffers[0].numel() * shard_buffers[0].element_size()
    assert [(begin <= pointer < end, shape) for pointer, shape in seen] == [(True, (WIDTH, WIDTH))]
    if use_orig_params:
        assert model.module.weight.shape == (WIDTH, WIDTH)
        assert model.module.weight.grad.shape == (WIDTH, WIDTH)

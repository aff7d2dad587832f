"""After any failure the next step trains on, with no call needed and no memory held."""

import copy
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import (
    FullyShardedDataParallel,
    LifecycleError,
    fully_shard,
    register_fsdp_forward_method,
)
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.unit.state import Absent, Leaving
from fullshard.unit.unit import Unit

WIDTH = 6


class PlannedError(Exception):
    """Raised by the tests' models."""


class Interrupted(BaseException):
    """Like KeyboardInterrupt: not an Exception."""


class Fuse:
    """Raises when told to, at the place where the model asks it."""

    def __init__(self) -> None:
        self.place: str | None = None
        self.kind: type[BaseException] = PlannedError

    def burn(self, place: str) -> None:
        if place == self.place:
            raise self.kind(place)

    @contextmanager
    def lit(self, place: str, kind: type[BaseException] = PlannedError) -> Iterator[None]:
        self.place, self.kind = place, kind
        try:
            yield
        finally:
            self.place, self.kind = None, PlannedError

    @contextmanager
    def out(self) -> Iterator[None]:
        """Do not raise for a while."""
        place, self.place = self.place, None
        yield
        self.place = place


fuse = Fuse()


class BurnInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: str) -> Tensor:
        ctx.place = place
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        fuse.burn(ctx.place)
        return grad, None


class Block(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        fuse.burn(f"{self.name} forward")
        x = BurnInBackward.apply(x, f"{self.name} backward")
        return self.down(x)


class Model(nn.Module):
    """Three blocks and parameters of its own; `catches` tries blocks and goes on without them."""

    def __init__(self, catches: bool = False) -> None:
        super().__init__()
        self.catches = catches
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(f"block {index}") for index in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        fuse.burn("root before")
        x = self.first(x)
        for block in self.blocks:
            if self.catches:
                try:
                    x = x + block(x)
                except PlannedError:
                    x = x * 2
            else:
                x = x + block(x)
        fuse.burn("root forward")
        x = BurnInBackward.apply(x, "root backward")
        return self.last(x)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def units_of(model: nn.Module) -> list[Unit]:
    hooks_list = dict.fromkeys(r for m in model.modules() if (r := hooks_of(m)) is not None)
    return [unit for hooks in hooks_list for unit in hooks.units]


def held_bytes(model: nn.Module) -> int:
    made = [unit.arrangement.all_gather for unit in units_of(model)]
    gatherers = [each for each in made if each is not None]
    return sum(g._full_buffer._storage.size() + g._staging._storage.size() for g in gatherers)


def assert_everything_sharded(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
    for unit in units_of(model):
        assert isinstance(unit.state, (Absent, Leaving)), unit
    assert held_bytes(model) == 0


def shard_blocks_and_root(rank: Rank, model: Model, **settings: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh(), **settings)
    fully_shard(model, mesh=rank.mesh(), **settings)
    return model


class Pair:
    """A sharded model and the unsharded one that sees every rank's batch."""

    def __init__(self, rank: Rank, build: Callable[[], Model] = Model, **settings: Any) -> None:
        torch.manual_seed(0)
        self.rank = rank
        self.reference = build()
        self.model = shard_blocks_and_root(rank, copy.deepcopy(self.reference), **settings)
        self.shards = dict(self.model.named_parameters())
        self.optimizers = [
            torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
            for each in (self.model, self.reference)
        ]

    def run(self, model: Any, replica: int, step: int, scale: float = 1.0) -> None:
        (model(batch_of(replica, step)).square().mean() * scale).backward()

    def forward_backward(self, step: int) -> None:
        self.run(self.model, self.rank.rank, step)
        for replica in range(self.rank.size):
            self.run(self.reference, replica, step, 1 / self.rank.size)

    def check(self, what: str, *, gradients: bool) -> None:
        expected = dict(self.reference.named_parameters())
        for name, parameter in self.shards.items():
            pair = (
                (parameter.grad, expected[name].grad) if gradients else (parameter, expected[name])
            )
            if pair[1] is None:
                assert pair[0] is None, f"{what}: {name} has a gradient"
                continue
            assert pair[0] is not None, f"{what}: {name} has no gradient"
            torch.testing.assert_close(
                full_tensor(pair[0].detach()),
                pair[1].detach(),
                rtol=1e-4,
                atol=1e-6,
                msg=lambda m, name=name: f"{what}: {name}: {m}",
            )

    def update(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def step(self, number: int) -> None:
        self.forward_backward(number)
        self.check(f"step {number}", gradients=True)
        self.update()
        self.check(f"after step {number}", gradients=False)
        assert_everything_sharded(self.model)


# In forward

FORWARD_PLACES = ["root before", "root forward", "block 0 forward", "block 2 forward"]


@on_ranks(2)
def test_an_error_in_forward_leaves_everything_sharded_and_the_next_step_correct(
    rank: Rank,
) -> None:
    for is_first in (True, False):
        for index, place in enumerate(FORWARD_PLACES):
            kind = PlannedError if (index % 2 == 0) == is_first else Interrupted
            pair = Pair(rank)
            if not is_first:
                pair.step(0)
            with fuse.lit(place, kind), pytest.raises(kind, match=place):
                pair.run(pair.model, rank.rank, 1)
            assert_everything_sharded(pair.model)
            pair.check("after the failure", gradients=False)
            pair.step(2)
            pair.step(3)


@on_ranks(2)
def test_errors_again_and_again_without_gradients_and_outside_of_the_root(rank: Rank) -> None:
    pair = Pair(rank)
    batch = batch_of(rank.rank, 1)

    def describe() -> str:
        raise PlannedError("described")

    def without_gradients() -> None:
        with torch.no_grad():
            pair.model(batch)

    pair.model.describe = describe
    register_fsdp_forward_method(pair.model, "describe")
    for number in range(2):
        for place in FORWARD_PLACES:
            for failing in (
                lambda: pair.run(pair.model, rank.rank, 1),
                without_gradients,
                pair.model.describe,
            ):
                with fuse.lit(place), pytest.raises(PlannedError):
                    failing()
                assert_everything_sharded(pair.model)
        with fuse.lit("block 1 forward"), pytest.raises(PlannedError):
            pair.model.blocks[1](batch)
        assert_everything_sharded(pair.model)
        try:
            raise ValueError("handled while a whole step runs")
        except ValueError:
            pair.step(number)


@on_ranks(2)
def test_an_error_in_a_forward_hook(rank: Rank) -> None:
    for place in ("root", "block", "inside a block"):
        for hook in ("pre", "post"):
            pair = Pair(rank)
            block = pair.model.blocks[1]
            module = {"root": pair.model, "block": block, "inside a block": block.up}[place]
            register = (
                module.register_forward_pre_hook if hook == "pre" else module.register_forward_hook
            )
            register(lambda *_: fuse.burn("hook"))
            for number in range(2):
                with fuse.lit("hook"), pytest.raises(PlannedError):
                    pair.run(pair.model, rank.rank, number)
                if (place, hook) != ("root", "post"):  # there the forward had ended
                    assert_everything_sharded(pair.model)
                pair.step(number)


# Caught inside forward


@on_ranks(2)
def test_a_model_may_catch_the_error_of_an_inner_unit_and_go_on(rank: Rank) -> None:
    for index in range(3):
        pair = Pair(rank, functools.partial(Model, catches=True))
        for number in range(2):
            with fuse.lit(f"block {index} forward"):
                pair.step(number)
        with fuse.lit(f"block {index} forward"), torch.no_grad():
            pair.model(batch_of(rank.rank, 5))
        assert all(isinstance(unit.state, (Absent, Leaving)) for unit in units_of(pair.model))
        pair.step(2)


class Recovering(Model):
    """In the except clause: reshards the unit, runs another one, or runs it once more."""

    how = "reshard"

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for index, block in enumerate(self.blocks):
            try:
                x = x + block(x)
            except PlannedError:
                if self.how == "another":
                    x = x + self.blocks[index + 1](x)
                    break
                if self.how == "once more":
                    with fuse.out():
                        x = x + block(x * 2)
                elif hooks_of(block) is not None:
                    block.reshard()
                    assert isinstance(block.up.weight, DTensor)
        return self.last(x)


@pytest.mark.parametrize("how", ["reshard", "another", "once more"])
@on_ranks(2)
def test_a_model_may_recover_in_the_except_clause(rank: Rank, how: str) -> None:
    pair = Pair(rank, Recovering)
    pair.model.how = pair.reference.how = how
    for number in range(3):
        with fuse.lit("block 1 forward" if number != 1 else "nowhere"):
            pair.step(number)


# In backward

BACKWARD_PLACES = ["root backward", "block 2 backward", "block 0 backward"]


@on_ranks(2)
def test_an_error_in_backward_leaves_the_next_step_correct(rank: Rank) -> None:
    for is_first in (True, False):
        for place in BACKWARD_PLACES:
            pair = Pair(rank)
            if not is_first:
                pair.step(0)
            with fuse.lit(place), pytest.raises(PlannedError):
                pair.run(pair.model, rank.rank, 1)
            for number in (2, 3):
                pair.step(number)


@on_ranks(2)
def test_an_error_in_a_gradient_hook(rank: Rank) -> None:
    for of in ("parameter", "accumulated gradient", "activation"):
        pair = Pair(rank)
        weight = pair.model.blocks[1].up.weight

        def burn(*_: Any) -> None:
            fuse.burn("hook")

        handles = []
        if of == "accumulated gradient":
            handles.append(weight.register_post_accumulate_grad_hook(burn))
        pair.step(0)
        if of == "parameter":
            handles.append(weight.register_hook(burn))
        output = pair.model(batch_of(rank.rank, 1))
        if of == "activation":
            output.register_hook(burn)
        with fuse.lit("hook"), pytest.raises(PlannedError):
            output.sum().backward()
        for handle in handles:
            handle.remove()
        for number in (2, 3):
            pair.step(number)


@on_ranks(2)
def test_after_an_error_in_backward_the_next_forward_begins_with_nothing_held(rank: Rank) -> None:
    pair = Pair(rank)
    pair.step(0)
    with fuse.lit("block 0 backward"), pytest.raises(PlannedError):
        pair.run(pair.model, rank.rank, 1)
    # The next forward fails first of all at the root: only the root was gathered by then, and the
    # abort releases that, too.
    with fuse.lit("root before"), pytest.raises(PlannedError):
        pair.run(pair.model, rank.rank, 2)
    assert_everything_sharded(pair.model)
    assert all(p.grad is None for p in pair.model.parameters()), "of the failed backward"
    pair.step(3)


@on_ranks(2)
def test_after_an_error_in_backward_parameters_may_be_resharded_or_gathered(rank: Rank) -> None:
    pair = Pair(rank)
    pair.step(0)
    for number, block in enumerate(pair.model.blocks, 1):
        with fuse.lit("block 1 backward"), pytest.raises(PlannedError):
            pair.run(pair.model, rank.rank, number)
        pair.model.reshard()
        assert_everything_sharded(pair.model)
        with fuse.lit("block 1 backward"), pytest.raises(PlannedError):
            pair.run(pair.model, rank.rank, number)
        block.unshard()
        assert torch.equal(
            block.up.weight, pair.shards[f"blocks.{number - 1}.up.weight"].full_tensor()
        )
        pair.step(number)


@pytest.mark.parametrize("use_orig_params", [True, False])
@on_ranks(2)
def test_a_wrapper_may_be_saved_after_an_error_in_backward(
    rank: Rank, use_orig_params: bool
) -> None:
    settings: dict[str, Any] = {"device_mesh": rank.mesh(), "use_orig_params": use_orig_params}
    model = Model()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **settings)
    wrapper = FullyShardedDataParallel(model, **settings)
    optimizer = torch.optim.AdamW(wrapper.parameters())
    with fuse.lit("block 1 backward"), pytest.raises(PlannedError):
        wrapper(batch_of(rank.rank, 0)).sum().backward()
    found = wrapper.state_dict()
    assert set(found) == set(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    with fuse.lit("block 1 backward"), pytest.raises(PlannedError):
        wrapper(batch_of(rank.rank, 0)).sum().backward()
    FullyShardedDataParallel.optim_state_dict(wrapper, optimizer)
    wrapper(batch_of(rank.rank, 0)).sum().backward()


@on_ranks(2)
def test_another_thread_does_not_take_a_backward_for_a_failed_one(rank: Rank) -> None:
    pair = Pair(rank)
    failures: list[str] = []

    def reshard() -> None:
        with pytest.raises(LifecycleError) as caught:
            pair.model.reshard()
        failures.append(str(caught.value))

    def during_backward(*_: Any) -> None:
        thread = threading.Thread(target=reshard)
        thread.start()
        thread.join()

    handle = pair.model.blocks[1].register_full_backward_hook(during_backward)
    pair.forward_backward(0)
    handle.remove()
    assert len(failures) == 1
    assert "while the module computes" in failures[0]
    pair.check("after another thread has called", gradients=True)


@on_ranks(2)
def test_reset_iter_state_lets_go_of_everything_at_once(rank: Rank) -> None:
    pair = Pair(rank)
    pair.step(0)
    with fuse.lit("block 0 backward"), pytest.raises(PlannedError):
        pair.run(pair.model, rank.rank, 1)
    assert held_bytes(pair.model) > 0, "otherwise this proves nothing"
    with pytest.raises(LifecycleError, match=r"blocks\.1: reset_iter_state must be called on"):
        pair.model.blocks[1].reset_iter_state()
    pair.model.reset_iter_state()
    assert_everything_sharded(pair.model)
    pair.step(2)


@on_ranks(2)
def test_gradients_of_earlier_backwards_stay_as_they_were(rank: Rank) -> None:
    """Two micro batches; the forward of the second fails: the first one's gradients remain."""
    pair = Pair(rank)
    pair.forward_backward(0)
    with fuse.lit("block 2 forward"), pytest.raises(PlannedError):
        pair.run(pair.model, rank.rank, 1)
    pair.check("after the failure", gradients=True)
    pair.forward_backward(2)
    pair.check("after a third micro batch", gradients=True)
    pair.update()
    pair.step(3)


@on_ranks(2)
def test_a_failed_forward_between_a_forward_and_its_backward(rank: Rank) -> None:
    pair = Pair(rank)
    pair.step(0)
    loss = pair.model(batch_of(rank.rank, 1)).square().mean()
    with fuse.lit("block 1 forward"), pytest.raises(PlannedError):
        pair.model(batch_of(rank.rank, 2))
    loss.backward()
    for replica in range(rank.size):
        pair.run(pair.reference, replica, 1, 1 / rank.size)
    pair.check("step 1", gradients=True)
    pair.update()
    pair.step(3)


# Shards that change between passes


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@on_ranks(2)
def test_parameters_kept_after_backward_are_gathered_again_after_an_update(
    rank: Rank, reshard_after_forward: bool
) -> None:
    pair = Pair(rank, reshard_after_forward=reshard_after_forward)
    pair.model.set_reshard_after_backward(False)
    for number in range(3):
        pair.forward_backward(number)
        assert not isinstance(pair.model.blocks[1].up.weight, DTensor), "kept"
        pair.check(f"step {number}", gradients=True)
        pair.update()
        pair.check(f"after step {number}", gradients=False)


@on_ranks(2)
def test_unsharding_before_the_update_does_not_keep_stale_parameters(rank: Rank) -> None:
    pair = Pair(rank)
    for number in range(2):
        pair.forward_backward(number)
        pair.model.unshard()
        pair.model.blocks[1].unshard(async_op=True)
        pair.update()
        found = pair.model(batch_of(0, 7)).detach()
        torch.testing.assert_close(found, pair.reference(batch_of(0, 7)).detach())
        pair.model.reshard()
        pair.check(f"after step {number}", gradients=False)


@on_ranks(2)
def test_shards_written_by_hand_are_seen(rank: Rank) -> None:
    pair = Pair(rank)
    batch = batch_of(0, 0)
    pair.model(batch)  # the root stays unsharded for a backward that does not come
    shards = [member.shard for unit in units_of(pair.model) for member in unit.params]
    with torch.no_grad():
        for shard in shards:
            shard.mul_(0.5)
        for parameter in pair.reference.parameters():
            parameter.mul_(0.5)
        torch.testing.assert_close(pair.model(batch), pair.reference(batch))
        for shard in shards:
            shard.to_local().add_(0.25)
        for parameter in pair.reference.parameters():
            parameter.add_(0.25)
        torch.testing.assert_close(pair.model(batch), pair.reference(batch))

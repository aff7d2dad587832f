"""Whole steps as CUDA graphs: they train as eager steps do, to the last bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    by_unit,
    capture,
    fully_shard,
)
from fullshard.errors import UnsupportedError
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.gpu.transformer import Block, Transformer, shard_blocks

BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
RATE = 2.0**-10  # as exact in float32 as it is on the host
NUM_STEPS = 7


class Checkpointed(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(self.norm(x)).float().square().mean()


class Dropping(Transformer):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embedding(tokens), 0.5)
        return self.head(self.norm(x)).float().square().mean()


def in_place(rank: Rank, model: nn.Module, **options: Any) -> nn.Module:
    policy = MixedPrecisionPolicy(**BF16)
    shard_blocks(model, fully_shard, **{"mesh": rank.mesh(), "mp_policy": policy, **options})
    return model


def wrapped(rank: Rank, model: nn.Module) -> nn.Module:
    return FullyShardedDataParallel(
        model,
        process_group=rank.mesh().get_group(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(**BF16),
        device_id=rank.device,
        use_orig_params=True,
    )


def replicated(rank: Rank, model: nn.Module) -> nn.Module:
    return in_place(rank, model, mesh=rank.mesh((2, rank.size // 2), ("replicate", "shard")))


@dataclass
class Trained:
    """A sharded model with its optimizer, and steps of it that take some micro-batches."""

    model: Any
    optimizer: torch.optim.Optimizer
    scaler: ShardedGradScaler | None = None

    def step(self, *micro_batches: torch.Tensor) -> torch.Tensor:
        losses = []
        for number, batch in enumerate(micro_batches):
            if isinstance(self.model, Transformer):
                self.model.set_requires_gradient_sync(number == len(micro_batches) - 1)
            loss = self.model(batch)
            losses.append(loss.detach())
            (loss if self.scaler is None else self.scaler.scale(loss)).backward()
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.1, foreach=True)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).mean()


def trained(
    rank: Rank,
    shard: Callable[[Rank, nn.Module], nn.Module],
    kind: type[Transformer] = Transformer,
    **options: Any,
) -> Trained:
    torch.manual_seed(0)
    model = shard(rank, kind(num_blocks=2).to(rank.device))
    torch.manual_seed(rank.rank)
    how = {"lr": torch.tensor(RATE, device=rank.device), "fused": True, "capturable": True}
    return Trained(model, torch.optim.AdamW(model.parameters(), **{**how, **options}))


def batches(rank: Rank, num_micro: int = 1, length: int = 32) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(10 + rank.rank)
    return [
        [torch.randint(0, 512, (2, length), generator=generator) for _ in range(num_micro)]
        for _ in range(NUM_STEPS)
    ]


def assert_same_losses(
    eager: Trained, captured: Trained, given: Sequence[Sequence[torch.Tensor]]
) -> None:
    expected = [eager.step(*each) for each in given]
    step = capture(captured.step, warmup=2)
    found = [step(*each) for each in given]
    assert step.num_graphs == 1
    assert torch.equal(torch.stack(found), torch.stack(expected))
    assert len(set(torch.stack(found).tolist())) == NUM_STEPS  # it has learned
    for one, other in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        local = [getattr(each, "_local_tensor", each) for each in (one, other)]
        assert torch.equal(*local)


@pytest.mark.parametrize("shard", [in_place, wrapped])
@pytest.mark.parametrize("num_micro", [1, 3])
@on_ranks(2, backend="nccl")
def test_a_captured_step_trains_as_an_eager_one(
    rank: Rank, shard: Callable[[Rank, nn.Module], nn.Module], num_micro: int
) -> None:
    eager, captured = (trained(rank, shard) for _ in range(2))
    assert_same_losses(eager, captured, batches(rank, num_micro))


@on_ranks(4, backend="nccl")
def test_a_step_over_replicas_is_captured(rank: Rank) -> None:
    eager, captured = (trained(rank, replicated) for _ in range(2))
    assert_same_losses(eager, captured, batches(rank))


@on_ranks(2, backend="nccl")
def test_a_step_with_activation_checkpointing_is_captured(rank: Rank) -> None:
    eager, captured = (trained(rank, in_place, Checkpointed) for _ in range(2))
    assert_same_losses(eager, captured, batches(rank))


@on_ranks(2, backend="nccl")
def test_a_step_of_an_optimizer_by_unit_is_captured(rank: Rank) -> None:
    eager, captured = (trained(rank, in_place) for _ in range(2))
    by_unit(eager.optimizer, enabled=False)  # by default both are stepped by unit
    assert_same_losses(eager, captured, batches(rank))


@on_ranks(2, backend="nccl")
def test_a_step_in_float16_with_a_scaler_is_captured(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(torch.float16, torch.float32)
    eager, captured = (trained(rank, partial(in_place, mp_policy=policy)) for _ in range(2))
    for each in (eager, captured):
        each.scaler = ShardedGradScaler(init_scale=2.0**8)
    assert_same_losses(eager, captured, batches(rank))


@on_ranks(2, backend="nccl")
def test_dropout_draws_other_numbers_in_every_replay(rank: Rank) -> None:
    step = capture(trained(rank, in_place, Dropping, lr=0.0).step, warmup=1)
    batch = batches(rank)[0]
    assert len({step(*batch).item() for _ in range(6)}) == 6


@on_ranks(2, backend="nccl")
def test_learning_rates_that_change_take_effect(rank: Rank) -> None:
    eager = trained(rank, in_place)
    captured = trained(rank, in_place, lr=RATE, capturable=False)
    schedulers = [
        torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda step: 0.5**step)
        for each in (eager, captured)
    ]
    losses: list[list[torch.Tensor]] = [[], []]
    steps = [eager.step, capture(captured.step, warmup=2)]
    for number, batch in enumerate(batches(rank)):
        for step, scheduler, found in zip(steps, schedulers, losses, strict=True):
            found.append(step(*batch))
            scheduler.step()
            if number == 4:  # as users without a scheduler do
                for group in scheduler.optimizer.param_groups:
                    group["lr"] = RATE / 8
    assert torch.equal(torch.stack(losses[0])[:1], torch.stack(losses[1])[:1])
    torch.testing.assert_close(torch.stack(losses[0]), torch.stack(losses[1]))


@on_ranks(2, backend="nccl")
def test_other_shapes_eager_steps_and_loaded_states_come_between_replays(rank: Rank) -> None:
    eager, captured = (trained(rank, in_place) for _ in range(2))
    step = capture(captured.step, warmup=1)
    long, short = batches(rank), batches(rank, length=16)
    losses: list[tuple[torch.Tensor, torch.Tensor]] = []

    def both(batch: list[torch.Tensor], run: Callable[..., torch.Tensor] = step) -> None:
        losses.append((eager.step(*batch), run(*batch)))

    for number in range(3):
        for batch in (long[number], short[number]):
            both(batch)
    assert step.num_graphs == 2
    both(long[3], captured.step)  # an eager step
    for run in (eager, captured):
        with torch.no_grad():
            run.model.eval()(long[0][0])
        run.model.train()(long[0][0])  # leaves the root unsharded
    for batch in (long[4], short[4]):
        both(batch)
    for run in (eager, captured):
        with torch.no_grad():
            run.model.eval()(long[0][0])
    kept = {name: value.clone() for name, value in captured.model.state_dict().items()}
    states = [run.optimizer.state_dict() for run in (eager, captured)]
    both(long[5])
    for run, state in zip((eager, captured), states, strict=True):
        run.model.load_state_dict(kept)
        run.optimizer.load_state_dict(state)
    for batch in (long[5], long[6], long[0], short[5]):
        both(batch)
    for expected, found in losses:
        assert torch.equal(found, expected), losses


@on_ranks(2, backend="nccl")
def test_what_is_trained_and_how_may_change_between_replays(rank: Rank) -> None:
    shard = partial(in_place, reshard_after_forward=True)
    eager, captured = (trained(rank, shard) for _ in range(2))
    step = capture(captured.step, warmup=1)
    losses = []
    for number, batch in enumerate(batches(rank)):
        for run in (eager, captured):
            if number == 3:
                run.model.head.requires_grad_(False)
            if number == 5:
                run.optimizer.param_groups[0]["weight_decay"] = 0.5
        losses.append((eager.step(*batch), step(*batch)))
        # This forward keeps what its backward would start with; the next replay changes it.
        losses.append((eager.model(batch[0]).detach(), captured.model(batch[0]).detach()))
        assert step.num_graphs == (number not in (0, 3, 5)), number
    for expected, found in losses:
        assert torch.equal(found, expected), losses


@on_ranks(2, backend="nccl")
def test_an_optimizer_that_lost_its_state_before_the_capture_is_warmed_up_again(rank: Rank) -> None:
    eager, captured = (trained(rank, in_place) for _ in range(2))
    step, given = capture(captured.step, warmup=2), batches(rank)
    for run, one in ((eager, eager.step), (captured, step)):
        for batch in given[:2]:  # the next one would be captured
            one(*batch)
        run.optimizer.state.clear()
    expected = [eager.step(*each) for each in given]
    assert torch.equal(torch.stack([step(*each) for each in given]), torch.stack(expected))
    assert step.num_graphs == 1


@on_ranks(2, backend="nccl")
def test_a_step_that_cannot_be_captured_is_named_and_leaves_the_model_usable(rank: Rank) -> None:
    eager, captured, fallen = (trained(rank, in_place) for _ in range(3))

    def step(run: Trained, batch: torch.Tensor) -> torch.Tensor:
        loss = run.step(batch)
        loss.item()  # waits for the device
        return loss

    given = [each[0] for each in batches(rank)]
    expected = [eager.step(each) for each in given]
    refused = capture(partial(step, captured), warmup=2)
    found = [refused(each) for each in given[:2]]
    with pytest.raises(UnsupportedError, match=r"test_cuda_capture\.py.*loss\.item\(\)"):
        refused(given[2])
    assert torch.rand(4, device=rank.device).unique().numel() == 4  # the generator, too
    found += [captured.step(each) for each in given[2:]]
    assert torch.equal(torch.stack(found), torch.stack(expected))
    relaxed = capture(partial(step, fallen), warmup=2, fallback=True)
    found = [relaxed(each) for each in given[:2]]
    with pytest.warns(UserWarning, match="steps are eager from now on"):
        found.append(relaxed(given[2]))
    found += [relaxed(each) for each in given[3:]]
    assert torch.equal(torch.stack(found), torch.stack(expected))


@on_ranks(1, backend="nccl")
def test_an_interrupted_capture_leaves_the_model_usable(rank: Rank) -> None:
    eager, captured = (trained(rank, in_place) for _ in range(2))
    is_interrupted = True

    def step(batch: torch.Tensor) -> torch.Tensor:
        loss = captured.step(batch)
        if is_interrupted and torch.cuda.is_current_stream_capturing():
            raise KeyboardInterrupt
        return loss

    given = [each[0] for each in batches(rank)]
    expected = [eager.step(each) for each in given]
    replayed = capture(step, warmup=2)
    found = [replayed(each) for each in given[:2]]
    with pytest.raises(KeyboardInterrupt):
        replayed(given[2])
    is_interrupted = False
    found += [captured.step(given[2])]
    found += [replayed(each) for each in given[3:]]
    assert replayed.num_graphs == 1
    assert torch.equal(torch.stack(found), torch.stack(expected))


@on_ranks(1, backend="nccl")
def test_offloaded_parameters_are_refused(rank: Rank) -> None:
    run = trained(
        rank,
        partial(in_place, offload_policy=CPUOffloadPolicy()),
        lr=RATE,
        capturable=False,
    )
    step = capture(run.step, warmup=1)
    batch = batches(rank)[0]
    step(*batch)
    with pytest.raises(UnsupportedError, match="on the host"):
        step(*batch)

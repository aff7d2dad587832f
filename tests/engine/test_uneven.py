"""Ranks that run different units, in any order: `set_uneven`."""

import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

from fullshard import (
    ConfigError,
    CPUOffloadPolicy,
    DisagreementError,
    FullyShardedDataParallel,
    LifecycleError,
    MixedPrecisionPolicy,
    RankFailedError,
    auto_shard,
    explain,
    fully_shard,
)
from fullshard.resilience import watcher
from fullshard.state.checkpoint.load import load
from fullshard.state.checkpoint.save import save
from fullshard.testing import (
    Rank,
    RankPool,
    RanksFailed,
    Training,
    assert_same_training,
    on_ranks,
    pool,
)
from fullshard.wrap import ModuleWrapPolicy

WIDTH = 8
NUM_EXPERTS = 4
LIMIT_S = 90.0


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ValueError("planted")
        return self.down(torch.nn.functional.gelu(self.up(x)))


class Experts(nn.Module):
    """Sends each token to one expert, or to none; decides which ones run, and in which order."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, NUM_EXPERTS + 1)
        self.experts = nn.ModuleList(Expert() for _ in range(NUM_EXPERTS))
        self.checkpoints = False
        self.num_run = 0

    def forward(self, x: Tensor) -> Tensor:
        # The data decide whether anything runs first, and what.
        noise = x.detach().sum().item()
        scores = (3 * self.router(x)).softmax(-1)
        chosen = scores.argmax(-1)
        drawn = torch.Generator().manual_seed(int(97 * noise) % 997)
        order = torch.randperm(NUM_EXPERTS, generator=drawn)
        out = torch.zeros_like(x)  # on a rank that runs no expert, no gradient gets through
        for index in order.tolist() if int(31 * noise) % 4 else ():
            tokens = (chosen == index).nonzero().squeeze(-1)
            if len(tokens):
                self.num_run += 1
                expert, given = self.experts[index], x[tokens]
                done = (
                    checkpoint(expert, given, use_reentrant=False)
                    if self.checkpoints
                    else expert(given)
                )
                out = out.index_add(0, tokens, done * scores[tokens, index, None])
        return out


class Model(nn.Module):
    def __init__(self, residual: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Experts(), Experts()])
        self.between = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.first(x))
        x = x + self.blocks[0](x)
        x = torch.tanh(self.between(x))
        out = self.blocks[1](x)
        out += x  # what a scope returns may be written to
        return self.last(out)


def batch(generator: torch.Generator) -> Tensor:
    return torch.randn(5, WIDTH, generator=generator)


def shard(model: Model, *, is_uneven: bool = True, **options: Any) -> None:
    for block in model.blocks:
        for expert in block.experts:
            fully_shard(expert, **options)
        fully_shard(block, **options)
        if is_uneven:
            block.set_uneven()
    fully_shard(model.between, **options)
    fully_shard(model, **options)


def adam(params: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=0.01)


def wrapped(model: Model, rank: Rank, *, use_orig_params: bool) -> FullyShardedDataParallel:
    result = FullyShardedDataParallel(
        model,
        process_group=rank.mesh().get_group(),
        auto_wrap_policy=ModuleWrapPolicy({Expert, Experts}),
        use_orig_params=use_orig_params,
    )
    for block in result.module.blocks:
        block.set_uneven()
    return result


@pytest.mark.sampled(3)
@pytest.mark.parametrize("api", ["fully_shard", "wrapper", "wrapper with flat parameters"])
@on_ranks(3, timeout_s=LIMIT_S)
def test_experts_that_differ_between_ranks_train_as_the_unsharded_model_does(
    rank: Rank, api: str
) -> None:
    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    blocks = list(model.blocks)
    if api == "fully_shard":
        shard(model, mesh=rank.mesh())
    else:
        model = wrapped(model, rank, use_orig_params=api == "wrapper")
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(20):
        generator = torch.Generator().manual_seed(step)
        batches = [batch(generator) for _ in range(rank.size)]
        losses = [reference(each).square().mean() for each in batches]
        loss = model(batches[rank.rank]).square().mean()
        torch.testing.assert_close(loss, losses[rank.rank])
        (sum(losses) / rank.size).backward()
        loss.backward()
        if step % 10 == 0:
            norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1)
            torch.testing.assert_close(clip_grad_norm_(model, 0.1), norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    num_run: list[Any] = [None] * rank.size
    dist.all_gather_object(num_run, [block.num_run for block in blocks])
    assert num_run[0] != num_run[1], "all ranks ran the same"
    full = StateDictOptions(full_state_dict=True)
    for name, value in get_model_state_dict(model, options=full).items():
        torch.testing.assert_close(value, reference.state_dict()[name])


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    if isinstance(model, FullyShardedDataParallel):
        return model.clip_grad_norm_(max_norm)
    return nn.utils.clip_grad_norm_(model.parameters(), max_norm).full_tensor()


class Layers(nn.Module):
    """Runs other layers in another order on each rank, and may leave early, by another head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, WIDTH)
        self.layers = nn.ModuleList(Expert() for _ in range(5))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(2))
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.fails = False

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        drawn = torch.Generator().manual_seed(int(tokens.sum()))
        num_run = int(torch.randint(6, (), generator=drawn))
        for index in torch.randperm(5, generator=drawn)[:num_run].tolist():
            x = x + self.layers[index](x)
        if self.fails:
            raise ValueError("planted")
        return self.heads[num_run % 2](x)


def tokens(generator: torch.Generator) -> Tensor:
    return torch.randint(16, (4,), generator=generator)


def shard_layers(model: Layers, **options: Any) -> None:
    for layer in (*model.layers, *model.heads, model.unused):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model.set_uneven()


@on_ranks(2, timeout_s=LIMIT_S)
def test_layers_may_be_skipped_and_a_forward_left_early_with_the_root_as_scope(rank: Rank) -> None:
    training = Training(tokens, optimizer=adam, steps=5)
    for after in (None, False):
        options = {"mesh": rank.mesh(), "reshard_after_forward": after}
        trained = assert_same_training(Layers, lambda m, o=options: shard_layers(m, **o), training)
        assert trained.sharded.unused.weight.grad is None


def checkpointing(model: Model) -> None:
    for block in model.blocks:
        block.checkpoints = True


class Recomputed(nn.Module):
    def __init__(self, inner: Callable[[], nn.Module], use_reentrant: bool) -> None:
        super().__init__()
        self.inner = inner()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=self.use_reentrant)


class Around(nn.Module):
    """A module around a scope, with work before and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.experts = Experts()
        self.after = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.before(x))
        return self.after(x + self.experts(x))


def recomputed(use_reentrant: bool) -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, WIDTH),
        Recomputed(Around, use_reentrant),
        Recomputed(Experts, False),
        nn.Linear(WIDTH, 3),
    )


def shard_recomputed(model: nn.Sequential, rank: Rank) -> None:
    around, experts = model[1].inner, model[2].inner
    for block in (around.experts, experts):
        for expert in block.experts:
            fully_shard(expert, mesh=rank.mesh())
        fully_shard(block, mesh=rank.mesh())
        block.set_uneven()
    for each in (around.before, around.after, model):
        fully_shard(each, mesh=rank.mesh())


def shard_in_scopes_in_a_scope(model: Model, mesh: DeviceMesh) -> None:
    shard(model, mesh=mesh)
    model.set_uneven()


def sync_last(model: nn.Module, micro_batch: int) -> None:
    model.set_requires_gradient_sync(micro_batch == 1)


@pytest.mark.exhaustive
@on_ranks(2, timeout_s=LIMIT_S)
def test_uneven_units_can_be_recomputed(rank: Rank) -> None:
    def build() -> Model:
        model = Model()
        checkpointing(model)
        return model

    training = Training(batch, optimizer=adam, steps=4)
    assert_same_training(build, lambda m: shard(m, mesh=rank.mesh()), training)
    for use_reentrant in (False, True):
        build_recomputed = partial(recomputed, use_reentrant)
        assert_same_training(build_recomputed, lambda m: shard_recomputed(m, rank), training)


@pytest.mark.exhaustive
@on_ranks(2, timeout_s=LIMIT_S)
def test_uneven_units_accumulate_offload_and_compute_in_low_precision(rank: Rank) -> None:
    mesh = rank.mesh()
    accumulated = Training(
        batch, optimizer=adam, steps=3, micro_batches=2, before_forward=sync_last
    )
    assert_same_training(Model, lambda m: shard(m, mesh=mesh), accumulated)
    training = Training(batch, optimizer=adam, steps=3)
    offload = CPUOffloadPolicy(pin_memory=False)
    assert_same_training(Model, lambda m: shard(m, mesh=mesh, offload_policy=offload), training)
    for after in (False, 1):
        options = {"mesh": mesh, "reshard_after_forward": after}
        assert_same_training(Model, lambda m, o=options: shard(m, **o), training)
    assert_same_training(Model, lambda m: shard_in_scopes_in_a_scope(m, mesh), training)
    low = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    # One rank decides for all which experts run, so that rounding cannot.
    def run(policy: MixedPrecisionPolicy) -> list[Tensor]:
        torch.manual_seed(0)
        model = Layers()
        shard_layers(model, mesh=mesh, mp_policy=policy)
        model(tokens(torch.Generator().manual_seed(rank.rank))).float().square().mean().backward()
        grads = [param.grad for param in model.parameters()]
        return [each.full_tensor() for each in grads if each is not None]

    for found, expected in zip(run(low), run(MixedPrecisionPolicy()), strict=True):
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.02)


@pytest.mark.exhaustive
@on_ranks(4, timeout_s=LIMIT_S)
def test_uneven_units_are_reduced_over_replicas_too(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    accumulated = Training(
        batch, optimizer=adam, steps=3, micro_batches=2, before_forward=sync_last
    )
    assert_same_training(Model, lambda m: shard(m, mesh=mesh), accumulated)


def own_batch(rank: Rank, step: int) -> Tensor:
    return batch(torch.Generator().manual_seed(100 * step + rank.rank))


@on_ranks(2, timeout_s=LIMIT_S)
def test_a_model_with_uneven_units_evaluates_and_is_saved(rank: Rank, tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference, model = Model(), Model()
    model.load_state_dict(reference.state_dict())
    auto_shard(model, ModuleWrapPolicy({Expert, Experts}), uneven=[Experts], mesh=rank.mesh())
    for step in range(8):
        given = own_batch(rank, step)
        with torch.no_grad():
            torch.testing.assert_close(model(given), reference(given))
    with torch.inference_mode():
        torch.testing.assert_close(model(given), reference(given))
    optimizer = adam(model.parameters())
    for step in range(3):
        model(own_batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    save(tmp_path / "step", model, optimizer)
    again = Model()
    auto_shard(again, ModuleWrapPolicy({Expert, Experts}), uneven=["blocks.0"], mesh=rank.mesh())
    load(tmp_path / "step", again)
    again.blocks[1].set_uneven()
    state = again.state_dict()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name].full_tensor(), value.full_tensor())
    torch.testing.assert_close(again(own_batch(rank, 9)), model(own_batch(rank, 9)))


@on_ranks(2, timeout_s=LIMIT_S)
def test_an_exception_inside_of_a_scope_leaves_the_model_usable(rank: Rank) -> None:
    torch.manual_seed(0)
    model = Layers()
    shard_layers(model, mesh=rank.mesh())
    same = torch.arange(4)
    for _ in range(2):
        # The first rank fails in its first layer, the other one after all of them.
        for each in model.layers if rank.rank == 0 else (model,):
            each.fails = True
        with pytest.raises(ValueError, match="planted"):
            model(same)
        for each in (model, *model.layers):
            each.fails = False
        model(tokens(torch.Generator().manual_seed(rank.rank))).sum().backward()


def fail_in_a_scope(rank: Rank, kind: str, phase: str) -> None:
    os.environ[watcher.SWITCH] = "1"
    model = Model()
    shard(model, mesh=rank.mesh())

    def fail(*_: Any) -> None:
        if kind == "raises":
            raise ZeroDivisionError("planned")
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(20):
        if rank.rank == 1 and step == 2:
            for block in model.blocks:
                for expert in block.experts:
                    if phase == "forward":
                        expert.up.register_forward_pre_hook(fail)
                    else:
                        expert.up.register_full_backward_hook(fail)
        model(own_batch(rank, step)).sum().backward()


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kind", "phase", "found"),
    [
        ("is killed", "backward", "its process is gone"),
        ("raises", "forward", "ZeroDivisionError: planned"),
    ],
)
def test_a_rank_that_fails_inside_of_a_scope_is_named(kind: str, phase: str, found: str) -> None:
    with RankPool(2, timeout_s=LIMIT_S) as ranks, pytest.raises(RanksFailed) as failed:
        ranks.run(fail_in_a_scope, kind, phase, expect_failure=True)
    error = failed.value.exceptions[0].exception
    assert isinstance(error, RankFailedError)
    with pytest.raises(RankFailedError, match=f"^rank 1: .*{found}"):
        raise error


def train_without_set_uneven(rank: Rank) -> list[str]:
    model = Model()
    shard(model, is_uneven=False, mesh=rank.mesh())
    try:
        for step in range(4):
            model(own_batch(rank, step)).sum().backward()
    except DisagreementError as error:
        return [str(error)]
    return []


def test_without_set_uneven_ranks_that_differ_are_told() -> None:
    for message in pool(2).run(train_without_set_uneven, timeout_s=LIMIT_S):
        assert "all ranks must run units in the same order" in message[0]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.b.weight = self.a.weight
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x))
        self.kept.append(x)
        return x.detach() * 2


@on_ranks(2, timeout_s=LIMIT_S)
def test_what_set_uneven_cannot_do_is_refused(rank: Rank) -> None:
    def sharded(model: Any, *inner: nn.Module) -> Any:
        for each in (*inner, model):
            fully_shard(each, mesh=rank.mesh())
        return model

    alone = sharded(nn.Linear(WIDTH, WIDTH))
    alone.set_uneven()
    with pytest.raises(ConfigError, match="needs units inside of this module"):
        alone(torch.ones(2, WIDTH))
    tied = Tied()
    sharded(tied, tied.a, tied.b).set_uneven()
    with pytest.raises(ConfigError, match=r"cannot share its parameters \(tied parameters"):
        tied(torch.ones(2, WIDTH))
    model = Tied()
    model.b.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))
    sharded(model, model.a, model.b).set_uneven()
    model(torch.ones(2, WIDTH))
    with pytest.raises(LifecycleError, match="reached this uneven unit in another way"):
        model.kept[0].sum().backward()
    different = Layers()
    shard_layers(different, mesh=rank.mesh())
    different.set_uneven(rank.rank == 0)
    with pytest.raises(DisagreementError, match="uneven is "):
        different(torch.arange(4))
    with pytest.raises(ConfigError, match="is neither a class nor the name of a unit"):
        auto_shard(Model(), ModuleWrapPolicy({Expert}), uneven=[Experts], mesh=rank.mesh())
    why = [unit.why for unit in explain(Layers(), ModuleWrapPolicy({Expert}), uneven=[""]).units]
    assert [text.endswith("; with uneven=True") for text in why] == [False] * 5 + [True]

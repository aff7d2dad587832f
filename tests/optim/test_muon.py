"""`Muon` trains sharded matrices as `torch.optim.Muon` trains them unsharded."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    ShardingStrategy,
    auto_shard,
    explain,
    fully_shard,
    state,
)
from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError, DisagreementError, UnsupportedError
from fullshard.optim import Muon
from fullshard.sharded_grad_scaler import ShardedGradScaler
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.engine import test_uneven

FORMS = ("rows", "columns", "slices", "flat")


class Block(nn.Module):
    """Matrices of several shapes, wide and tall, of which no size is even."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(7, 11, bias=False)
        self.gate = nn.Linear(7, 11, bias=False)
        self.down = nn.Linear(11, 7, bias=False)
        self.square = nn.Linear(7, 7, bias=False)
        self.thin = nn.Linear(7, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x)) * torch.sigmoid(self.gate(x))
        return x + self.down(hidden) + self.square(x) * self.thin(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def sharded(model: nn.Module, rank: Rank, form: str, **options: Any) -> nn.Module:
    if form in ("slices", "flat"):
        options = {"device_mesh": rank.mesh(rank.size), **options}
        return FullyShardedDataParallel(
            model,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=form == "slices",
            **options,
        )
    mesh = options.pop("mesh", None) or rank.mesh(rank.size)
    if form == "columns":
        options["shard_placement_fn"] = lambda param: Shard(1)
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batch(step: int) -> Tensor:
    return torch.randn(5, 7, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int = 4) -> list[float]:
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {name: param.detach().clone() for name, param in model.named_parameters()}
        return {name.replace("_fsdp_wrapped_module.", ""): each for name, each in found.items()}
    return {
        name: full_tensor(param) if isinstance(param, DTensor) else param.detach()
        for name, param in model.named_parameters()
    }


def seeded() -> Model:
    torch.manual_seed(0)
    return Model()


OPTIONS: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.3, "momentum": 0.8}


def assert_trained_alike(model: nn.Module, expected: nn.Module, **tolerance: float) -> None:
    wanted = whole_params(expected)
    for name, found in whole_params(model).items():
        torch.testing.assert_close(
            found, wanted[name], **tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.sampled(2)
@on_ranks(1, 2, 4)
def test_every_form_trains_as_torchs_muon_unsharded(rank: Rank) -> None:
    for options in ({}, {"nesterov": False, "ns_steps": 4, "adjust_lr_fn": "match_rms_adamw"}):
        reference = seeded()
        expected = train(reference, torch.optim.Muon(reference.parameters(), **OPTIONS, **options))
        assert expected[-1] < expected[0]
        for form in FORMS:
            model = sharded(seeded(), rank, form)
            found = train(model, Muon(model.parameters(), **OPTIONS, **options))
            assert found == pytest.approx(expected, rel=1e-2), form
            assert_trained_alike(model, reference, rtol=1e-2, atol=1e-3)


@on_ranks(4)
def test_replicas_divide_the_work_and_a_gather_gives_the_same(rank: Rank) -> None:
    reference = seeded()
    expected = train(reference, torch.optim.Muon(reference.parameters(), **OPTIONS))
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    hybrid = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    whole = {"device_mesh": rank.mesh(4), "sharding_strategy": ShardingStrategy.NO_SHARD}
    cases: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("rows", {"mesh": mesh}, {}),
        ("slices", hybrid, {}),
        ("flat", hybrid, {"exchange": "all_gather"}),
        ("slices", whole, {}),
        ("rows", {}, {"exchange": "all_gather"}),
    ]
    for form, how, options in cases:
        model = sharded(seeded(), rank, form, **how)
        optimizer = Muon(model.parameters(), **OPTIONS, **options)
        assert train(model, optimizer) == pytest.approx(expected, rel=1e-2), (form, how)
        assert_trained_alike(model, reference, rtol=1e-2, atol=1e-3)
        (work,) = optimizer._work.meshes if optimizer._work else ()
        assert sum(load > 0 for load in work.plan.loads()) == 4, "every rank has some of the work"


class Experts(nn.Module):
    """Stacks of matrices: fewer of them than there are ranks, or more."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(3, 7, 11) / 3)
        self.down = nn.Parameter(torch.randn(6, 11, 7) / 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.einsum("bi,eij->bej", x, self.up).tanh().repeat(1, 2, 1)
        return x + torch.einsum("bej,eji->bi", hidden, self.down)


def test_a_stack_is_trained_as_the_matrices_that_it_consists_of():
    torch.manual_seed(0)
    stack = nn.Parameter(torch.randn(3, 5, 7))
    matrices = [nn.Parameter(each.clone()) for each in stack.detach()]
    ours, theirs = Muon([stack], **OPTIONS), torch.optim.Muon(matrices, **OPTIONS)
    for _ in range(3):
        stack.grad = torch.randn(3, 5, 7)
        for matrix, grad in zip(matrices, stack.grad, strict=True):
            matrix.grad = grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(stack, torch.stack(matrices), rtol=1e-2, atol=1e-3)


@on_ranks(4)
def test_stacks_of_experts_are_trained_in_every_form(rank: Rank) -> None:
    def made() -> nn.Module:
        torch.manual_seed(1)
        model = Model()
        model.blocks = nn.ModuleList(Experts() for _ in range(2))
        return model

    reference = made()
    expected = train(reference, Muon(reference.parameters(), **OPTIONS))
    for form in ("rows", "columns"):
        model = sharded(made(), rank, form)
        optimizer = Muon(model.parameters(), **OPTIONS)
        assert train(model, optimizer) == pytest.approx(expected, rel=1e-2), form
        names = [each.name for each in explain(optimizer).matrices]
        assert len(names) == len(set(names)) == 18
    wrapped = nn.Sequential(
        *(FullyShardedDataParallel(b, use_orig_params=True) for b in made().blocks)
    )
    assert train(wrapped, Muon(wrapped.parameters(), **OPTIONS)) == pytest.approx(
        expected, rel=1e-2
    )


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(7)
        self.mixing = nn.Linear(7, 7)
        self.head = nn.Linear(7, 9, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.mixing(self.norm(x)))


def names_by_group(optimizer: Muon, model: nn.Module) -> list[set[str]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return [{names[id(param)] for param in g["params"]} for g in optimizer.param_groups]


def test_of_a_model_matrices_of_blocks_are_for_muon_and_a_function_decides_otherwise():
    model = Language()
    blocks = {name for name, _ in model.named_parameters() if name.startswith("blocks")}
    vectors = {"embedding.weight", "norm.weight", "norm.bias", "mixing.bias"}
    optimizer = Muon.of(model, lr=0.01, weight_decay=0.2, adamw={"betas": (0.8, 0.9)})
    assert names_by_group(optimizer, model) == [
        blocks | {"mixing.weight"}, {"head.weight"}, vectors,
    ]  # fmt: skip
    options = [
        (group["lr"], group["weight_decay"], group.get("betas"), group.get("adjust_lr_fn"))
        for group in optimizer.param_groups
    ]
    assert options == [
        (0.01, 0.2, None, "match_rms_adamw"),
        (0.01, 0.2, (0.8, 0.9), None),
        (0.01, 0.0, (0.8, 0.9), None),
    ]
    chosen = {"head.weight": True, "mixing.weight": False}
    optimizer = Muon.of(model, by_muon=lambda name, shape: chosen.get(name))
    assert names_by_group(optimizer, model) == [
        blocks | {"head.weight"}, {"mixing.weight"}, vectors,
    ]  # fmt: skip


def shard_language(model: nn.Module, rank: Rank, **options: Any) -> None:
    auto_shard(model, ModuleWrapPolicy({Block}), mesh=rank.mesh(rank.size), **options)


def tokens_of(generator: torch.Generator) -> Tensor:
    return torch.randint(9, (2, 5), generator=generator)


CLOSE = {"rtol": 1e-3, "atol": 2e-4}


@on_ranks(2)
def test_a_model_trains_accumulated_offloaded_and_with_an_optimizer_from_before(rank: Rank) -> None:
    kept: list[Muon] = []

    def made_before(model: nn.Module) -> None:
        kept.append(Muon.of(model, lr=1e-3))
        shard_language(model, rank)

    for shard in (
        lambda m: shard_language(m, rank, offload_policy=CPUOffloadPolicy()),
        lambda m: shard_language(m, rank, reshard_after_forward=False),
        made_before,
    ):
        models: list[nn.Module] = []

        def build(models: list[nn.Module] = models) -> nn.Module:
            models.append(Language())
            return models[-1]

        def optimizer(params: Any, models: list[nn.Module] = models) -> Any:
            return kept.pop() if kept else Muon.of(models[-1], lr=1e-3)

        training = Training(tokens_of, optimizer=optimizer, micro_batches=2)
        trained = assert_same_training(build, shard, training, **CLOSE)
        assert any("momentum_buffer" in state for state in trained.optimizer.state.values())
        assert any("exp_avg" in state for state in trained.optimizer.state.values())


@on_ranks(2)
def test_units_that_only_some_ranks_run_are_trained(rank: Rank) -> None:
    models: list[nn.Module] = []

    def build() -> nn.Module:
        models.append(test_uneven.Model())
        return models[-1]

    training = Training(test_uneven.batch, optimizer=lambda _: Muon.of(models[-1], lr=1e-3))
    assert_same_training(build, lambda m: test_uneven.shard(m, mesh=rank.mesh()), training, **CLOSE)


class Optional(Model):
    """Runs its first blocks only."""

    def forward(self, x: Tensor, number: int = 3) -> Tensor:
        for block in self.blocks[:number]:
            x = block(x)
        return x


@on_ranks(1, 4)
def test_matrices_without_gradients_and_their_momenta_stay_as_they_are(rank: Rank) -> None:
    def run(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step, number in enumerate((2, 3, 1, 3)):
            optimizer.zero_grad()
            model(batch(step), number).square().mean().backward()
            optimizer.step()

    def made() -> Optional:
        torch.manual_seed(0)
        return Optional()

    reference = made()
    run(reference, torch.optim.Muon(reference.parameters(), **OPTIONS))
    for form in ("rows", "slices"):
        model = sharded(made(), rank, form)
        optimizer = Muon(model.parameters(), **OPTIONS)
        run(model, optimizer)
        assert_trained_alike(model, reference, rtol=1e-2, atol=1e-3)


@on_ranks(2)
def test_a_step_that_a_scaler_or_the_device_skips_changes_nothing(rank: Rank) -> None:
    model = sharded(seeded(), rank, "rows")
    optimizer = Muon(model.parameters(), **OPTIONS)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)

    def step(is_spoiled: bool, found_inf: Tensor | None = None) -> None:
        loss = model(batch(0)).square().mean()
        (loss if found_inf is not None else scaler.scale(loss)).backward()
        if is_spoiled and rank.rank == 1:
            param = next(iter(model.parameters()))
            param.grad.to_local()[0, 0] = float("nan")  # type: ignore[union-attr]
        if found_inf is not None:
            optimizer.found_inf = found_inf
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        optimizer.zero_grad()

    def values() -> list[Tensor]:
        momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
        return [full_tensor(each).clone() for each in (*model.parameters(), *momenta)]

    step(is_spoiled=False)
    before = values()
    step(is_spoiled=True)
    step(is_spoiled=True, found_inf=torch.ones(1))
    assert all(map(torch.equal, values(), before))
    step(is_spoiled=False, found_inf=torch.zeros(1))
    assert not any(map(torch.equal, values(), before))
    assert all(each.isfinite().all() for each in values())


def test_state_is_that_of_torchs_muon():
    ours, theirs = seeded(), seeded()
    mine = Muon(ours.named_parameters(), **OPTIONS)
    other = torch.optim.Muon(theirs.named_parameters(), **OPTIONS)
    train(ours, mine, 2)
    train(theirs, other, 2)
    found, expected = mine.state_dict(), other.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    for number, wanted in expected["state"].items():
        assert found["state"][number].keys() == wanted.keys()
        moments = found["state"][number]["momentum_buffer"], wanted["momentum_buffer"]
        torch.testing.assert_close(*moments, rtol=1e-2, atol=1e-4)
    mine.load_state_dict(expected)
    ours.load_state_dict(theirs.state_dict())
    copied = copy.deepcopy(mine)
    assert [type(each) for each in (copied, pickle.loads(pickle.dumps(mine)))] == [Muon, Muon]
    assert train(ours, mine, 2) == pytest.approx(train(theirs, other, 2), rel=1e-2)


@on_ranks(2)
def test_a_checkpoint_of_one_form_is_resumed_in_another(rank: Rank, tmp_path: Path) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return Language()

    def go_on(model: nn.Module, optimizer: Muon, steps: range) -> list[float]:
        losses = []
        for number in steps:
            optimizer.zero_grad()
            tokens = tokens_of(torch.Generator().manual_seed(number))
            loss = model(tokens).square().mean()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    alone = made()
    expected = go_on(alone, Muon.of(alone), range(4))
    rows = made()
    shard_language(rows, rank)
    optimizer = Muon.of(rows)
    go_on(rows, optimizer, range(2))
    state.save(tmp_path / "saved", rows, optimizer)
    slices = FullyShardedDataParallel(
        made(), device_mesh=rank.mesh(2), auto_wrap_policy=ModuleWrapPolicy({Block}),
        use_orig_params=True,
    )  # fmt: skip
    other = Muon.of(slices)
    state.load(tmp_path / "saved", slices, other)
    assert go_on(slices, other, range(2, 4)) == pytest.approx(expected[2:], rel=1e-3)


@on_ranks(2)
def test_the_owners_are_printed_and_ranks_that_differ_are_told(rank: Rank) -> None:
    model = sharded(seeded(), rank, "rows")
    optimizer = Muon(model.parameters(), **OPTIONS)
    model(batch(0)).square().mean().backward()
    owners = explain(optimizer)
    assert {each.owner for each in owners.matrices} == {"rank 0", "rank 1"}
    assert sum(each.share for each in owners.matrices) == pytest.approx(1.0)
    numel = sum(each.shape[0] * each.shape[1] for each in owners.matrices)
    assert owners.sent_bytes == pytest.approx(numel, rel=0.3)  # half of a half, each way, in bf16
    text = repr(owners)
    assert re.search(r"blocks\.0\.up\.weight +11 x 7 +rank [01] +\d", text)
    assert "15 matrices" in text
    assert 1.0 <= owners.imbalance < 1.2
    params = list(model.parameters())
    odd = Muon(params[::-1] if rank.rank else params, **OPTIONS)
    with pytest.raises(DisagreementError, match="do not train the same matrices"):
        odd.step()


@pytest.mark.parametrize(
    "options, said",
    [
        ({"ns_steps": 0}, "ns_steps must be from 1 to 99, not 0"),
        ({"ns_steps": 100}, "not 100"),
        ({"lr": -1.0}, "lr must not be negative, but is -1.0"),
        ({"momentum": float("nan")}, "momentum must not be negative"),
        ({"adjust_lr_fn": "other"}, "'original' or 'match_rms_adamw', not 'other'"),
        ({"ns_coefficients": (1.0, 2.0)}, "must be three numbers"),
        ({"exchange": "ring"}, "not 'ring'"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, said):
    with pytest.raises(ConfigError, match=re.escape(said)):
        Muon([nn.Parameter(torch.zeros(2, 2))], **options)


@on_ranks(2)
def test_what_is_no_matrix_is_refused(rank: Rank) -> None:
    for shape in ((3,), (), (2, 2, 2, 2)):
        with pytest.raises(ConfigError, match="param_0: Muon trains matrices and stacks of them"):
            Muon([("param_0", nn.Parameter(torch.zeros(shape)))])
    with pytest.raises(ConfigError, match="Muon trains real parameters"):
        Muon([nn.Parameter(torch.zeros(2, 2, dtype=torch.complex64))])
    foreign = distribute_tensor(torch.zeros(4, 4), rank.mesh(2), [Shard(0)])
    with pytest.raises(UnsupportedError, match="no fully_shard of fullshard made"):
        Muon([nn.Parameter(foreign)])
    flat = FullyShardedDataParallel(Language(), device_mesh=rank.mesh(2), use_orig_params=False)
    with pytest.raises(ConfigError, match="use_orig_params=True"):
        Muon.of(flat)
    with pytest.raises(ConfigError, match="use_orig_params=True"):
        Muon(flat.parameters())
    mesh = rank.mesh((1, 2), ("dp", "tp"))
    parallel = nn.Linear(4, 4, bias=False)
    parallel.weight = nn.Parameter(distribute_tensor(parallel.weight, mesh["tp"], [Shard(0)]))
    fully_shard(parallel, mesh=mesh["dp"])
    with pytest.raises(UnsupportedError, match="tensor parallelism splits this matrix"):
        Muon(parallel.parameters())
    empty = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="No parameter of Linear requires a gradient"):
        Muon.of(empty)

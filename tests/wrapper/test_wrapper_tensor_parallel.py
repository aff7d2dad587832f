"""`FullyShardedDataParallel` over tensor parallelism: parameters that are DTensors on another axis.

Torch's class is the oracle on the same mesh, and the unsharded model where torch's is wrong: its
`clip_grad_norm_` forgets the other axis, and its full state dicts hold this rank's part of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import Adam

from fullshard.errors import CheckpointError, TopologyError
from fullshard.state.checkpoint.load import load
from fullshard.state.checkpoint.save import save
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import EQUAL, OURS, TORCH, Package, full

FORMS = pytest.mark.parametrize("use_orig_params", [True, False])


class Block(nn.Module):
    """Its `up` is split by rows, its `down` by columns; the bias of `down` is on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 10)
        self.down = nn.Linear(10, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Tower(nn.Module):
    """Two blocks that are tensor parallel, and a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def tower(seed: int = 0, mesh: DeviceMesh | None = None) -> Tower:
    torch.manual_seed(seed)
    model = Tower()
    for block in model.blocks if mesh is not None else ():
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(block, mesh["tp"], plan)
    return model


def wrapped(package: Package, rank: Rank, seed: int = 0, **options: Any) -> Any:
    """One wrapper around a block, and one around the rest: both kinds of parameters."""
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = tower(seed, mesh)
    options["device_mesh"] = mesh["dp"]
    model.blocks[0] = package(model.blocks[0], **options)
    return package(model, **options)


def batch(step: int, dp_rank: int) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + dp_rank))


def adam(model: nn.Module) -> Adam:
    return Adam(model.parameters(), lr=0.01)


def train(model: Any, optimizer: Adam, rank: Rank, num_steps: int = 2) -> list[Tensor]:
    losses = []
    for step in range(num_steps):
        loss = model(batch(step, rank.rank // 2)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def train_reference(num_steps: int = 2) -> tuple[nn.Module, Adam]:
    """The model that is not sharded, with the batches of both data-parallel ranks."""
    model = tower()
    optimizer = adam(model)
    for step in range(num_steps):
        for dp_rank in range(2):
            (model(batch(step, dp_rank)).square().mean() / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@contextmanager
def state_dict_type(package: Package, model: Any, kind: str, *configs: Any) -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's calls what it deprecates
        with package.FSDP.state_dict_type(model, package.package.StateDictType[kind], *configs):
            yield


def assert_same(actual: dict[str, Any], expected: dict[str, Any], what: str = "") -> None:
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        EQUAL.check(full(actual[name].detach()), full(value.detach()), f"{what} {name}")


def flat_states(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    return {
        f"{name}.{key}": value
        for name, state in state_dict["state"].items()
        for key, value in state.items()
    }


# Training


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "use_orig_params, strategy",
    [(True, "FULL_SHARD"), (False, "FULL_SHARD"), (True, "SHARD_GRAD_OP"), (False, "NO_SHARD")],
)
@on_ranks(4)
def test_tensor_parallel_models_train_like_torchs(
    rank: Rank, use_orig_params: bool, strategy: str
) -> None:
    options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
    model = wrapped(OURS, rank, **options)
    optimizer = adam(model)
    losses = train(model, optimizer, rank)
    held = [param for group in optimizer.param_groups for param in group["params"]]
    assert not any(isinstance(param, DTensor) for param in held)
    reference, _ = train_reference()
    assert_same(model.state_dict(), reference.state_dict())
    # Without sharding, torch's original parameters cannot: "Cannot writeback when the ..."
    theirs = wrapped(TORCH, rank, **options)
    EQUAL.check(losses, train(theirs, adam(theirs), rank), "losses")


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_mixed_precision_trains_like_torchs(rank: Rank, use_orig_params: bool) -> None:
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    losses = []
    for package in (OURS, TORCH):
        model = wrapped(package, rank, **options)
        losses.append(train(model, adam(model), rank))
    EQUAL.check(losses[0], losses[1], "losses")
    assert model(batch(0, 0)).dtype == torch.bfloat16


@FORMS
@on_ranks(4)
def test_modules_see_dtensors_while_they_compute(rank: Rank, use_orig_params: bool) -> None:
    model = wrapped(OURS, rank, use_orig_params=use_orig_params)
    seen = []
    up = model.module.blocks[1].up
    up.register_forward_pre_hook(lambda module, _: seen.append(module.weight))
    model(batch(0, 0))
    assert isinstance(seen[0], DTensor)
    assert seen[0].shape == (10, 8)


@FORMS
@on_ranks(4)
def test_an_optimizer_of_before_wrapping_follows(rank: Rank, use_orig_params: bool) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))
    model = tower(mesh=mesh)
    optimizer = adam(model)
    model = OURS(model, device_mesh=mesh["dp"], use_orig_params=use_orig_params)
    train(model, optimizer, rank)
    reference, _ = train_reference()
    assert_same(model.state_dict(), reference.state_dict())


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_orig_params, shape", [(True, (2, 1, 2)), (False, (1, 2, 2))])
@on_ranks(4)
def test_accumulated_gradients_and_replicas(
    rank: Rank, use_orig_params: bool, shape: tuple[int, int, int]
) -> None:
    mesh = rank.mesh(shape, ("replicate", "shard", "tp"))
    model = OURS(
        tower(mesh=mesh),
        device_mesh=mesh["replicate", "shard"],
        sharding_strategy="HYBRID_SHARD",
        use_orig_params=use_orig_params,
    )
    optimizer = adam(model)
    with model.no_sync():
        model(batch(0, rank.rank // 2)).square().mean().backward()
    model(batch(1, rank.rank // 2)).square().mean().backward()
    optimizer.step()
    reference = tower()
    expected = adam(reference)
    for step in range(2):
        for dp_rank in range(2):
            (reference(batch(step, dp_rank)).square().mean() / 2).backward()
    expected.step()
    assert_same(model.state_dict(), reference.state_dict())
    with state_dict_type(OURS, model, "SHARDED_STATE_DICT") if shape[1] > 1 else nullcontext():
        assert_same(model.state_dict(), reference.state_dict())


@on_ranks(4)
def test_ranks_start_with_the_values_of_the_first(rank: Rank) -> None:
    model = wrapped(OURS, rank, seed=rank.rank // 2, sync_module_states=True)
    assert_same(model.state_dict(), tower(seed=0).state_dict())


@on_ranks(4)
def test_a_mesh_that_is_no_neighbor_of_the_parameters_is_refused(rank: Rank) -> None:
    model = tower(mesh=rank.mesh((2, 2), ("dp", "tp")))
    with pytest.raises(TopologyError, match="slices of one root mesh"):
        OURS(model, device_mesh=rank.mesh((4,), ("all",)))


# Gradients


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "use_orig_params, order", [(True, 2.0), (False, 2.0), (True, 1.0), (False, torch.inf)]
)
@on_ranks(4)
def test_the_norm_is_that_of_the_whole_model(
    rank: Rank, use_orig_params: bool, order: float
) -> None:
    reference = tower()
    for dp_rank in range(2):
        (reference(batch(0, dp_rank)).square().mean() / 2).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, order)
    model = wrapped(OURS, rank, use_orig_params=use_orig_params)
    model(batch(0, rank.rank // 2)).square().mean().backward()
    EQUAL.check(model.clip_grad_norm_(0.1, order), norm, "norm")
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    assert_same(model.state_dict(), reference.state_dict())


# Summoned parameters


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_summoned_parameters_are_dtensors_and_are_written_back(
    rank: Rank, use_orig_params: bool
) -> None:
    shown = {}
    for package in (OURS, TORCH):
        model = wrapped(package, rank, use_orig_params=use_orig_params)
        names = [name for name, _ in model.named_parameters()]
        with package.FSDP.summon_full_params(model):
            shown[package] = {
                name: (type(param.data), param.shape) for name, param in model.named_parameters()
            }
            for param in model.parameters():
                param.detach().mul_(2)
        assert [name for name, _ in model.named_parameters()] == names
        expected = {name: 2 * value for name, value in tower().state_dict().items()}
        with state_dict_type(package, model, "SHARDED_STATE_DICT"):
            assert_same(model.state_dict(), expected, str(package))
    assert shown[OURS] == shown[TORCH]
    assert train(model, adam(model), rank, num_steps=1)


@on_ranks(4)
def test_gradients_are_summoned_too(rank: Rank) -> None:
    reference = tower()
    for dp_rank in range(2):
        (reference(batch(0, dp_rank)).square().mean() / 2).backward()
    model = wrapped(OURS, rank, use_orig_params=True)
    model(batch(0, rank.rank // 2)).square().mean().backward()
    with OURS.FSDP.summon_full_params(model, with_grads=True):
        found = {name: full(param.grad).clone() for name, param in model.named_parameters()}
        for param in model.parameters():
            param.grad.mul_(2)
    assert_same(found, {name: param.grad for name, param in reference.named_parameters()})
    with OURS.FSDP.summon_full_params(model, with_grads=True):
        found = {name: full(param.grad).clone() for name, param in model.named_parameters()}
    assert_same(found, {name: 2 * param.grad for name, param in reference.named_parameters()})


# State dicts


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_full_state_dicts_hold_whole_tensors(rank: Rank, use_orig_params: bool) -> None:
    model = wrapped(OURS, rank, use_orig_params=use_orig_params)
    expected = tower().state_dict()
    state = model.state_dict()
    assert list(state) == list(expected)
    assert not any(isinstance(value, DTensor) for value in state.values())
    torch.testing.assert_close(dict(state), dict(expected), rtol=0, atol=0)
    config = OURS.package.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with state_dict_type(OURS, model, "FULL_STATE_DICT", config):
        state = model.state_dict()
    assert_same(state, expected if rank.rank < 2 else {})
    target = wrapped(OURS, rank, seed=1, use_orig_params=not use_orig_params)
    target.load_state_dict(expected)
    assert_same(target.state_dict(), expected)
    with OURS.FSDP.summon_full_params(model, writeback=True):
        assert_same(model.state_dict(), expected)
        model.load_state_dict({name: 3 * value for name, value in expected.items()})
    assert_same(model.state_dict(), {name: 3 * value for name, value in expected.items()})


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_sharded_state_dicts_are_placed_like_torchs(rank: Rank, use_orig_params: bool) -> None:
    placed = {}
    for package in (OURS, TORCH):
        model = wrapped(package, rank, use_orig_params=use_orig_params)
        with state_dict_type(package, model, "SHARDED_STATE_DICT"):
            state = model.state_dict()
        assert_same(state, tower().state_dict(), str(package))
        placed[package] = {
            name: (value.device_mesh.mesh_dim_names, value.placements, value.to_local().shape)
            for name, value in state.items()
            if "head" not in name
        }
    assert placed[OURS] == placed[TORCH]


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_a_checkpoint_of_dcp_survives_a_round_trip_also_from_torchs(
    rank: Rank, use_orig_params: bool, tmp_path: Path
) -> None:
    for number, (source, target) in enumerate([(OURS, OURS), (TORCH, OURS), (OURS, TORCH)]):
        model = wrapped(source, rank, use_orig_params=use_orig_params)
        with state_dict_type(source, model, "SHARDED_STATE_DICT"):
            dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / str(number))
        other = wrapped(target, rank, seed=1, use_orig_params=use_orig_params)
        with state_dict_type(target, other, "SHARDED_STATE_DICT"):
            state = {"model": other.state_dict()}
            dcp.load(state, checkpoint_id=tmp_path / str(number))
            other.load_state_dict(state["model"])
            assert_same(other.state_dict(), tower().state_dict())


@on_ranks(4)
def test_what_does_not_fit_is_refused_on_all_ranks(rank: Rank) -> None:
    model = wrapped(OURS, rank)
    state = tower(seed=1).state_dict()
    if rank.rank == 3:
        state["blocks.1.up.weight"] = torch.zeros(5, 8)
    with pytest.raises(CheckpointError, match=r"blocks\.1\.up\.weight"):
        model.load_state_dict(state)
    assert_same(model.state_dict(), tower().state_dict())


# State of optimizers


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "use_orig_params, kind",
    [(False, "FULL_STATE_DICT"), (False, "SHARDED_STATE_DICT"), (True, "SHARDED_STATE_DICT")],
)
@on_ranks(4)
def test_optimizer_state_is_that_of_torchs_and_can_be_loaded(
    rank: Rank, use_orig_params: bool, kind: str
) -> None:
    found, losses = {}, {}
    for package in (OURS, TORCH):
        model = wrapped(package, rank, use_orig_params=use_orig_params)
        optimizer = adam(model)
        train(model, optimizer, rank)
        with state_dict_type(package, model, kind):
            saved = package.FSDP.optim_state_dict(model, optimizer)
        found[package] = flat_states(saved)
        if package is OURS:
            reference, expected = train_reference()
            names = [name for name, _ in reference.named_parameters()]
            states = {names[key]: state for key, state in expected.state_dict()["state"].items()}
            assert_same(found[OURS], flat_states({"state": states}))
            other = wrapped(OURS, rank, use_orig_params=not use_orig_params)
            other.load_state_dict(model.state_dict())
            loaded = adam(other)
            for _ in range(2):  # the second time with state that is there
                state = OURS.FSDP.optim_state_dict_to_load(other, loaded, saved)
                loaded.load_state_dict(state)
            losses["loaded"] = train(other, loaded, rank)
            losses["kept"] = train(model, optimizer, rank)
    EQUAL.check(losses["loaded"], losses["kept"], "losses")
    if kind == "SHARDED_STATE_DICT":  # some of torch's values in full ones are wrong
        assert_same(found[OURS], found[TORCH])
    assert isinstance(found[OURS]["blocks.0.up.weight.exp_avg"], DTensor) == ("SHARDED" in kind)


@on_ranks(4)
def test_optimizer_state_of_one_rank_is_whole_and_can_be_loaded(rank: Rank) -> None:
    model = wrapped(OURS, rank, use_orig_params=True)
    optimizer = adam(model)
    train(model, optimizer, rank)
    config = OURS.package.FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with state_dict_type(OURS, model, "FULL_STATE_DICT", None, config):
        saved = OURS.FSDP.optim_state_dict(model, optimizer)
        assert bool(saved) == (rank.rank == 0)
        other = adam(model)
        other.load_state_dict(OURS.FSDP.optim_state_dict_to_load(model, other, saved))
    EQUAL.check(
        [state["exp_avg"] for state in other.state.values()],
        [state["exp_avg"] for state in optimizer.state.values() if state["exp_avg"].numel()],
        "moments",
    )
    if rank.rank == 0:
        _, expected = train_reference()
        moment = expected.state_dict()["state"][0]["exp_avg"]
        EQUAL.check(saved["state"]["blocks.0.up.weight"]["exp_avg"], moment, "moment")


@pytest.mark.sampled(2)
@pytest.mark.parametrize("use_orig_params, is_full", [(True, False), (False, True)])
@on_ranks(4)
def test_torchs_helpers_get_and_set_state(rank: Rank, use_orig_params: bool, is_full: bool) -> None:
    options = StateDictOptions(full_state_dict=is_full)
    model = wrapped(OURS, rank, use_orig_params=use_orig_params)
    optimizer = adam(model)
    train(model, optimizer, rank)
    state, optim_state = get_state_dict(model, optimizer, options=options)
    reference, _ = train_reference()
    assert_same(state, reference.state_dict())
    other = wrapped(OURS, rank, seed=1, use_orig_params=use_orig_params)
    loaded = adam(other)
    set_state_dict(
        other,
        loaded,
        model_state_dict=state,
        optim_state_dict=optim_state,
        options=options,
    )
    EQUAL.check(train(other, loaded, rank), train(model, optimizer, rank), "losses")


# Checkpoints of our own


@pytest.mark.sampled(2)
@FORMS
@on_ranks(4)
def test_a_checkpoint_loads_into_another_form_and_into_a_plain_model(
    rank: Rank, use_orig_params: bool, tmp_path: Path
) -> None:
    mesh = rank.mesh((2, 2), ("dp", "tp"))

    def make(seed: int, use_orig_params: bool) -> tuple[Any, Adam]:
        block = tower(seed, mesh).blocks[1]
        model = OURS(block, device_mesh=mesh["dp"], use_orig_params=use_orig_params)
        return model, adam(model)

    model, optimizer = make(0, use_orig_params)
    train(model, optimizer, rank)
    save(tmp_path / "saved", model, optimizer)
    expected = model.state_dict()
    losses = train(model, optimizer, rank)
    other, loaded = make(1, not use_orig_params)
    load(tmp_path / "saved", other, loaded)
    EQUAL.check(train(other, loaded, rank), losses, "losses")
    whole = Block()
    load(tmp_path / "saved", whole)
    assert_same(whole.state_dict(), expected)

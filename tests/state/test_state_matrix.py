"""State dicts of models and optimizers: every form, every kind, against two oracles.

A state dict saved in any form and kind is that of the unsharded model and, where torch has the
form, that of torch; loaded into other forms, training goes on as that of the unsharded model.
"""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from fullshard.testing import Rank, on_ranks, pool
from tests.support.sharded_states import (
    FULL,
    FULLY_SHARD_KINDS,
    LOCAL,
    OPTIMIZERS,
    SHARDED,
    WRAPPER_KINDS,
    Form,
    Kind,
    MatrixNet,
    Net,
    OddNet,
    TiedAcrossNet,
    TiedNet,
    Trainee,
    UnusedNet,
    assert_same,
    by_set,
    forms,
    gathered,
    named_state,
    quiet,
    set_kind,
    snapshot,
)
from tests.support.wrapped import TORCH

CASES: list[tuple[type[nn.Module], str]] = [
    (Net, "adamw"),
    (Net, "momentum"),
    (Net, "plain"),
    (Net, "adagrad"),
    (Net, "counting"),
    (Net, "rich"),
    (OddNet, "adamw"),
    (OddNet, "adagrad"),
    (TiedNet, "adamw"),
    (TiedAcrossNet, "momentum"),
    (UnusedNet, "adamw"),
    (MatrixNet, "muon"),
]
# torch's functions, by which the state of `fully_shard` is taken, know these.
FULLY_SHARD_CASES = [(Net, "adamw"), (Net, "momentum"), (MatrixNet, "muon")]


def kinds_of(form: Form) -> list[Kind]:
    if not form.is_wrapper:
        return FULLY_SHARD_KINDS
    return [kind for kind in WRAPPER_KINDS if kind != LOCAL or form.mesh is None]


def is_known_to_torch(form: Form, kind: Kind, build: Any, optimizer: str) -> bool:
    """Whether torch saves this, and saves it right."""
    if not form.torch_has_it or build in (OddNet, TiedAcrossNet, UnusedNet):
        return False
    if not form.is_sharded and kind.name != "FULL":
        return False
    return optimizer != "rich" and not (kind.name == "FULL" and kind.config.get("offload_to_cpu"))


def assert_is_split(value: Any, form: Form, kind: Kind) -> None:
    if kind.name in ("FULL", "dcp"):
        is_split = kind.name == "dcp" and "full_state_dict" not in kind.config
        assert isinstance(value, DTensor) == is_split
    elif form.is_sharded:
        assert isinstance(value, DTensor if form.mesh is not None else ShardedTensor)
    if isinstance(value, DTensor):
        assert value.placements == (Replicate(), Shard(0))[2 - value.device_mesh.ndim :]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "build, optimizer", [pytest.param(*CASES[0], marks=pytest.mark.long), *CASES[1:]]
)
@on_ranks(4, timeout_s=400.0)
def test_state_is_that_of_the_unsharded_model_and_of_torch_and_loads_into_other_forms(
    rank: Rank, build: type[nn.Module], optimizer: str
) -> None:
    make = OPTIMIZERS[optimizer]
    before = Trainee.of(None, build, make).train(rank)
    after = Trainee.of(None, build, make).train(rank, (0, 1, 2))
    chosen = {
        name: form
        for name, form in forms(rank).items()
        if form.is_wrapper or (build, optimizer) in FULLY_SHARD_CASES
        if form.is_nested or build is not UnusedNet  # an unused part of a unit has gradients of 0
    }
    number_of_case = CASES.index((build, optimizer))
    is_first_case = number_of_case == 0
    # All forms in the first case, later a quarter of them, so that each has several cases.
    names = list(chosen) if is_first_case else list(chosen)[number_of_case % 4 :: 4]
    for number, name in enumerate(names):
        form = chosen[name]
        source = Trainee.of(form, build, make).train(rank)
        oracle = None
        if form.torch_has_it and build in (Net, TiedNet):
            oracle = Trainee.of(form, build, make, api=TORCH).train(rank)
        # Every kind from every third form in the first case, later the full and the sharded one.
        kinds = list(enumerate(kinds_of(form)))
        for shift, kind in kinds[number % 3 :: 3] if is_first_case else kinds[::4]:
            state = check_saved(rank, source, kind, before, f"{name}, {kind}")
            if oracle is not None and is_known_to_torch(form, kind, build, optimizer):
                check_as_torchs(state, oracle.saved(kind), form, kind, f"{name}, {kind}")
            # Into the form that is so many places further.
            other = names[(number + 2 * shift + 1) % len(names)]
            if can_load(chosen[other], form, kind):
                target = Trainee.of(chosen[other], build, make, seed=1)
                load_into(target, state, kind, before.model.state_dict())
                target.train(rank, (2,))
                found = target.saved(kinds_of(chosen[other])[0])
                check_state(found, after, f"{name}, {kind} into {other}")


def check_state(state: tuple[Any, Any], expected: Trainee, what: str) -> None:
    """Gathered, the state is that of an unsharded model."""
    model, optimizer = expected.model, expected.optimizer
    is_ordered = isinstance(model, Net)
    assert_same(gathered(state[0]), dict(model.state_dict()), what, ordered=is_ordered)
    assert_same(by_set(gathered(state[1])), by_set(named_state(model, optimizer)), what)


def check_saved(
    rank: Rank, source: Trainee, kind: Kind, expected: Trainee, what: str
) -> tuple[Any, Any]:
    assert source.form is not None
    saved, optim = source.saved(kind)
    if kind.is_on_rank0_only and rank.rank > 0:
        assert not optim
        return saved, optim
    weights = dict(expected.model.state_dict()) if kind == LOCAL else saved
    check_state((weights, optim), expected, what)
    moments = optim["state"].get("first.weight", {})
    if "exp_avg" in moments:
        assert_is_split(moments["exp_avg"], source.form, kind)
    return saved, optim


def check_as_torchs(
    state: tuple[Any, Any], theirs: tuple[Any, Any], form: Form, kind: Kind, what: str
) -> None:
    assert_same(state[1], theirs[1], what)
    # Of several replicas, torch takes one rank of each for the first; of whole models, every rank.
    has_replicas = not form.is_sharded or (form.mesh is not None and form.mesh.ndim == 2)
    if kind != LOCAL and not (kind.is_on_rank0_only and has_replicas):
        assert_same(state[0], theirs[0], what)


def load_into(target: Trainee, state: tuple[Any, Any], kind: Kind, weights: Any) -> None:
    assert target.form is not None
    saved, optim = copy.deepcopy(state) if kind.name == "dcp" else state  # the source's own tensors
    # The wrapper loads a model from all ranks, and an optimizer from one if asked to.
    is_missing = kind == LOCAL or (kind.is_on_rank0_only and target.form.is_wrapper)
    target.load(weights if is_missing else saved, optim, kind)


def can_load(target: Form, source: Form, kind: Kind) -> bool:
    """`fully_shard` takes full values of all ranks, and `DTensor`s of its own mesh."""
    if target.is_wrapper:
        return True
    if kind.name == "FULL" or "full_state_dict" in kind.config:
        return kind.name == "dcp" or not kind.is_on_rank0_only
    return source.mesh == target.mesh


@on_ranks(4)
def test_torchs_wrapper_loads_our_state(rank: Rank) -> None:
    for name in ("flat", "originals", "originals mesh"):
        form = forms(rank)[name]
        ours = Trainee.of(form).train(rank)
        for kind in (FULL, SHARDED):
            theirs = Trainee.of(form, api=TORCH, seed=1).train(rank, (4,))
            saved, optim = ours.saved(kind)
            set_kind(theirs.model, kind, TORCH)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs.model.load_state_dict(saved)
                result = TORCH.FSDP.optim_state_dict_to_load(theirs.model, theirs.optimizer, optim)
            theirs.optimizer.load_state_dict(result)
            assert_same(list(theirs.saved(FULL)), list(ours.saved(FULL)), name)


def save_checkpoint(rank: Rank, folder: str, name: str) -> tuple[Any, Any]:
    source = Trainee.of(on_any_ranks(rank)[name], seed=1).train(rank)
    saved, optim = source.saved(SHARDED if source.form.is_wrapper else Kind("dcp"))
    state = {"model": saved, "optim": optim}
    if source.form.is_wrapper and source.form.mesh is None:
        del state["optim"]  # torch takes no groups of parameters beside ShardedTensors
    with quiet():
        dcp.save(state, checkpoint_id=folder)
    return snapshot(saved), by_set(snapshot(optim))


def load_checkpoint(
    rank: Rank, folder: str, name: str, weights: Any, moments: Any, has_mesh: bool
) -> None:
    target = Trainee.of(on_any_ranks(rank)[name]).train(rank, (4,))
    kind = SHARDED if target.form.is_wrapper else Kind("dcp")
    saved, optim = target.saved(kind)
    state = {"model": saved, "optim": optim} if has_mesh else {"model": saved}
    with quiet():
        dcp.load(state, checkpoint_id=folder)
    target.load(state["model"], state.get("optim", optim), kind)
    saved, optim = target.saved(kind)
    assert_same(gathered(saved), weights)
    if has_mesh:
        assert_same(by_set(gathered(optim)), moments)


def on_any_ranks(rank: Rank) -> dict[str, Form]:
    mesh = {"device_mesh": rank.mesh()}
    found = {
        "fully_shard": Form({"mesh": rank.mesh()}, is_wrapper=False),
        "flat": Form(is_nested=False),
        "flat mesh": Form(mesh),
        "originals": Form({"use_orig_params": True}),
        "originals mesh": Form({"use_orig_params": True, **mesh}, is_nested=False),
    }
    return found if rank.size < 4 else {**forms(rank), **found}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "saving, source, loading, target",
    [
        (4, "fully_shard", 2, "originals mesh"),
        (2, "fully_shard", 4, "fully_shard hybrid"),
        (4, "originals hybrid", 2, "flat mesh"),
        (2, "flat mesh", 4, "fully_shard"),
        (4, "flat", 2, "originals"),
        (2, "originals", 4, "flat"),
    ],
)
def test_a_checkpoint_of_torch_loads_on_other_ranks_in_another_form(
    tmp_path: Path, saving: int, source: str, loading: int, target: str
) -> None:
    weights, moments = pool(saving).run(save_checkpoint, str(tmp_path), source)[0]
    has_mesh = source not in ("flat", "originals")
    pool(loading).run(load_checkpoint, str(tmp_path), target, weights, moments, has_mesh)

"""Optimizer state dicts, loaded into optimizers of wrapped models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard import FullyShardedDataParallel, OptimStateKeyType, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.testing import Rank, on_ranks, pool
from tests.test_wrapper_optim_state import (
    BOTH,
    OPTIMIZERS,
    Counting,
    Make,
    NamedAdamW,
    Net,
    OddNet,
    TiedAcrossNet,
    TiedNet,
    UnusedNet,
    assert_same,
    built,
    by_set,
    deprecated,
    named_state,
    quiet,
    saved,
    set_form,
    train,
    train_whole,
    wrapped,
)
from tests.wrapped import OURS, TORCH

FSDP = FullyShardedDataParallel
rekeyed = FSDP.rekey_optim_state_dict


def rich(model: nn.Module) -> Optimizer:
    return Counting(model.parameters(), is_rich=True)


def wrappings(rank: Rank) -> list[dict[str, Any]]:
    """Ways to wrap on 4 ranks that differ in where every element lies."""
    hybrid = rank.mesh((2, 2), ("replicate", "shard"))
    return [
        {"use_orig_params": True},
        {"use_orig_params": False},
        {"use_orig_params": True, "nested": False, "device_mesh": rank.mesh()},
        {"use_orig_params": False, "sharding_strategy": "NO_SHARD"},
        {"use_orig_params": True, "sharding_strategy": "NO_SHARD", "nested": False},
        {"use_orig_params": False, "sharding_strategy": "HYBRID_SHARD", "device_mesh": hybrid},
        {"use_orig_params": True, "sharding_strategy": "SHARD_GRAD_OP", "cpu_offload": True},
    ]


def with_weights_of(source: nn.Module, kind: type[nn.Module], **options: Any) -> Any:
    """A wrapped model with the weights of one that is not."""

    def make() -> nn.Module:
        model = kind()
        model.load_state_dict(source.state_dict())
        return model

    return wrapped(OURS, make, **options)


def loaded(model: nn.Module, optimizer: Any, state_dict: Any, **options: Any) -> Any:
    result = FSDP.optim_state_dict_to_load(model, optimizer, state_dict, **options)
    optimizer.load_state_dict(result)
    return result


def stepped(rank: Rank, make: Make = OPTIMIZERS["adamw"], **options: Any) -> tuple[Any, Any]:
    model = wrapped(OURS, **options)
    optimizer = make(model)
    train(model, optimizer, rank)
    return model, optimizer


# What may be loaded


@pytest.mark.parametrize(
    "kind, name",
    [
        (Net, "adamw"),
        (Net, "momentum"),
        (Net, "plain"),
        (Net, "adagrad"),
        (Net, "rich"),
        (OddNet, "adamw"),
        (TiedAcrossNet, "momentum"),
    ],
)
@on_ranks(4)
def test_the_state_of_the_unwrapped_model_trains_on_in_any_wrapping_and_goes_back(
    rank: Rank, kind: type[nn.Module], name: str
) -> None:
    make = rich if name == "rich" else OPTIMIZERS[name]
    for options in wrappings(rank):
        reference = built(kind)
        reference_optim = make(reference)
        train_whole(reference, reference_optim, rank.size)
        state = rekeyed(
            reference_optim.state_dict(),
            OptimStateKeyType.PARAM_NAME,
            reference,
            optim=reference_optim,
        )
        model = with_weights_of(reference, kind, **options)
        optimizer = make(model)
        before = copy.deepcopy(state)
        loaded(model, optimizer, state)
        assert_same(state, before)
        train(model, optimizer, rank, (2, 3))
        train_whole(reference, reference_optim, rank.size, (2, 3))
        actual = saved(OURS, model, optimizer)
        expected = named_state(reference, reference_optim)
        assert_same(by_set(actual), by_set(expected), f"{options}")
        back = make(reference)
        by_number = rekeyed(actual, OptimStateKeyType.PARAM_ID, reference, optim=back)
        back.load_state_dict(by_number)
        assert_same(named_state(reference, back)["state"], expected["state"])


@on_ranks(4)
def test_every_form_of_every_wrapping_loads_into_every_other(rank: Rank) -> None:
    forms: list[dict[str, Any]] = [
        {"kind": "FULL"},
        {"kind": "FULL", "rank0_only": True},
        {"kind": "FULL", "offload_to_cpu": False},
        {"kind": "SHARDED"},
        {"kind": "LOCAL"},
    ]
    trained = [stepped(rank, rich, **options) for options in wrappings(rank)]
    expected = by_set(saved(OURS, *trained[0]))
    for number, options in enumerate(wrappings(rank)):
        for shift, form in enumerate(forms):
            source = trained[(number + shift) % len(trained)]
            state = saved(OURS, *source, **form)
            model = wrapped(OURS, seed=1, **options)
            optimizer = rich(model)
            set_form(OURS, model, **form)
            loaded(model, optimizer, state)
            assert_same(by_set(saved(OURS, model, optimizer)), expected, f"{options} {form}")


def saves(rank: Rank, folder: str, options: dict[str, Any]) -> Any:
    # With a mesh: distributed checkpoints do not take parameter groups next to ShardedTensors.
    model, optimizer = stepped(rank, device_mesh=rank.mesh(), **options)
    with quiet():
        dcp.save({"optim": saved(OURS, model, optimizer, "SHARDED")}, checkpoint_id=folder)
    return saved(OURS, model, optimizer)


def loads(rank: Rank, folder: str, options: dict[str, Any], full: Any) -> Any:
    model, optimizer = stepped(rank, device_mesh=rank.mesh(), **options)
    train(model, optimizer, rank, (2,))
    template = {"optim": saved(OURS, model, optimizer, "SHARDED")}
    with quiet():
        dcp.load(template, checkpoint_id=folder)
    loaded(model, optimizer, template["optim"])
    from_disk = saved(OURS, model, optimizer)
    train(model, optimizer, rank, (3,))
    loaded(model, optimizer, full)
    return from_disk, saved(OURS, model, optimizer)


@pytest.mark.parametrize("num_saved, num_loaded", [(4, 2), (2, 4)])
def test_state_saved_on_some_ranks_loads_on_more_or_fewer(
    tmp_path: Path, num_saved: int, num_loaded: int
) -> None:
    for number, use_orig_params in enumerate(BOTH):
        folder = str(tmp_path / str(number))
        options = {"use_orig_params": use_orig_params}
        full = pool(num_saved).run(saves, folder, options)[0]
        other = {"use_orig_params": not use_orig_params, "nested": False}
        for from_disk, from_full in pool(num_loaded).run(loads, folder, other, full):
            assert_same(by_set(from_disk), by_set(full))
            assert_same(by_set(from_full), by_set(full))


@on_ranks(2)
def test_the_state_of_a_fully_shard_model_loads(rank: Rank) -> None:
    source = built()
    fully_shard(source.second, mesh=rank.mesh())
    fully_shard(source, mesh=rank.mesh())
    source_optim = AdamW(source.parameters(), lr=0.02)
    train(source, source_optim, rank)
    state = get_optimizer_state_dict(source, source_optim)
    expected = get_optimizer_state_dict(source, source_optim)["state"]
    expected = {
        name: {k: full_tensor(v) if k != "step" else v for k, v in values.items()}
        for name, values in expected.items()
    }
    for use_orig_params in BOTH:
        for kind in ("FULL", "SHARDED"):
            model = wrapped(OURS, use_orig_params=use_orig_params)
            optimizer = AdamW(model.parameters(), lr=0.01)
            set_form(OURS, model, kind)
            loaded(model, optimizer, state)
            actual = saved(OURS, model, optimizer)
            assert_same(actual["state"], expected)
            assert actual["param_groups"][0]["lr"] == 0.02


@on_ranks(2)
def test_what_torchs_class_saved_loads_here_and_the_other_way_round(rank: Rank) -> None:
    for use_orig_params in BOTH:
        ours, our_optim = stepped(rank, use_orig_params=use_orig_params)
        theirs = wrapped(TORCH, use_orig_params=use_orig_params)
        their_optim = OPTIMIZERS["adamw"](theirs)
        train(theirs, their_optim, rank, (4, 5))
        for kind in ("FULL", "SHARDED"):
            fresh = wrapped(OURS, use_orig_params=not use_orig_params)
            fresh_optim = OPTIMIZERS["adamw"](fresh)
            set_form(OURS, fresh, kind)
            loaded(fresh, fresh_optim, saved(TORCH, theirs, their_optim, kind))
            expected = by_set(saved(TORCH, theirs, their_optim))
            assert_same(by_set(saved(OURS, fresh, fresh_optim)), expected)
        state = saved(OURS, ours, our_optim)
        set_form(TORCH, theirs)
        with quiet():
            result = TorchFSDP.optim_state_dict_to_load(theirs, their_optim, state)
        their_optim.load_state_dict(result)
        assert_same(by_set(saved(TORCH, theirs, their_optim)), by_set(state))


@on_ranks(2)
def test_a_result_has_the_keys_and_groups_of_torchs(rank: Rank) -> None:
    reference = built()
    reference_optim = AdamW(reference.parameters(), lr=0.03)
    train_whole(reference, reference_optim, rank.size)
    state = named_state(reference, reference_optim)
    for use_orig_params in BOTH:
        results = []
        for door in (OURS, TORCH):
            model = wrapped(door, use_orig_params=use_orig_params, sharding_strategy="NO_SHARD")
            optimizer = AdamW(model.parameters(), lr=0.01)
            with quiet():
                given = copy.deepcopy(state)
                result = door.FSDP.optim_state_dict_to_load(model, optimizer, given)
            results.append(result)
        assert_same(results[0]["param_groups"], results[1]["param_groups"])
        assert results[0]["state"].keys() == results[1]["state"].keys()
        if use_orig_params:
            assert_same(results[0], results[1])


@on_ranks(2)
def test_the_older_names_warn_and_load(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source, source_optim = stepped(rank, use_orig_params=not use_orig_params)
        full = saved(OURS, source, source_optim)
        cut = saved(OURS, source, source_optim, "SHARDED")
        model = wrapped(OURS, use_orig_params=use_orig_params)
        optimizer = OPTIMIZERS["adamw"](model)
        expected = FSDP.optim_state_dict_to_load(model, optimizer, full)
        with deprecated("shard_full_optim_state_dict"):
            assert_same(FSDP.shard_full_optim_state_dict(full, model, optim=optimizer), expected)
        with deprecated("shard_full_optim_state_dict"):
            assert_same(FSDP.shard_full_optim_state_dict(full, model), expected)
        first = full if rank.rank == 0 else None
        with deprecated("scatter_full_optim_state_dict"):
            result = FSDP.scatter_full_optim_state_dict(first, model, optim=optimizer)
        assert_same(result, expected)
        with deprecated("flatten_sharded_optim_state_dict"):
            result = FSDP.flatten_sharded_optim_state_dict(cut, model, optimizer)
        assert_same(result, expected)
        with deprecated("scatter_full_optim_state_dict", "optim_input"):
            result = FSDP.scatter_full_optim_state_dict(first, model, list(model.parameters()))
        assert_same(result, expected)


@on_ranks(2)
def test_sharding_a_full_state_dict_needs_no_other_rank(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    full = saved(OURS, source, source_optim)
    if rank.rank == 0:
        with deprecated("shard_full_optim_state_dict"):
            result = FSDP.shard_full_optim_state_dict(full, source, optim=source_optim)
        assert result["state"]


@on_ranks(4)
def test_the_first_rank_of_a_group_may_be_the_only_one_that_has_the_state(rank: Rank) -> None:
    group = rank.mesh((2, 2), ("pair", "inside")).get_group("inside")
    source = wrapped(OURS, use_orig_params=True, process_group=group)
    source_optim = rich(source)
    train(source, source_optim, rank)
    expected = saved(OURS, source, source_optim)
    for use_orig_params in BOTH:
        model = wrapped(OURS, use_orig_params=use_orig_params, process_group=group)
        optimizer = rich(model)
        set_form(OURS, model, rank0_only=True)
        state = expected if rank.rank in (0, 2) else {}
        loaded(model, optimizer, state, group=group)
        assert_same(by_set(saved(OURS, model, optimizer)), by_set(expected))


# Which parameter is meant


@on_ranks(2)
def test_a_tied_parameter_may_come_under_any_of_its_names(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source = wrapped(OURS, TiedNet, use_orig_params=use_orig_params)
        source_optim = OPTIMIZERS["adamw"](source)
        train(source, source_optim, rank)
        expected = saved(OURS, source, source_optim)
        state = copy.deepcopy(expected)
        state["state"]["last.weight"] = state["state"].pop("first.weight")
        names = state["param_groups"][0]["params"]
        names[names.index("first.weight")] = "last.weight"
        both = copy.deepcopy(expected)
        both["state"]["last.weight"] = {
            key: value + 1 for key, value in both["state"]["first.weight"].items()
        }
        both["param_groups"][0]["params"].append("last.weight")
        for given in (state, both):
            model = wrapped(OURS, TiedNet, use_orig_params=not use_orig_params)
            optimizer = OPTIMIZERS["adamw"](model)
            loaded(model, optimizer, given)
            assert_same(by_set(saved(OURS, model, optimizer)), by_set(expected))


@on_ranks(2)
def test_the_state_of_a_parameter_that_is_not_wrapped_loads_by_name(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    for kind in ("FULL", "SHARDED"):
        for rank0_only in BOTH if kind == "FULL" else (False,):
            state = saved(OURS, source, source_optim, kind)
            model = built()
            model.second = OURS(model.second)
            optimizer = OPTIMIZERS["adamw"](model)
            set_form(OURS, model, kind, **({"rank0_only": True} if rank0_only else {}))
            loaded(model, optimizer, state if not rank0_only or rank.rank == 0 else {})
            expected = saved(OURS, source, source_optim)
            assert_same(by_set(saved(OURS, model, optimizer)), by_set(expected))


@on_ranks(2)
def test_an_optimizer_that_is_keyed_by_name_gets_names(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source, source_optim = stepped(rank, NamedAdamW, use_orig_params=use_orig_params)
        set_form(OURS, source)
        state = FSDP.optim_state_dict(source, source_optim)
        model = wrapped(OURS, use_orig_params=not use_orig_params)
        optimizer = NamedAdamW(model)
        result = loaded(model, optimizer, state, is_named_optimizer=True)
        names = [name for name, _ in model.named_parameters()]
        assert list(result["state"]) == names
        assert result["param_groups"][0]["params"] == names
        assert_same(by_set(saved(OURS, model, optimizer)), by_set(state))


def two_groups(model: nn.Module, is_reversed: bool = False) -> Optimizer:
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in params.items() if "bias" in n], "weight_decay": 0.5},
        {"params": [p for n, p in params.items() if "bias" not in n], "weight_decay": 0.25},
    ]
    return AdamW(groups[::-1] if is_reversed else groups, lr=0.01)


@on_ranks(2)
def test_groups_are_matched_by_what_is_in_them(rank: Rank) -> None:
    source, source_optim = stepped(rank, two_groups, use_orig_params=True)
    state = saved(OURS, source, source_optim)
    for is_reversed in BOTH:
        model = wrapped(OURS, use_orig_params=True, nested=False)
        optimizer = two_groups(model, is_reversed)
        loaded(model, optimizer, state)
        actual = saved(OURS, model, optimizer)
        assert_same(actual["state"], state["state"])
        assert [g["weight_decay"] for g in actual["param_groups"]] == (
            [0.25, 0.5] if is_reversed else [0.5, 0.25]
        )
        assert ("first.bias" in actual["param_groups"][0]["params"]) != is_reversed


@on_ranks(2)
def test_one_group_may_become_two_and_two_of_one_kind_one(rank: Rank) -> None:
    source, source_optim = stepped(rank, lambda m: AdamW(m.parameters(), lr=0.07))
    state = saved(OURS, source, source_optim)
    model = wrapped(OURS, use_orig_params=True)
    optimizer = two_groups(model)
    loaded(model, optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.07, 0.07]
    split = saved(OURS, model, optimizer)
    assert_same(split["state"], state["state"])
    model = wrapped(OURS)
    optimizer = AdamW(model.parameters())
    loaded(model, optimizer, split)
    assert_same(by_set(saved(OURS, model, optimizer)), by_set(state))


@on_ranks(2)
def test_frozen_parameters_may_be_in_the_optimizer_or_not(rank: Rank) -> None:
    def trainable(model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def all_of_them(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    for use_orig_params in BOTH:
        for save_with, load_with in ((trainable, all_of_them), (all_of_them, trainable)):
            source = wrapped(OURS, UnusedNet, use_orig_params=use_orig_params)
            source_optim = save_with(source)
            train(source, source_optim, rank)
            state = saved(OURS, source, source_optim)
            model = wrapped(OURS, UnusedNet, use_orig_params=not use_orig_params)
            optimizer = load_with(model)
            loaded(model, optimizer, state)
            assert_same(saved(OURS, model, optimizer)["state"], state["state"])


@on_ranks(4)
def test_a_rank_without_elements_has_state_only_if_its_optimizer_counts_on_it(rank: Rank) -> None:
    for make, has_state in ((OPTIMIZERS["adamw"], False), (OPTIMIZERS["adagrad"], True)):
        source, source_optim = stepped(rank, make, use_orig_params=True)
        state = saved(OURS, source, source_optim)
        model = wrapped(OURS, use_orig_params=True)
        optimizer = make(model)
        result = loaded(model, optimizer, state)
        empty = [i for i, p in enumerate(model.parameters()) if not p.numel()]
        assert empty
        assert all((number in result["state"]) == has_state for number in empty)
        train(model, optimizer, rank, (2,))
        for options in ({}, {"kind": "SHARDED"}):
            assert saved(OURS, model, optimizer, **options)["state"].keys() == state["state"].keys()
        assert saved(OURS, model, optimizer)["state"]["gain"]["step"] == 3


@on_ranks(2)
def test_state_that_belongs_to_no_parameter_is_passed_on(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    for rank0_only in BOTH:
        state = saved(OURS, source, source_optim)
        state["state"]["schedule"] = {"phase": torch.ones(2), "name": "warm"}
        model = wrapped(OURS)
        set_form(OURS, model, rank0_only=rank0_only)
        given = {} if rank0_only and rank.rank else state
        result = FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), given)
        assert_same(result["state"]["schedule"], {"phase": torch.ones(2), "name": "warm"})


@on_ranks(2)
def test_the_names_in_groups_are_those_of_the_optimizer_that_loads(rank: Rank) -> None:
    source, source_optim = stepped(
        rank, lambda m: AdamW(m.named_parameters(), lr=0.02), use_orig_params=True
    )
    state = saved(OURS, source, source_optim)
    model = wrapped(OURS, nested=False)
    named, unnamed = AdamW(model.named_parameters()), AdamW(model.parameters())
    for optimizer in (named, unnamed):
        loaded(model, optimizer, state)
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert saved(OURS, model, optimizer)["state"].keys() == state["state"].keys()
    assert named.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    assert "param_names" not in unnamed.param_groups[0]


@on_ranks(2)
def test_load_directly_loads_and_returns(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    state = saved(OURS, source, source_optim)
    model = wrapped(OURS, use_orig_params=True)
    optimizer = OPTIMIZERS["adamw"](model)
    result = FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert_same(optimizer.state_dict()["state"], result["state"])
    assert_same(by_set(saved(OURS, model, optimizer)), by_set(state))


@on_ranks(2)
def test_a_dict_without_groups_gives_one_without_groups(rank: Rank) -> None:
    model, optimizer = stepped(rank)
    state = {"state": saved(OURS, model, optimizer)["state"]}
    assert set(FSDP.optim_state_dict_to_load(model, optimizer, state)) == {"state"}


# Mistakes


def without_groups(state: Any) -> None:
    del state["state"]


def by_number(state: Any) -> None:
    state["state"] = dict(enumerate(state["state"].values()))


def unknown_name(state: Any) -> None:
    state["param_groups"][0]["params"].append("third.weight")


def missing_name(state: Any) -> None:
    state["param_groups"][0]["params"].remove("first.bias")
    state["param_groups"][0]["params"].remove("first.weight")
    state["param_groups"][0]["params"].remove("gain")
    state["param_groups"][0]["params"].remove("last.weight")


def wrong_shape(state: Any) -> None:
    state["state"]["first.weight"]["exp_avg"] = torch.zeros(5, 7)


def no_dict(state: Any) -> None:
    state["state"]["first.bias"] = torch.zeros(7)


def number_in_a_group(state: Any) -> None:
    state["param_groups"][0]["params"][0] = 0


MISTAKES: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (without_groups, ConfigError, "'state'"),
    (by_number, ConfigError, "rekey_optim_state_dict"),
    (unknown_name, UnknownNameError, "'third.weight'"),
    (missing_name, ConfigError, "'gain'"),
    (wrong_shape, ConfigError, r"'exp_avg' of 'first.weight'.*\(7, 5\).*\(5, 7\)"),
    (no_dict, ConfigError, "'first.bias'"),
    (number_in_a_group, ConfigError, "rekey_optim_state_dict"),
]


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_is_refused_on_all_ranks_and_nothing_is_loaded(
    rank: Rank,
) -> None:
    for use_orig_params in BOTH:
        model, optimizer = stepped(rank, use_orig_params=use_orig_params)
        state = saved(OURS, model, optimizer)
        train(model, optimizer, rank, (2,))
        before = copy.deepcopy(optimizer.state_dict())
        for rank0_only in BOTH:
            set_form(OURS, model, rank0_only=rank0_only)
            for spoil, error, match in MISTAKES:
                given = copy.deepcopy(state)
                if rank.rank == 0:  # the other rank has to hear of it
                    spoil(given)
                with pytest.raises(error, match=match):
                    FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
                assert_same(optimizer.state_dict(), before)
        set_form(OURS, model)
        loaded(model, optimizer, state)
        assert_same(saved(OURS, model, optimizer), state)


@on_ranks(2)
def test_ranks_that_load_different_state_are_told(rank: Rank) -> None:
    model, optimizer = stepped(rank)
    state = saved(OURS, model, optimizer, "SHARDED")
    if rank.rank == 1:
        del state["state"]["gain"]
    with pytest.raises(DisagreementError, match="same parameters"):
        FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(2)
def test_numbers_that_differ_within_a_flat_parameter_are_refused(rank: Rank) -> None:
    source, source_optim = stepped(rank, use_orig_params=True)
    state = saved(OURS, source, source_optim)
    state["state"]["first.bias"]["step"] += 1
    model = wrapped(OURS, use_orig_params=False)
    with pytest.raises(ValueError, match=r"'step'.*first.weight"):
        FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), state)
    apart = wrapped(OURS, use_orig_params=True, nested=False)
    optimizer = OPTIMIZERS["adamw"](apart)
    loaded(apart, optimizer, state)
    assert_same(saved(OURS, apart, optimizer)["state"], state["state"])


@on_ranks(2)
def test_groups_with_different_options_cannot_become_one(rank: Rank) -> None:
    source, source_optim = stepped(rank, two_groups, use_orig_params=True)
    state = saved(OURS, source, source_optim)
    model = wrapped(OURS)
    with pytest.raises(ConfigError, match="weight_decay"):
        FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), state)


@on_ranks(2)
def test_an_optimizer_of_another_model_cannot_load(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    state = saved(OURS, source, source_optim)
    foreign = AdamW(built().parameters())
    with pytest.raises(KeyError, match="parameter 0"):
        FSDP.optim_state_dict_to_load(source, foreign, state)


# Names and numbers


def trained_whole(kind: type[nn.Module] = Net) -> tuple[nn.Module, Optimizer]:
    model = built(kind)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train_whole(model, optimizer, 1)
    return model, optimizer


def test_names_and_numbers_are_those_of_torch():
    for kind in (Net, TiedNet):
        model, optimizer = trained_whole(kind)
        own = optimizer.state_dict()
        named = rekeyed(own, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        torch_named = TorchFSDP.rekey_optim_state_dict(
            own, TorchKeyType.PARAM_NAME, model, optim=optimizer
        )
        assert_same(named, torch_named)
        assert_same(rekeyed(own, OptimStateKeyType.PARAM_NAME, model), torch_named)
        numbered = rekeyed(named, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        assert_same(numbered, own)
        assert rekeyed(own, OptimStateKeyType.PARAM_ID, model) is own
        assert rekeyed(named, OptimStateKeyType.PARAM_NAME, model) is named


def test_groups_are_rekeyed_also_without_any_state():
    model = built()
    own = SGD(model.parameters(), lr=0.1).state_dict()
    named = rekeyed(own, OptimStateKeyType.PARAM_NAME, model)
    assert named["param_groups"][0]["params"] == sorted(n for n, _ in model.named_parameters())
    assert rekeyed(named, OptimStateKeyType.PARAM_ID, model)["param_groups"] == own["param_groups"]


def test_what_an_optimizer_was_built_with_tells_its_numbers():
    model = built()
    params = [model.last.weight, model.gain]
    groups = [{"params": model.last.weight}, {"params": [model.gain]}]
    own = Adagrad(params, lr=0.1).state_dict()
    for given in (params, groups):
        with pytest.warns(FutureWarning, match="optim_input"):
            named = rekeyed(own, OptimStateKeyType.PARAM_NAME, model, given)
        assert set(named["state"]) == {"last.weight", "gain"}
        assert named["state"]["gain"] is own["state"][1]


def test_mixed_unknown_and_meaningless_keys_are_refused():
    model, optimizer = trained_whole()
    own = optimizer.state_dict()
    named = rekeyed(own, OptimStateKeyType.PARAM_NAME, model)
    mixed = {"state": {**own["state"], "gain": {}}, "param_groups": own["param_groups"]}
    with pytest.raises(ValueError, match="'gain'"):
        rekeyed(mixed, OptimStateKeyType.PARAM_NAME, model)
    with pytest.raises(KeyError, match="parameter of the model"):
        rekeyed(named, OptimStateKeyType.PARAM_ID, built(TiedNet))
    with pytest.raises(KeyError, match="parameter of the model"):
        rekeyed(own, OptimStateKeyType.PARAM_NAME, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="'PARAM_ID'"):
        rekeyed(own, "PARAM_ID", model)
    for wrong, error in (([], ValueError), ([1, 2], TypeError), (5, TypeError)):
        with (
            pytest.warns(FutureWarning, match="optim_input"),
            pytest.raises(error, match=r"optim_input|iterable"),
        ):
            rekeyed(own, OptimStateKeyType.PARAM_NAME, model, wrong)

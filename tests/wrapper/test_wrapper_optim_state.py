"""Optimizer state dicts of wrapped models: what is saved, loaded, renumbered and refused.

`test_state_matrix.py` compares the state of every form and kind with that of the unsharded model.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import OptimStateKeyType as TorchKeyType
from torch.optim import SGD, Adagrad, AdamW, Optimizer

from fullshard import FullyShardedDataParallel, OptimStateKeyType
from fullshard.errors import ConfigError, DisagreementError, UnknownNameError
from fullshard.testing import Rank, on_ranks
from tests.support.sharded_states import (
    BOTH,
    OPTIMIZERS,
    Counting,
    Kind,
    Make,
    Net,
    TiedNet,
    UnusedNet,
    assert_same,
    built,
    by_set,
    gathered,
    load_optim,
    named_state,
    quiet,
    saved_optim,
    set_kind,
    train,
    train_whole,
    wrapped,
)
from tests.support.wrapped import OURS, TORCH

FSDP = FullyShardedDataParallel
rekeyed = FSDP.rekey_optim_state_dict


def saved(model: nn.Module, optimizer: Any, name: str = "FULL", **config: Any) -> Any:
    return saved_optim(model, optimizer, Kind(name, config))


def set_form(model: nn.Module, name: str = "FULL", **config: Any) -> None:
    set_kind(model, Kind(name, config))


class NamedAdamW(AdamW):
    """Its state dicts have the names that the model lists its parameters by."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        return self._renamed(super().state_dict(), dict(enumerate(self.names)))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        numbers = {name: number for number, name in enumerate(self.names)}
        super().load_state_dict(self._renamed(state_dict, numbers))

    @staticmethod
    def _renamed(state_dict: dict[str, Any], keys: dict[Any, Any]) -> dict[str, Any]:
        groups = [
            {**group, "params": [keys[key] for key in group["params"]]}
            for group in state_dict["param_groups"]
        ]
        state = {keys[key]: value for key, value in state_dict["state"].items()}
        return {"state": state, "param_groups": groups}


def stepped(
    rank: Rank, make: Make = OPTIMIZERS["adamw"], api: Any = OURS, **options: Any
) -> tuple[Any, Any]:
    model = wrapped(api=api, **options)
    optimizer = make(model)
    train(model, optimizer, rank)
    return model, optimizer


@contextmanager
def deprecated(*subjects: str) -> Iterator[None]:
    """FutureWarnings about these, in this order, that point at the caller."""
    with quiet(), warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", category=FutureWarning)
        yield
    found = [str(warning.message) for warning in caught]
    assert len(found) == len(subjects), found
    for subject, warning in zip(subjects, caught, strict=True):
        assert subject in str(warning.message), found
        assert warning.category is FutureWarning
        assert "/tests/wrapper/test_wrapper_optim" in warning.filename, warning.filename


# Saving


def two_groups(model: nn.Module, is_reversed: bool = False) -> Optimizer:
    params = dict(model.named_parameters())
    groups = [
        {"params": [p for n, p in params.items() if "bias" in n], "weight_decay": 0.5},
        {"params": [p for n, p in params.items() if "bias" not in n], "weight_decay": 0.25},
    ]
    return AdamW(groups[::-1] if is_reversed else groups, lr=0.01)


@on_ranks(2)
def test_several_parameter_groups_are_saved_with_their_options(rank: Rank) -> None:
    ours, theirs = (stepped(rank, two_groups, api, use_orig_params=True) for api in (OURS, TORCH))
    expected = saved_optim(*theirs, Kind("FULL"), TORCH)
    actual = FSDP.optim_state_dict(*ours)  # without settings: full, and on every rank
    assert_same(actual, expected)
    assert [group["weight_decay"] for group in actual["param_groups"]] == [0.5, 0.25]
    assert "second.0.bias" in actual["param_groups"][0]["params"]


@on_ranks(2)
def test_the_state_of_a_parameter_that_is_not_wrapped_passes_by_name(rank: Rank) -> None:
    for use_orig_params in BOTH:
        pair = []
        for api in (OURS, TORCH):
            ignoring, around = built(), built()
            ignored = [ignoring.first]
            ignoring = api(ignoring, ignored_modules=ignored, use_orig_params=use_orig_params)
            around.second = api(around.second, use_orig_params=use_orig_params)
            for model in (ignoring, around):
                optimizer = AdamW(model.parameters(), lr=0.01)
                train(model, optimizer, rank)
                full = saved_optim(model, optimizer, Kind("FULL"), api)
                pair.append([full, saved_optim(model, optimizer, Kind("SHARDED"), api)])
        ours, theirs = pair[:2], pair[2:]
        assert_same(ours, theirs)
        for full, cut in ours:
            assert type(cut["state"]["first.weight"]["exp_avg"]) is Tensor
            assert isinstance(cut["state"]["second.0.weight"]["exp_avg"], ShardedTensor)
            assert full["state"]["first.weight"]["exp_avg"].shape == (7, 5)


@on_ranks(2)
def test_an_optimizer_that_is_keyed_by_name_is_saved_and_gets_names(rank: Rank) -> None:
    for use_orig_params in BOTH:
        results = []
        for api in (OURS, TORCH):
            source, optimizer = stepped(rank, NamedAdamW, api, use_orig_params=use_orig_params)
            set_kind(source, Kind("FULL"), api)
            with quiet():
                own = optimizer.state_dict()
                results.append(api.FSDP.optim_state_dict(source, optimizer, own))
        assert_same(*results)
        model = wrapped(use_orig_params=not use_orig_params)
        optimizer = NamedAdamW(model)
        result = load_optim(model, optimizer, results[0], is_named_optimizer=True)
        names = [name for name, _ in model.named_parameters()]
        assert list(result["state"]) == names
        assert result["param_groups"][0]["params"] == names
        assert_same(by_set(saved(model, optimizer)), by_set(results[0]))


@on_ranks(2)
def test_the_older_names_warn_and_return_what_torchs_do(rank: Rank) -> None:
    for use_orig_params in BOTH:
        # With one state only: see `set_kind`.
        pair = [
            stepped(rank, OPTIMIZERS["momentum"], api, use_orig_params=use_orig_params)
            for api in (OURS, TORCH)
        ]
        for name, options in (
            ("full_optim_state_dict", {}),
            ("full_optim_state_dict", {"rank0_only": False}),
            ("sharded_optim_state_dict", {}),
        ):
            found = []
            for api, (model, optimizer) in zip((OURS, TORCH), pair, strict=True):
                with deprecated(name):
                    found.append(getattr(api.FSDP, name)(model, optimizer, **options))
            assert_same(*found)
            assert bool(found[0]) == (rank.rank == 0 or bool(options) or "sharded" in name)
        model, optimizer = pair[0]
        expected = saved(model, optimizer)
        for given in (list(model.parameters()), [{"params": list(model.parameters())}]):
            with deprecated("full_optim_state_dict", "optim_input"):
                actual = FSDP.full_optim_state_dict(model, optimizer, given, rank0_only=False)
            assert_same(actual, expected)


@on_ranks(4)
def test_a_model_on_some_ranks_is_saved_by_the_first_rank_of_its_group(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("pair", "inside"))
    group = mesh.get_group("inside")
    model = wrapped(use_orig_params=True, process_group=group)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    set_form(model, rank0_only=True)
    actual = OURS.FSDP.optim_state_dict(model, optimizer, group=group)
    assert bool(actual) == (rank.rank in (0, 2))
    set_form(model)
    everywhere = OURS.FSDP.optim_state_dict(model, optimizer, group=group)
    if actual:
        assert_same(actual, everywhere)


@on_ranks(2)
def test_an_optimizer_that_never_stepped_is_saved_without_state(rank: Rank) -> None:
    names = {name for name, _ in built().named_parameters()}
    for use_orig_params in BOTH:
        model = wrapped(use_orig_params=use_orig_params)
        actual = saved(model, AdamW(model.parameters()))
        assert actual["state"] == {}
        assert set(actual["param_groups"][0]["params"]) == names


@on_ranks(2)
def test_a_saved_state_dict_has_memory_of_its_own(rank: Rank) -> None:
    for use_orig_params in BOTH:
        for strategy in ("FULL_SHARD", "NO_SHARD"):
            options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
            model, optimizer = stepped(rank, **options)
            kinds = ({}, {"offload_to_cpu": False}, {"name": "SHARDED"})
            held = [saved(model, optimizer, **kind) for kind in kinds]
            before = [copy.deepcopy(gathered(state["state"])) for state in held]
            train(model, optimizer, rank, (2,))
            for state, values in zip(held, before, strict=True):
                assert_same(gathered(state["state"]), values)
            for values in held[0]["state"].values():
                assert all(v.untyped_storage().nbytes() == v.nbytes for v in values.values())


@on_ranks(2)
def test_state_of_a_shape_of_its_own_may_have_the_size_of_a_slice(rank: Rank) -> None:
    for use_orig_params in BOTH:
        layers = [nn.Linear(4, 2, bias=False), nn.Linear(2, 9, bias=False)]
        model = nn.Sequential(*(OURS(layer, use_orig_params=use_orig_params) for layer in layers))
        # Each rank has 4 elements of the first weight.
        optimizer = Counting(model.parameters(), is_rich=True, num_past=4)
        model(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        assert next(model[0].parameters()).numel() == 4
        for state in saved(model, optimizer)["state"].values():
            assert_same(state["history"], torch.arange(4.0))


# Mistakes


@on_ranks(2)
def test_an_optimizer_of_another_model_is_refused_on_every_rank(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(use_orig_params=use_orig_params)
        own = AdamW(model.parameters(), lr=0.01)
        train(model, own, rank)
        foreign = AdamW(built().parameters(), lr=0.01)
        # On one rank only: the other must hear of it.
        optimizer = foreign if rank.rank == 1 else own
        with pytest.raises(KeyError, match=r"parameter 0.*shape") as caught:
            saved(model, optimizer)
        assert isinstance(caught.value, UnknownNameError)
        assert ("rank 1" in str(caught.value)) == (rank.rank == 0)
        state = saved(model, own)
        assert state["state"]
        with pytest.raises(KeyError, match="parameter 0"):
            FSDP.optim_state_dict_to_load(model, foreign, state)
    plain = built()
    with pytest.raises(ValueError, match="Net has no FullyShardedDataParallel"):
        FSDP.optim_state_dict(plain, AdamW(plain.parameters()))


@on_ranks(2)
def test_numbers_that_differ_between_ranks_are_refused_by_name(rank: Rank) -> None:
    model = wrapped(use_orig_params=True, nested=False)
    optimizer = Counting(model.parameters())
    train(model, optimizer, rank)
    split = [p for p in model.parameters() if p in optimizer.state]
    for param in split:
        optimizer.state[param]["calls"] = 10 + rank.rank
    with pytest.raises(DisagreementError, match=r"first\.bias: .*'calls'.*10, 11"):
        saved(model, optimizer)


# Parts of a model


@on_ranks(2)
def test_a_part_of_a_model_may_have_an_optimizer_of_its_own(rank: Rank) -> None:
    for use_orig_params in BOTH:
        model = wrapped(use_orig_params=use_orig_params)
        optimizer = AdamW(model.second.parameters(), lr=0.01)
        train(model, optimizer, rank)
        inner = saved(model.second, optimizer)["state"]
        assert set(inner) == {"0.weight", "0.bias", "1.weight", "1.bias"}
        outer = saved(model, optimizer)["state"]
        assert_same(outer, {f"second.{name}": state for name, state in inner.items()})


@on_ranks(2)
def test_an_optimizer_built_before_wrapping_holds_the_original_parameters(rank: Rank) -> None:
    model = built()
    optimizer = AdamW(model.parameters(), lr=0.01)
    wrapper = OURS(model, use_orig_params=True)
    train(wrapper, optimizer, rank)
    reference = built()
    reference_optim = AdamW(reference.parameters(), lr=0.01)
    train_whole(reference, reference_optim, rank.size)
    assert_same(saved(wrapper, optimizer), named_state(reference, reference_optim))


@on_ranks(2)
def test_names_are_without_those_of_checkpoint_wrappers(rank: Rank) -> None:
    model = built()
    model.second = OURS(checkpoint_wrapper(model.second), use_orig_params=True)
    model = OURS(model, use_orig_params=True)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, rank)
    assert set(saved(model, optimizer)["state"]) == {n for n, _ in built().named_parameters()}


@on_ranks(1, 4)
def test_where_nothing_is_split_the_state_is_whole_in_every_form(rank: Rank) -> None:
    mesh = rank.mesh((rank.size, 1), ("replicate", "shard"))
    for use_orig_params in BOTH:
        model = wrapped(
            use_orig_params=use_orig_params,
            sharding_strategy="HYBRID_SHARD",
            device_mesh=mesh,
        )
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        reference = built()
        reference_optim = AdamW(reference.parameters(), lr=0.01)
        train_whole(reference, reference_optim, rank.size)
        expected = named_state(reference, reference_optim)["state"]
        for kind in ("FULL", "SHARDED"):
            assert_same(saved(model, optimizer, kind)["state"], expected)


# Loading


@on_ranks(2)
def test_a_result_has_the_keys_and_groups_of_torchs(rank: Rank) -> None:
    reference = built()
    reference_optim = AdamW(reference.parameters(), lr=0.03)
    train_whole(reference, reference_optim, rank.size)
    state = named_state(reference, reference_optim)
    for use_orig_params in BOTH:
        results = []
        for api in (OURS, TORCH):
            options = {"use_orig_params": use_orig_params, "sharding_strategy": "NO_SHARD"}
            model = wrapped(api=api, **options)
            optimizer = AdamW(model.parameters(), lr=0.01)
            with quiet():
                given = copy.deepcopy(state)
                result = api.FSDP.optim_state_dict_to_load(model, optimizer, given)
            results.append(result)
        assert_same(results[0]["param_groups"], results[1]["param_groups"])
        assert results[0]["state"].keys() == results[1]["state"].keys()
        if use_orig_params:
            assert_same(results[0], results[1])


@on_ranks(2)
def test_the_older_names_warn_and_load(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source, source_optim = stepped(rank, use_orig_params=not use_orig_params)
        full = saved(source, source_optim)
        cut = saved(source, source_optim, "SHARDED")
        model = wrapped(use_orig_params=use_orig_params)
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
    full = saved(source, source_optim)
    if rank.rank == 0:
        with deprecated("shard_full_optim_state_dict"):
            result = FSDP.shard_full_optim_state_dict(full, source, optim=source_optim)
        assert result["state"]


@on_ranks(4)
def test_the_first_rank_of_a_group_may_be_the_only_one_that_has_the_state(rank: Rank) -> None:
    group = rank.mesh((2, 2), ("pair", "inside")).get_group("inside")
    source = wrapped(use_orig_params=True, process_group=group)
    source_optim = OPTIMIZERS["rich"](source)
    train(source, source_optim, rank)
    expected = saved(source, source_optim)
    for use_orig_params in BOTH:
        model = wrapped(use_orig_params=use_orig_params, process_group=group)
        optimizer = OPTIMIZERS["rich"](model)
        set_form(model, rank0_only=True)
        state = expected if rank.rank in (0, 2) else {}
        load_optim(model, optimizer, state, group=group)
        assert_same(by_set(saved(model, optimizer)), by_set(expected))


# Which parameter is meant


@on_ranks(2)
def test_a_tied_parameter_may_come_under_any_of_its_names(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source = wrapped(TiedNet, use_orig_params=use_orig_params)
        source_optim = OPTIMIZERS["adamw"](source)
        train(source, source_optim, rank)
        expected = saved(source, source_optim)
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
            model = wrapped(TiedNet, use_orig_params=not use_orig_params)
            optimizer = OPTIMIZERS["adamw"](model)
            load_optim(model, optimizer, given)
            assert_same(by_set(saved(model, optimizer)), by_set(expected))


@on_ranks(2)
def test_the_state_of_a_parameter_that_is_not_wrapped_loads_by_name(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    for kind in ("FULL", "SHARDED"):
        for rank0_only in BOTH if kind == "FULL" else (False,):
            state = saved(source, source_optim, kind)
            model = built()
            model.second = OURS(model.second)
            optimizer = OPTIMIZERS["adamw"](model)
            set_form(model, kind, **({"rank0_only": True} if rank0_only else {}))
            load_optim(model, optimizer, state if not rank0_only or rank.rank == 0 else {})
            expected = saved(source, source_optim)
            assert_same(by_set(saved(model, optimizer)), by_set(expected))


@on_ranks(2)
def test_groups_are_matched_by_what_is_in_them(rank: Rank) -> None:
    source, source_optim = stepped(rank, two_groups, use_orig_params=True)
    state = saved(source, source_optim)
    for is_reversed in BOTH:
        model = wrapped(use_orig_params=True, nested=False)
        optimizer = two_groups(model, is_reversed)
        load_optim(model, optimizer, state)
        actual = saved(model, optimizer)
        assert_same(actual["state"], state["state"])
        assert [g["weight_decay"] for g in actual["param_groups"]] == (
            [0.25, 0.5] if is_reversed else [0.5, 0.25]
        )
        assert ("first.bias" in actual["param_groups"][0]["params"]) != is_reversed


@on_ranks(2)
def test_one_group_may_become_two_and_two_of_one_kind_one(rank: Rank) -> None:
    source, source_optim = stepped(rank, lambda m: AdamW(m.parameters(), lr=0.07))
    state = saved(source, source_optim)
    model = wrapped(use_orig_params=True)
    optimizer = two_groups(model)
    load_optim(model, optimizer, state)
    assert [group["lr"] for group in optimizer.param_groups] == [0.07, 0.07]
    split = saved(model, optimizer)
    assert_same(split["state"], state["state"])
    model = wrapped()
    optimizer = AdamW(model.parameters())
    load_optim(model, optimizer, split)
    assert_same(by_set(saved(model, optimizer)), by_set(state))


@on_ranks(2)
def test_frozen_parameters_may_be_in_the_optimizer_or_not(rank: Rank) -> None:
    def trainable(model: nn.Module) -> Optimizer:
        return AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)

    def all_of_them(model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    for use_orig_params in BOTH:
        for save_with, load_with in ((trainable, all_of_them), (all_of_them, trainable)):
            source = wrapped(UnusedNet, use_orig_params=use_orig_params)
            source_optim = save_with(source)
            train(source, source_optim, rank)
            state = saved(source, source_optim)
            model = wrapped(UnusedNet, use_orig_params=not use_orig_params)
            optimizer = load_with(model)
            load_optim(model, optimizer, state)
            assert_same(saved(model, optimizer)["state"], state["state"])


@on_ranks(4)
def test_a_rank_without_elements_has_state_only_if_its_optimizer_counts_on_it(rank: Rank) -> None:
    for make, has_state in ((OPTIMIZERS["adamw"], False), (OPTIMIZERS["adagrad"], True)):
        source, source_optim = stepped(rank, make, use_orig_params=True)
        state = saved(source, source_optim)
        model = wrapped(use_orig_params=True)
        optimizer = make(model)
        result = load_optim(model, optimizer, state)
        empty = [i for i, p in enumerate(model.parameters()) if not p.numel()]
        assert empty
        assert all((number in result["state"]) == has_state for number in empty)
        train(model, optimizer, rank, (2,))
        for options in ({}, {"name": "SHARDED"}):
            assert saved(model, optimizer, **options)["state"].keys() == state["state"].keys()
        assert saved(model, optimizer)["state"]["gain"]["step"] == 3


@on_ranks(2)
def test_the_names_in_groups_are_those_of_the_optimizer_that_loads(rank: Rank) -> None:
    source, source_optim = stepped(
        rank, lambda m: AdamW(m.named_parameters(), lr=0.02), use_orig_params=True
    )
    state = saved(source, source_optim)
    model = wrapped(nested=False)
    named, unnamed = AdamW(model.named_parameters()), AdamW(model.parameters())
    for optimizer in (named, unnamed):
        load_optim(model, optimizer, state)
        assert optimizer.param_groups[0]["lr"] == 0.02
        assert saved(model, optimizer)["state"].keys() == state["state"].keys()
    assert named.param_groups[0]["param_names"] == [n for n, _ in model.named_parameters()]
    assert "param_names" not in unnamed.param_groups[0]


# Mistakes


def names_in(state: Any) -> list[Any]:
    return state["param_groups"][0]["params"]


MISTAKES: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda s: s.pop("state"), ConfigError, '"state"'),
    (
        lambda s: s.update(state=dict(enumerate(s["state"].values()))),
        ConfigError,
        "rekey_optim_state_dict",
    ),
    (lambda s: names_in(s).append("third.weight"), UnknownNameError, "'third.weight'"),
    (
        lambda s: s["param_groups"][0].update(params=["second.0.weight", "second.0.bias"]),
        ConfigError,
        "'gain'",
    ),
    (
        lambda s: s["state"]["first.weight"].update(exp_avg=torch.zeros(5, 7)),
        ConfigError,
        r"'exp_avg' of 'first.weight' has shape \(5, 7\), but the parameter has \(7, 5\)",
    ),
    (lambda s: s["state"].update({"first.bias": torch.zeros(7)}), ConfigError, "'first.bias'"),
    (lambda s: names_in(s).__setitem__(0, 0), ConfigError, "rekey_optim_state_dict"),
]


@on_ranks(2)
def test_a_state_dict_that_does_not_fit_is_refused_on_all_ranks_and_nothing_is_loaded(
    rank: Rank,
) -> None:
    for use_orig_params in BOTH:
        model, optimizer = stepped(rank, use_orig_params=use_orig_params)
        state = saved(model, optimizer)
        train(model, optimizer, rank, (2,))
        before = copy.deepcopy(optimizer.state_dict())
        for rank0_only in BOTH:
            set_form(model, rank0_only=rank0_only)
            for spoil, error, match in MISTAKES:
                given = copy.deepcopy(state)
                if rank.rank == 0:  # the other rank has to hear of it
                    spoil(given)
                with pytest.raises(error, match=match):
                    FSDP.optim_state_dict_to_load(model, optimizer, given, load_directly=True)
                assert_same(optimizer.state_dict(), before)
        set_form(model)
        load_optim(model, optimizer, state)
        assert_same(saved(model, optimizer), state)


@on_ranks(2)
def test_ranks_that_load_different_state_are_told(rank: Rank) -> None:
    model, optimizer = stepped(rank)
    state = saved(model, optimizer, "SHARDED")
    if rank.rank == 1:
        del state["state"]["gain"]
    with pytest.raises(DisagreementError, match="different parameters"):
        FSDP.optim_state_dict_to_load(model, optimizer, state)


@on_ranks(2)
def test_numbers_that_differ_within_a_flat_parameter_are_refused(rank: Rank) -> None:
    source, source_optim = stepped(rank, use_orig_params=True)
    state = saved(source, source_optim)
    state["state"]["first.bias"]["step"] += 1
    model = wrapped(use_orig_params=False)
    with pytest.raises(ValueError, match=r"'step'.*first.weight"):
        FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), state)
    apart = wrapped(use_orig_params=True, nested=False)
    optimizer = OPTIMIZERS["adamw"](apart)
    load_optim(apart, optimizer, state)
    assert_same(saved(apart, optimizer)["state"], state["state"])


@on_ranks(2)
def test_groups_with_different_options_cannot_become_one(rank: Rank) -> None:
    source, source_optim = stepped(rank, two_groups, use_orig_params=True)
    state = saved(source, source_optim)
    model = wrapped()
    with pytest.raises(ConfigError, match="weight_decay"):
        FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), state)


# Names and numbers


def trained_whole(kind: type[nn.Module] = Net) -> tuple[nn.Module, Optimizer]:
    model = built(kind)
    optimizer = AdamW(model.parameters(), lr=0.01)
    train_whole(model, optimizer, 1)
    return model, optimizer


@on_ranks(2)
def test_state_goes_back_to_the_unwrapped_model(rank: Rank) -> None:
    for use_orig_params in BOTH:
        source, source_optim = stepped(rank, use_orig_params=use_orig_params)
        state = saved(source, source_optim)
        model = built()
        optimizer = OPTIMIZERS["adamw"](model)
        numbered = rekeyed(state, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        optimizer.load_state_dict(numbered)
        assert_same(named_state(model, optimizer)["state"], state["state"])


@on_ranks(2)
def test_state_that_belongs_to_no_parameter_is_passed_on(rank: Rank) -> None:
    source, source_optim = stepped(rank)
    own = source_optim.state_dict()
    own["state"]["schedule"] = {"phase": torch.ones(2), "name": "warm"}
    with pytest.warns(UserWarning, match="'schedule'"):
        state = FSDP.optim_state_dict(source, source_optim, own)
    for rank0_only in BOTH:
        model = wrapped()
        set_form(model, rank0_only=rank0_only)
        given = {} if rank0_only and rank.rank else state
        result = FSDP.optim_state_dict_to_load(model, AdamW(model.parameters()), given)
        assert_same(result["state"]["schedule"], {"phase": torch.ones(2), "name": "warm"})


@on_ranks(2)
def test_load_directly_loads_and_returns_and_groups_may_be_missing(rank: Rank) -> None:
    state = saved(*stepped(rank))
    model = wrapped(use_orig_params=True)
    optimizer = OPTIMIZERS["adamw"](model)
    result = FSDP.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    assert_same(optimizer.state_dict()["state"], result["state"])
    assert_same(by_set(saved(model, optimizer)), by_set(state))
    only = {"state": state["state"]}
    assert set(FSDP.optim_state_dict_to_load(model, optimizer, only)) == {"state"}


def test_names_and_numbers_are_those_of_torch():
    for kind in (Net, TiedNet):
        model, optimizer = trained_whole(kind)
        own = optimizer.state_dict()
        named = rekeyed(own, OptimStateKeyType.PARAM_NAME, model, optim=optimizer)
        torch_named = TORCH.FSDP.rekey_optim_state_dict(
            own, TorchKeyType.PARAM_NAME, model, optim=optimizer
        )
        assert_same(named, torch_named)
        assert_same(rekeyed(own, OptimStateKeyType.PARAM_NAME, model), torch_named)
        numbered = rekeyed(named, OptimStateKeyType.PARAM_ID, model, optim=optimizer)
        assert_same(numbered, own)
        assert rekeyed(own, OptimStateKeyType.PARAM_ID, model) is own
        assert rekeyed(named, OptimStateKeyType.PARAM_NAME, model) is named
    own = SGD(model.parameters(), lr=0.1).state_dict()  # groups without any state
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
    with pytest.raises(KeyError, match="not parameters of the model"):
        rekeyed(named, OptimStateKeyType.PARAM_ID, built(TiedNet))
    with pytest.raises(KeyError, match="not parameters of the model"):
        rekeyed(own, OptimStateKeyType.PARAM_NAME, nn.Linear(1, 1))
    with pytest.raises(ConfigError, match="'PARAM_ID'"):
        rekeyed(own, "PARAM_ID", model)
    for wrong, error in (([], ValueError), ([1, 2], TypeError), (5, TypeError)):
        with (
            pytest.warns(FutureWarning, match="optim_input"),
            pytest.raises(error, match=r"optim_input|iterable"),
        ):
            rekeyed(own, OptimStateKeyType.PARAM_NAME, model, wrong)

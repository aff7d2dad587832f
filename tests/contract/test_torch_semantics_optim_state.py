"""Contracts of torch's class on optimizer state dicts, each held beside it: ours does the same."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW

from fullshard.state.values import full_tensor_of, is_sharded
from fullshard.testing import Rank, on_ranks
from tests.support.sharded_states import (
    BOTH,
    FULL,
    LOCAL,
    SHARDED,
    Kind,
    assert_same,
    quiet,
    saved_optim,
    set_kind,
    train,
    wrapped,
)
from tests.support.wrapped import OURS, TORCH, Package

PACKAGES = (TORCH, OURS)
WIDTH = 5


@contextmanager
def silent() -> Iterator[None]:
    """Ignore warnings, of which torch's class gives many."""
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def same_on_all_ranks(value: Any) -> bool:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return all(each == everyone[0] for each in everyone)


def load_optim(api: Package, model: nn.Module, optimizer: Any, state: Any, **options: Any) -> Any:
    with silent():
        return api.FSDP.optim_state_dict_to_load(model, optimizer, copy.deepcopy(state), **options)


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(2)
def test_state_has_one_order_on_all_ranks_whatever_that_of_their_optimizers(
    rank: Rank, use_orig_params: bool
) -> None:
    for api in PACKAGES:
        model = wrapped(api=api, use_orig_params=use_orig_params)
        names = {param: name for name, param in model.named_parameters()}
        params = list(names)[:: -1 if rank.rank else 1]
        optimizer = AdamW(params, lr=0.01)
        train(model, optimizer, rank)
        for kind in (FULL, SHARDED):
            state = saved_optim(model, optimizer, kind, api)
            assert same_on_all_ranks(list(state["state"]))
            loaded = load_optim(api, model, optimizer, state)["state"]
            found = [names[params[number]] for number in loaded]
            assert found == [name for name in names.values() if name in found]
            assert len(found) > 1
        # Gathering sharded values in the order of the dict gives values that belong together.
        whole = saved_optim(model, optimizer, FULL, api)["state"]
        with silent():
            for name, each in state["state"].items():
                for key, value in each.items():
                    gathered = full_tensor_of(value) if is_sharded(value) else value
                    torch.testing.assert_close(gathered, whole[name][key])


class Beside(nn.Module):
    """A wrapped module, and perhaps one beside it that is not."""

    def __init__(self, api: Package, beside: str = "", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = api(nn.Sequential(nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)), **options)
        self.beside = beside
        if beside:
            self.add_module(beside, nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        return self.get_submodule(self.beside)(x) if self.beside else x


@pytest.mark.parametrize("use_orig_params", BOTH)
@on_ranks(2)
def test_parameters_outside_of_wrappers_that_were_not_saved_are_left_out(
    rank: Rank, use_orig_params: bool
) -> None:
    found: dict[Package, list[Any]] = {}
    for api in PACKAGES:
        source = Beside(api, use_orig_params=use_orig_params)
        optimizer = AdamW(source.parameters(), lr=0.02)
        train(source, optimizer, rank)
        full = saved_optim(source, optimizer, FULL, api)
        sharded = saved_optim(source, optimizer, SHARDED, api)
        model = Beside(api, "last", use_orig_params=use_orig_params)
        into = AdamW(model.parameters(), lr=0.01)
        with silent():
            results = [
                load_optim(api, model, into, full),
                api.FSDP.shard_full_optim_state_dict(copy.deepcopy(full), model, optim=into),
                api.FSDP.flatten_sharded_optim_state_dict(sharded, model, into),
            ]
        number = len(list(model.parameters()))
        for result in results:
            (group,) = result["param_groups"]
            assert group["params"] == list(range(number - 2))
            assert group["lr"] == 0.02
            # With the missing parameters added, it can be loaded.
            group["params"] += [number - 2, number - 1]
            into.load_state_dict(result)
        found[api] = [set(result["state"]) - set(range(number - 2)) for result in results]
    assert found[OURS] == found[TORCH]


class NamedAdamW(AdamW):
    """Its state dicts have the names that the model lists its parameters by."""

    def __init__(self, model: nn.Module) -> None:
        self.names = [name for name, _ in model.named_parameters()]
        super().__init__(model.parameters(), lr=0.01)

    def state_dict(self) -> dict[str, Any]:
        own = super().state_dict()
        groups = [{**group, "params": self.names} for group in own["param_groups"]]
        state = {self.names[number]: value for number, value in own["state"].items()}
        return {"state": state, "param_groups": groups}


@on_ranks(2)
def test_a_named_optimizer_may_have_parameters_of_this_rank_alone_beside_wrappers(
    rank: Rank,
) -> None:
    found = {}
    for api in PACKAGES:
        model = Beside(api, f"part_{rank.rank}", use_orig_params=True)
        optimizer = NamedAdamW(model)
        train(model, optimizer, rank)
        for kind in (SHARDED, FULL):
            with silent():
                state = saved_optim(model, optimizer, kind, api)
            own = {name for name in state["state"] if name.startswith("part_")}
            assert own == {f"part_{rank.rank}.weight", f"part_{rank.rank}.bias"}
            loaded = load_optim(api, model, optimizer, state, is_named_optimizer=True)
            for name in own:
                assert_same(loaded["state"][name], optimizer.state_dict()["state"][name])
            found[api, kind.name] = sorted(loaded["state"])
    for kind in (SHARDED, FULL):
        assert set(found[TORCH, kind.name]) <= set(found[OURS, kind.name])


@on_ranks(2)
def test_the_order_of_state_names_is_kept(rank: Rank) -> None:
    for api in PACKAGES:
        model = wrapped(api=api, use_orig_params=True)
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        state = saved_optim(model, optimizer, FULL, api)
        order = ["step", "exp_avg_sq", "exp_avg"]
        for name, each in state["state"].items():
            state["state"][name] = {key: each[key] for key in order}
        for loaded in load_optim(api, model, optimizer, state)["state"].values():
            assert list(loaded) == order
        set_kind(model, Kind("FULL", {"rank0_only": True}), api)
        for loaded in load_optim(api, model, optimizer, state)["state"].values():
            assert list(loaded) == order


@on_ranks(2)
def test_a_flat_parameter_of_which_a_part_has_no_state_is_refused(rank: Rank) -> None:
    for api in PACKAGES:
        model = wrapped(api=api)
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        state = saved_optim(model, optimizer, FULL, api)
        del state["state"]["first.bias"]
        with pytest.raises(ValueError, match=r"first\.weight"):
            load_optim(api, model, optimizer, state)
        for name in ("first.weight", "last.weight", "gain"):
            del state["state"][name]
        assert len(load_optim(api, model, optimizer, state)["state"]) == 1


@on_ranks(2)
def test_local_optimizer_state_dicts_need_a_wrapper_without_a_mesh(rank: Rank) -> None:
    for api in PACKAGES:
        model = wrapped(api=api, device_mesh=rank.mesh())
        optimizer = AdamW(model.parameters(), lr=0.01)
        train(model, optimizer, rank)
        set_kind(model, LOCAL, api)
        with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT"), silent():
            api.FSDP.optim_state_dict(model, optimizer)

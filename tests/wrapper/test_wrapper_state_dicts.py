"""State dicts of wrapped models: full, sharded and local, out and in, against torch's class."""

import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor import (
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    TensorProperties,
)
from torch.distributed._shard.sharded_tensor.metadata import MEM_FORMAT_ENCODING
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.remote_device import _remote_device
from torch.optim import SGD

from fullshard import LifecycleError, StateDictType, fully_shard
from fullshard.testing import Rank, on_ranks
from tests.support.sharded_states import assert_same
from tests.support.wrapped import OURS, TORCH

FULL, SHARDED, LOCAL = "FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"
WIDTH = 5


class Net(nn.Module):
    """Uneven sizes, a tie, buffers, a norm with state, and a part that wrappers leave alone."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, WIDTH), nn.Linear(WIDTH, WIDTH))
        self.gain = nn.Parameter(torch.full((1,), 1.5))
        self.norm = nn.BatchNorm1d(WIDTH)
        self.apart = nn.Linear(WIDTH, WIDTH)
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.tied.weight
        self.register_buffer("offset", torch.linspace(0.0, 1.0, WIDTH))
        self.register_buffer("passing", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.apart(self.norm(self.inner(x)) * self.gain)
        return self.last(self.tied(hidden)) + self.offset


def built(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def flat(api: Any, seed: int = 0, **options: Any) -> Any:
    model = built(seed)
    return api(model, ignored_modules=[model.apart], **options)


def nested(api: Any, seed: int = 0, **options: Any) -> Any:
    model = built(seed)
    model.inner[0] = api(model.inner[0], **options)
    model.inner = api(model.inner, **options)
    return api(model, ignored_modules=[model.apart], **options)


def whole(seed: int = 0) -> dict[str, torch.Tensor]:
    return dict(built(seed).state_dict())


def batch(rank: int) -> torch.Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


def train(model: nn.Module, rank: Rank) -> None:
    optimizer = SGD(model.parameters(), lr=0.1)
    model(batch(rank.rank)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state_of(api: Any, model: Any, kind: str, **config: Any) -> dict[str, Any]:
    name = {FULL: "Full", SHARDED: "Sharded", LOCAL: "Local"}[kind]
    made = getattr(api.api, f"{name}StateDictConfig")(**config)
    with warnings.catch_warnings():
        if api is TORCH:
            warnings.simplefilter("ignore")  # that its ShardedTensors are deprecated
        with api.FSDP.state_dict_type(model, api.api.StateDictType[kind], made):
            return dict(model.state_dict())


def full_state(model: Any) -> dict[str, torch.Tensor]:
    return state_of(OURS, model, FULL)


def assert_holds(model: Any, expected: dict[str, torch.Tensor]) -> None:
    assert_same(full_state(model), expected, ordered=True)


def assert_trains_alike(model: nn.Module, seed: int, rank: Rank) -> None:
    """From here on, `model` trains as the unsharded model of this seed does."""
    reference = built(seed)
    for other in range(rank.size):
        (reference(batch(other)).square().mean() / rank.size).backward()
    optimizer = SGD(model.parameters(), lr=0.1)
    model(batch(rank.rank)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        expected = {n: p - 0.1 * p.grad for n, p in reference.named_parameters()}
    found = full_state(model)
    for name in expected.keys() - {"apart.weight", "apart.bias"}:  # nobody reduces their gradients
        torch.testing.assert_close(found[name], expected[name])


# What a state dict holds


@on_ranks(2)
def test_a_state_dict_is_that_of_torchs_class_and_of_the_unsharded_model(rank: Rank) -> None:
    for make in (flat, nested):
        for use_orig_params in (False, True):
            for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
                options = {"use_orig_params": use_orig_params, "sharding_strategy": strategy}
                ours, theirs = make(OURS, **options), make(TORCH, **options)
                state = full_state(ours)
                assert_same(state, whole(), ordered=True)
                assert state["tied.weight"] is state["last.weight"]
                assert not any(value.requires_grad for value in state.values())
                for model in (ours, theirs):
                    train(model, rank)
                for kind in (FULL, SHARDED):
                    expected = state_of(TORCH, theirs, kind)
                    assert_same(state_of(OURS, ours, kind), expected, ordered=True)
                first = state_of(OURS, ours, FULL, rank0_only=True)
                assert_same(first, state_of(TORCH, theirs, FULL, rank0_only=True), ordered=True)
                assert len(first) == (2 if rank.rank else len(whole()))  # what wrappers leave alone


@on_ranks(2)
def test_parameters_that_are_kept_apart_in_one_wrapper_are_saved_in_their_order(
    rank: Rank,
) -> None:
    def mixed() -> Net:
        model = built()
        model.inner[0].to(torch.bfloat16)
        model.inner[1].weight.requires_grad_(False)
        model.norm.bias.requires_grad_(False)
        return model

    expected = dict(mixed().state_dict())
    for use_orig_params in (False, True):
        wrapper = OURS(mixed(), use_orig_params=use_orig_params)
        assert_holds(wrapper, expected)
        state = state_of(OURS, wrapper, SHARDED)
        assert list(state) == list(expected)
        wrapper.load_state_dict({name: value + 1 for name, value in expected.items()})
        assert_holds(wrapper, {name: value + 1 for name, value in expected.items()})
        local = state_of(OURS, wrapper, LOCAL)
        assert {"_flat_param", "_flat_param_1", "_flat_param_2"} <= local.keys()
        wrapper = OURS(mixed(), use_orig_params=use_orig_params)
        wrapper.load_state_dict(local)
        assert_holds(wrapper, {name: value + 1 for name, value in expected.items()})


@on_ranks(2)
def test_a_local_state_dict_holds_flat_slices_under_the_keys_of_torchs(rank: Rank) -> None:
    expected = state_of(TORCH, nested(TORCH), LOCAL)
    for use_orig_params in (False, True):
        model = nested(OURS, use_orig_params=use_orig_params)
        state = state_of(OURS, model, LOCAL)
        assert list(state) == list(expected)
        for key, value in expected.items():
            assert type(state[key]) is type(value)
            if isinstance(value, ShardedTensor):
                assert state[key].metadata().size == value.metadata().size
        numels: list[Any] = [None] * rank.size
        shards = state["inner._flat_param"].local_shards()
        dist.all_gather_object(numels, sum(shard.tensor.numel() for shard in shards))
        assert sum(numels) == WIDTH * WIDTH + WIDTH  # without padding


@on_ranks(2)
def test_a_local_slice_is_the_memory_that_is_trained_and_others_are_not(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = nested(OURS, use_orig_params=use_orig_params)
        held = {kind: state_of(OURS, model, kind) for kind in (FULL, SHARDED, LOCAL)}
        train(model, rank)
        now = {kind: state_of(OURS, model, kind) for kind in (FULL, SHARDED, LOCAL)}
        for name in ("inner.0.weight", "inner.1.weight", "gain", "tied.weight", "last.weight"):
            assert_same(held[FULL][name], whole()[name])
            assert not torch.equal(held[FULL][name], now[FULL][name])
            for before, after in zip(
                held[SHARDED][name].local_shards(), now[SHARDED][name].local_shards(), strict=True
            ):
                assert not torch.equal(before.tensor, after.tensor)
        assert_same(held[LOCAL]["inner._flat_param"], now[LOCAL]["inner._flat_param"])


@on_ranks(2)
def test_without_sharding_rank0_only_is_honored_and_every_kind_is_full(rank: Rank) -> None:
    model = nested(OURS, sharding_strategy="NO_SHARD")
    state = state_of(OURS, model, FULL, rank0_only=True)
    assert list(state) == (list(whole()) if rank.rank == 0 else ["apart.weight", "apart.bias"])
    for kind in (SHARDED, LOCAL):
        with pytest.warns(UserWarning, match="full_state_dict will be returned"):
            assert_same(state_of(OURS, model, kind), whole())


@on_ranks(4)
def test_a_mesh_with_a_shard_axis_of_one_rank_saves_full_tensors(rank: Rank) -> None:
    mesh = rank.mesh((4, 1), ("replicate", "shard"))
    model = nested(OURS, sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
    with pytest.warns(UserWarning, match="full_state_dict will be returned"):
        assert_same(state_of(OURS, model, SHARDED), whole())
    model.load_state_dict(whole(1))
    assert_holds(model, whole(1))


@on_ranks(1)
def test_in_a_world_of_one_rank_state_is_saved_loaded_and_summoned(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = nested(OURS, use_orig_params=use_orig_params)
        assert_holds(model, whole())
        held = full_state(model)
        model.load_state_dict(whole(1))
        assert_holds(model, whole(1))
        assert_same(held["gain"], whole()["gain"])
        with pytest.warns(UserWarning, match="full_state_dict will be returned"):
            assert_same(state_of(OURS, model, SHARDED), whole(1))
        with OURS.FSDP.summon_full_params(model), torch.no_grad():
            model.module.tied.weight.zero_()
        assert not full_state(model)["last.weight"].any()
        model.load_state_dict(whole(1))
        assert_trains_alike(model, 1, rank)


@on_ranks(2)
def test_a_local_state_dict_is_refused_where_a_mesh_was_given(rank: Rank) -> None:
    for api in (OURS, TORCH):
        model = flat(api, device_mesh=rank.mesh())
        with pytest.raises(RuntimeError, match="LOCAL_STATE_DICT"):
            state_of(api, model, LOCAL)


@on_ranks(2)
def test_a_module_around_wrappers_saves_and_loads_under_its_own_names(rank: Rank) -> None:
    for use_orig_params in (False, True):
        outer = nn.ModuleDict({"a": nested(OURS, use_orig_params=use_orig_params), "b": built(2)})
        outer["c"] = flat(OURS, seed=3, use_orig_params=use_orig_params)
        plain = nn.ModuleDict({"a": built(), "b": built(2), "c": built(3)})
        assert_same(dict(outer.state_dict()), dict(plain.state_dict()))
        with OURS.FSDP.state_dict_type(outer, StateDictType.SHARDED_STATE_DICT):
            sharded = outer.state_dict()
        assert isinstance(sharded["c.inner.0.weight"], ShardedTensor)
        other = nn.ModuleDict({"a": built(4), "b": built(5), "c": built(6)}).state_dict()
        assert outer.load_state_dict(other) == plain.load_state_dict(other)
        assert_same(dict(outer.state_dict()), dict(other))
        outer.load_state_dict(sharded)
        assert_same(outer["c"].state_dict()["inner.0.weight"], whole(3)["inner.0.weight"])
        del other["a.inner.0.weight"], other["c.offset"]
        other["c.more"] = torch.ones(1)
        result = outer.load_state_dict(other, strict=False)
        assert sorted(result.missing_keys) == ["a.inner.0.weight", "c.offset"]
        assert result.unexpected_keys == ["c.more"]
        with pytest.raises(RuntimeError, match=r"a\.inner\.0\.weight"):
            outer.load_state_dict(other)


@on_ranks(2)
def test_an_inner_wrapper_and_a_prefix_are_honored(rank: Rank) -> None:
    model = nested(OURS)
    state = model.module.inner.state_dict(prefix="x.")
    expected = {f"x.{name}": value for name, value in built().inner.state_dict().items()}
    assert_same(dict(state), expected)
    into: dict[str, Any] = {"first": torch.ones(1)}
    model.module.inner.state_dict(destination=into, prefix="y.")
    assert list(into) == ["first", *(name.replace("x.", "y.") for name in expected)]
    model.module.inner.load_state_dict(built(1).inner.state_dict())
    assert_same(full_state(model)["inner.1.bias"], whole(1)["inner.1.bias"])
    assert_same(full_state(model)["gain"], whole()["gain"])


@on_ranks(2)
def test_buffers_are_saved_in_the_dtype_that_they_had(rank: Rank) -> None:
    precision = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}
    for inner in (False, True):
        model = built()
        if inner:
            model.norm = OURS(model.norm, mixed_precision=precision)
        model = OURS(model, mixed_precision=precision)
        model(batch(rank.rank))
        assert model.module.offset.dtype == torch.bfloat16
        state = full_state(model)
        assert_same(state["offset"], whole()["offset"].bfloat16().float())
        assert state["inner.0.weight"].dtype == torch.float32
        assert {v.dtype for k, v in state.items() if "running" in k} == {torch.float32}


@on_ranks(2)
def test_names_are_clean_under_checkpointing_and_compile_wrappers(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = built()
        model.norm = checkpoint_wrapper(model.norm)
        model.inner[1] = torch.compile(model.inner[1], backend="eager")
        model.inner = OURS(checkpoint_wrapper(model.inner), use_orig_params=use_orig_params)
        wrapper = checkpoint_wrapper(OURS(model, use_orig_params=use_orig_params))
        assert_same(dict(wrapper.state_dict()), whole())
        result = wrapper.load_state_dict(whole(1))
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_same(dict(wrapper.state_dict()), whole(1))


@on_ranks(2)
def test_a_state_dict_in_forward_is_refused(rank: Rank) -> None:
    model = nested(OURS)
    failures: list[Exception] = []

    def save(*_: Any) -> None:
        try:
            model.state_dict()
        except LifecycleError as error:
            failures.append(error)

    handle = model.module.norm.register_forward_hook(save)
    model(batch(rank.rank))
    assert len(failures) == 1
    handle.remove()
    assert_same(full_state(model)["gain"], whole()["gain"])


# What a state dict is loaded into


@on_ranks(2)
def test_training_goes_on_from_what_was_loaded(rank: Rank) -> None:
    forms: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
        "flat": (flat, {}),
        "originals": (nested, {"use_orig_params": True}),
        "a mesh": (nested, {"device_mesh": rank.mesh()}),
        "not sharded": (flat, {"sharding_strategy": "NO_SHARD", "use_orig_params": True}),
        "offloaded": (nested, {"cpu_offload": True, "sharding_strategy": "SHARD_GRAD_OP"}),
    }
    for name, (make, options) in forms.items():
        for assign in (False, True):
            model = make(OURS, **options)
            train(model, rank)
            parameters = list(model.parameters())
            model.load_state_dict(whole(1), assign=assign)
            kept = zip(parameters, model.parameters(), strict=True)
            cared_for = [a is b for a, b in kept]
            assert sum(cared_for) >= len(cared_for) - (2 if assign else 0), name
            assert_trains_alike(model, 1, rank)


@on_ranks(2)
def test_a_local_state_dict_is_loaded_by_its_like(rank: Rank) -> None:
    for use_orig_params in (False, True):
        state = state_of(OURS, nested(OURS, 1, use_orig_params=use_orig_params), LOCAL)
        for kind in (LOCAL, FULL):
            model = nested(OURS, 0, use_orig_params=not use_orig_params)
            with OURS.FSDP.state_dict_type(model, StateDictType[kind]):
                result = model.load_state_dict(state)
            assert not result.missing_keys
            assert_holds(model, whole(1))
            assert_trains_alike(model, 1, rank)


ALLOWED = [ChunkShardingSpec, MEM_FORMAT_ENCODING, _remote_device, ShardedTensor, ShardMetadata]
ALLOWED += [
    ShardedTensor.ProcessGroupState,
    ShardedTensorMetadata,
    Shard,
    TensorProperties,
    getattr,
]
"""What programs that keep a wrapper's state dict in a file allow to be in it."""


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.parametrize("inside", [False, True], ids=["fully_shard inside", "wrapper inside"])
@on_ranks(2)
def test_state_of_both_apis_in_one_model_goes_through_a_file(rank: Rank, inside: bool) -> None:
    def sharded(seed: int) -> Any:
        model = built(seed)
        if inside:
            model.inner = OURS(model.inner, use_orig_params=True)
            return fully_shard(model, mesh=rank.mesh())
        fully_shard(model.inner, mesh=rank.mesh())
        return OURS(model)

    for kind in (FULL, SHARDED, LOCAL):
        source, model, file = sharded(1), sharded(0), io.BytesIO()
        with OURS.FSDP.state_dict_type(source, StateDictType[kind]):
            torch.save(source.state_dict(), file)
        file.seek(0)
        with torch.serialization.safe_globals(ALLOWED):
            state = torch.load(file, weights_only=True)
        with OURS.FSDP.state_dict_type(model, StateDictType[kind]):
            assert not model.load_state_dict(state).missing_keys
        for each in (source, model):
            each.eval()
        batch = torch.ones(2, 3)
        torch.testing.assert_close(model(batch), source(batch))
        torch.testing.assert_close(model(batch), built(1).eval()(batch))


@on_ranks(2)
def test_a_tied_parameter_may_come_under_any_of_its_names(rank: Rank) -> None:
    for use_orig_params in (False, True):
        for name in ("tied.weight", "last.weight"):
            model = nested(OURS, use_orig_params=use_orig_params)
            state = whole(1)
            del state[name]
            result = model.load_state_dict(state)
            assert not result.missing_keys
            assert_holds(model, whole(1))


@on_ranks(2)
def test_a_tie_across_wrappers_is_saved_and_loaded(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = built()
        for name in ("inner", "tied", "last"):
            setattr(model, name, OURS(getattr(model, name), use_orig_params=use_orig_params))
        wrapper = OURS(model, use_orig_params=use_orig_params)
        assert_holds(wrapper, whole())
        wrapper.load_state_dict(whole(1))
        assert_holds(wrapper, whole(1))
        state = state_of(OURS, wrapper, SHARDED)
        wrapper.load_state_dict(whole())
        wrapper.load_state_dict(state)
        assert_holds(wrapper, whole(1))


@on_ranks(2)
def test_a_wrapper_alone_saves_and_loads_what_another_one_owns(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = built()
        for name in ("tied", "last"):
            setattr(model, name, OURS(getattr(model, name), use_orig_params=use_orig_params))
        wrapper = OURS(model, use_orig_params=use_orig_params)
        for name in ("tied", "last"):
            inner = getattr(model, name)
            assert_same(dict(inner.state_dict()), {"weight": whole()["tied.weight"]})
            inner.load_state_dict({"weight": whole(1)["tied.weight"]})
            assert_same(full_state(wrapper)["tied.weight"], whole(1)["tied.weight"])
            wrapper.load_state_dict(whole())


@on_ranks(2)
def test_wrappers_with_no_wrapper_around_them_save_a_parameter_that_they_share(
    rank: Rank,
) -> None:
    for use_orig_params in (False, True):
        for runs_first in (False, True):
            model = built()
            weight = model.tied.weight.detach().clone()
            layers = [
                OURS(each, use_orig_params=use_orig_params) for each in (model.tied, model.last)
            ]
            pair = nn.Sequential(*layers)
            x = torch.ones(2, WIDTH)
            if runs_first:
                torch.testing.assert_close(pair(x), x @ weight.T @ weight.T)
            state = dict(pair.state_dict())
            assert_same(state, {"0.weight": weight, "1.weight": weight})
            pair.load_state_dict({name: value + 1 for name, value in state.items()})
            torch.testing.assert_close(pair(x), x @ (weight + 1).T @ (weight + 1).T)
            with OURS.FSDP.summon_full_params(pair):
                assert_same(pair.state_dict()["1.weight"], weight + 1)


class Odd(nn.Module):
    """Parameters that are hard to split."""

    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.randn(()))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.one = nn.Parameter(torch.randn(1, 7))


@on_ranks(2)
def test_scalars_and_empty_parameters_are_saved_and_loaded(rank: Rank) -> None:
    for use_orig_params in (False, True):
        for mesh in (None, rank.mesh()):
            expected = dict(Odd().state_dict())
            source = Odd()
            source.load_state_dict(expected)
            model = OURS(source, use_orig_params=use_orig_params, device_mesh=mesh)
            for kind in (FULL, SHARDED):
                state = state_of(OURS, model, kind)
                target = OURS(Odd(), use_orig_params=use_orig_params, device_mesh=mesh)
                target.load_state_dict(state)
                assert_holds(target, expected)


# The name that an error must contain, and the value under it; None: no value.
BROKEN: dict[str, tuple[str, Any]] = {
    "a parameter is missing": ("inner.0.weight", None),
    "a buffer is missing": ("norm.running_mean", None),
    "there is more": ("inner.2.weight", torch.ones(1)),
    "a parameter has another shape": ("inner.1.weight", torch.ones(WIDTH, WIDTH + 1)),
    "a parameter has fewer dims": ("inner.1.weight", torch.ones(WIDTH * WIDTH)),
    "a buffer has another shape": ("offset", torch.ones(WIDTH + 1)),
    "an ignored parameter has another shape": ("apart.bias", torch.ones(WIDTH + 1)),
    "a value is no tensor": ("gain", 1.5),
}


def broken(state: dict[str, Any], how: str) -> str:
    """Break a state dict; returns the name that an error must say."""
    name, value = BROKEN[how]
    state[name] = value
    if value is None:
        del state[name]
    return name


@on_ranks(2)
def test_what_does_not_fit_is_named_and_nothing_is_loaded(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = nested(OURS, use_orig_params=use_orig_params)
        for how in BROKEN:
            state = whole(1)
            name = broken(state, how)
            with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
                model.load_state_dict(state)
            assert_holds(model, whole())
        assert_trains_alike(model, 0, rank)


@on_ranks(2)
def test_without_strict_what_fits_is_loaded_and_the_rest_is_reported(rank: Rank) -> None:
    for make in (flat, nested):
        for use_orig_params in (False, True):
            ours = make(OURS, use_orig_params=use_orig_params)
            theirs = make(TORCH, use_orig_params=use_orig_params)
            state = whole(1)
            for how in ("a parameter is missing", "a buffer is missing", "there is more"):
                broken(state, how)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                expected = theirs.load_state_dict(state, strict=False)
            result = ours.load_state_dict(state, strict=False)
            assert sorted(result.missing_keys) == sorted(expected.missing_keys)
            assert sorted(result.unexpected_keys) == sorted(expected.unexpected_keys)
            assert_same(full_state(ours), state_of(TORCH, theirs, FULL))
            with pytest.raises(RuntimeError, match="size mismatch"):
                ours.load_state_dict({"gain": torch.ones(2)}, strict=False)


@on_ranks(2)
def test_a_rank_that_was_given_something_else_stops_all_of_them(rank: Rank) -> None:
    model = nested(OURS)
    state = whole(1)
    if rank.rank == 1:
        broken(state, "a parameter is missing")
    with pytest.raises(RuntimeError, match=r"inner\.0\.weight" if rank.rank else "rank 1"):
        model.load_state_dict(state)
    assert_holds(model, whole())


@on_ranks(2)
def test_an_old_state_dict_without_the_counter_of_a_norm_is_loaded(rank: Rank) -> None:
    model = nested(OURS)
    state = whole(1)
    del state["norm.num_batches_tracked"]
    assert not model.load_state_dict(state).missing_keys
    assert_same(full_state(model)["norm.weight"], whole(1)["norm.weight"])


class Renamed(nn.Linear):
    """Once called its weight `kernel`, and had its shift as a buffer of another name."""

    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("shift", torch.zeros(2))
        self.register_load_state_dict_pre_hook(self._rename)

    @staticmethod
    def _rename(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
        for old, new in (("kernel", "weight"), ("moved", "shift")):
            if prefix + old in state:
                state[prefix + new] = state.pop(prefix + old)


@on_ranks(2)
def test_hooks_of_modules_inside_may_rename_what_is_loaded(rank: Rank) -> None:
    for use_orig_params in (False, True):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), checkpoint_wrapper(Renamed()))
        model[1] = OURS(model[1], use_orig_params=use_orig_params)
        wrapper = OURS(model, use_orig_params=use_orig_params)
        expected = {name: torch.rand_like(value) for name, value in full_state(wrapper).items()}
        old = {
            name.replace("1.weight", "1.kernel").replace("shift", "moved"): value
            for name, value in expected.items()
        }
        result = wrapper.load_state_dict(old)
        assert not result.missing_keys
        assert not result.unexpected_keys
        assert_holds(wrapper, expected)

"""What frameworks read, assign and pass beyond the documented API, beside torch's own class."""

import dataclasses
import functools
import importlib
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh

import fullshard
from fullshard.errors import ConfigError
from fullshard.state.shards import full_tensor_of
from fullshard.testing import Rank, on_ranks
from tests.wrapped import (
    APIS,
    OURS,
    TORCH,
    WIDTH,
    Block,
    Net,
    Package,
    batch_of,
    shard_blocks,
    unit_sharder,
)

both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])

# Settings and enums

SETTINGS = [
    name
    for name in sorted(
        {*torch_fsdp.__all__, *importlib.import_module("torch.distributed.fsdp.api").__all__}
    )
    if dataclasses.is_dataclass(getattr(torch_fsdp, name, None))
]


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_can_be_assigned_compared_and_hashed_as_torchs(name: str) -> None:
    ours, theirs = getattr(fullshard, name), getattr(torch_fsdp, name)
    assert ours.__dataclass_params__.frozen == theirs.__dataclass_params__.frozen
    assert ours.__dataclass_params__.eq == theirs.__dataclass_params__.eq
    assert (ours.__hash__ is None) == (theirs.__hash__ is None)


def test_a_field_that_is_assigned_counts_in_comparisons() -> None:
    config = fullshard.FullStateDictConfig()
    config.rank0_only = config.offload_to_cpu = True
    assert config == fullshard.FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    assert config != fullshard.FullStateDictConfig()


@on_ranks(2)
def test_settings_that_are_assigned_after_they_were_given_take_effect(rank: Rank) -> None:
    config = fullshard.FullStateDictConfig()
    model, other = OURS(Net()), OURS(Net())
    OURS.FSDP.set_state_dict_type(model, fullshard.StateDictType.FULL_STATE_DICT, config)
    assert len(model.state_dict()) > 0
    config.rank0_only = True
    assert bool(model.state_dict()) == (rank.rank == 0)
    OURS.FSDP.get_state_dict_type(other).state_dict_config.rank0_only = True
    assert bool(other.state_dict()) == (rank.rank == 0)
    assert len(OURS(Net()).state_dict()) > 0  # a wrapper's default is its own


@on_ranks(2)
def test_the_wrapper_takes_torchs_own_enums_and_settings(rank: Rank) -> None:
    given = torch_fsdp
    torch.manual_seed(0)
    model = OURS.FSDP(
        Net(),
        sharding_strategy=given.ShardingStrategy.SHARD_GRAD_OP,
        backward_prefetch=given.BackwardPrefetch.BACKWARD_POST,
        cpu_offload=given.CPUOffload(offload_params=False),
        mixed_precision=given.MixedPrecision(param_dtype=torch.bfloat16),
        auto_wrap_policy=given.wrap.ModuleWrapPolicy({Block}),
    )
    wrappers = OURS.FSDP.fsdp_modules(model)
    assert [each.sharding_strategy for each in wrappers] == [
        fullshard.ShardingStrategy.SHARD_GRAD_OP
    ] * 3
    assert {each.backward_prefetch for each in wrappers} == {
        fullshard.BackwardPrefetch.BACKWARD_POST
    }
    model(batch_of(0, rank.rank)).sum().backward()
    with OURS.FSDP.state_dict_type(
        model,
        given.StateDictType.FULL_STATE_DICT,
        given.FullStateDictConfig(rank0_only=True),
        given.FullOptimStateDictConfig(rank0_only=True),
    ):
        assert bool(model.state_dict()) == (rank.rank == 0)
    with pytest.raises(ConfigError, match="sharding_strategy"):
        OURS.FSDP(Net(), sharding_strategy=given.StateDictType.FULL_STATE_DICT)


@on_ranks(2)
def test_optimizer_state_is_rekeyed_by_torchs_own_enum(rank: Rank) -> None:
    model = nn.Linear(WIDTH, 3)
    state = torch.optim.SGD(model.parameters(), lr=0.1).state_dict()
    by_name = OURS.FSDP.rekey_optim_state_dict(
        state,
        torch_fsdp.fully_sharded_data_parallel.OptimStateKeyType.PARAM_NAME,
        model,
        optim=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert sorted(by_name["param_groups"][0]["params"]) == ["bias", "weight"]


def checkpointed(package: Package, kind: str) -> str:
    def chosen(module: nn.Module) -> Any:
        if isinstance(module, Block):
            return {"preserve_rng_state": False}
        return isinstance(module, nn.Linear) and module.out_features == 3

    wrap = package.wrap
    policy = {
        "classes": wrap.ModuleWrapPolicy({Block}),
        "custom": wrap.CustomPolicy(chosen),
        "function": functools.partial(
            wrap.transformer_auto_wrap_policy, transformer_layer_cls={Block}
        ),
    }[kind]
    model = Net()
    apply_activation_checkpointing(model, auto_wrap_policy=policy)
    options = [
        module.checkpoint_fn.keywords
        for module in model.modules()
        if hasattr(module, "_checkpoint_wrapped_module")
    ]
    return f"{model} {options}"


@pytest.mark.parametrize("kind", ["classes", "custom", "function"])
def test_torchs_activation_checkpointing_takes_our_policies(kind: str) -> None:
    found = checkpointed(OURS, kind)
    assert "CheckpointWrapper" in found
    assert found == checkpointed(TORCH, kind)


# Attributes of the wrapper and of flat parameters


def attributes(package: Package, wrapper: Any) -> dict[str, Any]:
    flat = wrapper._flat_param
    module = importlib.import_module(f"{package.FSDP.__module__}")
    found = {
        "rank": (wrapper.rank, wrapper.world_size),
        "sharding_strategy": wrapper.sharding_strategy.name,
        "cpu_offload": wrapper.cpu_offload.offload_params,
        "prefetch": (wrapper.backward_prefetch.name, wrapper.forward_prefetch),
        "limit_all_gathers": wrapper.limit_all_gathers,
        "compute_device": wrapper.compute_device,
        "training_state": wrapper.training_state.name,
        "mixed_precision": wrapper.mixed_precision.param_dtype,
        "_has_params": wrapper._has_params,
        "_is_root": wrapper._is_root,
        "_use_orig_params": wrapper._use_orig_params,
        "_state_dict_type": wrapper._state_dict_type.name,
        "configs": (
            type(wrapper._state_dict_config).__name__,
            type(wrapper._optim_state_dict_config).__name__,
        ),
        "params": [each is flat for each in wrapper.params],
        "_handle": wrapper._handle is None,
    }
    if flat is not None:
        found["is a FlatParameter"] = isinstance(flat, module.FlatParameter)
        found["flat parameter"] = (list(flat._fqns), flat.dtype, flat.requires_grad, flat.device)
        found["dtype"] = wrapper._handle._orig_param_dtype
        found["_handle.flat_param"] = wrapper._handle.flat_param is flat
    return found


def shaped(package: Package, use_orig_params: bool, **options: Any) -> Any:
    """A net of wrappers, one of which has no parameters."""
    torch.manual_seed(0)
    net = Net()
    net.blocks.append(nn.Tanh())
    precision = {"param_dtype": torch.bfloat16}
    options |= {"use_orig_params": use_orig_params, "mixed_precision": precision}
    options["limit_all_gathers"] = False  # torch wants it alike everywhere
    net.blocks[2] = package(net.blocks[2], **options)
    net.blocks[0] = package(net.blocks[0], **options)
    return package(net, backward_prefetch="BACKWARD_POST", forward_prefetch=True, **options)


@both_forms
@on_ranks(2)
def test_a_wrapper_has_the_attributes_of_torchs(rank: Rank, use_orig_params: bool) -> None:
    alone = [dist.new_group([each]) for each in range(2)][rank.rank]
    for options in (
        {},
        {"sharding_strategy": "NO_SHARD"},
        {"sharding_strategy": "SHARD_GRAD_OP", "process_group": dist.group.WORLD},
        {"process_group": alone},  # where torch reports NO_SHARD
    ):
        models = {package: shaped(package, use_orig_params, **options) for package in (OURS, TORCH)}
        for moment in ("made", "trained"):
            ours, torchs = (
                [attributes(package, each) for each in package.FSDP.fsdp_modules(model)]
                for package, model in models.items()
            )
            for own, expected in zip(ours, torchs, strict=True):
                for name, value in expected.items():
                    assert own[name] == value, (name, own[name], value, moment, options)
            for model in models.values():
                model(batch_of(0, rank.rank)).sum().backward()
        for package, model in models.items():
            group = options.get("process_group", dist.group.WORLD)
            assert [each.process_group for each in package.FSDP.fsdp_modules(model)] == [group] * 3
            flattened = [getattr(each, "_fsdp_flattened", False) for each in model.parameters()]
            assert set(flattened) == {True}, package.package.__name__


@on_ranks(2)
def test_a_hybrid_wrapper_tells_the_group_that_it_shards_in(rank: Rank) -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    for package in (OURS, TORCH):
        model = package(Net(), sharding_strategy="HYBRID_SHARD", device_mesh=mesh)
        assert model.process_group is mesh.get_group("shard")
        assert (model.rank, model.world_size) == (rank.rank, 2)


def training_states(package: Package, rank: int, use_orig_params: bool) -> list[list[str]]:
    seen: list[list[str]] = []
    inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    first, last = (package(nn.Linear(WIDTH, WIDTH), use_orig_params=use_orig_params) for _ in "ab")
    model = package(nn.Sequential(first, inner, last), use_orig_params=use_orig_params)

    def look(*_: Any) -> None:
        seen.append([each.training_state.name for each in (model, first, last)])

    def look_in_backward(_: nn.Module, __: Any, output: Tensor) -> None:
        look()
        output.register_hook(look)

    inner.register_forward_hook(look_in_backward)
    look()
    output = model(batch_of(0, rank))
    look()
    output.sum().backward()
    look()
    with package.FSDP.summon_full_params(first):
        look()
    look()
    return seen


@both_forms
@on_ranks(2)
def test_the_training_state_is_torchs_at_every_moment(rank: Rank, use_orig_params: bool) -> None:
    ours, torchs = (training_states(p, rank.rank, use_orig_params) for p in (OURS, TORCH))
    assert ours == torchs
    assert {state for moment in ours for state in moment} == {
        "IDLE",
        "FORWARD_BACKWARD",
        "SUMMON_FULL_PARAMS",
    }


def upcast(
    package: Package, rank: int, use_orig_params: bool, *, frozen: bool
) -> dict[str, Tensor]:
    """Train a model that was loaded in bfloat16 as accelerate does: its parameters in float32."""
    torch.manual_seed(0)
    net = Net().to(torch.bfloat16)
    net.blocks[1].up.weight.requires_grad_(not frozen)
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    options = {"use_orig_params": use_orig_params, "mixed_precision": precision}
    model = package(net, auto_wrap_policy={Block}, **options)
    for wrapper in package.FSDP.fsdp_modules(model):
        flat = wrapper._flat_param
        assert wrapper._has_params
        assert (flat.dtype, flat.requires_grad) == (torch.bfloat16, True)
        flat.data = flat.data.to(torch.float32)
        wrapper._handle._orig_param_dtype = torch.float32
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # too small a step for bfloat16
    for step in range(3):
        model(batch_of(step, rank)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert {each.dtype for each in model.parameters()} == {torch.float32}
    return model.state_dict()


@pytest.mark.parametrize(
    ("use_orig_params", "frozen"), [(False, False), (True, False), (True, True)]
)
@on_ranks(2)
def test_what_is_assigned_to_a_flat_parameter_takes_effect(
    rank: Rank, use_orig_params: bool, frozen: bool
) -> None:
    ours, torchs = (
        upcast(package, rank.rank, use_orig_params, frozen=frozen) for package in (OURS, TORCH)
    )
    assert list(ours) == list(torchs)
    for name, value in torchs.items():
        assert ours[name].dtype == value.dtype, name
        torch.testing.assert_close(ours[name], value, rtol=1e-5, atol=1e-6)


def test_the_wrappers_module_has_the_names_that_frameworks_import_from_it() -> None:
    ours = importlib.import_module("fullshard.fully_sharded_data_parallel")
    theirs = importlib.import_module("torch.distributed.fsdp.fully_sharded_data_parallel")
    for name in ("FlatParameter", "CustomPolicy", "ModuleWrapPolicy", "TrainingState"):
        assert inspect.isclass(getattr(ours, name))
    assert [each.name for each in ours.TrainingState] == [
        each.name for each in theirs.TrainingState
    ]


# Names of `wrap`


def recursively_wrapped(package: Package, only_wrap_children: bool) -> tuple[str, int]:
    wrap = package.wrap
    policy = functools.partial(
        wrap._or_policy,
        policies=[
            functools.partial(wrap._module_wrap_policy, module_classes={Block}),
            functools.partial(wrap._wrap_module_cls_individually, module_classes=[Net]),
        ],
    )
    net = Net()
    wrapped, numel = wrap._recursive_wrap(
        net,
        auto_wrap_policy=policy,
        wrapper_cls=nn.Sequential,
        ignored_modules={net.head},
        ignored_params={*net.head.parameters()},
        only_wrap_children=only_wrap_children,
    )
    assert issubclass(wrap.CustomPolicy, wrap._Policy)
    return str(wrapped), numel


@pytest.mark.parametrize("only_wrap_children", [False, True])
def test_the_private_helpers_of_wrap_do_as_torchs(only_wrap_children: bool) -> None:
    ours = recursively_wrapped(OURS, only_wrap_children)
    assert ours == recursively_wrapped(TORCH, only_wrap_children)
    assert ours[1] > 0


# Lazy values


class Lazy:
    """A value of a checkpoint that is read when it is used, as Lightning's are."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    @property
    def shape(self) -> torch.Size:
        return self._value.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._value.dtype

    @property
    def is_meta(self) -> bool:
        return False

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        read = [each._value.clone() if isinstance(each, Lazy) else each for each in args]
        return function(*read, **(kwargs or {}))


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_values_that_only_have_a_torch_function_can_be_loaded(rank: Rank, api: str) -> None:
    torch.manual_seed(3)
    saved = Net().state_dict()
    lazy = {name: Lazy(value) for name, value in saved.items()}
    models = {package: shard_blocks(unit_sharder(package, api), Net()) for package in (OURS, TORCH)}
    # torch's `fully_shard` takes DTensors only.
    for model in models.values() if api != "fully_shard" else [models[OURS]]:
        result = model.load_state_dict(dict(lazy))
        assert [*result.missing_keys, *result.unexpected_keys] == []
        for name, value in model.state_dict().items():
            torch.testing.assert_close(full_tensor_of(value), saved[name], rtol=0, atol=0)
        with pytest.raises(RuntimeError, match=r"size mismatch for .*head\.weight"):
            model.load_state_dict({**lazy, "head.weight": Lazy(torch.zeros(2, 2))})

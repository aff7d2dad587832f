"""What frameworks read, assign and pass beyond the documented API, beside torch's own class."""

import dataclasses
import functools
import importlib
import inspect
import threading
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from torch import Tensor, nn
from torch.distributed._tools import fsdp2_mem_tracker
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed import multi_threaded_pg

import fullshard
from fullshard.errors import ConfigError
from fullshard.state.values import full_tensor_of
from fullshard.testing import Rank, on_ranks
from tests.support.wrapped import (
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
    options["limit_all_gathers"] = False  # torch requires it to be the same everywhere
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


# Names of `fully_shard`


def tracked(package: Package, rank: int) -> dict[str, list[str]]:
    """The moments of a step at which torch's memory tracker looked at each module."""
    torch.manual_seed(0)
    model = shard_blocks(unit_sharder(package, "fully_shard"), Net())
    with pytest.MonkeyPatch.context() as redirected:
        redirected.setattr(fsdp2_mem_tracker, "FSDPModule", package.package.FSDPModule)
        tracker = fsdp2_mem_tracker.FSDPMemTracker(model)
        tracker.track_inputs((batch_of(0, rank),))
        with tracker:
            model(batch_of(0, rank)).sum().backward()
    model(batch_of(1, rank)).sum().backward()  # it has put everything back
    return {
        stats.mod_fqn: [state.name for state in stats.snapshots]
        for stats in tracker.memory_tracking.values()
    }


@on_ranks(2)
def test_torchs_memory_tracker_follows_our_modules(rank: Rank) -> None:
    ours, torchs = (tracked(package, rank.rank) for package in (OURS, TORCH))
    assert set(ours) == set(torchs)
    for name, moments in torchs.items():
        assert set(ours[name]) == set(moments), (name, ours[name], moments)


@on_ranks(2)
def test_a_module_has_the_state_that_torchs_has(rank: Rank) -> None:
    for package in (OURS, TORCH):
        model = shard_blocks(unit_sharder(package, "fully_shard"), Net())
        state = package.package.fully_shard.state
        assert state(model) is state(model) is model._get_fsdp_state()
        assert not state(nn.Linear(2, 2))
        assert state(model.head) is None
        model(batch_of(0, rank.rank)).sum().backward()
        states = state(model)._state_ctx.all_states
        assert set(states) == {state(each) for each in (model, *model.blocks)}
        assert [each._is_root for each in (state(model), state(model.blocks[0]))] == [True, False]
        assert len({id(each._comm_ctx) for each in states}) == 1
        shards = [
            each.sharded_param for each in state(model.blocks[0])._fsdp_param_group.fsdp_params
        ]
        assert shards == [*model.blocks[0].parameters()]
        model._set_unshard_async_op(True)
        model(batch_of(0, rank.rank)).sum().backward()


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


# Process groups that are not torch's own


SEEDING = threading.Lock()
"""Threads share the random generator."""


def trained(package: Package, api: str, rank: int, **options: Any) -> dict[str, Tensor]:
    """The whole parameters and the loss after two steps."""
    with SEEDING:
        torch.manual_seed(0)
        net = Net()
    model = shard_blocks(unit_sharder(package, api, **options), net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = {}
    for step in range(2):
        loss = model(batch_of(step, rank)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found[f"loss {step}"] = loss.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of NO_SHARD
        state = model.state_dict()
    return found | {name: full_tensor_of(value) for name, value in state.items()}


class Threads:
    """Ranks that are threads of this process, as in torch's own tests."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.errors: list[BaseException] = []

    def run(self, work: Callable[[int], None]) -> None:
        isolate = torch._C._distributed_c10d._set_thread_isolation_mode
        isolate(True)
        multi_threaded_pg._install_threaded_pg()
        store = dist.HashStore()
        try:
            threads = [
                threading.Thread(target=self._rank, args=(work, rank, store))
                for rank in range(self.size)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            multi_threaded_pg.ProcessLocalGroup.reset()
            multi_threaded_pg._uninstall_threaded_pg()
            isolate(False)
        for error in self.errors:
            raise error

    def _rank(self, work: Callable[[int], None], rank: int, store: dist.Store) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=self.size, store=store)
        try:
            work(rank)
        except BaseException as error:
            self.errors.append(error)
            multi_threaded_pg.ProcessLocalGroup.exception_handle(error)
        finally:
            dist.destroy_process_group()


@pytest.mark.parametrize("api", APIS)
def test_ranks_that_are_threads_train_as_with_torch(api: str) -> None:
    def work(rank: int) -> None:
        options = {"mesh": init_device_mesh("cpu", (2,))} if api == "fully_shard" else {}
        ours, torchs = (trained(package, api, rank, **options) for package in (OURS, TORCH))
        assert list(ours) == list(torchs)
        for name, value in torchs.items():
            torch.testing.assert_close(ours[name], value, msg=lambda m, name=name: f"{name}: {m}")

    Threads(2).run(work)


class Managed(dist.ProcessGroup):
    """A group in Python around another one, with the methods that the functions of `dist` call."""

    def __init__(self, inside: dist.ProcessGroup) -> None:
        super().__init__(inside.rank(), inside.size())
        self.inside = inside
        self.calls: list[str] = []

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return "managed"


def forward(name: str) -> Callable[..., Any]:
    def call(self: Managed, *args: Any) -> Any:
        self.calls.append(name)
        return getattr(self.inside, name)(*args)

    return call


FORWARDED = ["allreduce", "broadcast", "allgather", "barrier"]
NEW_NAMES = ["all_gather_single", "reduce_scatter_single"]
OLD_NAMES = ["_allgather_base", "_reduce_scatter_base"]
FORWARDED += NEW_NAMES if hasattr(dist.ProcessGroup, NEW_NAMES[0]) else OLD_NAMES
for name in FORWARDED:
    setattr(Managed, name, forward(name))


@both_forms
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@on_ranks(2)
def test_a_group_that_is_written_in_python_trains_as_with_torch(
    rank: Rank, strategy: str, use_orig_params: bool
) -> None:
    api = "orig" if use_orig_params else "flat"
    groups = {package: Managed(dist.group.WORLD) for package in (OURS, TORCH)}
    ours, torchs = (
        trained(package, api, rank.rank, sharding_strategy=strategy, process_group=group)
        for package, group in groups.items()
    )
    for name, value in torchs.items():
        torch.testing.assert_close(ours[name], value, msg=lambda m, name=name: f"{name}: {m}")
    assert groups[OURS].calls


class Alike:
    """Not a group, but with a rank and a size."""

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 3


@both_forms
@on_ranks(1)
def test_a_rank_and_a_size_are_enough_to_construct_a_wrapper(
    rank: Rank, use_orig_params: bool
) -> None:
    models = [
        package(Net(), process_group=Alike(), use_orig_params=use_orig_params)
        for package in (OURS, TORCH)
    ]
    assert [(model.rank, model.world_size) for model in models] == [(1, 3)] * 2
    for model in models:  # whose shards are padded differently
        numel = sum(param.numel() for param in model.parameters())
        assert numel < sum(param.numel() for param in Net().parameters()) // 2
    with pytest.raises(ConfigError, match="one process group"):
        OURS(Net(), process_group="gloo")

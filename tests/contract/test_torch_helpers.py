"""`torch.distributed.checkpoint.state_dict` treats wrapped models like unsharded ones."""

import copy
from collections.abc import Iterator
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Adam, Optimizer

from fullshard import FullyShardedDataParallel, StateDictType
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.support.programs import outcome_of_forks
from tests.support.wrapped import full

Pair = tuple[nn.Module, Optimizer]

OPTIONS: dict[str, dict[str, bool]] = {
    "default": {},
    "cpu_offload": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "without frozen": {"ignore_frozen_params": True},
    "full": {"full_state_dict": True},
    "full flattened": {"full_state_dict": True, "flatten_optimizer_state_dict": True},
    "first rank": {"full_state_dict": True, "cpu_offload": True},
}


def built(
    seed: int,
    mesh: DeviceMesh | None = None,
    *,
    is_wrapped: bool = True,
    use_orig_params: bool = True,
) -> Pair:
    torch.manual_seed(seed)
    inner = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    model: nn.Module = nn.Sequential(nn.Linear(6, 5), inner, nn.Linear(7, 3))
    model[0].requires_grad_(not use_orig_params)
    if is_wrapped:
        policy = ModuleWrapPolicy({nn.Sequential})
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_mesh=mesh
        )
    trained = [param for param in model.parameters() if param.requires_grad]
    return model, Adam(trained, lr=0.1)


def train(rank: Rank, pair: Pair) -> None:
    model, optimizer = pair
    is_wrapped = isinstance(model, FullyShardedDataParallel)
    x = torch.randn(rank.size, 4, 6, generator=torch.Generator().manual_seed(7))
    for _ in range(2):
        batches = [x[rank.rank]] if is_wrapped else list(x)
        sum(model(batch).square().mean() / len(batches) for batch in batches).backward()
        optimizer.step()
        optimizer.zero_grad()


def leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested dicts and lists with their paths; parts made whole, names sorted."""
    if isinstance(value, dict | list):
        if name.endswith("/params"):
            value = sorted(value)
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from leaves(each, f"{name}/{key}")
    else:
        yield name, full(value) if isinstance(value, Tensor) else value


def assert_same(found: Any, expected: Any) -> None:
    ours, theirs = dict(leaves(found)), dict(leaves(expected))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if isinstance(value, Tensor):
            torch.testing.assert_close(ours[name], value, rtol=1e-4, atol=1e-5)
        else:
            assert ours[name] == value, name


@pytest.mark.sampled(3)
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@pytest.mark.parametrize("name", OPTIONS)
@on_ranks(2)
def test_states_are_those_of_an_unsharded_model_and_load_into_another(
    rank: Rank, name: str, use_orig_params: bool
) -> None:
    options = StateDictOptions(**OPTIONS[name])
    mesh = rank.mesh()  # so that parts are DTensors
    pair = built(0, mesh, use_orig_params=use_orig_params)
    reference = built(0, is_wrapped=False, use_orig_params=use_orig_params)
    for each in (pair, reference):
        train(rank, each)
    found = get_state_dict(*pair, options=options)
    expected = get_state_dict(*reference, options=options)
    assert_same(list(found), list(expected))
    other = built(1, mesh, use_orig_params=use_orig_params)
    if name == "without frozen":
        options.strict = False
    if name == "first rank":
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other[0], found[0], options=options)
    set_optimizer_state_dict(*other, found[1], options=options)
    whole = StateDictOptions(full_state_dict=True, ignore_frozen_params=name == "without frozen")
    assert_same(
        list(get_state_dict(*other, options=whole)), list(get_state_dict(*reference, options=whole))
    )


@on_ranks(2)
def test_what_dcp_saves_of_a_wrapped_model_opens_in_an_unsharded_one(
    rank: Rank, tmp_path: Path
) -> None:
    model, _ = pair = built(0)
    train(rank, pair)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=tmp_path)
    plain, _ = built(1, is_wrapped=False)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path)
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert_same(state["model"], dict(whole))


@pytest.mark.exhaustive
def test_the_helpers_know_the_wrapper_whichever_is_imported_first() -> None:
    first, second = "import fullshard\n", "import torch.distributed.checkpoint.state_dict\n"
    check = (
        "from torch.distributed.fsdp import FullyShardedDataParallel as Theirs\n"
        "Ours = fullshard.FullyShardedDataParallel\n"  # imported only now
        "from torch.distributed.checkpoint.state_dict import FSDP\n"
        "assert isinstance(Ours.__new__(Ours), FSDP)\n"
        "assert isinstance(Theirs.__new__(Theirs), FSDP)\n"
        "assert not isinstance(object(), FSDP)\n"
        "print('known')\n"
    )
    # The import of a module with the name of a function does not hide the function.
    hiding = (
        "import fullshard.fully_sharded_data_parallel\nassert callable(fullshard.fully_shard)\n"
    )
    programs = (first + second + check, second + first + check, hiding + check)
    assert outcome_of_forks("import torch.distributed.tensor", *programs) == 3 * "known\n"


@pytest.mark.filterwarnings("ignore:Please use DTensor instead:FutureWarning")
@pytest.mark.parametrize("use_orig_params", [True, False], ids=["originals", "flat"])
@on_ranks(2)
def test_a_sharded_state_dict_is_saved_while_training_goes_on(
    rank: Rank, use_orig_params: bool
) -> None:
    pair, other = (built(seed, use_orig_params=use_orig_params) for seed in (0, 1))
    folder: list[Any] = [mkdtemp() if rank.rank == 0 else None]
    dist.broadcast_object_list(folder)
    kind = FullyShardedDataParallel.state_dict_type
    expected = copy.deepcopy(pair[0].state_dict())
    with kind(pair[0], StateDictType.SHARDED_STATE_DICT):
        state = pair[0].state_dict()
        saving = dcp.async_save(state, checkpoint_id=folder[0])
        for value in state.values():
            for shard in value.local_shards():
                shard.tensor.zero_()
        train(rank, pair)
        saving.result()
    with kind(other[0], StateDictType.SHARDED_STATE_DICT):
        state = other[0].state_dict()
        dcp.load(state, checkpoint_id=folder[0])
        other[0].load_state_dict(state)
    dist.barrier()
    if rank.rank == 0:
        rmtree(folder[0])
    assert_same(other[0].state_dict(), expected)

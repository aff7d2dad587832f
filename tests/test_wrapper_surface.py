"""What can be imported and called is what torch's package has, under the same names."""

import dataclasses
import enum
import importlib
import inspect
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

import fullshard

MODULES = ["", ".api", ".wrap", ".fully_sharded_data_parallel", ".sharded_grad_scaler"]
METHODS = [
    "__init__",
    "_unshard",
    "apply",
    "check_is_root",
    "clip_grad_norm_",
    "flatten_sharded_optim_state_dict",
    "forward",
    "fsdp_modules",
    "full_optim_state_dict",
    "get_state_dict_type",
    "no_sync",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "register_comm_hook",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "set_state_dict_type",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
    "state_dict_type",
    "summon_full_params",
]
CONFIGURATION = [
    name
    for name in importlib.import_module("torch.distributed.fsdp.api").__all__
    if hasattr(torch_fsdp, name)
]


@pytest.mark.parametrize("module", MODULES)
def test_a_program_moves_over_by_its_import_lines(module: str) -> None:
    theirs = importlib.import_module(f"torch.distributed.fsdp{module}")
    ours = importlib.import_module(f"fullshard{module}")
    exported = getattr(theirs, "__all__", None) or ["ShardedGradScaler"]
    assert [name for name in exported if not hasattr(ours, name)] == []


def test_the_wrappers_module_has_the_configuration_too() -> None:
    ours = importlib.import_module("fullshard.fully_sharded_data_parallel")
    assert [name for name in CONFIGURATION if not hasattr(ours, name)] == []


def plain(value: Any) -> Any:
    """A default that can be compared: enums of the two packages are different objects."""
    return value.name if isinstance(value, enum.Enum) else value


def arguments(function: Any) -> list[tuple[str, Any]]:
    signature = inspect.signature(function)
    return [(name, plain(each.default)) for name, each in signature.parameters.items()]


@pytest.mark.parametrize("method", METHODS)
def test_a_method_takes_the_same_arguments(method: str) -> None:
    theirs = getattr(torch_fsdp.FullyShardedDataParallel, method)
    ours = getattr(fullshard.FullyShardedDataParallel, method)
    assert arguments(ours) == arguments(theirs)


def test_every_public_method_of_torchs_class_is_there() -> None:
    theirs = vars(torch_fsdp.FullyShardedDataParallel)
    public = [name for name in theirs if not name.startswith("_")]
    assert [n for n in public if not hasattr(fullshard.FullyShardedDataParallel, n)] == []


BESIDES = {"MixedPrecision": [("wire_dtype", None)]}


@pytest.mark.parametrize("name", CONFIGURATION)
def test_configuration_has_the_same_fields_defaults_and_values(name: str) -> None:
    ours, theirs = getattr(fullshard, name), getattr(torch_fsdp, name)
    if issubclass(theirs, enum.Enum):
        assert [each.name for each in ours] == [each.name for each in theirs]
    else:
        own, its = [
            [(field.name, field.default) for field in dataclasses.fields(each)]
            for each in (ours, theirs)
        ]
        # What we have besides comes last, so that positions mean the same.
        assert own[: len(its)] == its
        assert own[len(its) :] == BESIDES.get(name, [])

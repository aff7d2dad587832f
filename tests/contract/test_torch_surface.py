"""Whatever the installed torch lets programs import and call, ours has under the same names.

With a new release of torch, the failures here list the work to do. `KNOWN` has what differs on
purpose.
"""

import dataclasses
import enum
import importlib
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed.fsdp as torch_fsdp

MODULES = ["", ".api", ".wrap", ".fully_sharded_data_parallel", ".sharded_grad_scaler"]
# "module.Class.method" or "module.function", and why ours differs.
KNOWN: dict[str, str] = {}
# Private, but called by programs.
CALLED = {"FullyShardedDataParallel": ["__init__", "_unshard"]}
# Fields that we have besides torch's.
WIRES = ["wire_dtype", "gather_wire", "reduce_wire", "replica_wire"]
BESIDES = {"MixedPrecision": WIRES, "MixedPrecisionPolicy": WIRES}
# Fields and keyword arguments of a newer torch than some that we support.
NEWER = {"MixedPrecisionPolicy": ["param_dtype_override_fn"], "fully_shard": ["dp_mesh_dims"]}


def exported() -> Iterator[tuple[str, str, Any]]:
    """The public names of torch's package: the module of ours, the name, and what torch has."""
    for module in MODULES:
        theirs = importlib.import_module(f"torch.distributed.fsdp{module}")
        for name in getattr(theirs, "__all__", None) or ["ShardedGradScaler"]:
            yield f"fullshard{module}", name, getattr(theirs, name)


EXPORTED = [pytest.param(*each, id=".".join(each[:2])) for each in exported()]


def plain(value: Any) -> Any:
    """A default that can be compared: objects of the two packages are different ones."""
    if isinstance(value, enum.Enum):
        return value.name
    return type(value).__name__ if dataclasses.is_dataclass(value) else value


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, plain(each.default)) for each in found]


def assert_same_methods(name: str, ours: Any, theirs: Any) -> None:
    own_methods = [
        n for n, each in vars(theirs).items() if not n.startswith("_") and callable(each)
    ]
    for method in (*own_methods, *CALLED.get(name, ())):
        if f"{name}.{method}" in KNOWN:
            continue
        assert hasattr(ours, method), method
        found, expected = getattr(ours, method), getattr(theirs, method)
        assert arguments(found) == arguments(expected), method


def assert_same_fields(name: str, ours: Any, theirs: Any) -> None:
    """Our own additions come last or by keyword, so that positions mean the same."""
    besides = [*BESIDES.get(name, ()), *NEWER.get(name, ())]
    own = {field.name: field for field in dataclasses.fields(ours)}
    its = {field.name: field for field in dataclasses.fields(theirs)}
    assert [n for n in own if n not in besides] == [n for n in its if n not in besides]
    assert set(own) - set(its) <= set(besides)
    for each, field in its.items():
        assert plain(own[each].default) == plain(field.default), each
        assert own[each].kw_only == field.kw_only, each
    positional = [n for n, field in own.items() if not field.kw_only]
    expected = [n for n, field in its.items() if not field.kw_only]
    assert positional[: len(expected)] == expected


@pytest.mark.parametrize("module, name, theirs", EXPORTED)
def test_a_public_name_of_torch_is_ours_with_the_same_arguments(
    module: str, name: str, theirs: Any
) -> None:
    ours = getattr(importlib.import_module(module), name)
    if not inspect.isclass(theirs):
        if name not in KNOWN and callable(theirs):
            expected = arguments(theirs)
            newer = set(NEWER.get(name, ())) - {argument for argument, *_ in expected}
            assert [each for each in arguments(ours) if each[0] not in newer] == expected
    elif issubclass(theirs, enum.Enum):
        assert [each.name for each in ours] == [each.name for each in theirs]
    elif dataclasses.is_dataclass(theirs):
        assert_same_fields(name, ours, theirs)
    else:
        assert_same_methods(name, ours, theirs)


def test_the_wrappers_module_has_the_configuration_too() -> None:
    ours = importlib.import_module("fullshard.fully_sharded_data_parallel")
    configuration = importlib.import_module("torch.distributed.fsdp.api").__all__
    names = [name for name in configuration if hasattr(torch_fsdp, name)]
    assert [name for name in names if not hasattr(ours, name)] == []

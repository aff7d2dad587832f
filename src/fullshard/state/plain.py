"""State as a checkpoint holds it: plain data, which is read without running any code."""

from __future__ import annotations

import functools
import io
import json
import random
import sys
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch.distributed.tensor import DTensor

from fullshard._torch import new_dtensor, spec_of, to_local
from fullshard.errors import ConfigError

RANDOM = "random state"


def is_quantized(value: Any) -> bool:
    """Whether this is state of a torchao optimizer."""
    return isinstance(value, torch.Tensor) and hasattr(to_local(value), "codes")


def dequantized(value: torch.Tensor) -> torch.Tensor:
    """State as a checkpoint stores it: in float32, for any optimizer and number of ranks."""
    if not is_quantized(value):
        return value
    local = to_local(value).dequantize().cpu()
    return new_dtensor(local, spec_of(value)) if isinstance(value, DTensor) else local


def as_json(subject: str, value: Any) -> Any:
    """Convert a value to one that JSON can hold and that `from_json` restores."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        dtype = str(value.dtype).removeprefix("torch.")
        return {"kind": "tensor", "dtype": dtype, "value": value.item()}
    if isinstance(value, (list, tuple)):
        items = [as_json(subject, item) for item in value]
        return items if isinstance(value, list) else {"kind": "tuple", "value": items}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        inner = {key: as_json(f"{subject}.{key}", item) for key, item in value.items()}
        return {"kind": "dict", "value": inner}
    raise ConfigError(
        f"optimizer: {subject} is a {type(value).__name__}, but only plain data (numbers, "
        "strings, lists, dicts) can be saved; give the optimizer a plain value."
    )


def from_json(value: Any) -> Any:
    """Restore the value that `as_json` was given."""
    match value:
        case list():
            return [from_json(item) for item in value]
        case {"kind": "tuple", "value": list(inner)}:
            return tuple(from_json(item) for item in inner)
        case {"kind": "dict", "value": dict(inner)}:
            return {key: from_json(item) for key, item in inner.items()}
        case {"kind": "tensor", "value": inner, "dtype": str(name)}:
            dtype = getattr(torch, name, None)
            return torch.tensor(inner, dtype=dtype) if isinstance(dtype, torch.dtype) else value
    return value


# The state of a run besides its tensors. Each rank writes its own, as plain data in a file that is
# read without running any code.


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def packed(state: Mapping[str, Any]) -> bytes:
    """The content of one rank's file: of each object the state dict, if it has one."""
    extra = {
        name: value.state_dict() if callable(getattr(value, "state_dict", None)) else value
        for name, value in state["extra"].items()
    }
    buffer = io.BytesIO()
    try:
        torch.save({**state, "extra": extra}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        raise ConfigError(
            f"extra: {', '.join(map(repr, extra))} must be plain data (numbers, strings, "
            f"tensors, lists, dicts) to be loaded without running code, but is not ({error}); "
            "give it a state_dict method that returns plain data."
        ) from error
    return buffer.getvalue()


def random_state() -> dict[str, Any]:
    """The state of all generators that this process draws from."""
    version, internal, gauss = random.getstate()
    python = [version, list(internal), gauss]
    state: dict[str, Any] = {"python": python, "torch": torch.get_rng_state()}
    numpy = sys.modules.get("numpy")  # torch alone does not need it
    if numpy is not None:
        kind, keys, *others = numpy.random.get_state(legacy=True)
        state["numpy"] = [kind, keys.tolist(), *others]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        state[accelerator.type] = torch.get_device_module(accelerator).get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        numpy.random.set_state(tuple(state["numpy"]))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


# JSON from an untrusted source, as values of declared types.


def parse_json(text: str | bytes) -> dict[str, Any]:
    """A JSON object in which no name appears twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        require(len(found) == len(pairs), "names", "there once", "one that is there twice")
        return found

    result: dict[str, Any] = json.loads(text, object_pairs_hook=unique)
    require(isinstance(result, dict), "JSON", "an object", result)
    return result


_hints_of = functools.cache(get_type_hints)


def decode(kind: Any, value: Any, what: str) -> Any:
    """Convert a parsed JSON value to the type that it is declared with, or raise ValueError."""
    if kind is Any:
        return value
    if kind is str:
        require(isinstance(value, str), what, "text", value)
        return value
    if kind is int:
        # bool is an int in Python, but not here.
        fits = type(value) is int and 0 <= value < 2**63
        require(fits, what, "an integer of at least 0 that fits in 64 bits", value)
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is types.UnionType:  # with None
        return None if value is None else decode(arguments[0], value, what)
    if origin in (tuple, list):
        require(isinstance(value, list), what, "a list", value)
        return origin(decode(arguments[0], each, what) for each in value)
    require(isinstance(value, dict), what, "names with values", value)
    if origin is Mapping:
        return {name: decode(arguments[1], v, f"{name!a} in {what}") for name, v in value.items()}
    hints = _hints_of(kind)
    if value.keys() != hints.keys():
        require(False, what, f"the fields {sorted(hints)}", str(sorted(value)))
    return kind(**{n: decode(hint, value[n], f"{n} of {what}") for n, hint in hints.items()})


def require(condition: object, what: str, expected: str, found: Any) -> None:
    if not condition:
        # Lists from an untrusted source may nest deeper than repr can go.
        is_short = isinstance(found, str | int | float | None)
        shown = ascii(found)[:200] if is_short else type(found).__name__
        raise ValueError(f"{what} must be {expected}, not {shown}")

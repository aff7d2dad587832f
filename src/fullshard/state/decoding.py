"""JSON from an untrusted source, as values of declared types."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Mapping
from typing import Any, get_args, get_origin, get_type_hints


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

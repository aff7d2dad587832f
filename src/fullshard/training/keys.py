"""The keys of a configuration: one list for the file, the command line and what checks them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from typing import Any, get_type_hints

from fullshard.errors import ConfigError
from fullshard.training.config import TrainConfig

Value = str | bool | int | float | tuple[str, ...]

_LARGEST = 2**63 - 1  # what TOML promises, and torch takes as a seed
_MAX_SHOWN = 40
_WORDS: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list of strings",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a section. `kind` is str, bool, int, float, or tuple for several strings."""

    section: str
    name: str
    kind: type
    default: Value
    help: str
    option: str
    choices: tuple[str, ...]

    @property
    def subject(self) -> str:
        """How errors call it: by its key, and by its option."""
        return f"{self.section}.{self.name} (--{self.option})"

    @property
    def in_words(self) -> str:
        return _WORDS[self.kind]

    def checked(self, value: object, where: str) -> Value:
        """The value, as the section keeps it; `where` is what an error begins with."""
        if not self._has_kind(value):
            raise ConfigError(
                f"{where}: {self.name} expects {self.in_words}, found {_found(value)}."
            )
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{where}: {self.name} expects another value, found {value!r}"
                f"{nearest(str(value), self.choices)}"
            )
        if isinstance(value, list | tuple):
            return tuple(value)
        assert isinstance(value, str | int | float)
        return float(value) if self.kind is float else value

    def _has_kind(self, value: object) -> bool:
        if self.kind is tuple:
            return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if type(value) is int and self.kind in (int, float):
            return -_LARGEST <= value <= _LARGEST
        return type(value) is self.kind


def nearest(name: str, known: tuple[str, ...]) -> str:
    """The end of a sentence about a name that is not known: the one that may have been meant."""
    found = get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {found[0]!r}? " if found else ""
    return f"; {meant}{'Known' if found else 'known'} are {', '.join(known)}."


def _found(value: object) -> str:
    """What a file has where something else belongs."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) <= _LARGEST else "one of more than 64 bits"
    shown = repr(value) if isinstance(value, str | list) else str(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _keys() -> dict[tuple[str, str], Key]:
    found = {}
    for section in fields(TrainConfig):
        cls: Any = section.default_factory
        assert is_dataclass(cls)
        hints = get_type_hints(cls)
        for each in fields(cls):
            kind, default = hints[each.name], each.default
            assert default is not MISSING
            found[section.name, each.name] = Key(
                section=section.name,
                name=each.name,
                kind=kind if isinstance(kind, type) and kind in _WORDS else tuple,
                default=default,
                help=each.metadata["help"],
                option=each.metadata["option"] or each.name.replace("_", "-"),
                choices=each.metadata["choices"],
            )
    return found


KEYS: Mapping[tuple[str, str], Key] = _keys()
SECTIONS = tuple(dict.fromkeys(section for section, _ in KEYS))


def keys_of(section: str) -> tuple[Key, ...]:
    return tuple(key for key in KEYS.values() if key.section == section)


def value_of(config: TrainConfig, key: Key) -> Value:
    value: Value = getattr(getattr(config, key.section), key.name)
    return value

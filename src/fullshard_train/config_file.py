"""The configuration file in TOML: reading it, with errors that name the line, and writing it."""

from __future__ import annotations

import json
import re
import textwrap
import tomllib
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fullshard.errors import ConfigError
from fullshard_train.config import (
    KEYS,
    SECTIONS,
    Key,
    TrainConfig,
    Value,
    keys_of,
    suggestion,
    value_of,
)

Given = Mapping[tuple[str, str], Value]

_WIDTH = 88
_POSITION = re.compile(r"(?P<what>.*) \(at (?:line (?P<line>\d+), column (?P<column>\d+)|.*)\)")
# A key far longer than `section.name`: tomllib takes minutes for one of thousands of parts.
_LONG_KEY = re.compile(r"""(?<![\w-])(?:([\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+){50}""")
# Names that keys had in files of earlier versions.
_FORMER_NAMES = {("sharding", "door"): "api"}


def config_of(file: Path | None, given: Given) -> TrainConfig:
    """Return the configuration: options override the file, which overrides the defaults."""
    values = {} if file is None else read_config(file)
    for (section, name), value in given.items():
        key = KEYS[section, name]
        values.setdefault(section, {})[name] = key.checked(value, f"--{key.option}")
    parts: Any = fields(TrainConfig)
    return TrainConfig(
        **{part.name: part.default_factory(**values.get(part.name, {})) for part in parts}
    )


def read_config(path: Path) -> dict[str, dict[str, Value]]:
    """Return the sections of a file with their keys; errors name the line."""
    text = _text_of(path)
    return {
        name: _section(path, text, name, values) for name, values in _parsed(path, text).items()
    }


def _text_of(path: Path) -> str:
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"{path}: there is no such configuration file.") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder; pass a configuration file.") from None
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{path}, line {line}: the byte 0x{content[error.start]:02x} is not UTF-8."
        ) from None
    return text.replace("\r\n", "\n")


def _parsed(path: Path, text: str) -> dict[str, Any]:
    if long := _LONG_KEY.search(text):
        raise ConfigError(
            f"{path}, line {text.count(chr(10), 0, long.start()) + 1}: the key has more than 50 "
            "parts; write a section and its keys."
        )
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{path}: the file is nested too deeply; flatten it.") from None
    except ValueError as error:  # from tomllib, or for a number with too many digits
        match = _POSITION.fullmatch(str(error))
        what = match["what"] if match else str(error)
        line, column = (match["line"], match["column"]) if match else (None, None)
        if line is None:
            line = str(text.rstrip("\n").count("\n") + 1)
        where = f"line {line}" if column is None else f"line {line}, column {column}"
        raise ConfigError(
            f"{path}, {where}: this is not valid TOML: {what[:1].lower()}{what[1:]}."
        ) from None


def _section(path: Path, text: str, name: str, values: object) -> dict[str, Value]:
    """Check the keys of one section."""
    if name not in SECTIONS:
        owners = [key.section for key in KEYS.values() if key.name == name]
        hint = f"; put it under [{owners[0]}]." if owners else suggestion(name, SECTIONS)
        raise ConfigError(f"{path}, line {_line(text, name)}: there is no section {name!r}{hint}")
    if not isinstance(values, dict):
        raise ConfigError(
            f"{path}, line {_line(text, name)}: {name} is a section, but has a value here; write "
            f"[{name}]."
        )
    known = tuple(key.name for key in keys_of(name))
    found = {}
    for given, value in values.items():
        key = _FORMER_NAMES.get((name, given)) or str(given)
        if key not in known:
            owners = [f"[{other.section}]" for other in KEYS.values() if other.name == key]
            hint = f"; it belongs under {owners[0]}." if owners else suggestion(key, known)
            raise ConfigError(
                f"{path}, line {_line(text, name, given)}: [{name}] has no key {given!r}{hint}"
            )
        try:
            found[key] = KEYS[name, key].checked(value, str(path))
        except ConfigError:
            # Searching for the line is slow, so it is done only for an error.
            KEYS[name, key].checked(value, f"{path}, line {_line(text, name, given)}")
    return found


def _line(text: str, section: str, key: str | None = None) -> int:
    """Return the first line of the statement that defines a section, or a key of it.

    A prefix of the file that ends between two statements is valid TOML. The shortest prefix that
    contains the name ends with the statement; the longest that does not ends before it.
    """
    lines = text.split("\n")
    before = 0
    for end in range(1, len(lines) + 1):
        try:
            parsed = tomllib.loads("\n".join(lines[:end]))
        except ValueError:
            continue
        if section in parsed and (key is None or key in parsed[section]):
            break
        before = end
    return before + 1


def config_as_toml(config: TrainConfig) -> str:
    """Return the configuration as a file with comments, which reads back unchanged."""
    parts = []
    for section in SECTIONS:
        about = str(type(getattr(config, section)).__doc__).partition(": ")[2]
        parts.append(f"# {about[:1].upper()}{about[1:]}\n[{section}]\n")
        parts += [_statement(key, value_of(config, key)) for key in keys_of(section)]
    return "\n".join(parts)


def _statement(key: Key, value: Value) -> str:
    help = f"{key.help} One of {', '.join(key.choices)}." if key.choices else key.help
    lines = textwrap.wrap(help, _WIDTH, initial_indent="# ", subsequent_indent="# ")
    return "\n".join([*lines, f"{key.name} = {_toml(value)}", ""])


def _toml(value: Value) -> str:
    """Return a value as TOML, which differs from JSON in `inf`, `nan` and one character of text."""
    if isinstance(value, float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

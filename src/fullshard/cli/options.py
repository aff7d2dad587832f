"""Options made of the keys of a configuration: so the file and the command line say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from fullshard.cli.group import meant
from fullshard.training.keys import KEYS, SECTIONS, Key, Value

_TITLES = {"model": "Model", "data": "Data", "sharding": "Sharding", "optimizer": "Optimizer"}
_TITLES |= {"run": "Run"}


class _KeyOption(click.Option):
    """The option of one key. What is not typed is not given: the file may have it."""

    def __init__(self, key: Key) -> None:
        self.key = key
        is_switch = key.kind is bool
        super().__init__(
            [f"--{key.option}/--no-{key.option}" if is_switch else f"--{key.option}", _name(key)],
            type=None if is_switch else _type(key),
            multiple=key.kind is tuple,
            default=None,
            help=f"{key.help} {_ending(key)}".rstrip(),
        )


class _Choice(click.Choice[str]):
    """Says which value may have been meant."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        known = [str(choice) for choice in self.choices]
        return f"{value!r} is none of {', '.join(known)}{meant(str(value), known)}"


def _name(key: Key) -> str:
    return f"{key.section}_{key.name}"


def _type(key: Key) -> Any:
    if key.choices:
        return _Choice(key.choices)
    return {int: click.INT, float: click.FLOAT}.get(key.kind, click.STRING)


def _ending(key: Key) -> str:
    if key.kind is tuple:
        return "May be given several times."
    if key.kind is bool:
        return "[default: on]" if key.default else "[default: off]"
    return "" if key.default == "" else f"[default: {str(key.default).strip()}]"


class ConfiguredCommand(click.Command):
    """A command with the options of all keys, which its help shows by their sections.

    It takes them as keyword arguments; `given_of` has those that were typed.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params[:0] = [_KeyOption(key) for key in KEYS.values()]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        for section in SECTIONS:
            own = [p for p in params if isinstance(p, _KeyOption) and p.key.section == section]
            _write(f"{_TITLES[section]}, [{section}] in a file", own, ctx, formatter)
        _write("Options", [p for p in params if not isinstance(p, _KeyOption)], ctx, formatter)


def _write(
    title: str, params: list[Any], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    rows = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def given_of(ctx: click.Context) -> Mapping[tuple[str, str], Value]:
    """What was typed, of the options of keys."""
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        place: ctx.params[_name(key)]
        for place, key in KEYS.items()
        if ctx.get_parameter_source(_name(key)) is typed
    }

"""`fullshard train`, with one option for each key of the configuration."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from fullshard_train.config import KEYS, SECTIONS, Key, Value, validate, value_of
from fullshard_train.config_file import config_as_toml, config_of


class KeyOption(click.Option):
    """The option of one key; it has no default, because the file may set the key."""

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
    """A choice whose error suggests a similar value."""

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        known = [str(choice) for choice in self.choices]
        close = get_close_matches(str(value), known, n=1, cutoff=0.5)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        return f"{value!r} is not one of {', '.join(known)}{meant}"


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


class KeyCommand(click.Command):
    """A command with the options of keys, by default of all, grouped by section in its help."""

    keys: Collection[Key] = KEYS.values()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params[:0] = [KeyOption(key) for key in self.keys]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        params = self.get_params(ctx)
        for section in SECTIONS:
            own = [p for p in params if isinstance(p, KeyOption) and p.key.section == section]
            _write(f"{section.capitalize()}, [{section}] in a file", own, ctx, formatter)
        _write("Options", [p for p in params if not isinstance(p, KeyOption)], ctx, formatter)


def _write(
    title: str, params: list[Any], ctx: click.Context, formatter: click.HelpFormatter
) -> None:
    rows = [record for param in params if (record := param.get_help_record(ctx)) is not None]
    if rows:
        with formatter.section(title):
            formatter.write_dl(rows)


def given_options(ctx: click.Context) -> Mapping[tuple[str, str], Value]:
    """Return the keys that the command line sets."""
    typed = click.core.ParameterSource.COMMANDLINE
    return {
        place: ctx.params[_name(key)]
        for place, key in KEYS.items()
        if ctx.get_parameter_source(_name(key)) is typed
    }


def is_rank() -> bool:
    """Return whether torchrun, or a launcher that sets its variables, started this process."""
    has = os.environ.keys()
    return {"RANK", "WORLD_SIZE"} <= has and bool({"TORCHELASTIC_RUN_ID", "MASTER_ADDR"} & has)


@click.command(cls=KeyCommand, short_help="Train a model, sharded over all ranks.")
@click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="A configuration file in TOML; options override it.",
)
@click.option(
    "--print-config",
    is_flag=True,
    help="Print the whole configuration as a file with comments, and exit.",
)
@click.option(
    "--auto",
    is_flag=True,
    help="Choose the fastest micro-batch, resharding, recomputation, units, prefetch and offload.",
)
@click.pass_context
def train(
    ctx: click.Context, /, file: Path | None, print_config: bool, auto: bool, **_: Any
) -> None:
    """Train a model, sharded over all ranks of this machine; by default a small one.

    Under torchrun (torchrun -m fullshard train ...), this process is one rank of a larger world.

    Exit status: 0 success, 1 a rank failed, 2 the request is invalid, 130 interrupted by Ctrl-C.
    """
    config = config_of(file, given_options(ctx))
    validate(config)
    if auto and not is_rank():
        from fullshard_train.planning import chosen_for_this_machine

        kept = {place for place, key in KEYS.items() if value_of(config, key) != key.default}
        config = chosen_for_this_machine(config, kept | given_options(ctx).keys())
    if print_config:
        click.echo(config_as_toml(config), nl=False)
        return
    # Imported here, because printing help needs neither the models nor torch's launcher.
    if is_rank():
        from fullshard_train.run import run_and_leave

        run_and_leave(config)
    elif config.sharding.elastic_replicas:
        from fullshard_train.replicas import launch_replicas

        ctx.exit(launch_replicas(config))
    else:
        from fullshard_train.launcher import launch

        ctx.exit(launch(config))

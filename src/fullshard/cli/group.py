"""A group of commands: how they fail.

What the library raises on purpose, and what the user typed wrong, is one sentence on standard error
and exit code 2. `--debug`, before or after the name of any command, shows the traceback as well.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import click

from fullshard.cli.screen import note
from fullshard.errors import FullshardError
from fullshard.training.debugging import DEBUG, wants_tracebacks


class Refusal(click.ClickException):
    """An error in its own words, with its traceback if that is asked for."""

    exit_code = 2

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        is_wanted = error is not None and wants_tracebacks()
        self._trace = "".join(traceback.format_exception(error)) if is_wanted else ""

    def show(self, file: Any = None) -> None:
        note(self._trace)
        note(f"fullshard: {self.message}")


def _debugging(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Until the command ends; in the environment, so that ranks hear of it as well."""
    if not value:
        return
    before = os.environ.get(DEBUG)
    os.environ[DEBUG] = "1"

    def restore() -> None:
        del os.environ[DEBUG]
        if before is not None:
            os.environ[DEBUG] = before

    ctx.find_root().call_on_close(restore)


def debug_option() -> click.Option:
    return click.Option(
        ["--debug"],
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=_debugging,
        help=f"Show tracebacks of errors; {DEBUG}=1 does, too.",
    )


class Commands(click.Group):
    """Shows what the library raises on purpose as a line, and everything else as it is."""

    group_class = type  # groups within are of this class, too

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.params.append(debug_option())

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        if not isinstance(cmd, Commands):
            cmd.params.append(debug_option())
        super().add_command(cmd, name)

    def make_context(
        self,
        info_name: str | None,
        args: list[str],
        parent: click.Context | None = None,
        **extra: Any,
    ) -> click.Context:
        try:
            return super().make_context(info_name, args, parent, **extra)
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            raise Refusal(_in_a_sentence(error, self.name or "")) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            raise click.UsageError(f"no command {args[0]!r}{meant(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise  # `| head` has seen enough: click ends quietly
        except click.exceptions.NoArgsIsHelpError:
            raise
        except click.UsageError as error:
            command = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()
            raise Refusal(_in_a_sentence(error, command)) from error
        except FullshardError as error:
            raise Refusal(str(error), error) from error
        except OSError as error:
            raise Refusal(_of_the_system(error), error) from error
        except KeyboardInterrupt:
            ctx.exit(130)  # 1 would say that something is damaged or different


def _of_the_system(error: OSError) -> str:
    if error.filename is None or error.strerror is None:
        return str(error)
    return f"{error.filename}: {error.strerror}."


def _in_a_sentence(error: click.UsageError, command: str) -> str:
    """What was typed wrong, and where to read what can be."""
    if error.ctx is not None:
        command = error.ctx.command_path
    if isinstance(error, click.NoSuchOption):
        ctx = error.ctx
        known = [] if ctx is None else [o for p in ctx.command.get_params(ctx) for o in p.opts]
        what = f"no option {error.option_name!r}{meant(error.option_name, known)}"
    else:
        what = " ".join(error.format_message().split()).removesuffix(".")
    return f"{what}{'' if what.endswith('?') else '.'} See {command} --help."


def meant(name: str, known: Sequence[str]) -> str:
    """A question at the end of a sentence, if something is known that is nearly called so."""
    found = get_close_matches(name, [each for each in known if len(each) > 2], n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""

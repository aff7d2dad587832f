"""Error handling of all commands.

An error of the library, or invalid arguments, print one sentence to standard error and exit with
status 2. `--debug`, before or after the name of any command, also shows the traceback.
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import click

from fullshard.cli import DEBUG, wants_tracebacks
from fullshard.console import note
from fullshard.errors import FullshardError


class CommandError(click.ClickException):
    """An error message, with a traceback if `--debug` is set."""

    exit_code = 2

    def __init__(self, message: str, error: BaseException | None = None) -> None:
        super().__init__(message)
        is_wanted = error is not None and wants_tracebacks()
        self._trace = "".join(traceback.format_exception(error)) if is_wanted else ""

    def show(self, file: Any = None) -> None:
        note(self._trace)
        note(f"fullshard: {self.message}")


def _set_debug(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    """Set the variable until the command ends; ranks inherit it."""
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
        callback=_set_debug,
        help=f"Show tracebacks of errors, as {DEBUG}=1 does.",
    )


class Commands(click.Group):
    """A group that shows errors of the library as one line; other exceptions propagate."""

    group_class = type  # subgroups are of this class as well

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
            raise CommandError(_usage_message(error, self.name or "")) from error

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if self.get_command(ctx, args[0]) is None and not ctx.resilient_parsing:
            known = self.list_commands(ctx)
            raise click.UsageError(f"no command {args[0]!r}{suggestion(args[0], known)}", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (BrokenPipeError, click.exceptions.NoArgsIsHelpError):
            raise  # click exits quietly when the reader, such as `head`, has finished
        except click.UsageError as error:
            command = f"{ctx.command_path} {ctx.invoked_subcommand or ''}".rstrip()
            raise CommandError(_usage_message(error, command)) from error
        except FullshardError as error:
            raise CommandError(str(error), error) from error
        except OSError as error:
            is_about_file = error.filename is not None and error.strerror is not None
            message = f"{error.filename}: {error.strerror}." if is_about_file else str(error)
            raise CommandError(message, error) from error
        except KeyboardInterrupt:
            ctx.exit(130)  # status 1 would mean damaged or different


def _usage_message(error: click.UsageError, command: str) -> str:
    """Say what is wrong with the arguments, and refer to the help."""
    if error.ctx is not None:
        command = error.ctx.command_path
    if isinstance(error, click.NoSuchOption):
        ctx = error.ctx
        known = [] if ctx is None else [o for p in ctx.command.get_params(ctx) for o in p.opts]
        what = f"no option {error.option_name!r}{suggestion(error.option_name, known)}"
    else:
        what = " ".join(error.format_message().split()).removesuffix(".")
    return f"{what}{'' if what.endswith('?') else '.'} See {command} --help."


def suggestion(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" if a known name is similar, otherwise nothing."""
    found = get_close_matches(name, [each for each in known if len(each) > 2], n=1, cutoff=0.5)
    return f"; did you mean {found[0]!r}?" if found else ""

"""The entry point of the `fullshard` command."""

from __future__ import annotations

import os
import sys

from fullshard.processes import end_with_parent

_NEEDED = ("click", "rich")


def main() -> None:
    """Run the command, or say what to install if a dependency is missing."""
    if "TORCHELASTIC_RUN_ID" in os.environ:  # the parent is torchrun; this is one of its ranks
        end_with_parent(os.getppid())
    # Otherwise torch prints a stack trace for every connection to a process that has ended.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    try:
        from fullshard.cli.commands import fullshard
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in _NEEDED:
            raise
        extra = "train" if sys.argv[1:2] == ["train"] else "cli"
        print(
            f"fullshard: the command needs {' and '.join(_NEEDED)}, found no {error.name}; "
            f"run: pip install 'fullshard[{extra}]'",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    fullshard(prog_name="fullshard")


if __name__ == "__main__":
    main()

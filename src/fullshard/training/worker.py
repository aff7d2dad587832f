"""One rank of a run as a process: from joining the others to the status that it exits with."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from pathlib import Path

from fullshard.comm.collectives import leave
from fullshard.errors import FullshardError
from fullshard.state.rank_group import OtherRankError
from fullshard.training.config import TrainConfig
from fullshard.training.config_file import config_of
from fullshard.training.debugging import wants_tracebacks
from fullshard.training.leaving import Leaving
from fullshard.training.run import Run
from fullshard.training.signs import Signs
from fullshard.training.world import joined

LEFT = 130
REFUSED = 2


def run_rank(config: TrainConfig) -> int:
    """Be one of the ranks that a launcher started; the status to exit with."""
    signs = Signs.of_launcher()
    with Leaving() as leaving:
        if signs is not None:
            signs.ready()
        try:
            with joined(config.run.device) as world:
                is_done = Run(config, world).run(leaving)
        except (FullshardError, OSError) as error:
            if wants_tracebacks():
                traceback.print_exc()
            return _refused(error, signs)
        except RuntimeError as error:
            if not _is_lost_connection(error) or wants_tracebacks():
                raise
            rank = os.environ.get("RANK", "?")
            print(f"rank {rank}: lost its connection to another rank", file=sys.stderr, flush=True)
            return 1
    if is_done:
        return 0
    if signs is None:
        return LEFT
    signs.leave()
    return 0


def _refused(error: Exception, signs: Signs | None) -> int:
    """Say once, on the rank that knows it, what cannot be done."""
    is_known = not isinstance(error, OtherRankError)
    if signs is not None:
        if is_known:
            signs.refuse(str(error))
        return 0  # another status would make the launcher try again, to no avail
    if is_known:
        print(f"fullshard: {error}", file=sys.stderr, flush=True)
    return REFUSED


def _is_lost_connection(error: RuntimeError) -> bool:
    """Whether another rank is gone: that one's error is what the user wants to read."""
    signs = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")
    return any(sign in str(error) for sign in signs)


def _die_with_launcher() -> None:
    """On Linux: a launcher that is killed takes its ranks along, so that none trains on alone."""
    if sys.platform == "linux":
        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def main() -> None:
    """What the launcher starts: the configuration is the file that it names."""
    _die_with_launcher()
    leave(run_rank(config_of(Path(sys.argv[1]), {})))


if __name__ == "__main__":
    main()

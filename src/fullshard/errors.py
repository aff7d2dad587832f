"""The exceptions of this package, as a tree.

    FullshardError
    ├── ConfigError (ValueError)            what the caller asked for cannot be done
    │   ├── TopologyError                   meshes, process groups, ranks
    │   ├── UnknownNameError (KeyError)     a name or key that is unknown
    │   └── UnsupportedError (NotImplementedError, AssertionError)
    ├── LifecycleError (RuntimeError)       a call at the wrong time
    │   └── MisuseError (AssertionError, ValueError)    a sharded module copied, or sharded twice
    ├── DisagreementError (RuntimeError)    the ranks do not run the same program
    ├── RankFailedError (torch.distributed.DistBackendError)    in resilience/watcher.py
    ├── OutOfMemoryError (torch.OutOfMemoryError)               in resilience/oom_guard.py
    └── CheckpointError (RuntimeError)      what is on disk is not what was asked for
        └── OtherRankError                  a step failed on another rank, which raises the cause

Every message says what is wrong with what, and what to do. Each class is also
a subclass of what `torch.distributed.fsdp` raises in the same case, so that `except` clauses
written for torch keep working.
"""

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DisagreementError",
    "FullshardError",
    "LifecycleError",
    "MisuseError",
    "OtherRankError",
    "TopologyError",
    "UnknownNameError",
    "UnsupportedError",
]


class FullshardError(Exception):
    """The base class of all exceptions that this package raises."""


class ConfigError(FullshardError, ValueError):
    """The caller asked for something that cannot be done."""


class TopologyError(ConfigError, RuntimeError, AssertionError):
    """A mesh, a process group or a rank does not fit what was asked for."""


class UnknownNameError(ConfigError, KeyError):
    """A name or a key is unknown."""

    __str__ = Exception.__str__  # KeyError's own would quote the sentence


class UnsupportedError(ConfigError, NotImplementedError, AssertionError):
    """The request makes sense, but not for this kind of parameter or machine."""


class LifecycleError(FullshardError, RuntimeError):
    """A call came at a time when it means nothing or would do harm."""


class MisuseError(LifecycleError, AssertionError, ValueError):
    """A module that is already sharded was copied or sharded again, or summoned twice."""


class DisagreementError(FullshardError, RuntimeError):
    """The ranks do not run the same model, or not in the same order."""


class CheckpointError(FullshardError, RuntimeError):
    """What is on disk is not what was asked for."""


class OtherRankError(CheckpointError):
    """A step that all ranks take together failed on another rank, which raises the cause."""

    machine = ""  # of that rank, if it is known

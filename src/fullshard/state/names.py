"""What parameters are called by the people who made the model."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"
FLAT = "_flat_param"

_PREFIXES = (f"{WRAPPED}.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """A parameter's or a module's name without what wrappers add to it."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name


def flat_name(lane: int) -> str:
    """The name of the flat parameter of a wrapper's lane: of most wrappers, the only one."""
    return FLAT if lane == 0 else f"{FLAT}_{lane}"

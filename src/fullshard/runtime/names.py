"""What modules and parameters are called by the people who made the model."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"

_PREFIXES = (f"{WRAPPED}.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """A parameter's or a module's name without what wrappers add to it."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    for prefix in _PREFIXES:
        name = name.removesuffix(f".{prefix[:-1]}")
    return "" if name == WRAPPED else name

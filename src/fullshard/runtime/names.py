"""The names of modules and parameters as the model's author knows them."""

from __future__ import annotations

WRAPPED = "_fsdp_wrapped_module"

_PREFIXES = (f"{WRAPPED}.", "_checkpoint_wrapped_module.", "_orig_mod.")


def clean_name(name: str) -> str:
    """The name of a parameter or module without the parts that wrappers add."""
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    for prefix in _PREFIXES:
        name = name.removesuffix(f".{prefix[:-1]}")
    return "" if name == WRAPPED else name

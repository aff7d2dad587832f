"""What a run consists of beside its tensors: schedulers, scalers, random state, positions.

Each rank writes its own, as plain data in a file that is read without running anything.
"""

from __future__ import annotations

import io
import random
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fullshard.errors import CheckpointError, ConfigError
from fullshard.state.opened import StoredEntry, load_entry

RANDOM = "random state"


def rank_file(rank: int) -> str:
    return f"rank_{rank:05d}.pt"


def packed(
    extra: Mapping[str, Any], checkpoint_id: str, *, random_state: Mapping[str, Any]
) -> bytes:
    """One rank's file: of each object its state dict, of everything else the value itself."""
    values = {name: state_of(value) for name, value in extra.items()}
    buffer = io.BytesIO()
    try:
        torch.save({"id": checkpoint_id, RANDOM: dict(random_state), "extra": values}, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        names = [name for name, value in values.items() if not _is_plain(value)] or list(values)
        raise ConfigError(
            f"extra: {', '.join(map(repr, names))} must be plain data (numbers, strings, tensors, "
            f"lists, dicts) to be loaded without running code, found something else ({error}); "
            "give it a state_dict method that returns plain data."
        ) from error
    return buffer.getvalue()


def unpacked(path: Path, checkpoint_id: str) -> dict[str, Any]:
    """A rank's file, as plain data."""
    try:
        found = load_entry(path.name, StoredEntry(path, 0, path.stat().st_size))
        its_id = found["id"]
    except Exception as error:
        raise CheckpointError(
            f"{path}: a rank's file is expected, found one that cannot be read ({error}); the "
            "checkpoint is damaged."
        ) from error
    if its_id != checkpoint_id:
        raise CheckpointError(
            f"{path}: a file of checkpoint {checkpoint_id} is expected, found one of {its_id}; it "
            "was copied from elsewhere."
        )
    result: dict[str, Any] = found
    return result


def require_restorable(objects: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Raise what `restore` could not do, before anything is loaded."""
    missing = sorted(set(objects) - set(stored))
    if missing:
        raise CheckpointError(
            f"extra: {missing} must be in the checkpoint to be restored, found {sorted(stored)}; "
            "leave out what was not saved."
        )
    for name, value in objects.items():
        if not callable(getattr(value, "load_state_dict", None)):
            raise ConfigError(
                f"extra: {name!r} must have a load_state_dict method to be restored, found a "
                f"{type(value).__name__}; read it from what load returns."
            )


def restore(objects: Mapping[str, Any], stored: Mapping[str, Any]) -> None:
    """Give objects back the state that they had."""
    for name, value in objects.items():
        value.load_state_dict(stored[name])


def random_state() -> dict[str, Any]:
    """Of all generators that this process draws from."""
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy_random()
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.get_state(legacy=True)
        state["numpy"] = [kind, [int(key) for key in keys], position, has_gauss, cached]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        module = torch.get_device_module(accelerator)
        state[accelerator.type] = module.get_rng_state()
    return state


def restore_random_state(state: Mapping[str, Any]) -> None:
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    torch.set_rng_state(state["torch"])
    numpy = _numpy_random()
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.set_state((kind, keys, position, has_gauss, cached))
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator.type in state:
        torch.get_device_module(accelerator).set_rng_state(state[accelerator.type])


def _numpy_random() -> Any:
    """numpy's module, if the program uses it: torch alone does not need it."""
    numpy = sys.modules.get("numpy")
    return None if numpy is None else numpy.random


def state_of(value: Any) -> Any:
    """What is saved of an object: its state dict, or itself."""
    get = getattr(value, "state_dict", None)
    return get() if callable(get) else value


def _is_plain(value: Any) -> bool:
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        return False
    return True

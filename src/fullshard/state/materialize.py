"""Memory and values for a model on meta, however it is sharded.

Memory is for what is loaded. Buffers that are not loaded are computed, and parameters may be drawn.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from functools import partial

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard._torch import broadcast_coalesced, to_local, version_of
from fullshard.comm.mesh import MeshInfo
from fullshard.device import has_no_memory
from fullshard.errors import ConfigError, LifecycleError
from fullshard.layout.split import Box, intersection, pieces, slices
from fullshard.runtime.build import join
from fullshard.runtime.hooks import units_below
from fullshard.runtime.names import clean_name
from fullshard.runtime.replaced import replacement_of
from fullshard.state.shards import TensorShard

_BROADCAST_BYTES = 250 * 1024 * 1024


def give_memory(model: nn.Module) -> None:
    """Allocate memory for parameters and buffers on meta; for shards, only this rank's part.

    The memory has no values yet. Parameters stay the same objects, so ties and optimizers hold.
    """
    for unit in units_below(model):
        for sharded_param in unit.params:
            _allocate(sharded_param.param, unit.store.device)
        unit.refresh()  # one unit at a time: its shards move to their buffer
    device = device_of(model)
    made: dict[torch.Tensor, torch.Tensor] = {}  # some modules share a buffer
    for module in model.modules():
        for param in module._parameters.values():
            if param is not None:
                _allocate(param, device)
        for name, buffer in module._buffers.items():
            if buffer is not None and has_no_memory(buffer):
                if buffer not in made:
                    made[buffer] = torch.empty_like(buffer, device=device)
                module._buffers[name] = made[buffer]


def device_of(model: nn.Module) -> torch.device:
    """The device for tensors that no unit manages: where units compute, or where others are."""
    for unit in units_below(model):
        return unit.comm_ctx.device.torch_device
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            return tensor.device
        if isinstance(tensor, DTensor):
            return torch.device(tensor.device_mesh.device_type)
    return torch.get_default_device()


def _allocate(param: nn.Parameter, device: torch.device) -> None:
    if has_no_memory(param):
        made = torch.empty_like(param, device=device)
        torch.utils.swap_tensors(param, nn.Parameter(made, requires_grad=param.requires_grad))


def recreate_buffers(
    model: nn.Module, init_buffers: Callable[[nn.Module], object] | None = None
) -> tuple[str, ...]:
    """Compute buffers on meta that are not persistent, and so in no file; return their names.

    Raises, and leaves the model as it was, if nothing computes one of them. Parameters are still on
    meta, so a function that initializes them as well costs nothing.
    """
    modules = dict(model.named_modules())
    lost = {
        (path, name): buffer
        for path, module in modules.items()
        for name, buffer in module._buffers.items()
        if buffer is not None and buffer.is_meta and name in module._non_persistent_buffers_set
    }
    device = device_of(model)
    # Some modules share a buffer.
    made = {buffer: torch.empty_like(buffer, device=device) for buffer in lost.values()}
    versions = {buffer: version_of(empty) for buffer, empty in made.items()}
    try:
        for (path, name), buffer in lost.items():
            modules[path]._buffers[name] = made[buffer]
        for path in dict.fromkeys(path for path, _ in lost):
            with torch.no_grad(), device:
                _compute_of(modules, path, init_buffers)()
        unknown = []
        for (path, name), buffer in lost.items():
            found = modules[path]._buffers.get(name)
            is_same = found is made[buffer] and version_of(found) == versions[buffer]
            if found is None or found.is_meta or is_same:
                unknown.append(clean_name(join(path, name)))
            else:
                modules[path]._buffers[name] = found.to(device)
        if unknown:
            raise LifecycleError(
                f"{', '.join(unknown)}: these buffers are on meta and not in the files, and "
                "nothing computes them again; pass init_buffers, or give their module a method "
                "reset_non_persistent_buffers()."
            )
    except BaseException:
        for (path, name), buffer in lost.items():
            modules[path]._buffers[name] = buffer
        raise
    return tuple(clean_name(join(path, name)) for path, name in lost)


def _compute_of(
    modules: Mapping[str, nn.Module], path: str, init_buffers: Callable[[nn.Module], object] | None
) -> Callable[[], object]:
    """The function of a module, or of one around it, that computes the module's buffers."""
    module = modules[path]
    if init_buffers is not None:
        return partial(init_buffers, module)
    reset: Callable[[], object] | None = getattr(module, "reset_non_persistent_buffers", None)
    if callable(reset):
        return reset
    # The other ways also initialize parameters: use them only if no values would be lost.
    if any(p is not None and not p.is_meta for p in module._parameters.values()):
        return lambda: None
    reset_all: Callable[[], object] | None = getattr(module, "reset_parameters", None)
    if callable(reset_all):
        return reset_all
    parts = path.split(".")
    for length in range(len(parts) - 1, -1, -1):
        around = modules.get(".".join(parts[:length]))
        initialize = getattr(around, "_init_weights", None)  # as transformers' models have it
        if callable(initialize):
            return partial(initialize, module)
    return lambda: None


# Initial values that do not depend on how the model is sharded

# The most elements drawn at once, so that no rank materializes a large parameter.
_PIECE_NUMEL = 2**22


@torch.no_grad()
def draw_into(
    shard: TensorShard,
    name: str,
    seed: int,
    draw: Callable[[torch.Tensor, torch.Generator], object],
) -> None:
    """Give this rank's parts of a parameter values that depend on its name and shape and the seed.

    They are the same on any number of ranks: a parameter is cut into pieces by its shape alone, and
    each piece is drawn in float32 on the CPU, with a generator of its own. A rank draws only those
    pieces that it has a part of.

    Args:
        shard: The parameter, as `tensor_shards` lists it.
        name: What makes its values differ from those of other parameters.
        seed: Another seed gives other values.
        draw: Fills a tensor in place with values of a generator.
    """
    parts = shard.local_parts(shard.tensor)
    for number, piece in enumerate(pieces(Box.whole(shard.shape), _PIECE_NUMEL)):
        shared = [(part, box) for part in parts if (box := intersection(part.box, piece))]
        if not shared:
            continue
        values = torch.empty(piece.sizes, dtype=torch.float32)
        draw(values, torch.Generator().manual_seed(_mixed(seed, name, number)))
        for part, box in shared:
            part.values[slices(box, part.box)].copy_(values[slices(box, piece)])


def _mixed(seed: int, name: str, number: int) -> int:
    """Return a seed for one piece of a parameter; Python's `hash` differs between ranks."""
    digest = hashlib.blake2b(f"{seed} {name} {number}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")  # torch's CPU generator takes 32 bits


# Values of a model that is wrapped


def initialize(
    own: list[nn.Module],
    param_init_fn: Callable[[nn.Module], None] | None,
    device: torch.device,
    ignored: Collection[nn.Parameter],
) -> None:
    """Give memory and values to what is on meta; parameters that were tied stay tied."""
    ties: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for inner in own:
        for name, param in inner._parameters.items():
            if param is not None:
                ties.setdefault(param, []).append((inner, name))
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(
            f"param_init_fn: Expected {param_init_fn} to be callable but got "
            f"{type(param_init_fn)}; pass one that initializes a module."
        )
    for inner in own:
        if not _meta_states(inner, ignored):
            continue
        if param_init_fn is not None:
            param_init_fn(inner)
            continue
        reset = getattr(inner, "reset_parameters", None)
        if not callable(reset):
            raise LifecycleError(
                f"{type(inner).__name__} has parameters or buffers on meta and no "
                "reset_parameters method; pass param_init_fn."
            )
        with torch.no_grad():
            inner.to_empty(device=device, recurse=False)
            reset()
    for (first, first_name), *others in ties.values():
        for inner, name in others:
            inner._parameters[name] = first._parameters[first_name]
    for inner in own:
        for state in _meta_states(inner, ignored):
            raise LifecycleError(
                f"{type(inner).__name__}: param_init_fn left a parameter or buffer of shape "
                f"{tuple(state.shape)} on meta; call module.to_empty(device=..., recurse=False) "
                "and initialize it there."
            )


def _states(module: nn.Module, ignored: Collection[nn.Parameter]) -> list[torch.Tensor]:
    states = [*module._parameters.values(), *module._buffers.values()]
    return [state for state in states if state is not None and state not in ignored]


def _meta_states(module: nn.Module, ignored: Collection[nn.Parameter]) -> list[torch.Tensor]:
    return [state for state in _states(module, ignored) if has_no_memory(state)]


def broadcast_states(
    own: list[nn.Module],
    ignored: Collection[nn.Parameter],
    mesh_info: MeshInfo,
    device: torch.device,
) -> None:
    """Let all ranks start with the values of the first: parameters and buffers."""
    states = dict.fromkeys(state for inner in own for state in _states(inner, ignored))
    sent: list[torch.Tensor] = []
    for state in states:
        if replacement_of(state) is None:  # else an inner wrapper that it is tied to has sent it
            if state.device != device:
                state.data = state.data.to(device)
            sent.append(to_local(state.detach()))
    for axis in (mesh_info.shard, mesh_info.replicate):
        if axis.group is not None and not axis.is_single and sent:
            broadcast_coalesced(axis.group, sent, _BROADCAST_BYTES, 0)

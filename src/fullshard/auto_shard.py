"""`auto_shard` shards a model by a policy, or by itself; `explain` says what it would do."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from fullshard.choosing import Choice, Chosen, choose, has_forward, name_of
from fullshard.comm.mesh import default_mesh
from fullshard.errors import ConfigError, MisuseError
from fullshard.fully_shard import FSDPModule, fully_shard
from fullshard.repeated_blocks import RepeatedBlocks
from fullshard.runtime.hooks import hooks_of

_OPTIONS = tuple(inspect.signature(fully_shard).parameters)[1:]


def auto_shard(model: nn.Module, policy: Any = None, **options: Any) -> FSDPModule:
    """Call `fully_shard` on the modules that a policy chooses, inner ones first, then on the model.

    `explain` with the same arguments shows what would be done. A policy that chooses nothing
    leaves the model as one unit.

    Args:
        model: The model.
        policy: Which modules become units: a function or an object of `fullshard.wrap`, or one of
            your own. By default the blocks that the model repeats. Modules without a forward
            are left to the unit around them.
        options: What `fully_shard` takes. Options that a `CustomPolicy` has for a module win.

    Returns:
        The model.
    """
    choice = _chosen(model, policy, options)
    for name, module in model.named_modules():
        if hooks_of(module) is not None:
            raise MisuseError(
                f"{name or type(module).__name__}: auto_shard expects a model of which nothing is "
                "sharded, found this module sharded already; call fully_shard on the other modules "
                "too, or auto_shard first."
            )
    if options.get("mesh") is None:
        options["mesh"] = default_mesh()
    for unit in choice:
        fully_shard(unit.module, **{**options, **unit.overrides})
    return cast(FSDPModule, model)


@dataclass(frozen=True, slots=True)
class UnitSummary:
    """One unit that `auto_shard` would make. Sizes are those of the full parameters."""

    name: str
    module_class: str
    numel: int
    num_bytes: int
    dtypes: tuple[torch.dtype, ...]
    num_trainable: int
    num_frozen: int
    why: str

    @property
    def training(self) -> str:
        if self.num_frozen and self.num_trainable:
            return f"{self.num_trainable} trainable, {self.num_frozen} frozen"
        return "frozen" if self.num_frozen else "trainable" if self.num_trainable else "-"


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The units that `auto_shard` would make, in order, and their total. Prints as a table."""

    units: tuple[UnitSummary, ...]
    total: UnitSummary

    def __repr__(self) -> str:
        header = ("unit", "class", "parameters", "bytes", "dtype", "training", "why")
        return _table([header, *(_cells(each) for each in (*self.units, self.total))])

    __str__ = __repr__


def explain(model: nn.Module, policy: Any = None, **options: Any) -> Explanation:
    """What `auto_shard` would do with the same arguments, and why. Changes nothing.

    Needs no process group, and takes models on the meta device.
    """
    choice = _chosen(model, policy, options)
    units = tuple(_summary(unit) for unit in choice)
    params = [param for unit in choice for _, param in unit.params]
    number = "1 unit" if len(units) == 1 else f"{len(units)} units"
    return Explanation(units, _summed("total", type(model).__name__, params, number))


def _chosen(model: nn.Module, policy: Any, options: dict[str, Any]) -> Choice:
    """The choice of a policy, checked as far as it can be before anything is sharded."""
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: an nn.Module is expected, found {type(model).__name__}; pass the model itself."
        )
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not has_forward(model):
        raise ConfigError(
            f"model: a module with a forward is expected, found the container "
            f"{type(model).__name__}; pass the module around it, or one of its modules."
        )
    _check_options("options", options)
    asked = RepeatedBlocks(model) if policy is None else policy
    ignored_params = options.get("ignored_params") or ()
    choice = choose(
        model, asked, ignored_params=ignored_params, options=options, needs_forward=True
    )
    for unit in choice:
        _check_options(f"{unit.name or type(model).__name__}: overrides", unit.overrides)
    if choice.units:
        return choice
    reason = "found no repeated blocks" if policy is None else f"{name_of(policy)} chose nothing"
    root = choice.root
    why = f"{reason}: {root.why}"
    return Choice((), Chosen(root.name, root.module, root.params, root.overrides, why))


def _check_options(subject: str, given: Iterable[str]) -> None:
    for name in given:
        if name not in _OPTIONS:
            raise ConfigError(
                f"{subject}: options of fully_shard are expected, found {name!r}; choose from "
                f"{', '.join(_OPTIONS)}."
            )


def _summary(unit: Chosen) -> UnitSummary:
    params = [param for _, param in unit.params]
    overrides = ", ".join(f"{key}={value!r}" for key, value in unit.overrides.items())
    why = f"{unit.why}; with {overrides}" if overrides else unit.why
    return _summed(unit.name or "(root)", type(unit.module).__name__, params, why)


def _summed(name: str, module_class: str, params: list[nn.Parameter], why: str) -> UnitSummary:
    return UnitSummary(
        name=name,
        module_class=module_class,
        numel=sum(param.numel() for param in params),
        num_bytes=sum(param.numel() * param.element_size() for param in params),
        dtypes=tuple(dict.fromkeys(param.dtype for param in params)),
        num_trainable=sum(param.requires_grad for param in params),
        num_frozen=sum(not param.requires_grad for param in params),
        why=why,
    )


def _cells(unit: UnitSummary) -> tuple[str, ...]:
    dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in unit.dtypes) or "-"
    numel, num_bytes = f"{unit.numel:,}", _readable(unit.num_bytes)
    return (unit.name, unit.module_class, numel, num_bytes, dtypes, unit.training, unit.why)


def _readable(num_bytes: int) -> str:
    size = float(num_bytes)
    for word in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {word}" if word == "B" else f"{size:.1f} {word}"
        size /= 1024
    return f"{size:.1f} TiB"


def _table(rows: list[tuple[str, ...]]) -> str:
    """Rows as aligned columns; numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    numbers = (2, 3)
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if index in numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    rule = "  ".join("-" * width for width in widths)
    return "\n".join([lines[0], rule, *lines[1:-1], rule, lines[-1]])


__all__ = ["Explanation", "UnitSummary", "auto_shard", "explain"]

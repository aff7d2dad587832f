"""`auto_shard` shards the modules that a policy chooses; `explain` says what it would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast, overload

import torch
from torch import nn

from fullshard.comm.mesh import default_mesh
from fullshard.errors import ConfigError, MisuseError
from fullshard.formatting import readable, table
from fullshard.fully_shard import FSDPModule, ShardOptions, fully_shard
from fullshard.optim.muon import Muon
from fullshard.optim.owners import Owners
from fullshard.runtime.hooks import hooks_of
from fullshard.wrap import Chosen, RepeatedBlocks, choose, has_forward, name_of

__all__ = ["Explanation", "UnitSummary", "auto_shard", "explain"]

_OPTIONS = (*ShardOptions.__annotations__, "uneven")


def auto_shard(model: nn.Module, policy: Any = None, **options: Any) -> FSDPModule:
    """Call `fully_shard` on the modules that a policy chooses, inner ones first, then on the model.

    `explain` with the same arguments shows what would be done. If a policy chooses nothing, the
    model is one unit.

    Args:
        model: The model.
        policy: Which modules become units: a function or an object of `fullshard.wrap`, or one of
            your own. By default the blocks that the model repeats. Modules without a forward
            belong to the unit around them.
        options: Arguments of `fully_shard`. Options that a `CustomPolicy` has for a module override
            them. `uneven` lists classes or names of units on which `set_uneven` is called.

    Returns:
        The model.
    """
    choice = _chosen(model, policy, options)
    for name, module in model.named_modules():
        if hooks_of(module) is not None:
            raise MisuseError(
                f"{name or type(module).__name__}: auto_shard expects a model of which nothing "
                "is sharded, but this module is sharded already; call fully_shard on the other "
                "modules too, or auto_shard first."
            )
    if options.get("mesh") is None:
        options["mesh"] = default_mesh()
    for unit in choice:
        is_uneven = unit.overrides.pop("uneven", False)
        sharded = fully_shard(unit.module, **{**options, **unit.overrides})
        if is_uneven:
            sharded.set_uneven()
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

    def _cells(self) -> tuple[str, ...]:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes) or "-"
        numel, num_bytes = f"{self.numel:,}", readable(self.num_bytes, "B")
        return (self.name, self.module_class, numel, num_bytes, dtypes, self.training, self.why)


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """The units that `auto_shard` would make, in order, and their total. Prints as a table."""

    units: tuple[UnitSummary, ...]
    total: UnitSummary

    def __repr__(self) -> str:
        header = ("unit", "class", "parameters", "bytes", "dtype", "training", "why")
        rows = [header, *(each._cells() for each in (*self.units, self.total))]
        return "\n".join(table(rows, numbers=(2, 3)))


@overload
def explain(model: Muon) -> Owners: ...


@overload
def explain(model: nn.Module, policy: Any = None, **options: Any) -> Explanation: ...


def explain(model: Any, policy: Any = None, **options: Any) -> Explanation | Owners:
    """Return what `auto_shard` would do with the same arguments, and why. Changes nothing.

    It needs no process group, and takes models on the meta device. Of an optimizer of type
    `fullshard.optim.Muon`, it returns which rank orthogonalizes which matrix.
    """
    if isinstance(model, Muon):
        return model.owners()
    units: list[UnitSummary] = []
    all_params: list[nn.Parameter] = []
    for unit in _chosen(model, policy, options):
        overrides = ", ".join(f"{key}={value!r}" for key, value in unit.overrides.items())
        why = f"{unit.why}; with {overrides}" if overrides else unit.why
        params = [param for _, param in unit.params]
        units.append(_summary(unit.name or "(root)", unit.module, params, why))
        all_params += params
    number = "1 unit" if len(units) == 1 else f"{len(units)} units"
    return Explanation(tuple(units), _summary("total", model, all_params, number))


def _summary(name: str, module: nn.Module, params: Sequence[nn.Parameter], why: str) -> UnitSummary:
    return UnitSummary(
        name=name,
        module_class=type(module).__name__,
        numel=sum(param.numel() for param in params),
        num_bytes=sum(param.nbytes for param in params),
        dtypes=tuple(dict.fromkeys(param.dtype for param in params)),
        num_trainable=sum(param.requires_grad for param in params),
        num_frozen=sum(not param.requires_grad for param in params),
        why=why,
    )


def _chosen(model: nn.Module, policy: Any, options: dict[str, Any]) -> list[Chosen]:
    """The choice of a policy, checked as far as possible before anything is sharded."""
    is_container = isinstance(model, (nn.ModuleList, nn.ModuleDict))
    if not isinstance(model, nn.Module) or (is_container and not has_forward(model)):
        raise ConfigError(
            f"model must be an nn.Module with a forward, not a {type(model).__name__}; pass the "
            "model itself, or the module around a container."
        )
    uneven = options.pop("uneven", ())
    choice = choose(
        model,
        RepeatedBlocks(model) if policy is None else policy,
        ignored_params=options.get("ignored_params") or (),
        options=options,
        needs_forward=True,
    )
    given = {f"{unit.name or type(model).__name__}: overrides": unit.overrides for unit in choice}
    for subject, names in {"options": options, **given}.items():
        for name in names:
            if name not in _OPTIONS:
                raise ConfigError(
                    f"{subject}: {name!r} is not an option of fully_shard; choose from "
                    f"{', '.join(_OPTIONS)}."
                )
    for each in uneven:
        is_class = isinstance(each, type)
        own = [u for u in choice if (isinstance(u.module, each) if is_class else u.name == each)]
        if not own:
            raise ConfigError(
                f"uneven: {each!r} is neither a class nor the name of a unit; let the policy "
                f"choose it, or pass one of {[unit.name for unit in choice]}."
            )
        for unit in own:
            unit.overrides["uneven"] = True
    if len(choice) == 1:
        is_own = policy is None
        reason = "found no repeated blocks" if is_own else f"{name_of(policy)} chose nothing"
        choice = [replace(choice[0], why=f"{reason}: {choice[0].why}")]
    return choice

"""Tied parameters: which unit owns a parameter that several modules use, and who borrows it.

A tied parameter belongs to the innermost unit around all its places, so that it is gathered once.
The other hooks borrow it: its unit is unsharded whenever their modules run, even on their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torch import nn

from fullshard.runtime.hooks import (
    ModuleHooks,
    hooks_below,
    hooks_managing,
    hooks_of,
    hooks_of_unit,
)
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.unit import Unit

_T = TypeVar("_T")


def chains_of(
    roots: Iterable[nn.Module], owner_of: Callable[[nn.Module], _T | None]
) -> dict[nn.Module, tuple[_T, ...]]:
    """For every module, the owners of the modules around it and of itself, outermost first."""
    chains: dict[nn.Module, tuple[_T, ...]] = {}

    def walk(module: nn.Module, around: tuple[_T, ...]) -> None:
        if module not in chains:
            owner = owner_of(module)
            if owner is not None and (not around or around[-1] is not owner):
                around = (*around, owner)
            chains[module] = around
            for child in module.children():
                walk(child, around)

    for root in roots:
        walk(root, ())
    return chains


def innermost(chains: Sequence[tuple[_T, ...]]) -> _T:
    """The innermost owner that all chains have in common."""
    common = chains[0][0]
    for level in zip(*chains, strict=False):
        if any(owner is not level[0] for owner in level):
            break
        common = level[0]
    return common


def lending_tops(top: ModuleHooks) -> list[ModuleHooks]:
    """The roots of other trees that own parameters which modules below `top` use.

    There are some when one of two tied modules runs before the module around both, or when there
    is no such module.
    """
    below = hooks_below(*top.modules)
    owners = [hooks_of_unit(unit) for hooks in below for unit in hooks.lenders]
    for module in top.modules:
        for param in module.parameters():
            found = replacement_of(param)
            if found is not None:
                owners += [hooks_managing(location.module) for location in found.locations]
    others = dict.fromkeys(each for each in owners if each is not None and each not in below)
    return [each.root for each in others]


def join_late_ties(hooks_list: Sequence[ModuleHooks]) -> None:
    """If a user has tied a parameter to another one since sharding, replace it by the other."""
    for unit in [unit for hooks in hooks_list for unit in hooks.units]:
        for param in unit.params:
            for location in list(param.locations):
                found = location.get()
                other = None if found is None else replacement_of(found)
                if other is not None and other is not param:
                    param.locations.remove(location)
                    other.locations.append(location)
        if not all(param.locations for param in unit.params):
            unit.params = [param for param in unit.params if param.locations]
            unit.replan()


def settle_ties(tops: Sequence[ModuleHooks]) -> None:
    """Give every parameter that several hooks use to the innermost hooks around them."""
    modules = [module for top in tops for module in top.modules]
    chains = chains_of(modules, hooks_of)
    hooks_list = hooks_below(*modules)
    for hooks in hooks_list:
        hooks.lenders.clear()
    changed: list[Unit] = []
    for owner in hooks_list:
        for unit in owner.units:
            for param in list(unit.params):
                # The tree does not run modules outside of it: such a tie waits for their root.
                places = [location.module for location in param.locations]
                around = [chains[module] for module in places if module in chains]
                users = dict.fromkeys(chain[-1] for chain in around)
                if all(user is owner for user in users):
                    continue
                taker = innermost(around)
                target = next((each for each in taker.units if _can_take(each, unit)), unit)
                if target is not unit:
                    unit.make_whole()
                    target.make_whole()
                    unit.params.remove(param)
                    target.params.append(param)
                    changed += [unit, target]
                for user in users:
                    if target not in user.reads:
                        user.lenders.append(target)
    for unit in dict.fromkeys(changed):
        unit.replan()


def _can_take(unit: Unit, other: Unit) -> bool:
    """Whether a unit can take over a parameter of another one."""
    forms = [None if each.flat is None else each.flat.form for each in (unit, other)]
    is_alike = unit.mesh_info is other.mesh_info and forms[0] is forms[1]
    return is_alike and not unit.is_large

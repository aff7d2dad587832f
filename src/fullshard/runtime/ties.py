"""Tied parameters: which unit owns a parameter that several modules use, and who borrows it.

A tied parameter belongs to the innermost unit around all its places, so that it is gathered once.
The other hooks borrow it: its unit is unsharded whenever their modules run, also on their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.runtime.hooks import ModuleHooks, hooks_managing, hooks_of, hooks_of_unit
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.param import ShardedParam
from fullshard.unit.unit import Unit


def hooks_below(top: ModuleHooks) -> Iterator[ModuleHooks]:
    """All hooks in the module tree, outer before inner, each once."""
    found = (hooks_of(child) for module in top.modules for child in module.modules())
    yield from dict.fromkeys(hooks for hooks in found if hooks is not None)


def lending_tops(top: ModuleHooks) -> Iterator[ModuleHooks]:
    """The roots of other trees that own parameters which modules below `top` use.

    There are some when one of two tied modules runs before the module around both, or when there
    is no such module.
    """
    below = list(hooks_below(top))
    for owner in dict.fromkeys(_owners(top, below)):
        if owner not in below:
            root = owner if owner.scheduler is None else owner.scheduler.root
            assert isinstance(root, ModuleHooks)
            yield root


def _owners(top: ModuleHooks, below: Sequence[ModuleHooks]) -> Iterator[ModuleHooks]:
    """Those that lend to hooks below, and those that manage what their modules use."""
    for hooks in below:
        for unit in hooks.lenders:
            yield from filter(None, [hooks_of_unit(unit)])
    for module in top.modules:
        for child in module.modules():
            for param in child._parameters.values():
                found = None if param is None else replacement_of(param)
                if found is not None:
                    yield from filter(None, map(hooks_managing, _modules_of(found)))


def join_late_ties(hooks_list: Sequence[ModuleHooks]) -> None:
    """Where a user has tied a parameter to another one since sharding, let the other replace it."""
    for unit in [unit for hooks in hooks_list for unit in hooks.units]:
        before = list(unit.params)
        for param in before:
            for location in list(param.locations):
                found = location.get()
                other = None if found is None else replacement_of(found)
                if other is not None and other is not param:
                    param.locations.remove(location)
                    other.locations.append(location)
        unit.params = [param for param in before if param.locations]
        if len(unit.params) < len(before):
            unit.replan()


def settle_ties(tops: Sequence[ModuleHooks], hooks_list: Sequence[ModuleHooks]) -> None:
    """Give every parameter that several hooks use to the innermost hooks around them."""
    chains = _chains(tops)
    for hooks in hooks_list:
        hooks.lenders.clear()
    changed: list[Unit] = []
    for owner in hooks_list:
        for unit in list(owner.units):
            for param in list(unit.params):
                # Modules outside of the tree are not run by it: the tie waits for their root.
                users = [chains[m][-1] for m in _modules_of(param) if m in chains]
                if all(user is owner for user in users):
                    continue
                around = _innermost_around(chains, param)
                target = next((u for u in around.units if _can_take(u, unit)), unit)
                if target is not unit:
                    unit.make_whole()
                    target.make_whole()
                    unit.params.remove(param)
                    target.params.append(param)
                    changed += [unit, target]
                for user in dict.fromkeys(users):
                    if target not in user.units and target not in user.lenders:
                        user.lenders.append(target)
    for unit in dict.fromkeys(changed):
        unit.replan()


def _can_take(unit: Unit, other: Unit) -> bool:
    """Whether a parameter of another unit could be one of this."""
    forms = [None if each.flat is None else each.flat.form for each in (unit, other)]
    return unit.mesh_info is other.mesh_info and forms[0] is forms[1]


def _modules_of(param: ShardedParam) -> list[nn.Module]:
    return [location.module for location in param.locations]


def _chains(tops: Sequence[ModuleHooks]) -> dict[nn.Module, tuple[ModuleHooks, ...]]:
    """For every module, the hooks around it, outermost first."""
    chains: dict[nn.Module, tuple[ModuleHooks, ...]] = {}

    def walk(module: nn.Module, around: tuple[ModuleHooks, ...]) -> None:
        hooks = hooks_of(module)
        if hooks is not None and (not around or around[-1] is not hooks):
            around = (*around, hooks)
        if module in chains:
            return
        chains[module] = around
        for child in module.children():
            walk(child, around)

    for top in tops:
        for module in top.modules:
            walk(module, ())
    return chains


def _innermost_around(
    chains: dict[nn.Module, tuple[ModuleHooks, ...]], param: ShardedParam
) -> ModuleHooks:
    around = [chains[module] for module in _modules_of(param) if module in chains]
    common = around[0][0]
    for level in zip(*around, strict=False):
        if any(hooks is not level[0] for hooks in level):
            break
        common = level[0]
    return common

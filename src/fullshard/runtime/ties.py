"""Parameters that several units use: who owns them, who borrows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.runtime.hooks import ModuleHooks, hooks_managing, hooks_of, hooks_of_unit
from fullshard.runtime.replaced import replacement_of
from fullshard.unit.param import ShardedParam
from fullshard.unit.unit import Unit


def hooks_below(top: ModuleHooks) -> Iterator[ModuleHooks]:
    """All runners in the module tree, outer before inner, each once."""
    seen: set[ModuleHooks] = set()
    for module in top.modules:
        for child in module.modules():
            hooks = hooks_of(child)
            if hooks is not None and hooks not in seen:
                seen.add(hooks)
                yield hooks


def lending_tops(top: ModuleHooks) -> Iterator[ModuleHooks]:
    """The trees outside of `top`'s that own parameters which modules below it use.

    So it is when one of two tied modules runs before the module around both does, or when there
    is none.
    """
    below = list(hooks_below(top))
    for owner in dict.fromkeys(_owners(top, below)):
        if owner not in below:
            yield owner if owner.scheduler is None else owner.scheduler.hooks[0]


def _owners(top: ModuleHooks, below: Sequence[ModuleHooks]) -> Iterator[ModuleHooks]:
    """Those that lend to runners below, and those that care for what their modules use."""
    for hooks in below:
        for unit in hooks.lenders:
            yield from filter(None, [hooks_of_unit(unit)])
    for module in top.modules:
        for child in module.modules():
            for param in child._parameters.values():
                sharded_param = None if param is None else replacement_of(param)
                if sharded_param is not None:
                    yield from filter(None, map(hooks_managing, _modules_of(sharded_param)))


def join_late_ties(hooks_list: Sequence[ModuleHooks]) -> None:
    """Where a user has tied a parameter to another one since sharding, let the other replace it."""
    for unit in [unit for hooks in hooks_list for unit in hooks.units]:
        before = list(unit.params)
        for sharded_param in before:
            for location in list(sharded_param.locations):
                found = location.get()
                other = None if found is None else replacement_of(found)
                if other is not None and other is not sharded_param:
                    sharded_param.locations.remove(location)
                    other.locations.append(location)
        unit.params = [sharded_param for sharded_param in before if sharded_param.locations]
        if len(unit.params) < len(before):
            unit.replan()


def settle_ties(tops: Sequence[ModuleHooks], hooks_list: Sequence[ModuleHooks]) -> None:
    """Give every parameter that several runners use to the innermost runner around them."""
    chains = _chains(tops)
    for hooks in hooks_list:
        hooks.lenders.clear()
    changed: list[Unit] = []
    for owner in hooks_list:
        for unit in list(owner.units):
            for sharded_param in list(unit.params):
                # Modules outside of the tree are not run by it: the tie waits for their root.
                users = [chains[m][-1] for m in _modules_of(sharded_param) if m in chains]
                if all(user is owner for user in users):
                    continue
                home = _common(chains, sharded_param)
                target = next((u for u in home.units if _can_take(u, unit)), unit)
                if target is not unit:
                    unit.collect()
                    target.collect()
                    unit.params.remove(sharded_param)
                    target.params.append(sharded_param)
                    changed += [unit, target]
                for user in dict.fromkeys(users):
                    if target not in user.units and target not in user.lenders:
                        user.lenders.append(target)
    for unit in dict.fromkeys(changed):
        unit.replan()


def _can_take(unit: Unit, other: Unit) -> bool:
    """Whether a member of another unit could be one of this."""
    forms = [None if each.flat is None else each.flat.form for each in (unit, other)]
    return unit.mesh_info is other.mesh_info and forms[0] is forms[1]


def _modules_of(sharded_param: ShardedParam) -> list[nn.Module]:
    return [location.module for location in sharded_param.locations]


def _chains(tops: Sequence[ModuleHooks]) -> dict[nn.Module, tuple[ModuleHooks, ...]]:
    """For every module, the runners around it, outermost first."""
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


def _common(
    chains: dict[nn.Module, tuple[ModuleHooks, ...]], sharded_param: ShardedParam
) -> ModuleHooks:
    around = [chains[module] for module in _modules_of(sharded_param) if module in chains]
    common = around[0][0]
    for level in zip(*around, strict=False):
        if any(hooks is not level[0] for hooks in level):
            break
        common = level[0]
    return common

"""Parameters that several units use: who owns them, who borrows them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.runtime.runner import Runner, manager_of, runner_of, runner_of_unit
from fullshard.unit.member import Member
from fullshard.unit.succession import successor
from fullshard.unit.unit import Unit


def runners_below(top: Runner) -> Iterator[Runner]:
    """All runners in the module tree, outer before inner, each once."""
    seen: set[Runner] = set()
    for module in top.modules:
        for child in module.modules():
            runner = runner_of(child)
            if runner is not None and runner not in seen:
                seen.add(runner)
                yield runner


def lending_tops(top: Runner) -> Iterator[Runner]:
    """The trees outside of `top`'s that own parameters which modules below it use.

    So it is when one of two tied modules runs before the module around both does, or when there
    is none.
    """
    below = list(runners_below(top))
    for owner in dict.fromkeys(_owners(top, below)):
        if owner not in below:
            yield owner if owner.root is None else owner.root.runners[0]


def _owners(top: Runner, below: Sequence[Runner]) -> Iterator[Runner]:
    """Those that lend to runners below, and those that care for what their modules use."""
    for runner in below:
        for unit in runner.lenders:
            yield from filter(None, [runner_of_unit(unit)])
    for module in top.modules:
        for child in module.modules():
            for param in child._parameters.values():
                member = None if param is None else successor(param)
                if member is not None:
                    yield from filter(None, map(manager_of, _modules_of(member)))


def join_late_ties(runners: Sequence[Runner]) -> None:
    """Where a user has tied a parameter to another one since sharding, let the other replace it."""
    for unit in [unit for runner in runners for unit in runner.units]:
        before = list(unit.members)
        for member in before:
            for location in list(member.locations):
                found = location.get()
                other = None if found is None else successor(found)
                if other is not None and other is not member:
                    member.locations.remove(location)
                    other.locations.append(location)
        unit.members = [member for member in before if member.locations]
        if len(unit.members) < len(before):
            unit.rehome()


def settle_ties(tops: Sequence[Runner], runners: Sequence[Runner]) -> None:
    """Give every parameter that several runners use to the innermost runner around them."""
    chains = _chains(tops)
    for runner in runners:
        runner.lenders.clear()
    changed: list[Unit] = []
    for owner in runners:
        for unit in list(owner.units):
            for member in list(unit.members):
                # Modules outside of the tree are not run by it: the tie waits for their root.
                users = [chains[m][-1] for m in _modules_of(member) if m in chains]
                if all(user is owner for user in users):
                    continue
                home = _common(chains, member)
                target = next((u for u in home.units if _can_take(u, unit)), unit)
                if target is not unit:
                    unit.collect()
                    target.collect()
                    unit.members.remove(member)
                    target.members.append(member)
                    changed += [unit, target]
                for user in dict.fromkeys(users):
                    if target not in user.units and target not in user.lenders:
                        user.lenders.append(target)
    for unit in dict.fromkeys(changed):
        unit.rehome()


def _can_take(unit: Unit, other: Unit) -> bool:
    """Whether a member of another unit could be one of this."""
    forms = [None if each.flat is None else each.flat.form for each in (unit, other)]
    return unit.topology is other.topology and forms[0] is forms[1]


def _modules_of(member: Member) -> list[nn.Module]:
    return [location.module for location in member.locations]


def _chains(tops: Sequence[Runner]) -> dict[nn.Module, tuple[Runner, ...]]:
    """For every module, the runners around it, outermost first."""
    chains: dict[nn.Module, tuple[Runner, ...]] = {}

    def walk(module: nn.Module, around: tuple[Runner, ...]) -> None:
        runner = runner_of(module)
        if runner is not None and (not around or around[-1] is not runner):
            around = (*around, runner)
        if module in chains:
            return
        chains[module] = around
        for child in module.children():
            walk(child, around)

    for top in tops:
        for module in top.modules:
            walk(module, ())
    return chains


def _common(chains: dict[nn.Module, tuple[Runner, ...]], member: Member) -> Runner:
    around = [chains[module] for module in _modules_of(member) if module in chains]
    common = around[0][0]
    for level in zip(*around, strict=False):
        if any(runner is not level[0] for runner in level):
            break
        common = level[0]
    return common

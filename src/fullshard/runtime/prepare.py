"""What happens once, before the first pass: the root finds its units and settles what is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.comm.agreement import Agreement
from fullshard.errors import LifecycleError
from fullshard.runtime.root import Phase, Root
from fullshard.runtime.runner import Runner, manager_of, runner_of
from fullshard.unit.flow import Flow
from fullshard.unit.member import Member
from fullshard.unit.succession import repoint_living_optimizers, successor
from fullshard.unit.unit import Unit


def prepare(top: Runner) -> Root:
    """Make `top` the root of all runners below it, and of those it borrows parameters from."""
    tops = [top, *_lending_tops(top)]
    runners = list(dict.fromkeys(runner for each in tops for runner in _runners_below(each)))
    for runner in runners:
        if runner.root is not None and runner.root.phase is not Phase.IDLE:
            raise LifecycleError(
                f"{runner.name}: a unit must be idle when an outer module runs for the first time, "
                f"found it in {runner.root.phase.value}; run the outer module's forward first."
            )
    _name(tops, runners)
    flow = top.shared_flow or Flow(top.units[0].flow.device)
    for runner in runners:
        runner.is_root = runner is top
        for unit in runner.units:
            unit.reshard_now()
            unit.flow = flow
    _join_late_ties(runners)
    _settle_ties(tops, runners)
    for runner in runners:
        for unit in runner.units:
            unit.refresh(plan_training=True)
            unit.require_ready()
    topology = top.units[0].topology
    agreement = None
    if topology.num_ranks > 1:
        agreement = Agreement(topology, flow.device.torch_device)
        plans = [(unit.name, unit.describe()) for runner in runners for unit in runner.units]
        agreement.compare_plans(plans)
    repoint_living_optimizers()
    root = Root(runners, flow, agreement)
    for runner in runners:
        runner.root = root
    return root


def _runners_below(top: Runner) -> Iterator[Runner]:
    """All runners in the module tree, outer before inner, each once."""
    seen: set[Runner] = set()
    for module in top.modules:
        for child in module.modules():
            runner = runner_of(child)
            if runner is not None and runner not in seen:
                seen.add(runner)
                yield runner


def _lending_tops(top: Runner) -> Iterator[Runner]:
    """The trees outside of `top`'s that own parameters which modules below it use.

    So it is when one of two tied modules runs before the module around both does, or when there
    is none.
    """
    below = set(_runners_below(top))
    for module in top.modules:
        for child in module.modules():
            for param in child._parameters.values():
                member = None if param is None else successor(param)
                owner = None if member is None else manager_of(member.locations[0].module)
                if owner is not None and owner not in below:
                    yield owner if owner.root is None else owner.root.runners[0]


def _named_modules(tops: Sequence[Runner]) -> Iterator[tuple[str, nn.Module]]:
    for top in tops:
        for module in top.modules:
            yield from module.named_modules(remove_duplicate=False)


def _name(tops: Sequence[Runner], runners: Sequence[Runner]) -> None:
    """Give units and members the names that users know: paths from the root."""
    names: dict[nn.Module, str] = {}
    for name, module in _named_modules(tops):
        names.setdefault(module, name)
    for runner in runners:
        paths = [names[module] for module in runner.modules]
        own = ", ".join(path for path in paths if path)
        runner.name = own or type(runner.modules[0]).__name__.removeprefix("FSDP")
        for unit in runner.units:
            unit.name = runner.name
            for member in unit.members:
                location = member.locations[0]
                path = names.get(location.module, "")
                member.name = f"{path}.{location.name}" if path else location.name


def _join_late_ties(runners: Sequence[Runner]) -> None:
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


def _settle_ties(tops: Sequence[Runner], runners: Sequence[Runner]) -> None:
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
                target = next((u for u in home.units if u.topology is unit.topology), unit)
                if target is not unit:
                    unit.members.remove(member)
                    target.members.append(member)
                    changed += [unit, target]
                for user in dict.fromkeys(users):
                    if target not in user.units and target not in user.lenders:
                        user.lenders.append(target)
    for unit in dict.fromkeys(changed):
        unit.rehome()


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

"""What happens once, before the first pass: the root finds its units and settles what is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.comm.agreement import Agreement
from fullshard.errors import LifecycleError
from fullshard.runtime.root import Phase, Root
from fullshard.runtime.runner import Runner, runner_of
from fullshard.unit.flow import Flow
from fullshard.unit.member import Member
from fullshard.unit.succession import repoint_living_optimizers
from fullshard.unit.unit import Unit


def prepare(top: Runner) -> Root:
    """Make `top` the root of all runners below it."""
    runners = list(_runners_below(top))
    for runner in runners:
        if runner.root is not None and runner.root.phase is not Phase.IDLE:
            raise LifecycleError(
                f"{runner.name}: a unit must be idle when an outer module runs for the first time, "
                f"found it in {runner.root.phase.value}; run the outer module's forward first."
            )
    _name(top, runners)
    flow = top.shared_flow or Flow(top.units[0].flow.device)
    for runner in runners:
        runner.is_root = runner is top
        for unit in runner.units:
            unit.reshard_now()
            unit.flow = flow
    _settle_ties(top, runners)
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


def _named_modules(top: Runner) -> Iterator[tuple[str, nn.Module]]:
    for module in top.modules:
        yield from module.named_modules(remove_duplicate=False)


def _name(top: Runner, runners: Sequence[Runner]) -> None:
    """Give units and members the names that users know: paths from the root."""
    names: dict[nn.Module, str] = {}
    for name, module in _named_modules(top):
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


def _settle_ties(top: Runner, runners: Sequence[Runner]) -> None:
    """Give every parameter that several runners use to the innermost runner around them."""
    chains = _chains(top)
    for runner in runners:
        runner.lenders.clear()
    changed: list[Unit] = []
    for owner in runners:
        for unit in list(owner.units):
            for member in list(unit.members):
                users = [chains[location.module][-1] for location in member.locations]
                if all(user is owner for user in users):
                    continue
                home = _common(users, chains, member)
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


def _chains(top: Runner) -> dict[nn.Module, tuple[Runner, ...]]:
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

    for module in top.modules:
        walk(module, ())
    return chains


def _common(
    users: Sequence[Runner], chains: dict[nn.Module, tuple[Runner, ...]], member: Member
) -> Runner:
    around = [chains[location.module] for location in member.locations]
    common = around[0][0]
    for level in zip(*around, strict=False):
        if any(runner is not level[0] for runner in level):
            break
        common = level[0]
    return common

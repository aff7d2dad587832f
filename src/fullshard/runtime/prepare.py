"""What happens once, before the first pass: the root finds its units and settles what is theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from fullshard.comm.agreement import Agreement
from fullshard.errors import LifecycleError
from fullshard.runtime.names import clean_name
from fullshard.runtime.root import Phase, Root
from fullshard.runtime.runner import Runner
from fullshard.runtime.ties import join_late_ties, lending_tops, runners_below, settle_ties
from fullshard.unit.flow import Flow
from fullshard.unit.succession import repoint_living_optimizers


def prepare(top: Runner) -> Root:
    """Make `top` the root of all runners below it, and of those it borrows parameters from."""
    lending = list(lending_tops(top))
    for outer in lending:
        if top in runners_below(outer):
            return prepare(outer)
    tops = [top, *lending]
    runners = list(dict.fromkeys(runner for each in tops for runner in runners_below(each)))
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
    join_late_ties(runners)
    settle_ties(tops, runners)
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
        paths = [clean_name(names[module]) for module in runner.modules]
        own = ", ".join(path for path in paths if path)
        runner.name = own or type(runner.modules[0]).__name__.removeprefix("FSDP")
        for unit in runner.units:
            unit.name = runner.name
            for member in unit.members:
                location = member.locations[0]
                path = names.get(location.module, "")
                member.name = clean_name(f"{path}.{location.name}" if path else location.name)

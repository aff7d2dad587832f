"""A step of one rank, simulated: its memory by kind, its timeline and what it sends."""

from __future__ import annotations

import copy
import gc
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fullshard._torch import FakeStore, to_local
from fullshard.auto_shard import auto_shard
from fullshard.device import simulated
from fullshard.errors import ConfigError, FullshardError, LifecycleError
from fullshard.formatting import counted, readable, table
from fullshard.optim.muon import Muon, is_for_muon
from fullshard.plan.device_profile import DeviceProfile
from fullshard.plan.ledger import Kind, Peak
from fullshard.plan.simulator import Fabric, Simulator
from fullshard.runtime.hooks import units_below
from fullshard.trace import seam
from fullshard.trace.seam import Activity
from fullshard.trace.timeline import Timeline

# In the first step optimizers make their state, and the order of units becomes known.
_WARMUP_STEPS = 1
# Optimizers that look at whole matrices.
_WHOLE = (torch.optim.Muon, torch.optim.LBFGS, torch.optim.Adafactor)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """`num_hosts` of `ranks_per_host` devices each; the profile has the network between them."""

    profile: DeviceProfile
    ranks_per_host: int = 8
    num_hosts: int = 1

    @property
    def num_ranks(self) -> int:
        return self.ranks_per_host * self.num_hosts


@dataclass(frozen=True, slots=True)
class Job:
    """A sharded model, how it makes a loss, and how gradients are clipped and applied."""

    model: nn.Module
    loss: Callable[[], torch.Tensor]
    optimizer: torch.optim.Optimizer
    clip: Callable[[list[torch.Tensor]], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What a rank will hold, send and wait for in a step; `repr` is a table.

    `memory` is what is held at moments of the step, by kind, and `peak` is the most of it. The
    driver and libraries take `context_bytes` in addition. The host needs `host_s` to issue the
    step. `micro_batch_s` has the last micro-batch's parts of both times. `sent_bytes` are what a
    rank receives in collectives or copies, by name. `host_bytes` is host memory that tensors take.
    """

    machine: Machine
    num_parameters: int
    num_trainable: int
    peak: Peak
    memory: tuple[tuple[float, Mapping[Kind, int]], ...]
    timeline: Timeline
    host_s: float
    micro_batch_s: tuple[float, float]
    sent_bytes: Mapping[str, int]
    num_collectives: Mapping[str, int]
    tflop: float
    host_bytes: int
    context_bytes: int

    @property
    def peak_bytes(self) -> int:
        """What tensors take at most, as `torch.cuda.max_memory_allocated` reports it."""
        return self.peak.num_bytes

    @property
    def device_bytes(self) -> int:
        """What the device needs, with the context."""
        return self.peak_bytes + self.context_bytes

    @property
    def step_s(self) -> float:
        return self.timeline.duration_s

    @property
    def exposed_s(self) -> float:
        """How long compute waits for communication."""
        return self.timeline.exposed_s()

    def __repr__(self) -> str:
        machine, peak = self.machine, self.peak
        is_all = self.num_trainable == self.num_parameters
        trainable = "all" if is_all else f"{self.num_trainable:,}"
        hosts = f"{machine.num_hosts} hosts of " * (machine.num_hosts > 1)
        rows = [("on each rank", "at the peak")]
        rows += [(k.value, readable(peak.kinds.get(k, 0))) for k in Kind if peak.kinds.get(k)]
        rows.append(("total", readable(peak.num_bytes)))
        lines = [
            f"{self.num_parameters:,} parameters, {trainable} trainable, on {hosts}"
            f"{machine.ranks_per_host} {machine.profile.name}",
            *table(rows, numbers=(1,)),
            f"peak in the {peak.where}, after {_shown_s(peak.at_s)}",
        ]
        if self.context_bytes:
            lines.append(f"plus {readable(self.context_bytes)} for the driver and NCCL")
        if self.host_bytes:
            lines.append(f"plus {readable(self.host_bytes)} of host memory")
        for name, num_bytes in self.sent_bytes.items():
            number = self.num_collectives.get(name, 0)
            calls = f" in {counted(number, 'call')}" * bool(number)
            lines.append(f"{name}: {readable(num_bytes)} per step{calls}")
        lines.append(
            f"step {_shown_s(self.step_s)}, of which {_shown_s(self.exposed_s)} wait for "
            f"communication; {_shown_rate(self.tflop / self.step_s)} TFLOP/s"
        )
        return "\n".join(lines)


def _shown_s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _shown_rate(tflops: float) -> str:
    return f"{tflops:,.0f}" if tflops >= 10 else f"{tflops:.2g}"


def plan(
    model: nn.Module | Callable[[], nn.Module],
    batch: Sequence[torch.Tensor],
    machine: Machine,
    *,
    shard: Callable[[nn.Module], Any] = auto_shard,
    loss: Callable[[Any], torch.Tensor] = lambda output: output.float().mean(),
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
    accumulate: int = 1,
    is_offloaded: bool = False,
) -> StepPlan:
    """Return the step of a rank that trains a model, simulated on a machine.

        with torch.device("meta"):
            model, tokens = Model(), torch.empty(1, 8192, dtype=torch.int64)
        print(plan(model, [tokens], Machine(profile=profile_named("H100"))))

    Args:
        model: A model on the meta device, a copy of which is sharded, or a function that builds it.
        batch: The arguments of its forward, on the meta device.
        machine: The ranks to train on.
        shard: Shards the model in a world of these ranks, and returns it.
        loss: Computes the loss from the model's output.
        optimizer: Makes the optimizer for the parameters; by default fused AdamW.
        accumulate: Micro-batches per step.
        is_offloaded: Whether `shard` offloads to host memory.

    Raises:
        ConfigError: If the model is not on the meta device.
    """
    make_optimizer = optimizer or (lambda params: torch.optim.AdamW(params, fused=True))

    def make() -> Job:
        with torch.device("meta"):
            built = copy.deepcopy(model) if isinstance(model, nn.Module) else model()
        for name, tensor in [*built.named_parameters(), *built.named_buffers()]:
            if not tensor.is_meta:
                raise ConfigError(
                    f"plan: {name!r} is on {tensor.device}, but the model must be on the meta "
                    "device; build it under `with torch.device('meta')`, and compute values of "
                    "tensors when it is trained."
                )
        sharded = shard(built)
        made = make_optimizer([param for param in sharded.parameters() if param.requires_grad])
        return Job(sharded, lambda: loss(sharded(*batch)), made, lambda params: None)

    return simulate(make, machine, accumulate=accumulate, is_offloaded=is_offloaded)


def simulate(
    make: Callable[[], Job], machine: Machine, *, accumulate: int = 1, is_offloaded: bool = False
) -> StepPlan:
    """Run the engine on a simulated rank and return its step, once steps repeat themselves.

    Args:
        make: Makes the job, in a world of the machine's ranks. Tensors on meta are the device's.
        machine: The machine that the rank belongs to.
        accumulate: Micro-batches per step.
        is_offloaded: Whether tensors in host memory have to be simulated, too.
    """
    profile = machine.profile
    fabric = Fabric(profile, machine.ranks_per_host)
    simulator = Simulator(profile, fabric, is_offloaded=is_offloaded)
    world = _world(machine.num_ranks)
    with _without_collector(), world, simulated(simulator), simulator.running():
        job, workspace = (
            make(),
            torch.empty(profile.workspace_bytes, dtype=torch.uint8, device="meta"),
        )
        _mark(simulator, workspace, Kind.WORKSPACE)
        model, shards = job.model, _step_locals(job.optimizer)
        model.register_forward_hook(lambda *_: _mark(simulator, _[-1], Kind.LOSS))
        params = [param for unit in units_below(model) for param in unit.params]
        numel = [(param.split.numel, param.is_trainable) for param in params]
        with seam.observed(simulator), _explained(model):
            for _ in range(_WARMUP_STEPS):
                _step(simulator, job, shards, 1)
            gc.collect()
            _classify(simulator, job)
            simulator.begin_step()
            begun_s = simulator.host_s
            micro_batch_s = _step(simulator, job, shards, accumulate)
            host_s = simulator.host_s - begun_s
        timeline = simulator.end_step()
        peak, memory = simulator.ledger.peak(), tuple(simulator.ledger.over_time())
    context = profile.context_bytes + (profile.comm_bytes if machine.num_ranks > 1 else 0)
    return StepPlan(
        machine=machine,
        num_parameters=sum(number for number, _ in numel),
        num_trainable=sum(number for number, is_trained in numel if is_trained),
        peak=peak,
        memory=memory,
        timeline=timeline,
        host_s=host_s,
        micro_batch_s=micro_batch_s,
        sent_bytes=dict(simulator.sent),
        num_collectives=dict(simulator.num_collectives),
        tflop=simulator.flops / 1e12,
        host_bytes=simulator.ledger.host_peak_bytes,
        context_bytes=context,
    )


@dataclass(frozen=True, slots=True)
class _Local:
    """The local tensor of a parameter, as one that is clipped, and stepped unless Muon steps it."""

    local: nn.Parameter
    param: torch.Tensor
    is_stepped: bool

    def take_grad(self) -> None:
        self.local.grad = None if self.param.grad is None else to_local(self.param.grad)
        if self.is_stepped:
            self.param.grad = None


def _step_locals(optimizer: torch.optim.Optimizer) -> list[_Local]:
    """Let an elementwise optimizer step local tensors, not DTensors: the same, but much faster."""
    found: list[_Local] = []
    for group in () if isinstance(optimizer, _WHOLE) else optimizer.param_groups:
        is_stepped = not (isinstance(optimizer, Muon) and is_for_muon(group))
        own = [
            _Local(nn.Parameter(to_local(param).detach()), param, is_stepped)
            for param in group["params"]
        ]
        if is_stepped:
            group["params"] = [each.local for each in own]
        found += own
    return found


def _step(
    simulator: Simulator, job: Job, shards: list[_Local], accumulate: int
) -> tuple[float, float]:
    """Run a step; return how long the last micro-batch took, and how long the host to issue it."""
    for _ in range(accumulate):
        begun_s = simulator.all_done_s, simulator.host_s
        simulator.phase = "forward"
        loss = job.loss() / accumulate
        simulator.phase = "backward"
        loss.backward()
        del loss
        for held in job.model.parameters():
            if held.grad is not None:
                _mark(simulator, to_local(held.grad), Kind.GRADIENTS)
    micro_batch_s = simulator.all_done_s - begun_s[0], simulator.host_s - begun_s[1]
    simulator.phase = "optimizer"
    with seam.doing(Activity.OPTIMIZER, "optimizer"):
        for each in shards:
            each.take_grad()
        job.clip([each.local for each in shards] or [*job.model.parameters()])
        job.optimizer.step()
        job.optimizer.zero_grad()
    return micro_batch_s


def _mark(simulator: Simulator, found: Any, kind: Kind) -> None:
    for tensor in [found] if isinstance(found, torch.Tensor) else getattr(found, "values", list)():
        if isinstance(tensor, torch.Tensor):
            simulator.ledger.set_kind(tensor.untyped_storage(), kind)


def _classify(simulator: Simulator, job: Job) -> None:
    """Mark what lasts from step to step, and have full gradients marked as they are made."""
    for unit in units_below(job.model):
        for buffer in unit.shard_buffers.lanes:
            _mark(simulator, buffer, Kind.PARAMETERS)
        for param in unit.params:
            if param.full is not None and param.full.requires_grad:
                param.full.register_post_accumulate_grad_hook(
                    lambda full: _mark(simulator, full.grad, Kind.FULL_GRADIENTS)
                )
    for state in job.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                _mark(simulator, to_local(value), Kind.OPTIMIZER)
    for tensor in job.model.buffers():
        _mark(simulator, tensor, Kind.OTHER)


@contextmanager
def _world(num_ranks: int) -> Iterator[None]:
    """A default process group in which this process is the first rank, and nothing is sent."""
    if dist.is_initialized():
        raise LifecycleError(
            "plan: this process already has a default process group; plan before "
            "init_process_group, or in another process (fullshard plan)."
        )
    hook = sys.excepthook  # torch adds the rank to what it prints
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    sys.excepthook = hook
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Explain an error in a step: tensors had no values."""
    try:
        yield
    except FullshardError:
        raise
    except (RuntimeError, TypeError) as error:
        raise ConfigError(
            f"{type(model).__name__}: its step does not run on the meta device "
            f"({type(error).__name__}: {error}); leave out what needs values of tensors."
        ) from error


@contextmanager
def _without_collector() -> Iterator[None]:
    """Disable the collector, which would free cycles at any time, and have it skip old objects."""
    was_enabled, num_frozen = gc.isenabled(), gc.get_freeze_count()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        if not num_frozen:
            gc.unfreeze()
        if was_enabled:
            gc.enable()

"""A simulated device: virtual streams, and a time for every operation of torch.

While a `Simulator` is entered, the engine runs as usual, on meta tensors. Its streams are
`VirtualStream`s, whose time is when they will have finished their work. An operation starts when
its stream is free and the host has issued it, and takes as long as the profile of the device says.
The ledger tracks the memory of every storage.
"""

from __future__ import annotations

import warnings
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist

from fullshard._torch import (
    FakeTensorMode,
    TorchDispatchMode,
    fused_optimizers_on,
    has_own_dispatch,
    hosts_of_meta_devices,
)
from fullshard.comm.collectives import Collectives
from fullshard.comm.work import CollectiveWork
from fullshard.device import Device, Streams
from fullshard.layout import Wire
from fullshard.plan.device_profile import DeviceProfile
from fullshard.plan.ledger import Kind, Ledger
from fullshard.plan.operations import (
    Cost,
    TensorShape,
    Traits,
    bytes_of,
    described,
    fused_kernels,
    is_simulated,
    tensors_in,
    traits_of,
)
from fullshard.trace.seam import Activity
from fullshard.trace.timeline import MemorySample, Span, Timeline

_META = torch.device("meta")


class VirtualStream:
    """A queue of work, represented by the time at which it will be done."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.time_s = 0.0


class VirtualEvent:
    """The time at which a stream will have done what it had been given."""

    def __init__(self, time_s: float, simulator: Simulator) -> None:
        self.time_s = time_s
        self._simulator = simulator

    def query(self) -> bool:
        return self._simulator.host_s >= self.time_s

    def wait(self, stream: VirtualStream) -> None:
        stream.time_s = max(stream.time_s, self.time_s)

    def synchronize(self) -> None:
        self._simulator.host_s = max(self._simulator.host_s, self.time_s)


class SimulatedDevice(Device):
    """The device that the engine asks for streams; a CPU has none."""

    def __init__(self, simulator: Simulator) -> None:
        super().__init__(_META)
        self._simulator = simulator
        self.has_streams = simulator.profile.device_type != "cpu"

    def make_streams(self) -> Streams:
        return Streams(*map(VirtualStream, ("all-gather", "reduce-scatter", "all-reduce")))

    @contextmanager
    def on(self, stream: VirtualStream) -> Iterator[None]:
        simulator = self._simulator
        before = simulator.current
        if self.has_streams:
            simulator.current = stream
        try:
            yield
        finally:
            simulator.current = before

    def record(self) -> Any:
        if not self.has_streams:
            return None
        return VirtualEvent(self._simulator.now_s, self._simulator)

    def wait(self, event: VirtualEvent | None, stream: VirtualStream | None = None) -> None:
        if event is not None:
            event.wait(self._simulator.current if stream is None else stream)

    def synchronize(self, event: VirtualEvent | None) -> None:
        if event is not None:
            event.synchronize()


class SimulatedCollectives(Collectives):
    """Collectives that take time and send nothing."""

    def __init__(self, simulator: Simulator) -> None:
        self._simulator = simulator
        self.averages = simulator.device.has_streams

    def all_gather(self, outs: Any, ins: Any, group: Any) -> CollectiveWork:
        return self._simulator.collective("all-gather", sum(out.nbytes for out in outs), group)

    def reduce_scatter(
        self, outs: Any, ins: Any, group: Any, *, average: bool, wire: Any = None
    ) -> CollectiveWork:
        simulator, num_bytes = self._simulator, sum(inp.nbytes for inp in ins)
        if outs[0].dtype == ins[0].dtype:
            return simulator.collective("reduce-scatter", num_bytes, group)
        for out, inp in zip(outs, ins, strict=True):
            received = torch.empty_like(inp)
            crossing = self._crossing_bytes(out, inp, group, wire)
            simulator.collective("reduce-scatter", inp.nbytes, group, crossing).wait()
            torch.sum(received.view(group.size(), -1), 0, dtype=out.dtype, out=out)
        return CollectiveWork()

    def _crossing_bytes(self, out: Any, inp: Any, group: Any, wire: Wire) -> int:
        """What an exchange would send in all if everything crossed to another host once."""
        num_hosts, num_local = self._simulator.fabric.shape_of(group)
        if wire.holds_sums and num_local > 1:  # sums of hosts
            numel: int = wire.message_numel(out.numel())
            return num_hosts * num_local * numel * wire.dtype.itemsize
        return self._exchanged_bytes(inp, group)

    def _exchanged_bytes(self, inp: Any, group: Any) -> int:
        """What all ranks of a host exchange, each as much as this one."""
        num_bytes: int = inp.nbytes
        return num_bytes * self._simulator.fabric.shape_of(group)[1]

    def all_to_all(
        self, out: Any, inp: Any, out_numel: Any, in_numel: Any, group: Any
    ) -> CollectiveWork:
        simulator, crossing = self._simulator, self._exchanged_bytes(inp, group)
        if not simulator.device.has_streams:
            return simulator.collective("all-to-all", inp.nbytes, group, crossing)
        stream = simulator.exchange
        stream.time_s = max(stream.time_s, simulator.now_s)
        with simulator.device.on(stream):
            simulator.collective("all-to-all", inp.nbytes, group, crossing)
        done = VirtualEvent(stream.time_s, simulator)
        return CollectiveWork([done], wait=lambda each: each.wait(simulator.current))


class Fabric:
    """How long collectives take: rings over the links of a host, and over the network of hosts."""

    def __init__(self, profile: DeviceProfile, ranks_per_host: int) -> None:
        self._profile = profile
        self.ranks_per_host = ranks_per_host
        self._shapes: dict[Any, tuple[int, int]] = {}

    def seconds(self, name: str, num_bytes: int, crossing_bytes: int, group: Any) -> float:
        """The time of a collective over `num_bytes` in all; an all-reduce moves them twice."""
        times = 1 + (name == "all-reduce")
        shape = self.shape_of(group)
        return self.seconds_of(times * num_bytes, *shape, times * crossing_bytes)

    def host_of(self, rank: int) -> int:
        return rank // self.ranks_per_host

    def shape_of(self, group: Any) -> tuple[int, int]:
        if group not in self._shapes:
            self._shapes[group] = self.shape(dist.get_process_group_ranks(group))
        return self._shapes[group]

    def shape(self, ranks: Sequence[int]) -> tuple[int, int]:
        """The number of hosts of these ranks, and how many are on each."""
        by_host = Counter(map(self.host_of, ranks))
        return len(by_host), max(by_host.values())

    def seconds_of(
        self, num_bytes: int, num_hosts: int, num_local: int, crossing_bytes: int | None = None
    ) -> float:
        """`crossing_bytes` is as much as `num_bytes` unless hosts send each other another form."""
        crossing_bytes = num_bytes if crossing_bytes is None else crossing_bytes
        profile, size = self._profile, num_hosts * num_local
        if size == 1:
            return 0.0
        share = profile.link_efficiency * 1e9
        latency_s = profile.latency_s
        inside_s = across_s = 0.0
        if num_local > 1:
            inside_s = num_bytes * (size - 1) / size / (profile.link_gbs * share)
        if num_hosts > 1:
            latency_s = profile.network_latency_s or latency_s
            # The other ranks of the host use the rest: they take the same step in other groups.
            adapters = profile.adapters_per_host or self.ranks_per_host
            rate = profile.network_gbs * share * adapters * num_local / self.ranks_per_host
            across_s = crossing_bytes * (num_hosts - 1) / num_hosts / rate
        # CPU ranks gather from other hosts first and then share it; GPUs do both at once.
        is_staged = profile.device_type == "cpu"
        sending_s = inside_s + across_s if is_staged else max(inside_s, across_s)
        return latency_s + profile.hop_s * (size - 1) + sending_s


_Interval = tuple[float, float]


def _free_from(taken: list[_Interval], start_s: float, seconds: float) -> float:
    """Take the first moment from `start_s` on for which nothing else is sent for so long."""
    # In order and without overlaps: all before the last one that begins by then have ended.
    index = max(0, bisect_right(taken, start_s, key=itemgetter(0)) - 1)
    while index < len(taken) and taken[index][0] < start_s + seconds:
        start_s = max(start_s, taken[index][1])
        index += 1
    taken.insert(index, (start_s, start_s + seconds))
    return start_s


class Simulator(TorchDispatchMode):
    """Time and memory of one rank, while it is entered with `running`.

    `phase` is what the step does: "forward", "backward" or "optimizer". `_units` are the units that
    are running, the innermost last. As an observer, it turns what the engine tells into spans.
    """

    def __init__(self, profile: DeviceProfile, fabric: Fabric, *, is_offloaded: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Tensors in host memory are fake ones.
        self._fake = FakeTensorMode(allow_non_fake_inputs=True) if is_offloaded else None
        self.profile = profile
        self.played = profile.device_type
        self.host_s = 0.0
        self.current = self.compute = VirtualStream("compute")
        self.exchange = VirtualStream("all-to-all")
        self._network = VirtualStream("network")
        # When streams use the links of a host, and the network between hosts.
        self._transfers: tuple[list[_Interval], list[_Interval]] = ([], [])
        self.device = SimulatedDevice(self)
        self.collectives = SimulatedCollectives(self)
        # On a CPU, the times of collectives are known when they are issued.
        self.wants_collective_ends = self.device.has_streams
        self.ledger = Ledger()
        self.phase = "forward"
        self.flops = 0
        self.sent: Counter[str] = Counter()
        self.num_collectives: Counter[str] = Counter()
        self.fabric = fabric
        self._units: list[str] = []
        self._is_first = False
        self._issuing: tuple[Activity, str, float] | None = None
        self._began_s = 0.0
        self._open: dict[tuple[Activity, str], list[float]] = {}
        self._spans: list[Span] = []
        self._known: dict[Any, Cost] = {}

    @contextmanager
    def running(self) -> Iterator[None]:
        hosts = hosts_of_meta_devices(self.fabric.ranks_per_host)
        with fused_optimizers_on("meta"), hosts, fused_kernels(self.played), self:
            yield

    # Time

    @property
    def now_s(self) -> float:
        """When something that is issued now would start on the current stream."""
        return max(self.current.time_s, self.host_s) if self.device.has_streams else self.host_s

    @property
    def all_done_s(self) -> float:
        return max(self.compute.time_s, self.host_s, self._network.time_s)

    def run(self, seconds: float) -> None:
        """Run something on the current stream, or on the host if there are no streams."""
        self._issue()
        if self.device.has_streams:
            self.current.time_s = max(self.current.time_s, self.host_s) + seconds
        else:
            self.host_s += seconds

    def _issue(self) -> None:
        """Let the host issue an operation, which takes longer if backward recomputes it."""
        is_recomputed = self.phase == "backward" and torch.is_grad_enabled()
        self.host_s += self.profile.launch_s * (_RECOMPUTED if is_recomputed else 1)

    def collective(
        self, name: str, num_bytes: int, group: Any, crossing_bytes: int | None = None
    ) -> CollectiveWork:
        self.host_s += self.profile.launch_s * _COLLECTIVE * self._is_first
        self._is_first = False
        crossing_bytes = num_bytes if crossing_bytes is None else crossing_bytes
        seconds = self.fabric.seconds(name, num_bytes, crossing_bytes, group)
        self.sent[name] += num_bytes * (group.size() - 1) // group.size()
        self.num_collectives[name] += 1
        if self.device.has_streams:
            self._issue()
            transfers = self._transfers[self.fabric.shape_of(group)[0] > 1]
            start_s = _free_from(transfers, self.now_s, seconds)
            self.current.time_s = start_s + seconds
            return CollectiveWork()
        network = self._network
        network.time_s = max(network.time_s, self.host_s) + seconds
        if self._issuing is not None:
            activity, unit, start_s = self._issuing
            start_s, end_s = start_s - self._began_s, network.time_s - self._began_s
            self._spans.append(Span(activity, unit, start_s, end_s))
        done = VirtualEvent(network.time_s, self)
        return CollectiveWork([done], wait=VirtualEvent.synchronize)

    def host_of(self, rank: int) -> int:
        return self.fabric.host_of(rank)

    def all_reduce(self, num_bytes: int, group: Any) -> None:
        self.collective("all-reduce", num_bytes, group).wait()

    # What the engine tells

    def begin(self, activity: Activity, unit: str) -> None:
        if activity in (Activity.FORWARD, Activity.BACKWARD):
            self._units.append(unit)
        is_collective = activity in (Activity.GATHER, Activity.REDUCE)
        self._is_first |= is_collective
        if is_collective and not self.device.has_streams:
            self._issuing = (activity, unit, self.now_s)
            return
        self._open.setdefault((activity, unit), []).append(self.now_s - self._began_s)

    def end(self, activity: Activity, unit: str) -> None:
        if activity in (Activity.FORWARD, Activity.BACKWARD) and unit in self._units:
            del self._units[len(self._units) - 1 - self._units[::-1].index(unit)]
        if activity in (Activity.GATHER, Activity.REDUCE) and not self.device.has_streams:
            self._issuing = None
            return
        begun = self._open.get((activity, unit))
        if begun:
            self._spans.append(Span(activity, unit, begun.pop(0), self.now_s - self._began_s))

    def hold(self, unit: str, num_bytes: int) -> None:
        pass  # the ledger tracks this

    def begin_step(self) -> None:
        """Restart the clock, with everything done."""
        self._began_s = self.host_s = self.compute.time_s = self.all_done_s
        self._spans.clear()
        self._open.clear()
        self.sent.clear()
        self.num_collectives.clear()
        self.flops = 0
        self._note_time()
        self.ledger.begin_step()

    def end_step(self) -> Timeline:
        duration_s = self.all_done_s - self._began_s
        samples = (
            MemorySample(at_s, held[Kind.FULL], sum(held.values()))
            for at_s, held in self.ledger.over_time()
        )
        return Timeline(0, duration_s, tuple(self._spans), tuple(samples))

    # Memory

    def address_of(self, storage: torch.UntypedStorage) -> int:
        block = self.ledger.block_of(storage)
        return 0 if block is None else block.start

    def resized(self, storage: torch.UntypedStorage, kind: str) -> None:
        self._note_time()
        self.ledger.allocated(storage, Kind(kind or Kind.OTHER), "", self.current.name)

    def copied(self, num_bytes: int) -> None:
        """Take the time of a kernel that reads and writes so many bytes."""
        profile = self.profile
        rate = profile.memory_gbs * profile.memory_efficiency * 1e9
        self.run(profile.kernel_s + num_bytes / rate)

    def _note_time(self) -> None:
        at_s = self.compute.time_s if self.device.has_streams else self.host_s
        unit = self._units[-1] if self._units and self.phase != "optimizer" else ""
        self.ledger.now = (at_s - self._began_s, self.phase, unit)

    def _enter(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if self.ledger.knows(storage):
            return
        is_on_host = not tensor.is_meta
        stream = "host" if is_on_host else self.current.name
        kind = Kind.OTHER
        if self.current is not self.compute:
            kind = Kind.STAGING
        elif self._units:
            kind = Kind.ACTIVATIONS
        elif self.phase != "optimizer":
            kind = Kind.LOSS
        owner = self._units[-1] if self._units else ""
        self.ledger.allocated(storage, kind, owner, stream, is_on_host=is_on_host)

    # What torch does

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled under it, and True would cost time in every operation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(map(has_own_dispatch, types)):
            return NotImplemented  # the tensors that it is made of are dispatched here
        traits = traits_of(func)
        if traits.is_view:
            if traits.is_aten and self.current is self.compute:
                self._issue()
            return func(*args, **kwargs)
        inputs: list[torch.Tensor] = []
        key = (func, described(args, inputs), described(tuple(kwargs.items()), inputs))
        if not (any(map(is_simulated, inputs)) if inputs else self._is_made_here(kwargs)):
            return func(*args, **kwargs)  # numbers on the host, such as a mesh
        if traits.is_read:
            # The host waits, and reads what most conditions hope for: one, or true.
            self.host_s = max(self.host_s, self.current.time_s)
            return torch.ones((), dtype=args[0].dtype).item()
        if traits.only_allocates:
            found = self._made(described(self._run(traits, func, args, kwargs), []))
            self._note_time()
            self._enter(found)
            return found
        # Results and costs depend on shapes alone. Keep them: running an operation on meta is slow.
        known = self._known.get(key)
        if known is None:
            found = self._run(traits, func, args, kwargs)
            known = self._known[key] = self._cost(traits, inputs, args, kwargs, found)
        found = traits.written(args, kwargs) if traits.is_in_place else self._made(known.found)
        self.flops += known.flops
        if known.copied_bytes:
            self.sent["host copies"] += known.copied_bytes
        if known.is_by_host:
            self.host_s += known.seconds
        else:
            self.run(known.seconds)
        self._note_time()
        for tensor in tensors_in(found):
            self._enter(tensor)
        return found

    def _is_made_here(self, kwargs: Any) -> bool:
        """Whether a new tensor is on the device, or in the memory that is offloaded to."""
        device, dtype = kwargs.get("device"), kwargs.get("dtype") or torch.get_default_dtype()
        if device is not None and device.type == "meta":
            return True
        return self._fake is not None and dtype.is_floating_point

    def _run(self, traits: Traits, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the result of an operation. One that only writes has nothing to do on meta."""
        if traits.is_in_place:
            return traits.written(args, kwargs)
        device = kwargs.get("device")
        is_on_host = device is not None and device.type != "meta"
        tensors = (*tensors_in(args), *tensors_in(tuple(kwargs.values())))
        if self._fake is None or not (is_on_host or any(not t.is_meta for t in tensors)):
            return func(*args, **kwargs)
        kwargs = {name: value for name, value in kwargs.items() if name != "pin_memory"}
        with self._fake, warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
            return func(*args, **kwargs)

    def _made(self, described: Any) -> Any:
        """Make tensors without values, of the shapes that were described."""
        if isinstance(described, TensorShape):
            shape, stride, dtype, device = described
            if device.type == "meta" or self._fake is None:
                return torch.empty_strided(shape, stride, dtype=dtype, device=device)
            with self._fake:
                return torch.empty_strided(shape, stride, dtype=dtype, device=device)
        if described and isinstance(described[0], type):
            return described[1]
        return tuple([self._made(each) for each in described])

    def _cost(
        self, traits: Traits, inputs: list[torch.Tensor], args: Any, kwargs: Any, found: Any
    ) -> Cost:
        """The cost of an operation: the time for its bytes or its FLOPs, whichever is longer."""
        profile, tensors = self.profile, list(inputs)
        made = described(found, tensors)
        num_bytes = sum(map(bytes_of, tensors))
        # A number in host memory travels with the kernel.
        if any(not tensor.is_meta and bytes_of(tensor) > _SMALL_BYTES for tensor in tensors):
            largest = max(map(bytes_of, tensors))
            if any(tensor.is_meta for tensor in tensors):
                return Cost(made, largest / (profile.host_gbs * 1e9), copied_bytes=largest)
            return Cost(made, num_bytes / (_HOST_MEMORY_GBS * 1e9), is_by_host=True)
        if traits.is_fused_step:
            num_bytes += num_bytes * 3 // 4  # three of the four are written, too
        seconds = num_bytes / (profile.memory_gbs * profile.memory_efficiency * 1e9)
        flops = 0
        if traits.flops is not None:
            flops = int(traits.flops(*args, **kwargs, out_val=found))
            # A sum of products may be wider than these.
            width = min(each.itemsize for each in inputs if each.is_floating_point())
            peak = profile.tflops(width) * profile.matmul_efficiency
            done: float = flops
            if traits.is_attention:
                # Kernels skip what is masked.
                peak = profile.tflops(width) * profile.attention_efficiency
                done = flops / 2 if traits.is_causal(args, kwargs) else flops
            seconds = max(seconds, done / (peak * 1e12))
        return Cost(made, profile.kernel_s + seconds, flops)


# The host time of the all-gather or reduce-scatter of a unit, and of an operation that is
# recomputed, as a number of operations. Fitted together with `launch_s` (docs/planning.md).
_COLLECTIVE, _RECOMPUTED = 22.0, 1.7
_SMALL_BYTES = 1 << 10
_HOST_MEMORY_GBS = 24.0

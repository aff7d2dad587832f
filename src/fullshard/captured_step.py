"""`capture`: a whole training step as a CUDA graph.

A step of many small kernels waits for the host that launches them. A graph of the step is launched
at once: forward with its all-gathers, backward with its reduce-scatters, clipping, the optimizer.

The first calls run eagerly, on the stream that will be captured, and show which sharded modules and
optimizers take part. A graph is made for each shape of the inputs. What the engine keeps from step
to step (full parameters, gradient buffers, events) is made anew for a capture and dropped after it,
so that eager steps, state dicts and graphs share nothing but the shards and the optimizer's state.
"""

from __future__ import annotations

import operator
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from fullshard.comm import guard
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.runtime.hooks import ModuleHooks, hooks_of
from fullshard.runtime.step import Scheduler
from fullshard.runtime.trees import map_tensors
from fullshard.trace import seam

__all__ = ["CapturedStep", "capture"]

P = ParamSpec("P")
R = TypeVar("R")

_PACKAGES = (Path(torch.__file__).parent, Path(__file__).parent)


def capture(
    train_step: Callable[P, R], *, warmup: int = 3, fallback: bool = False, max_graphs: int = 4
) -> CapturedStep[P, R]:
    """Return a training step that is replayed as a CUDA graph.

        def train_step(batch):
            loss = model(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = capture(train_step)
        for batch in batches:
            loss = step(batch)

    The first `warmup` calls are eager steps. Then the step is captured once for each shape of its
    inputs; later calls copy their inputs into the graph's, replay it, and return copies of its
    results. Python code of `train_step` does not run again in a replay.

    Optimizers that take part become `capturable`, and their learning rates tensors: a scheduler,
    or an assignment to a group's `"lr"`, still takes effect. Eager steps, state dicts and
    checkpoints may come between replays. The step is captured again when parameters or optimizer
    state get other memory, are frozen or unfrozen, or an option of a group is changed.

    Args:
        train_step: Forward, backward and update, over modules that are sharded by either API.
        warmup: The number of eager steps before the first capture, at least one.
        fallback: Go on with eager steps, after one warning, if the step cannot be captured.
        max_graphs: The number of graphs that are kept, for different inputs.

    Raises:
        UnsupportedError: From the returned step, if it cannot be captured: it reads a value of the
            device on the host, or parameters are offloaded, or there is no CUDA device.
    """
    if warmup < 1 or max_graphs < 1:
        raise ConfigError(
            f"capture: warmup={warmup} and max_graphs={max_graphs} must both be 1 or more."
        )
    return CapturedStep(train_step, warmup, fallback, max_graphs)


@dataclass(frozen=True, slots=True)
class _Slot:
    """Stands for a tensor where inputs are compared."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(slots=True)
class _Graph:
    """A step for inputs like `signature`: eager until it has been captured."""

    signature: Any
    num_eager: int = 0
    graph: torch.cuda.CUDAGraph | None = None
    inputs: list[torch.Tensor] = field(default_factory=list)
    output: Any = None


class CapturedStep(Generic[P, R]):
    """What `capture` returns: call it like the step that it was made from.

    `_hooks` and `_optimizers` are those that took part in eager steps. `_rates` has the learning
    rates of each optimizer's groups as the tensors that graphs read. `_used` is what the last
    eager step or capture used and a user may replace.
    """

    def __init__(
        self, train_step: Callable[P, R], warmup: int, fallback: bool, max_graphs: int
    ) -> None:
        self._step = train_step
        self._warmup = warmup
        self._fallback = fallback
        self._max_graphs = max_graphs
        self._graphs: list[_Graph] = []
        self._is_eager = False
        self._hooks: dict[ModuleHooks, None] = {}
        self._optimizers: dict[Optimizer, None] = {}
        self._rates: dict[Optimizer, list[torch.Tensor]] = {}
        self._used: list[Any] = []
        self._stream: Any = None
        self._pool: Any = None

    @property
    def num_graphs(self) -> int:
        """How many graphs there are."""
        return sum(each.graph is not None for each in self._graphs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Replay the step, or run it eagerly while there is no graph for such inputs."""
        if self._is_eager:
            return self._step(*args, **kwargs)
        if self._stream is None:
            if not torch.cuda.is_available():
                return self._refuse("there is no CUDA device", None, args, kwargs)
            self._stream, self._pool = torch.cuda.Stream(), torch.cuda.graph_pool_handle()
        if not self._is_current():
            self._graphs.clear()
        tensors: list[torch.Tensor] = []
        entry = self._find(tensors, args, kwargs)
        if entry.graph is None:
            if entry.num_eager < (1 if self.num_graphs else self._warmup):
                entry.num_eager += 1
                return self._run_eagerly(args, kwargs)
            error = self._capture(entry, tensors, args, kwargs)
            if error is not None:
                problem = "the step must not wait for the device, but it does: "
                return self._refuse(problem + _described(error), error, args, kwargs)
        return self._replay(entry, tensors)

    def _find(self, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> _Graph:
        """The entry for such inputs, moved to the end; lists their tensors in `tensors`."""

        def slot(tensor: torch.Tensor) -> Any:
            tensors.append(tensor)
            return _Slot(tensor.shape, tensor.dtype)

        signature = map_tensors(slot, (list(args), dict(kwargs)))
        for entry in self._graphs:
            if entry.signature == signature:
                self._graphs.remove(entry)
                break
        else:
            entry = _Graph(signature)
            del self._graphs[: len(self._graphs) + 1 - self._max_graphs]
        self._graphs.append(entry)
        return entry

    # Eager steps

    def _run_eagerly(self, args: Any, kwargs: Any) -> R:
        """Run the step on the capture stream, and note which modules and optimizers take part."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream), self._watching():
            result = self._step(*args, **kwargs)
        current.wait_stream(self._stream)
        for optimizer in self._optimizers:
            self._make_capturable(optimizer)
        self._used = self._replaceable()
        return result

    @contextmanager
    def _watching(self) -> Iterator[None]:
        def before_forward(module: nn.Module, args: Any) -> None:
            hooks = hooks_of(module)
            if hooks is not None:
                self._hooks[hooks] = None

        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            self._optimizers[optimizer] = None

        handles = (
            register_module_forward_pre_hook(before_forward),
            register_optimizer_step_pre_hook(before_step),
        )
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _make_capturable(self, optimizer: Optimizer) -> None:
        """Keep learning rates and counts of steps on the device."""
        rates = self._rates.setdefault(optimizer, [])
        for index, group in enumerate(optimizer.param_groups):
            if "capturable" in group:
                group["capturable"] = True
            if index == len(rates):
                rate = torch.as_tensor(group["lr"], dtype=torch.float32, device="cuda")
                rates.append(rate.clone())
        self._follow_rates()
        for state in optimizer.state.values():
            count = state.get("step") if isinstance(state, dict) else None
            if isinstance(count, torch.Tensor) and not count.is_cuda:
                state["step"] = count.to("cuda", torch.float32)

    def _follow_rates(self) -> None:
        """Take over learning rates that were assigned since."""
        for optimizer, rates in self._rates.items():
            for group, rate in zip(optimizer.param_groups, rates, strict=False):
                if group["lr"] is not rate:
                    rate.fill_(group["lr"])
                    group["lr"] = rate

    # Capture

    @property
    def _schedulers(self) -> list[Scheduler]:
        found = (hooks.scheduler for hooks in self._hooks)
        return list(dict.fromkeys(each for each in found if each is not None))

    def _replaceable(self) -> list[Any]:
        """What a graph has fixed and a user may replace: memory, what is trained, options."""
        units = [unit for scheduler in self._schedulers for unit in scheduler.units]
        found: list[Any] = [unit.shard_buffers for unit in units]
        found += [param.is_trainable for unit in units for param in unit.params]
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                found += [value for name, value in group.items() if name not in ("params", "lr")]
                for param in group["params"][:1]:
                    found += optimizer.state.get(param, {}).values()
        return found

    def _is_current(self) -> bool:
        """Whether what the last step used is still there: a graph must not make optimizer state."""
        if not self._graphs:
            return True
        now = self._replaceable()
        return len(now) == len(self._used) and all(map(operator.is_, now, self._used))

    def _capture(
        self, entry: _Graph, tensors: list[torch.Tensor], args: Any, kwargs: Any
    ) -> Exception | None:
        """Make the graph of a step without running it; return the error if that failed."""
        for scheduler in self._schedulers:
            for unit in scheduler.units:
                if not unit.store.is_on_device:
                    return UnsupportedError(f"the parameters of {unit.name} on the host")
            if any(member.turnstile.defers for member in scheduler.members):
                return UnsupportedError("uneven units, which the host learns of in each step")
        entry.inputs = [torch.empty_like(tensor, device="cuda") for tensor in tensors]
        static = iter(entry.inputs)
        given, given_by_name = map_tensors(lambda _: next(static), (list(args), dict(kwargs)))
        graph, failure = torch.cuda.CUDAGraph(), None
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        random_state = generator.clone_state()
        for scheduler in self._schedulers:
            scheduler.begin_capture()
        try:
            how = {"pool": self._pool, "stream": self._stream}
            with seam.silenced(), torch.cuda.graph(graph, capture_error_mode="thread_local", **how):
                try:
                    entry.output = self._step(*given, **given_by_name)
                except Exception as error:
                    failure = error  # the capture has to be ended first
            entry.graph = graph if failure is None else None
        except RuntimeError as error:
            failure = failure or error
        finally:  # also for an interrupt
            has_failed = entry.graph is None
            for scheduler in self._schedulers:
                scheduler.end_capture(has_failed=has_failed)
            if has_failed:  # the generator is in a state that only captures can use
                generator.graphsafe_set_state(random_state)
                self._graphs.clear()  # they would go on with the other state
                self._pool = torch.cuda.graph_pool_handle()  # the next capture cannot use that one
        if failure is None:
            self._used = self._replaceable()
        return failure

    def _replay(self, entry: _Graph, tensors: list[torch.Tensor]) -> R:
        assert entry.graph is not None
        guard.check()
        self._follow_rates()
        for static, tensor in zip(entry.inputs, tensors, strict=True):
            static.copy_(tensor, non_blocking=True)
        entry.graph.replay()
        for scheduler in self._schedulers:
            scheduler.end_replay()
        result: R = map_tensors(lambda tensor: tensor.detach().clone(), entry.output)
        return result

    def _refuse(self, problem: str, error: Exception | None, args: Any, kwargs: Any) -> R:
        if not self._fallback:
            raise UnsupportedError(
                f"capture: {problem}; change that, or pass fallback=True for eager steps."
            ) from error
        warnings.warn(f"capture: {problem}; steps are eager from now on.", stacklevel=3)
        self._is_eager = True
        self._graphs.clear()
        return self._step(*args, **kwargs)


def _described(error: Exception) -> str:
    """What an error says, and the line of the user's program that raised it."""
    said = repr((str(error).strip().splitlines() or [type(error).__name__])[0])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not any(package in Path(frame.filename).parents for package in _PACKAGES):
            return f"{said} at {frame.filename}:{frame.lineno} ({frame.line})"
    return said

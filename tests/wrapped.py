"""Models, both doors to the wrapper, and the comparison of what they train.

Every comparison has two judges: the unsharded model that sees every rank's batches and averages
their gradients, and torch's own `FullyShardedDataParallel`, which sees this rank's.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from fullshard.runtime.names import clean_name

WIDTH = 6


class Door:
    """One implementation of the wrapper: a package laid out like `torch.distributed.fsdp`.

    Called with a module, it wraps it. Options are those of the constructor, with enums given by
    name, dataclasses as their fields, and a set of classes as a `ModuleWrapPolicy`.
    """

    def __init__(self, package: str) -> None:
        self.api = importlib.import_module(f"{package}.api")
        self.wrap = importlib.import_module(f"{package}.wrap")
        self.FSDP = importlib.import_module(package).FullyShardedDataParallel

    def __call__(self, module: nn.Module, **options: Any) -> Any:
        return self.FSDP(module, **self.options(options))

    def options(self, options: dict[str, Any]) -> dict[str, Any]:
        api = self.api
        of_name: dict[str, Callable[[Any], Any]] = {
            "sharding_strategy": lambda value: api.ShardingStrategy[value],
            "backward_prefetch": lambda value: value and api.BackwardPrefetch[value],
            "mixed_precision": lambda value: value and api.MixedPrecision(**value),
            "cpu_offload": lambda value: api.CPUOffload(offload_params=value),
            "auto_wrap_policy": lambda value: (
                self.wrap.ModuleWrapPolicy(value) if isinstance(value, set) else value
            ),
        }
        return {
            name: of_name[name](value) if name in of_name else value
            for name, value in options.items()
        }


class TorchDoor(Door):
    """Torch's class on the CPU: it wants to be told the device, and cannot offload to itself."""

    def __call__(self, module: nn.Module, **options: Any) -> Any:
        options.pop("cpu_offload", None)
        options.setdefault("device_id", torch.device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its advice is for others
            return super().__call__(module, **options)


TORCH = TorchDoor("torch.distributed.fsdp")
OURS = Door("fullshard")
Shard = Callable[[Door, Any], Any]
"""`shard(door, model)` wraps the model, or parts of it, and returns what is to be called."""


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 1)
        self.down = nn.Linear(2 * width + 1, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks and a head, a parameter and a buffer of its own; no size is even."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3))
        self.register_buffer("shift", torch.linspace(-0.3, 0.3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale + self.shift


def flat(door: Door, model: Net, **options: Any) -> Any:
    return door(model, **options)


def by_policy(door: Door, model: Net, **options: Any) -> Any:
    return door(model, auto_wrap_policy={Block}, **options)


def by_hand(door: Door, model: Net, **options: Any) -> Any:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = door(block, **options)
    model.head = door(model.head, **options)
    return door(model, **options)


WRAPPINGS: dict[str, Callable[..., Any]] = {"flat": flat, "policy": by_policy, "hand": by_hand}


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def loss_of(output: Any) -> Tensor:
    leaves = output if isinstance(output, tuple) else (output,)
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def each_backward(model: Any, batches: list[Any], scale: float) -> Tensor:
    total = torch.zeros(())
    for batch in batches:
        loss = loss_of(model(batch))
        (loss * scale).backward()
        total += loss.detach()
    return total


def sgd(model: nn.Module) -> Optimizer:
    """Linear in the gradients, so it does not blow up rounding errors."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How the models of a comparison are trained.

    `step(model, batches, scale)` runs forward and backward of its micro batches, their losses
    multiplied by `scale`, and returns the sum of the losses. The unsharded model is given every
    rank's batches, one rank at a time.
    """

    make_batch: Callable[[torch.Generator], Any] = make_batch
    step: Callable[[Any, list[Any], float], Tensor] = each_backward
    optimizer: Callable[[Any], Optimizer] = sgd
    num_steps: int = 3
    num_micro_batches: int = 1
    set_to_none: bool = True

    def batches(self, step: int, rank: int) -> list[Any]:
        seeds = range(1000 * step + 10 * rank, 1000 * step + 10 * rank + self.num_micro_batches)
        return [self.make_batch(torch.Generator().manual_seed(seed)) for seed in seeds]


class Closeness(NamedTuple):
    rtol: float
    atol: float

    def check(self, actual: Tensor, expected: Tensor, what: str) -> None:
        torch.testing.assert_close(
            actual, expected, rtol=self.rtol, atol=self.atol, msg=lambda m: f"{what}: {m}"
        )


EQUAL = Closeness(1e-5, 1e-6)
ROUNDED = Closeness(5e-2, 2e-2)
"""For a model that computes in 16 bits, next to one that computes in 32."""


@dataclass(slots=True)
class Learner:
    """A model in training. `door` made it; None is the unsharded one."""

    model: Any
    optimizer: Optimizer
    door: Door | None

    def learn(self, lesson: Lesson, step: int) -> float:
        """Forward and backward; the loss on this rank's batches."""
        ranks = [dist.get_rank()] if self.door else list(range(dist.get_world_size()))
        losses = {}
        for rank in ranks:
            torch.manual_seed(1000 * step + rank)
            loss = lesson.step(self.model, lesson.batches(step, rank), 1 / len(ranks))
            losses[rank] = loss.item()
        return losses[dist.get_rank()]

    def full_parameters(self) -> dict[str, Tensor]:
        with self._summoned():
            return {clean_name(n): p.detach().clone() for n, p in self.model.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor] | None:
        """Zeros say as much as no gradient does; None if there are only flat parameters'."""
        if any("_flat_param" in name for name, _ in self.model.named_parameters()):
            return None
        with self._summoned(with_grads=True):
            return {
                clean_name(n): (p.grad if p.grad is not None else torch.zeros_like(p)).clone()
                for n, p in self.model.named_parameters()
                if p.requires_grad
            }

    def buffers(self) -> dict[str, Tensor]:
        return {clean_name(n): b.clone() for n, b in self.model.named_buffers()}

    def _summoned(self, **options: Any) -> contextlib.AbstractContextManager[None]:
        if self.door is None:
            return contextlib.nullcontext()
        return self.door.FSDP.summon_full_params(self.model, writeback=False, **options)


def start(
    build: Callable[[], nn.Module], shard: Shard | None, door: Door | None, lesson: Lesson
) -> Learner:
    torch.manual_seed(0)
    model = build()
    if shard is not None and door is not None:
        model = shard(door, model)
    return Learner(model, lesson.optimizer(model), door)


def assert_same_values(
    actual: dict[str, Tensor], expected: dict[str, Tensor], near: Closeness, when: str
) -> None:
    assert sorted(actual) == sorted(expected), f"{when}: {list(actual)} against {list(expected)}"
    for name, value in expected.items():
        near.check(actual[name], value, f"{when}: {name!r}")


def assert_trains_alike(
    build: Callable[[], nn.Module],
    shard: Shard,
    lesson: Lesson | None = None,
    *,
    torch_shard: Shard | str | None = "same",
    near: Closeness = EQUAL,
    near_torch: Closeness = EQUAL,
) -> Learner:
    """Train `build()` wrapped, unsharded, and wrapped by torch's class; compare them.

    `torch_shard` is how torch's class wraps it where that differs, None where it cannot. Losses
    of every step, and its full gradients where the original parameters have them, must agree
    with both judges, and so must the full parameters at the end. Buffers are compared with
    torch's only: those of the unsharded model have seen every rank's batches.
    """
    lesson = lesson or Lesson()
    ours = start(build, shard, OURS, lesson)
    learners = [ours, start(build, None, None, lesson)]
    judges = [(near, "the unsharded model"), (near_torch, "torch's class")]
    if torch_shard is None:
        judges.pop()
    else:
        chosen = shard if isinstance(torch_shard, str) else torch_shard
        learners.append(start(build, chosen, TORCH, lesson))
    for step in range(lesson.num_steps):
        losses = [learner.learn(lesson, step) for learner in learners]
        gradients = [learner.full_gradients() for learner in learners]
        for index, (near_it, who) in enumerate(judges, start=1):
            when = f"step {step}, against {who}"
            near_it.check(torch.tensor(losses[0]), torch.tensor(losses[index]), f"{when}: loss")
            if gradients[0] is not None and gradients[index] is not None:
                assert_same_values(gradients[0], gradients[index], near_it, f"{when}: gradient of")
        for learner in learners:
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=lesson.set_to_none)
    parameters = [learner.full_parameters() for learner in learners]
    for index, (near_it, who) in enumerate(judges, start=1):
        assert_same_values(parameters[0], parameters[index], near_it, f"trained, against {who}")
    if torch_shard is not None:
        assert_same_values(ours.buffers(), learners[2].buffers(), near_torch, "buffer")
    return ours


def pairs_covered(factors: dict[str, tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """Few combinations in which every value of a factor meets every value of every other."""
    names = list(factors)
    left = {
        (a, x, b, y)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        for x in range(len(factors[a]))
        for y in range(len(factors[b]))
    }
    while left:
        first = min(left)
        row = {first[0]: first[1], first[2]: first[3]}
        for name in names:
            if name not in row:
                row[name] = max(
                    range(len(factors[name])),
                    key=lambda value: (_num_met(left, {**row, name: value}, name), -value),
                )
        left -= {pair for pair in left if row[pair[0]] == pair[1] and row[pair[2]] == pair[3]}
        yield {name: factors[name][row[name]] for name in names}


def _num_met(left: set[tuple[str, int, str, int]], row: dict[str, int], name: str) -> int:
    return sum(
        name in (a, b) and row.get(a) == x and row.get(b) == y  # a pair that this value adds
        for a, x, b, y in left
    )

"""Both APIs, ours and torch's, small models, and the comparison of what they train.

Every comparison has two oracles: the unsharded model, which sees every rank's batches and averages
their gradients, and the same API of torch, which sees this rank's.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import clean_name
from fullshard.testing import Rank
from fullshard.unit.state import Absent, Leaving
from fullshard.unit.unit import Unit

WIDTH = 6


class Package:
    """`fullshard` or `torch.distributed.fsdp`, whose modules have the same names.

    Called with a module, it wraps it. Options are those of the wrapper's constructor, with enums
    given by name, dataclasses as their fields, and a set of classes as a `ModuleWrapPolicy`.
    """

    def __init__(self, name: str) -> None:
        self.package = importlib.import_module(name)
        self.api = importlib.import_module(f"{name}.api")
        self.wrap = importlib.import_module(f"{name}.wrap")
        self.FSDP = self.package.FullyShardedDataParallel

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


class TorchPackage(Package):
    """Torch's wrapper on the CPU: it wants to be told the device, and cannot offload to itself."""

    def __call__(self, module: nn.Module, **options: Any) -> Any:
        options.pop("cpu_offload", None)
        options.setdefault("device_id", torch.device("cpu"))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its advice is for others
            return super().__call__(module, **options)


TORCH = TorchPackage("torch.distributed.fsdp")
OURS = Package("fullshard")
APIS = ("fully_shard", "flat", "orig")
"""The APIs: `fully_shard`, and the wrapper without and with `use_orig_params`."""
Shard = Callable[[Package, Any], Any]
"""`shard(package, model)` shards the model, or parts of it, and returns what is to be called."""
ShardUnit = Callable[..., Any]
"""Makes one module a unit and returns it, or its wrapper."""


@functools.cache
def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def unit_sharder(
    package: Package,
    api: str,
    sharding_strategy: str = "FULL_SHARD",
    *,
    mesh: DeviceMesh | None = None,
    mixed_precision: dict[str, torch.dtype] | None = None,
    cpu_offload: bool = False,
    **wrapper_options: Any,
) -> ShardUnit:
    """How an API makes a module a unit; `wrapper_options` are for the wrapper only."""
    if api != "fully_shard":
        return functools.partial(
            package,
            use_orig_params=api == "orig",
            sharding_strategy=sharding_strategy,
            device_mesh=mesh,
            mixed_precision=mixed_precision,
            cpu_offload=cpu_offload,
            **wrapper_options,
        )
    options: dict[str, Any] = {"mesh": mesh or world_mesh()}
    if mixed_precision:
        options["mp_policy"] = package.package.MixedPrecisionPolicy(**mixed_precision)
    if cpu_offload:
        options["offload_policy"] = package.package.CPUOffloadPolicy(pin_memory=False)
    keeps = sharding_strategy in ("SHARD_GRAD_OP", "_HYBRID_SHARD_ZERO2")
    return functools.partial(
        package.package.fully_shard, reshard_after_forward=not keeps, **options
    )


def shard_parts(shard_unit: ShardUnit, model: nn.Module, *names: str) -> Any:
    """Make the named submodules units, in this order, and then the model."""
    for name in names:
        parent, _, own_name = name.rpartition(".")
        setattr(model.get_submodule(parent), own_name, shard_unit(model.get_submodule(name)))
    return shard_unit(model)


def shard_blocks(shard_unit: ShardUnit, model: nn.Module) -> Any:
    names = [name for name, module in model.named_modules() if isinstance(module, Block)]
    return shard_parts(shard_unit, model, *names)


class Model(nn.Module):
    """A module of these parts that computes `run(self, *args)`."""

    def __init__(self, run: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self, *args, **kwargs)


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH, **options)


def vector() -> nn.Parameter:
    return nn.Parameter(torch.ones(WIDTH))


def several(build: Callable[[], nn.Module], number: int) -> nn.ModuleList:
    return nn.ModuleList(build() for _ in range(number))


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


class Branches(nn.Module):
    """Uses one of two branches, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, 5)
        self.right = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor, use: str) -> Tensor:
        return sum(getattr(self, name)(x).square() for name in use.split())


def flat(package: Package, model: Net, **options: Any) -> Any:
    return package(model, **options)


def by_policy(package: Package, model: Net, **options: Any) -> Any:
    return package(model, auto_wrap_policy={Block}, **options)


def by_hand(package: Package, model: Net, **options: Any) -> Any:
    return shard_parts(functools.partial(package, **options), model, "blocks.0", "blocks.1", "head")


def make_batch(generator: torch.Generator) -> Tensor:
    return torch.randn(4, WIDTH, generator=generator)


def batch_of(step: int, rank: int) -> Tensor:
    return make_batch(torch.Generator().manual_seed(10 * step + rank))


def layers() -> nn.Sequential:
    sizes = (WIDTH, 9, 5, 2)
    linear = [nn.Linear(*each) for each in itertools.pairwise(sizes)]
    return nn.Sequential(linear[0], nn.Tanh(), linear[1], nn.Tanh(), linear[2])


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


@contextlib.contextmanager
def unsynced(model: Any) -> Iterator[None]:
    """`no_sync`; torch's `fully_shard` has only the setter, and an unsharded model has neither."""
    if hasattr(model, "no_sync"):
        with model.no_sync():
            yield
        return
    set_sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
    set_sync(False)
    yield
    set_sync(True)


def last_synced(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Only the last micro batch is reduced."""
    with unsynced(model):
        loss = each_backward(model, batches[:-1], scale)
    return loss + each_backward(model, batches[-1:], scale)


def sgd(model: nn.Module) -> Optimizer:
    """Linear in the gradients, so it does not amplify rounding errors."""
    return SGD(model.parameters(), lr=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Lesson:
    """How the models of a comparison are trained.

    `step(model, batches, scale)` runs forward and backward of its micro batches, their losses
    multiplied by `scale`, and returns what is to be compared, such as the sum of the losses. The
    unsharded model is given every rank's batches, one rank at a time.
    """

    make_batch: Callable[[torch.Generator], Any] = make_batch
    step: Callable[[Any, list[Any], float], Any] = each_backward
    optimizer: Callable[[Any], Optimizer] = sgd
    num_steps: int = 2  # the second uses what the first has recorded and allocated
    num_micro_batches: int = 1
    set_to_none: bool = True

    def batches(self, step: int, rank: int) -> list[Any]:
        seeds = range(1000 * step + 10 * rank, 1000 * step + 10 * rank + self.num_micro_batches)
        return [self.make_batch(torch.Generator().manual_seed(seed)) for seed in seeds]


def are_close(actual: Any, expected: Any, rtol: float = 1e-7, atol: float = 1e-7) -> bool:
    """Takes a tenth of the time of `assert_close`, which says what differs."""
    return (
        type(actual) is type(expected) is Tensor
        and (actual.shape, actual.dtype) == (expected.shape, expected.dtype)
        and torch.allclose(actual, expected, rtol=rtol, atol=atol)
    )


class Closeness(NamedTuple):
    rtol: float
    atol: float

    def check(self, actual: Any, expected: Any, what: str) -> None:
        if are_close(actual, expected, self.rtol, self.atol):
            return
        torch.testing.assert_close(
            actual, expected, rtol=self.rtol, atol=self.atol, msg=lambda m: f"{what}: {m}"
        )


EQUAL = Closeness(1e-5, 1e-6)
ROUNDED = Closeness(5e-2, 2e-2)
"""Tolerances for a model that computes in 16 bits, next to one that computes in 32."""


@dataclass(slots=True)
class Learner:
    """A model in training. `package` made it; None is the unsharded one."""

    model: Any
    optimizer: Optimizer
    package: Package | None

    @property
    def is_wrapped(self) -> bool:
        package = self.package
        return package is not None and any(
            isinstance(m, package.FSDP) for m in self.model.modules()
        )

    def learn(self, lesson: Lesson, step: int) -> Any:
        """Forward and backward; the results on this rank's batches."""
        ranks = [dist.get_rank()] if self.package else list(range(dist.get_world_size()))
        results = {}
        for rank in ranks:
            torch.manual_seed(1000 * step + rank)
            results[rank] = lesson.step(self.model, lesson.batches(step, rank), 1 / len(ranks))
        return results[dist.get_rank()]

    def full_parameters(self) -> dict[str, Tensor]:
        with self._summoned():
            return {clean_name(n): full(p.detach()) for n, p in self.model.named_parameters()}

    def full_gradients(self) -> dict[str, Tensor | None] | None:
        """Those of a wrapper are zeros instead of None; None if there are only flat parameters'."""
        if any("_flat_param" in name for name, _ in self.model.named_parameters()):
            return None
        with self._summoned(with_grads=True):
            return {
                clean_name(n): (
                    full(p.grad)
                    if p.grad is not None
                    else (torch.zeros_like(p) if self.is_wrapped else None)
                )
                for n, p in self.model.named_parameters()
                if p.requires_grad
            }

    def buffers(self) -> dict[str, Tensor]:
        return {clean_name(n): b.clone() for n, b in self.model.named_buffers()}

    def _summoned(self, **options: Any) -> contextlib.AbstractContextManager[None]:
        if self.package is None or not self.is_wrapped:
            return contextlib.nullcontext()
        return self.package.FSDP.summon_full_params(self.model, writeback=False, **options)


def full(tensor: Tensor) -> Tensor:
    """All of a tensor, in memory of its own; collective for a `DTensor`."""
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor.clone()


def assert_same_step(
    rank: Rank, model: nn.Module, reference: nn.Module, batch: Callable[[int], Tensor]
) -> None:
    """One SGD step of each: the model on this rank's batch, the reference on those of all."""
    model(batch(rank.rank)).square().mean().backward()
    for other in range(rank.size):
        (reference(batch(other)).square().mean() / rank.size).backward()
    found = dict(model.named_parameters())
    for name, param in reference.named_parameters():
        grad = found[name].grad
        assert (grad is None) == (param.grad is None), name
        if grad is not None:
            torch.testing.assert_close(full(grad), param.grad, msg=lambda m, n=name: f"{n}: {m}")
            with torch.no_grad():
                param.sub_(param.grad, alpha=0.1)
                found[name].sub_(grad, alpha=0.1)
    model.zero_grad()
    reference.zero_grad()


def start(
    build: Callable[[], nn.Module], shard: Shard | None, package: Package | None, lesson: Lesson
) -> Learner:
    torch.manual_seed(0)
    model = build()
    if shard is not None and package is not None:
        model = shard(package, model)
    return Learner(model, lesson.optimizer(model), package)


def units_of(model: nn.Module) -> list[Unit]:
    hooks_list = dict.fromkeys(r for m in model.modules() if (r := hooks_of(m)) is not None)
    return [unit for hooks in hooks_list for unit in hooks.units]


def held_bytes(unit: Unit) -> int:
    """Memory for full parameters that a unit holds."""
    gatherer = unit.arrangement.all_gather
    if gatherer is None:
        return 0
    return gatherer._full_buffer._storage.size() + gatherer._staging._storage.size()


def assert_all_sharded(model: nn.Module) -> None:
    """After backward every parameter is a shard, and no memory is held for full ones."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
    for unit in units_of(model):
        assert isinstance(unit.state, (Absent, Leaving)), unit
        assert held_bytes(unit) == 0, unit


def assert_same_values(
    actual: dict[str, Any], expected: dict[str, Any], near: Closeness, when: str
) -> None:
    assert sorted(actual) == sorted(expected), f"{when}: {list(actual)} against {list(expected)}"
    for name, value in expected.items():
        found = actual[name]
        if value is None and found is not None:
            value = torch.zeros_like(found)  # a wrapper's; `fully_shard` is checked before
        near.check(found, value, f"{when}: {name!r}")


def assert_trains_alike(
    build: Callable[[], nn.Module],
    shard: Shard,
    lesson: Lesson | None = None,
    *,
    torch_shard: Shard | str | None = "same",
    near: Closeness = EQUAL,
    near_torch: Closeness = EQUAL,
    cell: str = "",
    all_sharded: bool = True,
) -> Learner:
    """Train `build()` sharded, unsharded, and sharded by torch; compare them.

    `torch_shard` is how torch shards it where that differs, None where it cannot. Results of every
    step, and its full gradients where the original parameters have them, must agree with both
    oracles, and so must the full parameters at the end. Buffers are compared with torch's only:
    those of the unsharded model have seen every rank's batches. Messages begin with `cell`.
    """
    lesson = lesson or Lesson()
    ours = start(build, shard, OURS, lesson)
    learners = [ours, start(build, None, None, lesson)]
    oracles = [(near, f"{cell}: the unsharded model"), (near_torch, f"{cell}: torch")]
    if torch_shard is None:
        oracles.pop()
    else:
        chosen = shard if isinstance(torch_shard, str) else torch_shard
        learners.append(start(build, chosen, TORCH, lesson))
    for step in range(lesson.num_steps):
        results = [learner.learn(lesson, step) for learner in learners]
        gradients = [learner.full_gradients() for learner in learners]
        for index, (near_it, who) in enumerate(oracles, start=1):
            found, expected = gradients[0], gradients[index]
            near_it.check(results[0], results[index], f"{who}: results of step {step}")
            if found is None or expected is None:
                continue
            if not ours.is_wrapped:
                missing = [[n for n, g in each.items() if g is None] for each in (found, expected)]
                assert missing[0] == missing[1], f"{who}: step {step}: without a gradient"
            assert_same_values(found, expected, near_it, f"{who}: step {step}: gradient of")
        if not ours.is_wrapped and all_sharded:
            assert_all_sharded(ours.model)
        for learner in learners:
            learner.optimizer.step()
            learner.optimizer.zero_grad(set_to_none=lesson.set_to_none)
    parameters = [learner.full_parameters() for learner in learners]
    for index, (near_it, who) in enumerate(oracles, start=1):
        assert_same_values(parameters[0], parameters[index], near_it, f"{who}: trained")
    if torch_shard is not None:
        assert_same_values(ours.buffers(), learners[2].buffers(), near_torch, f"{cell}: buffer")
    return ours


# Strategies under which a way to run a model is compared: with torch's under the first of them.
STRATEGIES_OF = {
    "fully_shard": ("FULL_SHARD", "SHARD_GRAD_OP"),
    "flat": ("FULL_SHARD", "SHARD_GRAD_OP"),
    "orig": ("FULL_SHARD", "NO_SHARD"),
}


def assert_api_trains_alike(
    api: str,
    build: Callable[[], nn.Module],
    shard: Callable[[ShardUnit, Any], Any] = shard_blocks,
    lesson: Lesson | None = None,
    *,
    torch_too: bool = True,
    **options: Any,
) -> Learner:
    """`assert_trains_alike` under the strategies of an API; the learner of the last of them."""
    for strategy in STRATEGIES_OF[api]:
        learner = assert_trains_alike(
            build,
            lambda package, model, s=strategy: shard(unit_sharder(package, api, s), model),
            lesson,
            torch_shard="same" if torch_too else None,
            cell=f"{api}, {strategy}",
            **options,
        )
        torch_too = False
    return learner


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

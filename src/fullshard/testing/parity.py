"""Trains a model twice, sharded and unsharded, and compares the two after every step."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from fullshard._torch import tree_leaves, tree_map_only
from fullshard.comm.placement import full_tensor
from fullshard.errors import TopologyError

# Wrappers add these to the names of parameters; the reference has none of them.
WRAPPER_NAMES = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


def mean_square(model: nn.Module, batch: Any) -> Tensor:
    """The default loss: the model's own where it returns a 0-dim tensor, else a mean of squares.

    A tuple is the model's positional arguments, a dict its keyword arguments.
    """
    if isinstance(batch, tuple):
        output = model(*batch)
    elif isinstance(batch, dict):
        output = model(**batch)
    else:
        output = model(batch)
    if isinstance(output, Tensor) and output.ndim == 0:
        return output
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return torch.stack([leaf.float().square().mean() for leaf in leaves]).sum()


def sgd_with_momentum(parameters: Iterable[Tensor]) -> Optimizer:
    """The default optimizer: linear in the gradients, so it does not blow up rounding errors."""
    return SGD(parameters, lr=0.05, momentum=0.9)


@dataclass(frozen=True, slots=True)
class Training:
    """How the models of a comparison are trained.

    `make_batch` gets a generator seeded for one step, micro-batch and rank, and returns what
    `loss` takes; tensors are moved to the model's device. `before_forward(model, micro_batch)`
    is called with the sharded model (and the oracle's) before each forward, for example to switch
    gradient sync. Every rank of `data_mesh` (default: all ranks) gets a batch of its own.
    """

    make_batch: Callable[[torch.Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor] = mean_square
    optimizer: Callable[[Iterable[Tensor]], Optimizer] = sgd_with_momentum
    steps: int = 3
    micro_batches: int = 1
    before_forward: Callable[[nn.Module, int], None] | None = None
    data_mesh: DeviceMesh | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Trained:
    """What a comparison has trained, for further checks."""

    sharded: nn.Module
    reference: nn.Module
    optimizer: Optimizer
    reference_optimizer: Optimizer
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Learner:
    """A model with its optimizer; `replicas` are the data ranks whose batches it sees."""

    model: nn.Module
    optimizer: Optimizer
    device: torch.device
    replicas: tuple[int, ...]
    before_forward: Callable[[nn.Module, int], None] | None


def assert_same_training(
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], object],
    training: Training,
    *,
    oracle: Callable[[nn.Module], object] | None = None,
    rtol: float = 1e-5,
    atol: float = 1e-6,
) -> Trained:
    """Train `build()` with and without sharding, and compare after every step; collective.

    The sharded model sees this rank's batches. The reference sees every rank's, and averages
    their gradients. Losses, full gradients and full parameters must agree; gradients that are
    None on both sides agree. With `oracle`, another way to shard, the reference is `build()`
    sharded by it, sees this rank's batches only, and local shards must agree.

    `shard` and `oracle` change their model in place or return another one. Construction and every
    forward are seeded alike for both models, so dropout agrees too. The AssertionError names the
    first step and parameter that differ, and by how much.
    """
    data_rank, num_data_ranks = _place_in(training.data_mesh)
    everyone = tuple(range(num_data_ranks))
    reference = _learner(build, oracle, training, (data_rank,) if oracle is not None else everyone)
    sharded = _learner(build, shard, training, (data_rank,))
    view = _full if oracle is None else _local

    def check(actual: Tensor, expected: Tensor, what: str) -> None:
        def message(found: str) -> str:
            return f"{what} differs from the reference. {found}"

        # Takes a tenth of the time of `assert_close`, which only describes what differs.
        if (actual.shape, actual.dtype) == (expected.shape, expected.dtype) and torch.allclose(
            actual, expected, rtol=rtol, atol=atol
        ):
            return
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=atol, msg=message)

    def compare(when: str, *, gradients: bool) -> None:
        actual = dict(_values(sharded.model, view, gradients))
        expected = dict(_values(reference.model, view, gradients))
        _compare(actual, expected, check, when, "gradient of" if gradients else "parameter")

    compare("before step 0", gradients=False)
    losses = []
    for step in range(training.steps):
        expected = _accumulate(reference, training, step)[data_rank]
        actual = _accumulate(sharded, training, step)[data_rank]
        losses.append(actual.item())
        compare(f"step {step}", gradients=True)
        check(actual.float(), expected.float(), f"step {step}: loss")
        for learner in (sharded, reference):
            learner.optimizer.step()
        compare(f"after step {step}", gradients=False)
        for learner in (sharded, reference):
            learner.optimizer.zero_grad()
    return Trained(
        sharded.model, reference.model, sharded.optimizer, reference.optimizer, tuple(losses)
    )


def _place_in(mesh: DeviceMesh | None) -> tuple[int, int]:
    """This rank's index among the ranks that get batches of their own, and their number."""
    if mesh is None:
        return dist.get_rank(), dist.get_world_size()
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise TopologyError(
            f"Training: data_mesh {mesh} does not contain rank {dist.get_rank()}; it must "
            "contain every rank that trains."
        )
    place = 0
    for index, axis_size in zip(coordinate, mesh.shape, strict=True):
        place = place * axis_size + index
    return place, mesh.size()


def _learner(
    build: Callable[[], nn.Module],
    shard: Callable[[nn.Module], object] | None,
    training: Training,
    replicas: tuple[int, ...],
) -> _Learner:
    torch.manual_seed(training.seed)
    model = build()
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    if shard is not None:
        result = shard(model)
        model = result if isinstance(result, nn.Module) else model
    before_forward = None if shard is None else training.before_forward
    return _Learner(model, training.optimizer(model.parameters()), device, replicas, before_forward)


def _accumulate(learner: _Learner, training: Training, step: int) -> dict[int, Tensor]:
    """Run forward and backward of every micro-batch; return the summed loss of each replica."""
    losses: dict[int, Tensor] = {}
    for micro_batch in range(training.micro_batches):
        for replica in learner.replicas:
            seed = ((training.seed * 1000 + step) * 100 + micro_batch) * 10_000 + replica
            batch = training.make_batch(torch.Generator().manual_seed(seed))
            batch = tree_map_only(Tensor, lambda leaf: leaf.to(learner.device), batch)
            if learner.before_forward is not None:
                learner.before_forward(learner.model, micro_batch)
            torch.manual_seed(seed)
            loss = training.loss(learner.model, batch)
            (loss / len(learner.replicas)).backward()
            losses[replica] = losses.get(replica, torch.zeros_like(loss)) + loss.detach()
    return losses


def _compare(
    actual: dict[str, Tensor | None],
    expected: dict[str, Tensor | None],
    check: Callable[[Tensor, Tensor, str], None],
    when: str,
    word: str,
) -> None:
    if actual.keys() != expected.keys():
        raise AssertionError(
            f"{when}: both models must have the same parameters; only the sharded one has "
            f"{sorted(actual.keys() - expected.keys())}, only the reference "
            f"{sorted(expected.keys() - actual.keys())}."
        )
    if expected and all(value is None for value in expected.values()):
        raise AssertionError(f"{when}: no parameter took a gradient; nothing would be compared.")
    for name, value in expected.items():
        found, what = actual[name], f"{when}: {word} {name!r}"
        if value is None or found is None:
            if value is not found:
                raise AssertionError(
                    f"{what} is {_brief(found)}, in the reference {_brief(value)}."
                )
        else:
            check(found, value, what)


def _values(
    model: nn.Module, view: Callable[[Tensor], Tensor], gradients: bool
) -> Iterator[tuple[str, Tensor | None]]:
    for name, parameter in model.named_parameters():
        for wrapper_name in WRAPPER_NAMES:
            name = name.replace(wrapper_name, "")
        value = parameter.grad if gradients else parameter
        yield name, None if value is None else view(value.detach())


def _full(value: Tensor) -> Tensor:
    if not isinstance(value, DTensor):
        return value.cpu()
    # Offloaded shards are on the CPU, for which the mesh may have no backend.
    on_mesh: DTensor = value.to(value.device_mesh.device_type)  # type: ignore[assignment]
    return full_tensor(on_mesh).cpu()


def _local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).cpu()


def _brief(value: Tensor | None) -> str:
    return "None" if value is None else f"a tensor of shape {tuple(value.shape)}"

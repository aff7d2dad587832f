"""Every way to run a sharded model computes what the unsharded model computes.

The judge is the unsharded model that sees every rank's batch, and mostly also torch's own
`fully_shard`, which sees this rank's.
"""

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register_forward_method
from torch.distributed.tensor import DTensor

from fullshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fullshard.comm.placement import full_tensor
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.unit.unit import Sharded, Unit
from tests.counted import CountedGather, CountedReduce

WIDTH = 6
Door = Callable[..., Any]
Shard = Callable[[Door, Any], None]
Step = Callable[[Any, Tensor, float], Any]
"""`step(model, batch, scale)` runs forward and backward, its losses multiplied by `scale`."""


def batch_of(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, WIDTH, generator=generator)


def one_loss(model: Any, batch: Tensor, scale: float) -> Tensor:
    loss = model(batch).square().mean()
    (loss * scale).backward()
    return loss


def full(tensor: Tensor) -> Tensor:
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


def units_of(model: nn.Module) -> list[Unit]:
    hooks_list = dict.fromkeys(r for m in model.modules() if (r := hooks_of(m)) is not None)
    return [unit for hooks in hooks_list for unit in hooks.units]


def held_bytes(unit: Unit) -> int:
    gatherer = unit._all_gather
    if gatherer is None:
        return 0
    return gatherer._full_buffer._storage.size() + gatherer._staging._storage.size()


def assert_at_rest(model: nn.Module) -> None:
    """After backward everything is sharded and no memory is held."""
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
    for unit in units_of(model):
        assert isinstance(unit.state, Sharded), unit
        assert held_bytes(unit) == 0, unit


def assert_same_steps(
    rank: Rank,
    build: Callable[[], nn.Module],
    shard: Shard,
    step: Step = one_loss,
    *,
    steps: int = 3,
    torch_too: bool = True,
    at_rest: bool = True,
    lr: float = 0.1,
) -> nn.Module:
    """Train unsharded (all ranks' batches), with fullshard, and with torch's door; compare."""
    torch.manual_seed(0)
    reference = build()
    ours = copy.deepcopy(reference)
    models = {"fullshard": ours}
    shard(functools.partial(fully_shard, mesh=rank.mesh()), ours)
    if torch_too:
        theirs = copy.deepcopy(reference)
        shard(functools.partial(torch_fully_shard, mesh=rank.mesh()), theirs)
        models["torch"] = theirs
    optimizers = [
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
        for model in (reference, *models.values())
    ]
    for number in range(steps):
        expected: Any = None
        for replica in range(rank.size):
            torch.manual_seed(number)
            result = step(reference, batch_of(replica, number), 1 / rank.size)
            if replica == rank.rank:
                expected = result
        for name, model in models.items():
            torch.manual_seed(number)
            found = step(model, batch_of(rank.rank, number), 1.0)
            what = f"step {number}, {name}"
            torch.testing.assert_close(found, expected, msg=lambda m, w=what: f"{w}: result: {m}")
            compare(model, reference, what, gradients=True)
        if at_rest:
            assert_at_rest(ours)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for name, model in models.items():
            compare(model, reference, f"after step {number}, {name}", gradients=False)
    return ours


def compare(model: nn.Module, reference: nn.Module, what: str, *, gradients: bool) -> None:
    found = dict(model.named_parameters())
    some = False
    for name, expected in reference.named_parameters():
        value = found[name]
        if gradients:
            if expected.grad is None or value.grad is None:
                assert (expected.grad is None) == (value.grad is None), (
                    f"{what}: {name}: no gradient"
                )
                continue
            some = True
            expected, value = expected.grad, value.grad
        torch.testing.assert_close(
            full(value.detach()),
            expected.detach(),
            rtol=1e-4,
            atol=1e-6,
            msg=lambda m, name=name: f"{what}: {name}: {m}",
        )
    assert some or not gradients, f"{what}: no gradient at all"


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Stack(nn.Module):
    """A root with parameters of its own around its blocks."""

    def __init__(self, num_blocks: int = 3) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def shard_stack(door: Door, model: Stack) -> None:
    for block in model.blocks:
        door(block)
    door(model)


# Nesting and lists


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = Stack(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * self.scale) * self.scale


@on_ranks(1, 2)
def test_units_nested_three_deep_train_alike(rank: Rank) -> None:
    def shard(door: Door, model: Nested) -> None:
        shard_stack(door, model.inner)
        door(model)

    assert_same_steps(rank, Nested, shard)


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_reshard_after_forward_changes_nothing_but_memory(rank: Rank, reshard: bool) -> None:
    def shard(door: Door, model: Stack) -> None:
        shard_stack(functools.partial(door, reshard_after_forward=reshard), model)

    assert_same_steps(rank, Stack, shard)


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = Block()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.which = "both"

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.which == "left":
            return self.left(x)
        if self.which == "right":
            return self.right(x)
        return self.right(self.left(x))


def shard_heads_together(door: Door, model: TwoHeads) -> None:
    door(model.body)
    door([model.left, model.right])
    door(model)


@on_ranks(2)
def test_a_list_of_modules_is_one_unit(rank: Rank) -> None:
    ours = assert_same_steps(rank, TwoHeads, shard_heads_together)
    assert hooks_of(ours.left) is hooks_of(ours.right)
    assert len(hooks_of(ours.left).units[0].params) == 4


@on_ranks(2)
def test_a_list_of_modules_may_run_in_part(rank: Rank) -> None:
    turn = {"step": 0}

    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        model.which = ("left", "right", "both", "left")[turn["step"]]
        return one_loss(model, batch, scale)

    def counted(model: Any, batch: Tensor, scale: float) -> Tensor:
        loss = step(model, batch, scale)
        if isinstance(model, nn.Module) and hooks_of(model) is not None:
            turn["step"] += 1
        return loss

    assert_same_steps(rank, TwoHeads, shard_heads_together, counted, steps=4, torch_too=False)


class ChunkedHead(nn.Module):
    """Its forward ends with the norm; the loss calls the head, chunk by chunk."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def shard_chunked(door: Door, model: ChunkedHead) -> None:
    for block in model.blocks:
        door(block)
    door([model.norm, model.head])
    door(model)


def chunked_loss(model: Any, batch: Tensor, scale: float) -> Tensor:
    hidden = model(batch)
    loss = torch.stack([model.head(part).square().mean() for part in hidden.chunk(4)]).mean()
    (loss * scale).backward()
    return loss


@on_ranks(2)
def test_a_head_called_chunk_by_chunk_outside_the_roots_forward(rank: Rank) -> None:
    assert_same_steps(rank, ChunkedHead, shard_chunked, chunked_loss)


@on_ranks(2)
def test_a_head_whose_chunks_each_run_backward_at_once(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        hidden = model(batch)
        detached = hidden.detach().requires_grad_()
        losses = []
        for part in detached.chunk(2):
            loss = model.head(part).square().mean()
            (loss * scale).backward()
            losses.append(loss.detach())
        hidden.backward(detached.grad)
        return torch.stack(losses)

    assert_same_steps(rank, ChunkedHead, shard_chunked, step)


# Several runs


class Repeating(nn.Module):
    """Runs the blocks in an order in which some come twice."""

    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(max(order) + 1))
        self.last = nn.Linear(WIDTH, WIDTH)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return self.last(x)


@pytest.mark.parametrize("order", [(0, 0, 1), (0, 1, 0), (0, 1, 1, 0, 0, 2, 1)])
@on_ranks(2)
def test_a_unit_that_runs_several_times_in_one_forward(rank: Rank, order: tuple[int, ...]) -> None:
    assert_same_steps(rank, lambda: Repeating(order), shard_stack)


@on_ranks(2)
def test_several_forwards_before_one_backward(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        losses = [model(part).square().mean() for part in batch.chunk(3)]
        loss = torch.stack(losses).sum()
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, Stack, shard_stack, step)


@pytest.mark.parametrize("reverse", [False, True])
@on_ranks(2)
def test_two_forwards_then_their_two_backwards(rank: Rank, reverse: bool) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        losses = [model(part).square().mean() for part in batch.chunk(2)]
        for loss in reversed(losses) if reverse else losses:
            (loss * scale).backward()
        return losses

    assert_same_steps(rank, Stack, shard_stack, step)


@on_ranks(2)
def test_two_losses_of_one_forward_run_backward_one_after_another(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        output = model(batch)
        losses = [output.square().mean(), output.sigmoid().sum()]
        (losses[0] * scale).backward(retain_graph=True)
        (losses[1] * scale).backward()
        return losses

    assert_same_steps(rank, Stack, shard_stack, step)


@on_ranks(2)
def test_a_forward_without_a_backward_leaves_the_next_step_alone(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        dropped = model(batch * 2).sum().detach()
        kept = model(batch * 3)  # its graph lives on through the step
        loss = one_loss(model, batch, scale)
        return [dropped, kept.detach(), loss]

    assert_same_steps(rank, Stack, shard_stack, step)


@on_ranks(2)
def test_a_root_that_calls_itself_trains_alike(rank: Rank) -> None:
    def shard(door: Door, model: Recursive) -> None:
        door(model.block)
        door(model)

    assert_same_steps(rank, Recursive, shard, torch_too=False)


class Recursive(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        if depth:
            x = self(x, depth - 1)
        return self.block(x) * self.scale


# Without gradients


GRAD_FREE = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}


@pytest.mark.parametrize("mode", GRAD_FREE)
@on_ranks(2)
def test_forwards_without_gradients_come_first_and_between_steps(rank: Rank, mode: str) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        model.eval()
        with GRAD_FREE[mode]():
            before = model(batch)
        model.train()
        loss = one_loss(model, batch, scale)
        with GRAD_FREE[mode]():
            after = model(batch)
        return [before.clone(), loss, after.clone()]

    assert_same_steps(rank, Stack, shard_stack, step, at_rest=False, torch_too=False)


@on_ranks(2)
def test_units_made_whole_for_inference_can_be_trained(rank: Rank) -> None:
    """Resharding at the root too, so that training gathers into what inference made."""

    def shard(door: Door, model: Stack) -> None:
        shard_stack(functools.partial(door, reshard_after_forward=True), model)

    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        with torch.inference_mode():
            seen = model(batch)
            assert seen.is_inference()
        assert not any(p.is_inference() for p in model.parameters())
        return [seen.clone(), one_loss(model, batch, scale)]

    assert_same_steps(rank, Stack, shard, step, torch_too=False)


@on_ranks(2)
def test_an_inner_unit_that_saw_no_gradient_holds_no_memory_after_eval(rank: Rank) -> None:
    model = Stack()
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    for _ in range(2):
        with torch.no_grad():
            model(batch_of(0, 0))
        for block in model.blocks:
            assert isinstance(hooks_of(block).units[0].state, Sharded)
            assert held_bytes(hooks_of(block).units[0]) == 0


@on_ranks(2)
def test_frozen_units_and_frozen_inputs_train_the_rest(rank: Rank) -> None:
    def build() -> nn.Module:
        model = Stack()
        model.first.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return model

    assert_same_steps(rank, build, shard_stack)


# Other methods


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Block()
        self.decoder = Block()
        self.middle = nn.Parameter(torch.ones(WIDTH))

    def encode(self, x: Tensor, *, twice: bool = False) -> Tensor:
        x = self.encoder(x) * self.middle
        return self.encoder(x) if twice else x

    def decode(self, x: Tensor) -> Tensor:
        return self.decoder(x) * self.middle

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))


@on_ranks(2)
def test_methods_other_than_forward_can_be_registered(rank: Rank) -> None:
    def shard(door: Door, model: Autoencoder) -> None:
        ours = door.func is fully_shard
        register = register_fsdp_forward_method if ours else torch_register_forward_method
        door(model.encoder)
        door(model.decoder)
        door(model)
        register(model, "encode")
        register(model, "decode")

    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        code = model.encode(batch, twice=True)
        loss = (model.decode(code) - batch).square().mean()
        (loss * scale).backward()
        return [code.detach(), loss, one_loss(model, batch, scale)]

    assert_same_steps(rank, Autoencoder, shard, step)


@on_ranks(2)
def test_registering_a_method_of_an_unsharded_module_does_nothing(rank: Rank) -> None:
    model = Autoencoder()
    register_fsdp_forward_method(model, "encode")
    assert "encode" not in vars(model)


# What goes in and comes out


@dataclass
class Pair:
    left: Tensor
    right: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class FrozenPair:
    left: Tensor
    right: Tensor
    nothing: None = None


class NamedPair(NamedTuple):
    left: Tensor
    right: Tensor


Wrap = Callable[[Tensor, Tensor], Any]
Unwrap = Callable[[Any], tuple[Tensor, Tensor]]
CONTAINERS: dict[str, tuple[Wrap, Unwrap]] = {
    "dict": (lambda a, b: {"a": a, "b": b, "n": 3}, lambda v: (v["a"], v["b"])),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda v: (v["a"], v["b"])),
    "tuple": (lambda a, b: (a, None, "text", b), lambda v: (v[0], v[3])),
    "list": (lambda a, b: [a, b], lambda v: (v[0], v[1])),
    "dataclass": (Pair, lambda v: (v.left, v.right)),
    "frozen dataclass": (FrozenPair, lambda v: (v.left, v.right)),
    "named tuple": (NamedPair, lambda v: (v.left, v.right)),
    "nested": (
        lambda a, b: {"deep": [Pair(a, b), (None, NamedPair(a * 2, b))], 7: torch.arange(3)},
        lambda v: (v["deep"][0].left + v["deep"][1][1].left, v["deep"][1][1].right),
    ),
}


class Carrying(nn.Module):
    """A unit that takes and returns a container."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, given: Any, unused: Any = None) -> Any:
        wrap, unwrap = CONTAINERS[self.kind]
        left, right = unwrap(given)
        return wrap(torch.tanh(self.left(left)) + right.to(left.dtype), self.right(right))


class Carriers(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.units = nn.ModuleList(Carrying(kind) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        wrap, unwrap = CONTAINERS[self.kind]
        value = wrap(x, x + 1)
        for unit in self.units:
            value = unit(given=value, unused={"flag": True})
        left, right = unwrap(value)
        return left * right


@pytest.mark.parametrize("kind", CONTAINERS)
@on_ranks(2)
def test_tensors_travel_in_containers(rank: Rank, kind: str) -> None:
    def shard(door: Door, model: Carriers) -> None:
        for unit in model.units:
            door(unit)
        door(model)

    assert_same_steps(rank, lambda: Carriers(kind), shard, torch_too=False)


@pytest.mark.parametrize("kind", CONTAINERS)
@on_ranks(2)
def test_tensors_in_containers_are_cast(rank: Rank, kind: str) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    wrap, unwrap = CONTAINERS[kind]
    unit = fully_shard(Carrying(kind), mesh=rank.mesh(), mp_policy=policy)
    seen: list[torch.dtype] = []
    unit.left.register_forward_pre_hook(lambda _, args: seen.append(args[0].dtype))
    given = wrap(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
    result = unit(given=given)
    assert seen == [torch.bfloat16]
    assert type(result) is type(given)
    assert all(tensor.dtype is torch.float64 for tensor in unwrap(result))
    assert all(tensor.dtype is torch.float32 for tensor in unwrap(given)), (
        "the caller's is untouched"
    )
    sum(tensor.sum() for tensor in unwrap(result)).backward()
    assert unit.left.weight.grad.dtype is torch.float32


class Hidden:
    """Something that nobody knows how to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class FrozenAndBias(nn.Module):
    """Its bias has its gradient before its frozen weights are read for the input's gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)
        self.two = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.bias = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Any) -> Any:
        tensor = x.tensor if isinstance(x, Hidden) else x
        output = self.two(torch.tanh(self.one(tensor))) + self.bias
        return Hidden(output) if isinstance(x, Hidden) else output


class PlainOutput(FrozenAndBias):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x).tensor


class HiddenInputsOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.units = nn.ModuleList(PlainOutput() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            x = unit(Hidden(x))
        return x


@on_ranks(2)
def test_inputs_that_cannot_be_seen_keep_frozen_weights_until_they_were_read(rank: Rank) -> None:
    def shard(door: Door, model: HiddenInputsOnly) -> None:
        door(model.first)
        for unit in model.units:
            door(unit)
        door(model)

    assert_same_steps(rank, HiddenInputsOnly, shard)


class Viewing(nn.Module):
    """Returns a view: of what it computed, or one of several."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.wide(x)
        return y[:, :WIDTH], y.view(-1, 2, WIDTH)[:, 1]


class ViewsChangedInPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Viewing() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            left, right = unit(x)
            left.mul_(torch.sigmoid(right))
            left.add_(1)
            x = torch.tanh(left)
        return x


@on_ranks(2)
def test_outputs_that_are_views_may_be_changed_in_place(rank: Rank) -> None:
    def shard(door: Door, model: ViewsChangedInPlace) -> None:
        for unit in model.units:
            door(unit)
        door(model)

    assert_same_steps(rank, ViewsChangedInPlace, shard, torch_too=False)


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.change = nn.ModuleList(InPlace() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for unit, change in zip(self.units, self.change, strict=True):
            x = change(unit(x))
        return x


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(WIDTH))
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x.detach().clone()))
        x.add_(self.bias)
        return x.mul_(gate)


@on_ranks(2)
def test_a_unit_may_change_its_input_in_place(rank: Rank) -> None:
    def shard(door: Door, model: ChangesItsInput) -> None:
        for unit in (*model.units, *model.change):
            door(unit)
        door(model)

    assert_same_steps(rank, ChangesItsInput, shard, torch_too=False)


class WithAux(nn.Module):
    """A unit with a second output, as a mixture of experts has."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()
        self.router = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x), self.router(x).softmax(-1)


class AuxModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(WithAux() for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        aux = []
        for unit in self.units:
            x, extra = unit(x)
            aux.append(extra)
        return x, aux


def shard_aux(door: Door, model: AuxModel) -> None:
    for unit in model.units:
        door(unit)
    door(model)


@on_ranks(2)
def test_an_aux_loss_on_an_inner_units_second_output(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        output, aux = model(batch)
        loss = output.square().mean() + sum(extra.square().sum() for extra in aux)
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, AuxModel, shard_aux, step)


@on_ranks(2)
def test_an_output_that_the_loss_does_not_use(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        output, aux = model(batch)
        loss = output.square().mean() + aux[1].square().sum()
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, AuxModel, shard_aux, step)


@on_ranks(2)
def test_only_an_aux_output_of_an_early_unit_runs_backward(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        _, aux = model(batch)
        loss = aux[1].square().sum()
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, AuxModel, shard_aux, step)


# Gradients of inputs, and gradients inside forward


@on_ranks(2)
def test_inputs_that_require_gradients_get_them(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        batch = batch.requires_grad_()
        loss = model(batch).square().mean()
        (loss * scale).backward()
        return [loss, batch.grad / scale]

    assert_same_steps(rank, Stack, shard_stack, step)


@on_ranks(2)
def test_a_tensor_given_again_and_again_does_not_gather_hooks(rank: Rank) -> None:
    model = Stack()
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    prompt = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(3):
        model(prompt).sum().backward()
    assert len(prompt._backward_hooks or ()) <= 1


@on_ranks(2)
def test_gradients_asked_for_with_autograd_grad(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        batch = batch.requires_grad_()
        (found,) = torch.autograd.grad(model(batch).square().mean(), batch)
        return [found, one_loss(model, batch.detach(), scale)]

    assert_same_steps(rank, Stack, shard_stack, step)


class Penalised(nn.Module):
    """The gradient of an inner unit's output by its input is part of the loss."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.create_graph = create_graph
        self.before = nn.Linear(WIDTH, WIDTH)
        self.critic = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.after = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x * self.own)
        scored = self.critic(x)
        (slope,) = torch.autograd.grad(
            scored.sum(), x, create_graph=self.create_graph, retain_graph=True
        )
        return self.after(scored + slope) * self.own


@pytest.mark.parametrize("create_graph", [False, True])
@on_ranks(2)
def test_a_gradient_taken_inside_forward(rank: Rank, create_graph: bool) -> None:
    def shard(door: Door, model: Penalised) -> None:
        for unit in (model.before, model.critic, model.after):
            door(unit)
        door(model)

    assert_same_steps(rank, lambda: Penalised(create_graph), shard, torch_too=False)


@on_ranks(2)
def test_a_gradient_penalty_around_the_whole_model(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        batch = batch.requires_grad_()
        output = model(batch)
        (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
        loss = output.square().mean() + (slope.norm(dim=-1) - 1).square().mean()
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, Stack, shard_stack, step, torch_too=False)


# Encoder and decoder, frozen weights


class Adapted(nn.Module):
    """A frozen linear with a trainable low-rank one beside it."""

    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, rank, bias=False)
        self.up = nn.Linear(rank, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.frozen(x) + self.up(self.down(x))


class CrossBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = Adapted(), Adapted(), Adapted()
        self.out = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(self.norm(x)) @ self.key(memory).transpose(-1, -2)
        return x + self.out(scores.softmax(-1) @ self.value(memory))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(Adapted() for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        x = x * 2
        for layer in self.decoder:
            x = layer(x, memory)
        return x


def shard_encoder_decoder(door: Door, model: EncoderDecoder) -> None:
    for layer in (*model.encoder, *model.decoder):
        door(layer)
    door(model)


@on_ranks(2)
def test_units_with_inputs_from_two_units_and_frozen_weights(rank: Rank) -> None:
    assert_same_steps(rank, EncoderDecoder, shard_encoder_decoder)


@on_ranks(2)
def test_an_input_that_many_units_share_does_not_keep_them_all_unsharded(rank: Rank) -> None:
    model = EncoderDecoder()
    shard_encoder_decoder(functools.partial(fully_shard, mesh=rank.mesh()), model)
    layers = [*model.encoder, *model.decoder]
    held: list[int] = []

    def look(*_: Any) -> None:
        held.append(sum(held_bytes(hooks_of(layer).units[0]) > 0 for layer in layers))

    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: output.register_hook(look) and None)
    for step in range(2):
        model(batch_of(rank.rank, step)).square().mean().backward()
    assert len(held) == 2 * len(layers)
    assert max(held) <= 2, held  # the one that computes and the next


class PassesThrough(nn.Module):
    """Returns what it was given beside what it made of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        return self.block(x) + memory, memory


class Relay(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.units = nn.ModuleList(PassesThrough() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        memory = self.first(x)
        for unit in self.units:
            x, memory = unit(x, memory)
        return x + memory


@on_ranks(2)
def test_what_a_unit_only_passes_on_brings_it_back_no_second_time(rank: Rank) -> None:
    def shard(door: Door, model: Relay) -> None:
        door(model.first)
        for unit in model.units:
            door(unit)
        door(model)

    model = assert_same_steps(rank, Relay, shard, torch_too=False)
    gathers: list[str] = []
    for unit in units_of(model):
        was = unit.unshard

        def counted(unit: Unit = unit, was: Callable[[], None] = was) -> None:
            if isinstance(unit.state, Sharded) and held_bytes(unit) == 0:
                gathers.append(unit.name)
            was()

        unit.unshard = counted
    loss = model(batch_of(rank.rank, 9)).sum()
    gathers.clear()
    loss.backward()
    assert len(gathers) == len(set(gathers)), gathers


class Detached(nn.Module):
    """A unit whose input takes no gradient, between units whose inputs do."""

    def __init__(self) -> None:
        super().__init__()
        self.units = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.units[0](x)
        y = self.units[1](x.detach())
        return self.units[2](x + y)


@on_ranks(2)
def test_a_unit_whose_inputs_take_no_gradient(rank: Rank) -> None:
    def shard(door: Door, model: Detached) -> None:
        for unit in model.units:
            door(unit)
        door(model)

    assert_same_steps(rank, Detached, shard)


# Parts of the model alone


@on_ranks(2)
def test_a_submodule_runs_alone_before_and_after_the_root(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> list[Tensor]:
        alone = model.blocks[1]
        before = one_loss(alone, batch, scale)
        whole = one_loss(model, batch, scale)
        after = one_loss(alone, batch, scale)
        return [before, whole, after]

    assert_same_steps(rank, Stack, shard_stack, step, torch_too=False)


@on_ranks(2)
def test_a_submodules_own_forward_joins_the_roots_in_one_backward(rank: Rank) -> None:
    def step(model: Any, batch: Tensor, scale: float) -> Tensor:
        alone = model.blocks[0](batch).square().mean()
        loss = alone + model(batch).square().mean() + model.blocks[2](batch).sum()
        (loss * scale).backward()
        return loss

    assert_same_steps(rank, Stack, shard_stack, step, torch_too=False)


@on_ranks(2)
def test_an_unsharded_submodule_is_called_outside_its_roots_forward(rank: Rank) -> None:
    """`first` belongs to the root's unit: it may be read where the root was unsharded by hand."""
    model = Stack()
    reference = copy.deepcopy(model)
    shard_stack(functools.partial(fully_shard, mesh=rank.mesh()), model)
    batch = batch_of(0, 0)
    model.unshard()
    torch.testing.assert_close(model.first(batch), reference.first(batch))
    model.reshard()
    assert_at_rest(model)


@on_ranks(2)
def test_a_list_of_modules_is_gathered_and_reduced_once_in_backward(rank: Rank) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))
    model.extend([nn.LayerNorm(4), nn.Linear(4, 2)])
    for block in model[:3]:
        fully_shard(block, mesh=rank.mesh())
    norm, head = model[3], model[4]
    fully_shard([norm, head], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    gather, reduce = CountedGather(), CountedReduce()
    norm.set_custom_all_gather(gather)
    norm.set_custom_reduce_scatter(reduce)
    for _ in range(3):
        gather.numels.clear()
        reduce.numels.clear()
        loss = model(torch.randn(2, 4)).square().mean()
        assert len(gather.numels) == 1
        loss.backward()
        assert len(gather.numels) <= 2  # the first backward finds it not released yet
        assert len(reduce.numels) == 1

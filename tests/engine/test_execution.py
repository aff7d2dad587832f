"""Every way to run a sharded model computes what the unsharded model computes.

The oracles are the unsharded model, which sees every rank's batch, and mostly torch's own API,
which sees this rank's.
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
from torch.distributed.fsdp import register_fsdp_forward_method as torch_register_forward_method
from torch.optim import AdamW, Optimizer

from fullshard import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from fullshard.unit.state import Absent, Leaving
from fullshard.unit.unit import Unit
from tests.support.counted import CountedGather, CountedReduce
from tests.support.wrapped import (
    APIS,
    WIDTH,
    Block,
    Closeness,
    Lesson,
    Model,
    Net,
    Package,
    ShardUnit,
    assert_all_sharded,
    assert_api_trains_alike,
    assert_trains_alike,
    each_backward,
    held_bytes,
    linear,
    loss_of,
    make_batch,
    several,
    shard_blocks,
    shard_parts,
    unit_sharder,
    units_of,
    vector,
)

all_apis = pytest.mark.parametrize("api", APIS)


def one_loss(model: Any, batch: Tensor, scale: float) -> Tensor:
    return each_backward(model, [batch], scale)


def shard_list(*names: str) -> Callable[[ShardUnit, Any], Any]:
    """Make every module of these lists a unit, and then the root."""

    def shard(shard_unit: ShardUnit, model: nn.Module) -> Any:
        parts = [
            f"{name}.{index}"
            for name in names
            for index in range(len(model.get_submodule(name)))  # type: ignore[arg-type]
        ]
        return shard_parts(shard_unit, model, *parts)

    return shard


def parts(*names: str) -> Callable[[ShardUnit, Any], Any]:
    return lambda shard_unit, model: shard_parts(shard_unit, model, *names)


# Ways to run forward and backward


def several_forwards(model: Any, batches: list[Any], scale: float) -> Tensor:
    total = torch.stack([loss_of(model(batch)) for batch in batches]).sum()
    (total * scale).backward()
    return total.detach()


def forwards_then_backwards(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    losses = [loss_of(model(batch)) for batch in batches]
    for loss in losses:
        (loss * scale).backward()
    return losses


def forwards_then_backwards_in_reverse(
    model: Any, batches: list[Any], scale: float
) -> list[Tensor]:
    losses = [loss_of(model(batch)) for batch in batches]
    for loss in reversed(losses):
        (loss * scale).backward()
    return losses


def two_backwards_of_one_forward(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    output = model(batches[0])
    losses = [loss_of(output[:2]), output[2:].sigmoid().sum()]
    (losses[0] * scale).backward(retain_graph=True)
    (losses[1] * scale).backward()
    return losses


def dropped_forwards(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    dropped = model(batches[0] * 2).sum().detach()
    kept = model(batches[0] * 3)  # its graph lives on through the step
    return [dropped, kept.detach(), each_backward(model, batches, scale)]


def evaluated_first(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        seen = model(batches[0])
    with torch.inference_mode():
        inferred = model(batches[0])
        assert inferred.is_inference()
    assert not any(param.is_inference() for param in model.parameters())
    model.train()
    return [seen, inferred.clone(), each_backward(model, batches, scale)]


def gradient_of_the_input(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    batch = batches[0].requires_grad_()
    loss = one_loss(model, batch, scale)
    return [loss, batch.grad / scale]


def gradient_by_autograd_grad(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    batch = batches[0].requires_grad_()
    (found,) = torch.autograd.grad(loss_of(model(batch)), batch)
    return [found, one_loss(model, batch.detach(), scale)]


def gradient_penalty(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Penalize the gradient of the input, which is differentiated again."""
    batch = batches[0].requires_grad_()
    output = model(batch)
    (slope,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    loss = loss_of(output) + (slope.norm(dim=-1) - 1).square().mean()
    (loss * scale).backward()
    return loss.detach()


def a_part_alone(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    """Run a part before and after the whole model."""
    part = model.blocks[1]
    before = one_loss(part, batches[0], scale)
    whole = one_loss(model, batches[0], scale)
    return [before, whole, one_loss(part, batches[0], scale)]


def a_part_in_the_same_backward(model: Any, batches: list[Any], scale: float) -> Tensor:
    alone = loss_of(model.blocks[0](batches[0]))
    loss = alone + loss_of(model(batches[0])) + model.blocks[1](batches[0]).sum()
    (loss * scale).backward()
    return loss.detach()


class PlannedError(Exception):
    """Raised by the tests' models."""


def after_a_failed_forward(model: Any, batches: list[Any], scale: float) -> Tensor:
    def fail(*_: Any) -> None:
        raise PlannedError

    handle = model.head.register_forward_pre_hook(fail)
    with pytest.raises(PlannedError):
        model(batches[0])
    handle.remove()
    return each_backward(model, batches, scale)


def frozen_in_turns(model: Any, batches: list[Any], scale: float) -> Tensor:
    is_trained = bool(torch.initial_seed() // 1000 % 2)
    for param in model.blocks[1].parameters():
        param.requires_grad_(is_trained)
    return each_backward(model, batches, scale)


# By step: the APIs of torch that can run it.
STEPS: dict[Callable[..., Any], tuple[str, ...]] = {
    several_forwards: APIS,
    forwards_then_backwards: ("fully_shard",),
    forwards_then_backwards_in_reverse: ("fully_shard",),
    two_backwards_of_one_forward: ("fully_shard",),
    dropped_forwards: ("fully_shard",),
    evaluated_first: ("flat",),  # original parameters of torch are left as inference tensors
    gradient_of_the_input: APIS,
    gradient_by_autograd_grad: ("fully_shard",),
    gradient_penalty: (),
    a_part_alone: (),
    a_part_in_the_same_backward: (),
    after_a_failed_forward: (),
    frozen_in_turns: ("flat", "orig"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("step", STEPS)
@all_apis
@on_ranks(2)
def test_forward_and_backward_may_be_run_in_any_way(
    rank: Rank, api: str, step: Callable[..., Any]
) -> None:
    lesson = Lesson(step=step, num_micro_batches=2)
    assert_api_trains_alike(api, Net, shard_blocks, lesson, torch_too=api in STEPS[step])


# Units that run several times, sometimes or never


def nested() -> nn.Module:
    return Model(
        lambda self, x: self.inner(x * self.scale) * self.scale[:3], scale=vector(), inner=Net()
    )


@pytest.mark.sampled(2)
@all_apis
@on_ranks(1, 2)
def test_units_nested_three_deep_train_alike(rank: Rank, api: str) -> None:
    shard = parts("inner.blocks.0", "inner.blocks.1", "inner")
    assert_api_trains_alike(api, nested, shard, torch_too=rank.size > 1)


def repeating() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 0, 0, 2, 1):
            x = self.blocks[index](x)
        return self.last(x)

    return Model(run, blocks=several(Block, 3), last=linear())


@all_apis
@on_ranks(2)
def test_a_unit_that_runs_several_times_in_one_forward(rank: Rank, api: str) -> None:
    assert_api_trains_alike(api, repeating, torch_too=api == "fully_shard")


def recursive() -> nn.Module:
    def run(self: Any, x: Tensor, depth: int = 2) -> Tensor:
        return self.block(self(x, depth - 1) if depth else x) * self.scale

    return Model(run, block=Block(), scale=vector())


@on_ranks(2)
def test_a_root_that_calls_itself_trains_alike(rank: Rank) -> None:
    assert_api_trains_alike("fully_shard", recursive, torch_too=False)


def resting() -> nn.Module:
    """Runs a unit twice, one only if told to, and one never."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = self.twice(torch.tanh(self.twice(x)))
        return (self.sometimes(x) if self.takes_detour else x) * self.own

    units = {"twice": Block(), "sometimes": Block(), "never": Block()}
    return Model(run, **units, own=vector(), takes_detour=True)


def branching() -> nn.Module:
    """Also has an unused parameter, whose gradient is zeros in a wrapper and None elsewhere."""
    model = resting()
    model.unused = vector()
    return model


def set_detour(model: Any, takes_detour: bool) -> None:
    getattr(model, "module", model).takes_detour = takes_detour


def with_and_without(model: Any, batches: list[Any], scale: float) -> Tensor:
    set_detour(model, True)
    loss = each_backward(model, batches, scale)
    set_detour(model, False)
    return loss + each_backward(model, batches, scale)


def every_other_step(model: Any, batches: list[Any], scale: float) -> Tensor:
    set_detour(model, bool(torch.initial_seed() // 1000 % 2))
    return each_backward(model, batches, scale)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=0.02, weight_decay=0.1, eps=1e-3)


LESSONS = {
    branching: Lesson(step=with_and_without),
    resting: Lesson(step=every_other_step, optimizer=adamw, num_steps=4),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("build", LESSONS)
@all_apis
@on_ranks(2)
def test_units_run_twice_sometimes_or_never(
    rank: Rank, api: str, build: Callable[[], nn.Module]
) -> None:
    near, torch_too = Closeness(1e-4, 1e-5), api != "fully_shard"
    shard = parts("twice", "sometimes", "never")
    assert_api_trains_alike(
        api, build, shard, LESSONS[build], torch_too=torch_too, near=near, near_torch=near
    )


def routed(dtype: torch.dtype) -> nn.Module:
    """Sends a whole batch to one of two experts: the batch says which."""

    def run(self: Any, x: Tensor) -> Tensor:
        expert = self.experts[int(x[0, 0] > 0)]
        return self.head(torch.tanh(expert(x.to(expert.weight.dtype))).float())

    experts = nn.ModuleList([linear(), linear(dtype=dtype)])
    return Model(run, experts=experts, head=nn.Linear(WIDTH, 3))


def to_one_expert(generator: torch.Generator) -> Tensor:
    """Send every rank to another expert."""
    batch = make_batch(generator)
    batch[0, 0] = 1.0 if generator.initial_seed() % 20 < 10 else -1.0
    return batch


@pytest.mark.parametrize("api", ["flat", "orig"])
@on_ranks(2)
def test_ranks_may_use_different_parameters_of_a_wrapper(rank: Rank, api: str) -> None:
    """With `fully_shard` that is `set_reduce_scatter_unused_params`."""
    for dtype in (torch.float32, torch.float64):
        build = functools.partial(routed, dtype)
        lesson = Lesson(to_one_expert)
        assert_api_trains_alike(api, build, parts(), lesson, torch_too=dtype == torch.float32)


def pair() -> nn.Module:
    """Two models that are trained through each other, with nothing around them."""

    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        made = self.maker(x)
        return self.judge(made.detach()), self.judge(made)

    return Model(run, maker=Net(), judge=nn.Linear(3, 2))


@all_apis
@on_ranks(2)
def test_two_roots_train_through_each_other(rank: Rank, api: str) -> None:
    def shard(shard_unit: ShardUnit, model: Any) -> Any:
        model.maker = shard_blocks(shard_unit, model.maker)
        model.judge = shard_unit(model.judge)
        return model

    assert_api_trains_alike(api, pair, shard, torch_too=api != "fully_shard")


# Frozen parameters


FROZEN = {
    "a_bias_of_each": ("blocks.0.up.bias", "blocks.1.down.bias", "head.bias"),
    "the_first_block": ("blocks.0.",),
    "the_last_block": ("blocks.1.",),
    "the_root": ("head.", "scale"),
    "all_but_a_bias": ("blocks.", "head.weight", "scale"),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("part", FROZEN)
@all_apis
@on_ranks(2)
def test_what_is_frozen_stays_and_the_rest_trains(rank: Rank, api: str, part: str) -> None:
    def build() -> Net:
        model = Net()
        for name, param in model.named_parameters():
            param.requires_grad_(not name.startswith(FROZEN[part]))
        return model

    def shard(api: str, package: Package, model: Net) -> Any:
        return shard_blocks(unit_sharder(package, api), model)

    torch.manual_seed(0)
    before = dict(build().named_parameters())
    # Torch's wrapper refuses a flat parameter of both kinds.
    torch_shard = functools.partial(shard, "orig" if api == "flat" else api)
    learner = assert_trains_alike(build, functools.partial(shard, api), torch_shard=torch_shard)
    for name, value in learner.full_parameters().items():
        assert torch.equal(value, before[name]) is not before[name].requires_grad, name


# Lists of modules that are one unit


def two_heads() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.which != "right":
            x = self.left(x)
        return x if self.which == "left" else self.right(x)

    return Model(run, body=Block(), left=linear(), right=linear(), which="both")


def shard_heads_together(shard_unit: ShardUnit, model: Any) -> Any:
    shard_unit(model.body)
    shard_unit([model.left, model.right])
    return shard_unit(model)


def heads_in_turns(model: Any, batches: list[Any], scale: float) -> Tensor:
    model.which = ("left", "right", "both", "left")[torch.initial_seed() // 1000]
    return each_backward(model, batches, scale)


@on_ranks(2)
def test_a_list_of_modules_is_one_unit_and_may_run_in_part(rank: Rank) -> None:
    ours = assert_api_trains_alike("fully_shard", two_heads, shard_heads_together).model
    assert hooks_of(ours.left) is hooks_of(ours.right)
    assert len(hooks_of(ours.left).units[0].params) == 4
    lesson = Lesson(step=heads_in_turns, num_steps=4)
    assert_api_trains_alike("fully_shard", two_heads, shard_heads_together, lesson, torch_too=False)


def chunked_head() -> nn.Module:
    """Its forward ends with the norm; the loss calls the head, chunk by chunk."""

    def run(self: Any, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    head = nn.Linear(WIDTH, 5)
    return Model(run, blocks=several(Block, 2), norm=nn.LayerNorm(WIDTH), head=head)


def shard_chunked(shard_unit: ShardUnit, model: Any) -> Any:
    for block in model.blocks:
        shard_unit(block)
    shard_unit([model.norm, model.head])
    return shard_unit(model)


def chunks_in_one_backward(model: Any, batches: list[Any], scale: float) -> Tensor:
    hidden = model(batches[0])
    loss = torch.stack([loss_of(model.head(part)) for part in hidden.chunk(4)]).mean()
    (loss * scale).backward()
    return loss


def chunks_in_a_backward_each(model: Any, batches: list[Any], scale: float) -> Tensor:
    hidden = model(batches[0])
    detached = hidden.detach().requires_grad_()
    losses = [one_loss(model.head, part, scale) for part in detached.chunk(2)]
    hidden.backward(detached.grad)
    return torch.stack(losses)


@pytest.mark.parametrize("step", [chunks_in_one_backward, chunks_in_a_backward_each])
@on_ranks(2)
def test_a_head_called_chunk_by_chunk_outside_the_roots_forward(
    rank: Rank, step: Callable[..., Tensor]
) -> None:
    assert_api_trains_alike("fully_shard", chunked_head, shard_chunked, Lesson(step=step))


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


def encoded_and_decoded(model: Any, batches: list[Any], scale: float) -> list[Tensor]:
    code = model.encode(batches[0], twice=True)
    loss = (model.decode(code) - batches[0]).square().mean()
    (loss * scale).backward()
    return [code.detach(), loss, each_backward(model, batches, scale)]


@on_ranks(2)
def test_methods_other_than_forward_can_be_registered(rank: Rank) -> None:
    def shard(shard_unit: Any, model: Autoencoder) -> Autoencoder:
        ours = shard_unit.func is fully_shard
        register = register_fsdp_forward_method if ours else torch_register_forward_method
        shard_parts(shard_unit, model, "encoder", "decoder")
        register(model, "encode")
        register(model, "decode")
        return model

    lesson = Lesson(step=encoded_and_decoded)
    assert_api_trains_alike("fully_shard", Autoencoder, shard, lesson)
    unsharded = Autoencoder()
    register_fsdp_forward_method(unsharded, "encode")
    assert "encode" not in vars(unsharded)


# Inputs and outputs


@dataclass
class Two:
    left: Tensor
    right: Tensor
    note: str = "kept"


@dataclass(frozen=True)
class FrozenTwo:
    left: Tensor
    right: Tensor
    nothing: None = None


class NamedTwo(NamedTuple):
    left: Tensor
    right: Tensor


Wrap = Callable[[Tensor, Tensor], Any]
Unwrap = Callable[[Any], tuple[Tensor, Tensor]]
CONTAINERS: dict[str, tuple[Wrap, Unwrap]] = {
    "dict": (lambda a, b: {"a": a, "b": b, "n": 3}, lambda v: (v["a"], v["b"])),
    "ordered dict": (lambda a, b: OrderedDict(a=a, b=b), lambda v: (v["a"], v["b"])),
    "tuple": (lambda a, b: (a, None, "text", b), lambda v: (v[0], v[3])),
    "list": (lambda a, b: [a, b], lambda v: (v[0], v[1])),
    "dataclass": (Two, lambda v: (v.left, v.right)),
    "frozen dataclass": (FrozenTwo, lambda v: (v.left, v.right)),
    "named tuple": (NamedTwo, lambda v: (v.left, v.right)),
    "nested": (
        lambda a, b: {"deep": [Two(a, b), (None, NamedTwo(a * 2, b))], 7: torch.arange(3)},
        lambda v: (v["deep"][0].left + v["deep"][1][1].left, v["deep"][1][1].right),
    ),
}


def carrying(kind: str) -> nn.Module:
    """A unit that takes and returns a container."""
    wrap, unwrap = CONTAINERS[kind]

    def run(self: Any, *, given: Any, unused: Any = None) -> Any:
        left, right = unwrap(given)
        return wrap(torch.tanh(self.left(left)) + right.to(left.dtype), self.right(right))

    return Model(run, left=linear(), right=linear())


def carriers(kind: str) -> nn.Module:
    wrap, unwrap = CONTAINERS[kind]

    def run(self: Any, x: Tensor) -> Tensor:
        value = wrap(x, x + 1)
        for unit in self.units:
            value = unit(given=value, unused={"flag": True})
        left, right = unwrap(value)
        return left * right

    return Model(run, units=several(functools.partial(carrying, kind), 3))


@pytest.mark.parametrize(
    "api, kind",
    [
        ("fully_shard", "ordered dict"),
        ("fully_shard", "frozen dataclass"),
        *((api, "nested") for api in APIS),
    ],
)
@on_ranks(2)
def test_tensors_travel_in_containers(rank: Rank, api: str, kind: str) -> None:
    build = functools.partial(carriers, kind)
    assert_api_trains_alike(api, build, shard_list("units"), torch_too=False)


@on_ranks(2)
def test_tensors_in_containers_are_cast(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float64)
    for kind, (wrap, unwrap) in CONTAINERS.items():
        unit = fully_shard(carrying(kind), mesh=rank.mesh(), mp_policy=policy)
        seen: list[torch.dtype] = []
        unit.left.register_forward_pre_hook(lambda _, args, s=seen: s.append(args[0].dtype))
        given = wrap(torch.ones(2, WIDTH), torch.ones(2, WIDTH))
        result = unit(given=given)
        assert seen == [torch.bfloat16], kind
        assert type(result) is type(given), kind
        assert all(tensor.dtype is torch.float64 for tensor in unwrap(result)), kind
        assert kind != "nested" or result[7].dtype is torch.int64
        unchanged = all(tensor.dtype is torch.float32 for tensor in unwrap(given))
        assert unchanged, f"{kind}: the caller's container was changed"
        sum(tensor.sum() for tensor in unwrap(result)).backward()
        assert unit.left.weight.grad.dtype is torch.float32, kind


class Hidden:
    """An object that nothing knows how to look into."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def frozen_and_bias() -> nn.Module:
    """Its bias has its gradient before its frozen weights are read for the input's gradient."""

    def run(self: Any, x: Hidden) -> Tensor:
        return self.two(torch.tanh(self.one(x.tensor))) + self.bias

    one, two = (linear().requires_grad_(False) for _ in range(2))
    return Model(run, one=one, two=two, bias=vector())


def hidden_inputs() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        x = self.first(x)
        for unit in self.units:
            x = unit(Hidden(x))
        return x

    return Model(run, first=Block(), units=several(frozen_and_bias, 2))


@on_ranks(2)
def test_inputs_that_cannot_be_seen_keep_frozen_weights_until_they_were_read(rank: Rank) -> None:
    shard = parts("first", "units.0", "units.1")
    assert_api_trains_alike("fully_shard", hidden_inputs, shard)


def viewing() -> nn.Module:
    """Returns views of what it computed."""

    def run(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.wide(x)
        return y[:, :WIDTH], y.view(-1, 2, WIDTH)[:, 1]

    return Model(run, wide=nn.Linear(WIDTH, 2 * WIDTH))


def changing() -> nn.Module:
    """Changes its input in place."""

    def run(self: Any, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x.detach().clone()))
        x.add_(self.bias)
        return x.mul_(gate)

    return Model(run, bias=vector(), gate=linear())


def changed_in_place() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        for unit in self.viewing:
            left, right = unit(x)
            left.mul_(torch.sigmoid(right))
            left.add_(1)
            x = torch.tanh(left)
        for unit, change in zip(self.plain, self.changing, strict=True):
            x = change(unit(x))
        return x

    units = {"viewing": several(viewing, 3), "plain": several(linear, 2)}
    return Model(run, **units, changing=several(changing, 2))


@on_ranks(2)
def test_inputs_and_outputs_of_units_may_be_changed_in_place(rank: Rank) -> None:
    shard = shard_list("viewing", "plain", "changing")
    assert_api_trains_alike("fully_shard", changed_in_place, shard, torch_too=False)


def with_aux() -> nn.Module:
    """A unit with a second output, as a mixture of experts has."""
    return Model(
        lambda self, x: (self.block(x), self.router(x).softmax(-1)),
        block=Block(),
        router=nn.Linear(WIDTH, 3),
    )


def aux_model() -> nn.Module:
    def run(self: Any, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        aux = []
        for unit in self.units:
            x, extra = unit(x)
            aux.append(extra)
        return x, aux

    return Model(run, units=several(with_aux, 3))


# Which outputs the loss uses.
AUX_LOSSES: dict[str, Callable[[Tensor, list[Tensor]], Tensor]] = {
    "all": lambda output, aux: output.square().mean() + sum(a.square().sum() for a in aux),
    "not all": lambda output, aux: output.square().mean() + aux[1].square().sum(),
    "only an early one": lambda output, aux: aux[1].square().sum(),
}


@pytest.mark.parametrize("used", AUX_LOSSES)
@on_ranks(2)
def test_a_loss_on_inner_units_second_outputs(rank: Rank, used: str) -> None:
    def step(model: Any, batches: list[Any], scale: float) -> Tensor:
        loss = AUX_LOSSES[used](*model(batches[0]))
        (loss * scale).backward()
        return loss

    assert_api_trains_alike("fully_shard", aux_model, shard_list("units"), Lesson(step=step))


@on_ranks(2)
def test_a_tensor_given_again_and_again_does_not_gather_hooks(rank: Rank) -> None:
    model = shard_blocks(functools.partial(fully_shard, mesh=rank.mesh()), Net())
    prompt = torch.randn(4, WIDTH, requires_grad=True)
    for _ in range(3):
        model(prompt).sum().backward()
    assert len(prompt._backward_hooks or ()) <= 1


def penalized(create_graph: bool) -> nn.Module:
    """The gradient of an inner unit's output by its input is part of the loss."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = self.before(x * self.own)
        scored = self.critic(x)
        (slope,) = torch.autograd.grad(
            scored.sum(), x, create_graph=create_graph, retain_graph=True
        )
        return self.after(scored + slope) * self.own

    critic = nn.Sequential(linear(), nn.Tanh(), linear())
    return Model(run, before=linear(), critic=critic, after=linear(), own=vector())


@pytest.mark.parametrize("create_graph", [False, True])
@on_ranks(2)
def test_a_gradient_taken_inside_forward(rank: Rank, create_graph: bool) -> None:
    build = functools.partial(penalized, create_graph)
    shard = parts("before", "critic", "after")
    assert_api_trains_alike("fully_shard", build, shard, torch_too=False)


# Units whose inputs come from several others


def adapted() -> nn.Module:
    """A frozen linear with a trainable low-rank one beside it."""
    return Model(
        lambda self, x: self.frozen(x) + self.up(self.down(x)),
        frozen=linear().requires_grad_(False),
        down=nn.Linear(WIDTH, 2, bias=False),
        up=nn.Linear(2, WIDTH, bias=False),
    )


def cross_block() -> nn.Module:
    def run(self: Any, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(self.norm(x)) @ self.key(memory).transpose(-1, -2)
        return x + self.out(scores.softmax(-1) @ self.value(memory))

    attention = {name: adapted() for name in ("query", "key", "value")}
    out = linear().requires_grad_(False)
    return Model(run, **attention, out=out, norm=nn.LayerNorm(WIDTH))


def encoder_decoder() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        memory = x
        for layer in self.encoder:
            memory = torch.tanh(layer(memory))
        x = x * 2
        for layer in self.decoder:
            x = layer(x, memory)
        return x

    return Model(run, encoder=several(adapted, 2), decoder=several(cross_block, 4))


@on_ranks(2)
def test_an_input_that_many_units_share_does_not_keep_them_all_unsharded(rank: Rank) -> None:
    shard = shard_list("encoder", "decoder")
    model = assert_api_trains_alike("fully_shard", encoder_decoder, shard).model
    model.set_reshard_after_forward(True)
    layers = [*model.encoder, *model.decoder]
    held: list[int] = []

    def look(*_: Any) -> None:
        held.append(sum(held_bytes(hooks_of(layer).units[0]) > 0 for layer in layers))

    for layer in layers:
        layer.register_forward_hook(lambda _, args, output: output.register_hook(look) and None)
    for _ in range(2):
        model(torch.randn(4, WIDTH)).square().mean().backward()
    assert len(held) == 2 * len(layers)
    assert max(held) <= 2, held  # the one that computes and the next


def passing() -> nn.Module:
    """Returns its input beside what it made of it."""
    return Model(lambda self, x, memory: (self.block(x) + memory, memory), block=Block())


def relay() -> nn.Module:
    def run(self: Any, x: Tensor) -> Tensor:
        memory = self.first(x)
        for unit in self.units:
            x, memory = unit(x, memory)
        return x + memory

    return Model(run, first=linear(), units=several(passing, 4))


@on_ranks(2)
def test_what_a_unit_only_passes_on_does_not_gather_it_a_second_time(rank: Rank) -> None:
    shard = parts("first", *(f"units.{index}" for index in range(4)))
    model = assert_api_trains_alike("fully_shard", relay, shard, torch_too=False).model
    model.set_reshard_after_forward(True)
    gathers: list[str] = []
    for unit in units_of(model):
        was = unit.unshard

        def counted(unit: Unit = unit, was: Callable[[], None] = was) -> None:
            if isinstance(unit.state, (Absent, Leaving)) and held_bytes(unit) == 0:
                gathers.append(unit.name)
            was()

        unit.unshard = counted
    loss = model(torch.randn(4, WIDTH)).sum()
    gathers.clear()
    loss.backward()
    assert len(gathers) == len(set(gathers)), gathers


def detached() -> nn.Module:
    """A unit whose input takes no gradient, between units whose inputs do."""

    def run(self: Any, x: Tensor) -> Tensor:
        x = self.units[0](x)
        return self.units[2](x + self.units[1](x.detach()))

    return Model(run, units=several(Block, 3))


@all_apis
@on_ranks(2)
def test_a_unit_whose_inputs_take_no_gradient(rank: Rank, api: str) -> None:
    assert_api_trains_alike(api, detached, torch_too=api == "fully_shard")


# Memory


@on_ranks(2)
def test_inner_units_hold_no_memory_after_an_evaluation(rank: Rank) -> None:
    model = shard_blocks(functools.partial(fully_shard, mesh=rank.mesh()), Net())
    for _ in range(2):
        with torch.no_grad():
            model(torch.randn(4, WIDTH))
        for block in model.blocks:
            assert isinstance(hooks_of(block).units[0].state, (Absent, Leaving))
            assert held_bytes(hooks_of(block).units[0]) == 0


@on_ranks(2)
def test_a_unit_unsharded_by_hand_may_be_read_outside_its_forward(rank: Rank) -> None:
    """`head` belongs to the root's unit."""
    model = Net()
    reference = copy.deepcopy(model)
    shard_blocks(functools.partial(fully_shard, mesh=rank.mesh()), model)
    batch = torch.randn(4, WIDTH)
    model.unshard()
    torch.testing.assert_close(model.head(batch), reference.head(batch))
    model.reshard()
    assert_all_sharded(model)


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

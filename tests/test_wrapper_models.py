"""Models that are frozen, mixed, tied, ignored, on meta or out of step train as they should."""

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fullshard.runtime.names import clean_name
from fullshard.testing import Rank, on_ranks
from tests.wrapped import (
    OURS,
    ROUNDED,
    TORCH,
    WIDTH,
    Block,
    Closeness,
    Door,
    Lesson,
    Net,
    assert_trains_alike,
    by_hand,
    by_policy,
    each_backward,
    flat,
    loss_of,
)

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
both_forms = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


# Frozen.


def frozen(*names: str) -> Callable[[], Net]:
    def build() -> Net:
        model = Net()
        for name in names:
            for param in _named(model, name):
                param.requires_grad_(False)
        return model

    return build


def _named(model: nn.Module, name: str) -> Iterator[nn.Parameter]:
    found = functools.reduce(getattr, name.split("."), model)
    if isinstance(found, nn.Parameter):
        yield found
    else:
        yield from found.parameters()  # type: ignore[union-attr]


FROZEN = {
    "a_weight": ("blocks.0.up.weight",),
    "a_bias_of_each": ("blocks.0.up.bias", "blocks.1.down.bias", "head.bias"),
    "the_first_block": ("blocks.0",),
    "the_last_block": ("blocks.1",),
    "all_but_the_head": ("blocks", "scale"),
    "the_root": ("head", "scale"),
    "all_but_a_bias": ("blocks", "head.weight", "scale"),
}


@pytest.mark.parametrize("part", FROZEN)
@both_forms
@on_ranks(2)
def test_what_is_frozen_stays_and_the_rest_trains(
    rank: Rank, part: str, use_orig_params: bool
) -> None:
    build = frozen(*FROZEN[part])
    torch.manual_seed(0)
    start = dict(build().named_parameters())
    for wrap, strategy in ((flat, "FULL_SHARD"), (by_policy, "SHARD_GRAD_OP"), (flat, "NO_SHARD")):
        learner = assert_trains_alike(
            build,
            lambda d, m, w=wrap, s=strategy: w(
                d, m, sharding_strategy=s, use_orig_params=use_orig_params
            ),
            # Torch's class refuses a flat parameter of both kinds.
            torch_shard=lambda d, m, w=wrap, s=strategy: w(
                d, m, sharding_strategy=s, use_orig_params=True
            ),
        )
        for name, value in learner.full_parameters().items():
            assert torch.equal(value, start[name]) is not start[name].requires_grad, name


@both_forms
@on_ranks(2)
def test_a_unit_in_which_all_is_frozen_takes_no_gradient(rank: Rank, use_orig_params: bool) -> None:
    model = by_policy(OURS, frozen("blocks.0")(), use_orig_params=use_orig_params)
    model(torch.randn(4, WIDTH)).sum().backward()
    assert [p.grad is None for p in model.module.blocks[0].parameters()] == [
        True for _ in model.module.blocks[0].parameters()
    ]
    assert any(p.grad is not None for p in model.module.blocks[1].parameters())


# Mixed dtypes.


class Mixed(nn.Module):
    """Parameters of three dtypes, of which none is cast for another."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH).to(dtype) for dtype in dtypes)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float() * self.scale


@pytest.mark.parametrize("strategy", STRATEGIES)
@both_forms
@on_ranks(2)
def test_dtypes_mixed_in_a_unit_are_each_trained_in_their_own(
    rank: Rank, strategy: str, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for dtypes, near in (
        ((torch.float64, torch.float32, torch.float64), Closeness(1e-5, 1e-6)),
        ((torch.bfloat16, torch.float32, torch.float64), ROUNDED),
    ):
        learner = assert_trains_alike(
            functools.partial(Mixed, dtypes),
            lambda d, m: flat(d, m, **options),
            torch_shard=None,  # which refuses
            near=near,
        )
        found = [learner.full_parameters()[f"layers.{i}.weight"].dtype for i in range(3)]
        assert found == list(dtypes)


@both_forms
@on_ranks(2)
def test_dtypes_mixed_in_a_unit_compute_in_the_one_dtype_of_a_precision(
    rank: Rank, use_orig_params: bool
) -> None:
    options = {"mixed_precision": {"param_dtype": torch.bfloat16}}
    assert_trains_alike(
        functools.partial(Mixed, (torch.float64, torch.float32)),
        lambda d, m: flat(d, m, use_orig_params=use_orig_params, **options),
        torch_shard=None,
        near=ROUNDED,
    )


# Tied.


class Tied(nn.Module):
    """The first and the last layer are one weight, and a block lies between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.block = Block()
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(torch.tanh(self.first(x))))


@pytest.mark.parametrize("strategy", STRATEGIES)
@both_forms
@on_ranks(2)
def test_a_weight_tied_inside_a_unit_trains_as_one(
    rank: Rank, strategy: str, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
    for wrap in (flat, by_policy):
        assert_trains_alike(Tied, lambda d, m, w=wrap: w(d, m, **options))


@pytest.mark.parametrize("strategy", STRATEGIES)
@both_forms
@on_ranks(2)
def test_a_weight_tied_across_units_trains_as_one(
    rank: Rank, strategy: str, use_orig_params: bool
) -> None:
    options = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}

    def wrap_by_hand(door: Door, model: Tied) -> Any:
        model.first = door(model.first, **options)
        model.block = door(model.block, **options)
        model.last = door(model.last, **options)
        return door(model, **options)

    def wrap_one_by_hand(door: Door, model: Tied) -> Any:
        model.last = door(model.last, **options)
        return door(model, **options)

    def wrap_by_policy(door: Door, model: Tied) -> Any:
        return door(model, auto_wrap_policy={nn.Linear}, **options)

    for wrap in (wrap_by_hand, wrap_one_by_hand, wrap_by_policy):
        learner = assert_trains_alike(Tied, wrap, torch_shard=None)  # which unties them
        with OURS.FSDP.summon_full_params(learner.model, writeback=False):
            assert learner.model.module.first.weight is learner.model.module.last.weight


# Ignored.


def with_ignored_averaged(model: Any, batches: list[Any], scale: float) -> Tensor:
    """Gradients of what is ignored are the user's to reduce; here the user does."""
    loss = each_backward(model, batches, scale)
    if scale == 1:
        with_gradient = [p for p in model.parameters() if getattr(p, "is_ignored", False)]
        assert with_gradient
        for param in with_gradient:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()
    return loss


def ignoring(kind: str, model: Net) -> dict[str, Any]:
    """The option that ignores the first block, and the head's bias where parameters are named."""
    block: Any = model.blocks[0]
    ignored = [*block.parameters(), model.head.bias] if kind == "parameters" else block.parameters()
    for param in ignored:
        param.is_ignored = True
    return {
        "ignored_modules": {"ignored_modules": [block]},
        "modules_as_states": {"ignored_states": [block]},
        "parameters": {"ignored_states": [*block.parameters(), model.head.bias]},
    }[kind]


@pytest.mark.parametrize("kind", ["ignored_modules", "modules_as_states", "parameters"])
@both_forms
@on_ranks(2)
def test_what_is_ignored_is_whole_and_reduced_by_nobody(
    rank: Rank, kind: str, use_orig_params: bool
) -> None:
    def shard(wrap: Callable[..., Any], door: Door, model: Net) -> Any:
        block, shapes = model.blocks[0], [p.shape for p in model.blocks[0].parameters()]
        params = list(block.parameters())
        wrapped = wrap(door, model, use_orig_params=use_orig_params, **ignoring(kind, model))
        assert not any(isinstance(module, door.FSDP) for module in block.modules())
        assert all(a is b for a, b in zip(block.parameters(), params, strict=True))
        assert [p.shape for p in block.parameters()] == shapes
        return wrapped

    for wrap in (flat, by_policy):
        assert_trains_alike(Net, functools.partial(shard, wrap), Lesson(step=with_ignored_averaged))


@on_ranks(2)
def test_the_gradient_of_what_is_ignored_is_this_ranks_own(rank: Rank) -> None:
    torch.manual_seed(0)
    reference = Net()
    model = copy.deepcopy(reference)
    model = flat(OURS, model, ignored_modules=[model.head])
    batch = Lesson().batches(0, rank.rank)[0]
    for each in (model, reference):
        loss_of(each(batch)).backward()
    torch.testing.assert_close(model.module.head.weight.grad, reference.head.weight.grad)


# On meta.


def filled(module: nn.Module) -> None:
    """Values that depend on a tensor's name and shape only."""
    for name, tensor in (
        *module.named_parameters(recurse=False),
        *module.named_buffers(recurse=False),
    ):
        values = torch.arange(tensor.numel(), dtype=torch.float32).reshape(tensor.shape)
        with torch.no_grad():
            tensor.copy_(torch.sin(values + len(name)) / 2)


def made_and_filled(module: nn.Module) -> None:
    module.to_empty(device="cpu", recurse=False)
    filled(module)


class SelfFilled(nn.Module):
    """Fills each of its modules by `reset_parameters`."""

    class Linear(nn.Linear):
        def reset_parameters(self) -> None:
            filled(self)

    def __init__(self) -> None:
        super().__init__()
        self.first = SelfFilled.Linear(WIDTH, 5)
        self.last = SelfFilled.Linear(5, 3)
        self.scale = nn.Parameter(torch.empty(3))
        self.register_buffer("shift", torch.empty(3))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        filled(self)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(x))) * self.scale + self.shift


@both_forms
@on_ranks(2)
def test_a_model_on_meta_is_filled_by_param_init_fn(rank: Rank, use_orig_params: bool) -> None:
    def build() -> nn.Module:
        return Net().apply(filled)

    def on_meta(wrap: Callable[..., Any], door: Door, _: Net) -> Any:
        with torch.device("meta"):
            model = Net()
        return wrap(door, model, use_orig_params=use_orig_params, param_init_fn=made_and_filled)

    for wrap in (flat, by_policy, by_hand):
        assert_trains_alike(build, functools.partial(on_meta, wrap))


@both_forms
@on_ranks(2)
def test_a_model_on_meta_fills_itself_by_reset_parameters(
    rank: Rank, use_orig_params: bool
) -> None:
    def on_meta(policy: Any, door: Door, _: nn.Module) -> Any:
        with torch.device("meta"):
            model = SelfFilled()
        return door(model, use_orig_params=use_orig_params, auto_wrap_policy=policy)

    for policy in (None, {SelfFilled.Linear}):
        assert_trains_alike(SelfFilled, functools.partial(on_meta, policy))


@both_forms
@on_ranks(2)
def test_only_the_part_on_meta_is_filled(rank: Rank, use_orig_params: bool) -> None:
    def build() -> Net:
        model = Net()
        model.blocks[1].apply(filled)
        return model

    def partly_on_meta(door: Door, model: Net) -> Any:
        with torch.device("meta"):
            model.blocks[1] = Block()
        return by_policy(
            door, model, use_orig_params=use_orig_params, param_init_fn=made_and_filled
        )

    assert_trains_alike(build, partly_on_meta)


@on_ranks(2)
def test_device_id_may_name_the_cpu(rank: Rank) -> None:
    for use_orig_params in (False, True):
        learner = assert_trains_alike(
            Net,
            lambda d, m, u=use_orig_params: by_policy(
                d, m, device_id=torch.device("cpu"), use_orig_params=u
            ),
        )
        assert {param.device.type for param in learner.model.parameters()} == {"cpu"}


# Out of step.


def out_of_step(model: Net) -> Net:
    """The same on rank 0, other values on every other."""
    if dist.get_rank():
        generator = torch.Generator().manual_seed(dist.get_rank())
        with torch.no_grad():
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


@both_forms
@on_ranks(2, 4)
def test_ranks_that_start_apart_are_synced_from_the_first(
    rank: Rank, use_orig_params: bool
) -> None:
    places: list[dict[str, Any]] = [{"sharding_strategy": name} for name in STRATEGIES]
    if rank.size == 4:
        mesh = rank.mesh((2, 2), ("replicate", "shard"))
        places = [
            {"sharding_strategy": "HYBRID_SHARD", "device_mesh": mesh},
            {
                "sharding_strategy": "_HYBRID_SHARD_ZERO2",
                "process_group": (mesh.get_group("shard"), mesh.get_group("replicate")),
            },
        ]
    for place in places:
        for wrap in (flat, by_policy, by_hand):
            learner = assert_trains_alike(
                Net,
                lambda d, m, w=wrap, p=place: w(
                    d, out_of_step(m), sync_module_states=True, use_orig_params=use_orig_params, **p
                ),
                # Torch's class broadcasts on accelerators only.
                torch_shard=lambda d, m, w=wrap, p=place: w(
                    d, m, use_orig_params=use_orig_params, **p
                ),
            )
            torch.testing.assert_close(learner.buffers()["shift"], torch.linspace(-0.3, 0.3, 3))


@on_ranks(2)
def test_a_model_on_meta_but_on_the_first_rank_is_synced_from_it(rank: Rank) -> None:
    def shard(door: Door, model: Net) -> Any:
        if rank.rank:
            with torch.device("meta"):
                model = Net()
        return by_policy(
            door,
            model,
            sync_module_states=True,
            param_init_fn=lambda m: m.to_empty(device="cpu", recurse=False) if rank.rank else None,
        )

    assert_trains_alike(Net, shard, torch_shard=by_policy)


# Modules that a precision leaves alone, and buffers.


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.dtypes: set[torch.dtype] = set()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.linear(x))
        self.dtypes.add(self.norm.weight.dtype)
        return torch.tanh(x)


def normed() -> nn.Sequential:
    return nn.Sequential(Normed(), Normed(), nn.Linear(WIDTH, 3))


def names_of_wrappers(door: Door, model: nn.Module) -> list[str]:
    return [clean_name(f"{n}.") for n, m in model.named_modules() if isinstance(m, door.FSDP)]


@pytest.mark.filterwarnings("ignore:Both mixed precision and an auto_wrap_policy:UserWarning")
@both_forms
@on_ranks(2)
def test_a_policy_leaves_batch_norm_in_full_precision(rank: Rank, use_orig_params: bool) -> None:
    for precision in (
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "_module_classes_to_ignore": [nn.BatchNorm1d, nn.Linear]},
    ):
        models: dict[Door, Any] = {}

        def shard(door: Door, model: Any, p: dict[str, Any] = precision, m: Any = models) -> Any:
            m[door] = door(
                model, auto_wrap_policy={Normed}, mixed_precision=p, use_orig_params=use_orig_params
            )
            return m[door]

        assert_trains_alike(normed, shard, near=ROUNDED, near_torch=Closeness(1e-2, 1e-3))
        ours, torchs = models[OURS], models[TORCH]
        assert names_of_wrappers(OURS, ours) == names_of_wrappers(TORCH, torchs)
        assert [m.dtypes for m in ours.modules() if isinstance(m, Normed)] == [
            m.dtypes for m in torchs.modules() if isinstance(m, Normed)
        ]


class Counting(nn.Module):
    """Buffers that forward changes: one by value, one by assignment, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("last", torch.zeros(WIDTH), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        self.count += 1
        self.mean.lerp_(x.detach().mean(0).to(self.mean.dtype), 0.5)
        self.last = x.detach()[0].clone()
        return torch.tanh(x)


@both_forms
@on_ranks(2)
def test_buffers_are_each_ranks_own_and_follow_forward(rank: Rank, use_orig_params: bool) -> None:
    for precision in (None, {"param_dtype": torch.bfloat16, "buffer_dtype": torch.float16}):
        for policy in (None, {Counting}):
            learner = assert_trains_alike(
                lambda: nn.Sequential(Counting(), Counting()),
                lambda d, m, p=precision, w=policy: d(
                    m, use_orig_params=use_orig_params, mixed_precision=p, auto_wrap_policy=w
                ),
                near=ROUNDED if precision else Closeness(1e-5, 1e-6),
                near_torch=Closeness(1e-3, 1e-4),
            )
            assert learner.buffers()["0.count"].item() == 3


# Modules that keep their parameters in ways of their own.


class Recurrent(nn.Module):
    """Keeps a list of its weights beside the registered ones."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(WIDTH, 5, num_layers=2, batch_first=True)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        output, _ = self.cells(x.unsqueeze(1).expand(-1, 3, -1))
        return self.head(output[:, -1])


class Attending(nn.Module):
    """Reads the weights of a module inside it without running that module."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 8, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.unsqueeze(1).expand(-1, 3, -1))


class Listed(nn.Module):
    """Parameters in a list and a dict, transposed, of no dim, of no element, and computed ones."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.ParameterList(nn.Parameter(torch.randn(WIDTH)) for _ in range(3))
        self.named = nn.ParameterDict({"last": nn.Parameter(torch.randn(3, WIDTH).t())})
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        for param in self.some:
            x = torch.tanh(x * param)
        return self.normed(x @ self.named["last"]) * self.factor + self.empty.sum()


class Reused(nn.Module):
    """One block in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.between = Block()
        self.again = self.first

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.between(self.first(x)))


@pytest.mark.parametrize("build", [Recurrent, Attending, Listed, Reused])
@both_forms
@on_ranks(2)
def test_modules_with_ways_of_their_own_train(
    rank: Rank, build: Callable[[], nn.Module], use_orig_params: bool
) -> None:
    classes = {nn.LSTM, nn.TransformerEncoderLayer, Block}
    # Torch's class refuses parameters of no dim, and gathers a module that is in two places for
    # one of them only.
    torch_too = build in (Recurrent, Attending)
    for strategy in STRATEGIES:
        for policy in (None, classes):
            assert_trains_alike(
                build,
                lambda d, m, s=strategy, p=policy: d(
                    m, sharding_strategy=s, auto_wrap_policy=p, use_orig_params=use_orig_params
                ),
                torch_shard="same" if torch_too else None,
            )

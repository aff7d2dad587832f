"""Mixed precision: the dtypes of compute, reduction, output and inputs, and mixed units."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import MixedPrecisionPolicy as TorchPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fullshard import (
    ConfigError,
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from fullshard._torch import TORCH
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.support.wrapped import (
    APIS,
    EQUAL,
    ROUNDED,
    Package,
    assert_same_step,
    assert_trains_alike,
    batch_of,
    full,
    make_batch,
    shard_parts,
    unit_sharder,
)

# Policies that the matrix in test_parity.py does not have.
POLICIES: dict[str, dict[str, Any]] = {
    "params_bf16_output_fp32": {"param_dtype": torch.bfloat16, "output_dtype": torch.float32},
    "only_reduced_in_fp16": {"reduce_dtype": torch.float16},
    "params_fp64": {"param_dtype": torch.float64},
    "only_output_bf16": {"output_dtype": torch.bfloat16},
}


class Watched(nn.Module):
    """A linear layer that notes the dtypes it computes with."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width_in, width_out)
        self.seen: list[tuple[torch.dtype, torch.dtype]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((x.dtype, self.inner.weight.dtype))
        return F.linear(x.to(self.inner.weight.dtype), self.inner.weight, self.inner.bias)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Watched(6, 10)
        self.second = Watched(10, 7)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x))) * self.scale


def step_both(rank: Rank, model: nn.Module, reference: nn.Module, step: int) -> None:
    assert_same_step(rank, model, reference, partial(batch_of, step))


@pytest.mark.parametrize("kind", POLICIES)
@on_ranks(2)
def test_a_policy_trains_alike(rank: Rank, kind: str) -> None:
    def shard(package: Package, model: Net) -> Any:
        policy = package.package.MixedPrecisionPolicy(**POLICIES[kind])
        shard_unit = partial(package.package.fully_shard, mesh=rank.mesh(), mp_policy=policy)
        return shard_parts(shard_unit, model, "first", "second")

    assert_trains_alike(Net, shard, near=ROUNDED, cell=kind)


@on_ranks(2)
def test_the_gradient_is_that_of_the_low_precision_model_averaged_in_the_reduce_dtype(
    rank: Rank,
) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 3))
    low = copy.deepcopy(model).to(torch.bfloat16)
    expected = {name: torch.zeros(p.shape) for name, p in low.named_parameters()}
    for other in range(rank.size):
        low.zero_grad()
        low(batch_of(0, other).to(torch.bfloat16)).sum().backward()
        for name, param in low.named_parameters():
            expected[name] += param.grad.float() / rank.size
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    model(batch_of(0, rank.rank)).sum().backward()
    for name, param in model.named_parameters():
        assert torch.equal(full(param.grad), expected[name]), name


@on_ranks(2)
def test_shards_and_gradients_keep_the_dtype_that_parameters_were_made_with(rank: Rank) -> None:
    model = Net()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
    fully_shard(model.first, mesh=rank.mesh(), mp_policy=policy)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    output = model(batch_of(0, rank.rank))
    assert output.dtype == torch.bfloat16
    output.float().sum().backward()
    assert model.first.seen == [(torch.bfloat16, torch.bfloat16)]
    for name, param in model.named_parameters():
        assert param.dtype == torch.float32, name
        assert param.grad.dtype == param.grad.to_local().dtype == torch.float32, name


@on_ranks(2)
def test_parameters_kept_in_bf16_are_reduced_in_float32_and_get_bf16_gradients(rank: Rank) -> None:
    mesh = rank.mesh()

    def build() -> nn.Module:
        return Net().to(torch.bfloat16)

    def ours(model: Net) -> None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        fully_shard(model.first, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)

    def torchs(model: Net) -> None:
        policy = TorchPolicy(reduce_dtype=torch.float32)
        torch_fully_shard(model.first, mesh=mesh, mp_policy=policy)
        torch_fully_shard(model, mesh=mesh, mp_policy=policy)

    trained = assert_same_training(build, ours, Training(make_batch), oracle=torchs)
    trained.sharded(batch_of(9, rank.rank)).float().sum().backward()
    for param in trained.sharded.parameters():
        assert param.dtype == param.grad.dtype == torch.bfloat16


@on_ranks(2)
def test_units_with_different_policies_train_as_in_torch(rank: Rank) -> None:
    mesh = rank.mesh()
    low = {"param_dtype": torch.bfloat16, "output_dtype": torch.float32}
    kept = {"param_dtype": torch.float32, "cast_forward_inputs": False}

    def ours(model: Net) -> None:
        fully_shard(model.first, mesh=mesh, mp_policy=MixedPrecisionPolicy(**low))
        fully_shard(model.second, mesh=mesh, mp_policy=MixedPrecisionPolicy(**kept))
        fully_shard(model, mesh=mesh)

    def torchs(model: Net) -> None:
        torch_fully_shard(model.first, mesh=mesh, mp_policy=TorchPolicy(**low))
        torch_fully_shard(model.second, mesh=mesh, mp_policy=TorchPolicy(**kept))
        torch_fully_shard(model, mesh=mesh)

    trained = assert_same_training(Net, ours, Training(make_batch), oracle=torchs)
    assert set(trained.sharded.first.seen) == {(torch.bfloat16, torch.bfloat16)}
    assert set(trained.sharded.second.seen) == {(torch.float32, torch.float32)}
    assert trained.sharded.first.seen == trained.reference.first.seen
    assert trained.sharded.second.seen == trained.reference.second.seen


@pytest.mark.parametrize("cast", [True, False])
@on_ranks(2)
def test_forward_inputs_are_cast_only_if_asked(rank: Rank, cast: bool) -> None:
    seen: list[torch.dtype] = []

    class Inputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))

        def forward(self, x, index, *, more):
            seen.extend((x.dtype, index.dtype, more["deep"][0].dtype))
            return (x + more["deep"][0]) * self.weight * index

    model = Inputs()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=cast)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    more = {"deep": [torch.ones(6, dtype=torch.float64)]}
    output = model(torch.ones(4, 6), torch.ones(6, dtype=torch.int64), more=more)
    if cast:
        assert seen == [torch.bfloat16, torch.int64, torch.bfloat16]
        assert output.dtype == torch.bfloat16
    else:
        assert seen == [torch.float32, torch.int64, torch.float64]
        assert output.dtype == torch.float64
    assert more["deep"][0].dtype == torch.float64, "the caller's container was changed"


@on_ranks(2)
def test_a_cast_input_still_takes_its_gradient_in_its_own_dtype(rank: Rank) -> None:
    model = nn.Linear(6, 3)
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    x = batch_of(0, rank.rank).requires_grad_()
    model(x).sum().backward()
    weight = full(model.weight).to(torch.bfloat16)
    assert x.grad.dtype == torch.float32
    torch.testing.assert_close(x.grad, weight.sum(0).float().expand(4, 6), rtol=2e-2, atol=1e-2)


@on_ranks(4)
def test_a_reduction_in_fp16_divides_before_it_would_overflow(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for rows in (4, 3):
        model = nn.Linear(1, rows, bias=False)
        fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
        # 30000 a rank: the sum over 4 ranks is beyond fp16's 65504, half of it is not.
        model(torch.full((1, 1), 30000.0)).sum().backward()
        assert torch.equal(full(model.weight.grad), torch.full((rows, 1), 30000.0))


@on_ranks(4)
def test_a_reduction_in_fp16_over_shards_and_replicas_divides_as_torch_does(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))

    def ours(model: nn.Module) -> None:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))

    def torchs(model: nn.Module) -> None:
        torch_fully_shard(model, mesh=mesh, mp_policy=TorchPolicy(reduce_dtype=torch.float16))

    assert_same_training(Net, ours, Training(make_batch), oracle=torchs, rtol=2e-3, atol=1e-4)


class Mixed(nn.Module):
    """Parameters of several dtypes, none of which is cast for another."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(dtype) for dtype in dtypes)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            self.seen.add(layer.weight.dtype)
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float() * self.scale


MIXTURES = {
    (torch.float64, torch.float32, torch.float64): EQUAL,
    (torch.bfloat16, torch.float32, torch.float64): ROUNDED,
}


@pytest.mark.parametrize("precision", [None, {"param_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_dtypes_mixed_in_a_unit_are_each_trained_in_their_own(
    rank: Rank, api: str, precision: dict[str, Any] | None
) -> None:
    for (dtypes, near), strategy in zip(MIXTURES.items(), ("NO_SHARD", "FULL_SHARD"), strict=True):
        learner = assert_trains_alike(
            partial(Mixed, dtypes),
            lambda package, model, s=strategy: unit_sharder(
                package, api, s, mixed_precision=precision
            )(model),
            torch_shard=None,  # torch refuses
            near=ROUNDED if precision else near,
        )
        assert learner.model.seen == ({torch.bfloat16} if precision else set(dtypes))
        found = [learner.full_parameters()[f"layers.{i}.weight"].dtype for i in range(3)]
        assert found == list(dtypes)
        if api == "flat":
            flat_names = ["_flat_param", "_flat_param_1", "_flat_param_2"][: len(set(dtypes))]
            names = [name.split(".")[-1] for name, _ in learner.model.named_parameters()]
            assert names == flat_names


class Quantized(nn.Module):
    """An int8 weight with a trained scale for each row."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.randint(-127, 128, (7, 6), dtype=torch.int8)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.scale = nn.Parameter(torch.full((7, 1), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


@pytest.mark.parametrize("param_dtype", [None, torch.bfloat16])
@on_ranks(2)
def test_an_integer_weight_is_sharded_and_keeps_its_dtype(rank: Rank, param_dtype: Any) -> None:
    seen: list[torch.dtype] = []

    def shard(model: nn.Module) -> None:
        fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(param_dtype))
        model.register_forward_pre_hook(lambda m, _: seen.append(m.weight.dtype))

    tolerance = {} if param_dtype is None else {"rtol": 3e-2, "atol": 3e-2}
    trained = assert_same_training(Quantized, shard, Training(make_batch), **tolerance)
    assert set(seen) == {torch.int8}
    assert trained.sharded.weight.to_local().dtype == torch.int8
    assert trained.sharded.weight.to_local().shape == ((4, 3)[rank.rank], 6)
    assert trained.sharded.weight.grad is None


@on_ranks(2)
def test_a_complex_parameter_trains_as_unsharded(rank: Rank) -> None:
    class Wave(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.phase = nn.Parameter(torch.randn(5, 6, dtype=torch.complex64))
            self.gain = nn.Parameter(torch.ones(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.to(torch.complex64) @ self.phase.T).abs() * self.gain

    assert_same_training(Wave, lambda m: fully_shard(m, mesh=rank.mesh()), Training(make_batch))


def sharded_and_reference(rank: Rank, frozen: tuple[str, ...] = ()) -> tuple[nn.Module, nn.Module]:
    """A model with a unit inside, and an unsharded copy; `frozen` before sharding."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5), nn.Tanh(), nn.Linear(5, 3))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    reference = copy.deepcopy(model)
    fully_shard(model[0], mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    return model, reference


NAMES = ["0.weight", "2.bias", "4.weight"]


@pytest.mark.parametrize("is_trained", [False, True])
@on_ranks(2)
def test_a_parameter_frozen_or_thawed_before_the_first_forward_is_planned_so(
    rank: Rank, is_trained: bool
) -> None:
    for name in NAMES:
        model, reference = sharded_and_reference(rank, frozen=(name,) if is_trained else ())
        for each in (model, reference):
            each.get_parameter(name).requires_grad_(is_trained)
        for step in range(2):
            step_both(rank, model, reference, step)
        unit = hooks_of(model[0] if name.startswith("0") else model).units[0]
        frozen = [entry.name for entry in unit.layout.params if not entry.is_trainable]
        assert frozen == ([] if is_trained else [name])


@pytest.mark.parametrize("frozen_first", [False, True])
@on_ranks(2)
def test_a_parameter_frozen_or_thawed_between_steps_trains_as_unsharded(
    rank: Rank, frozen_first: bool
) -> None:
    for name in NAMES:
        model, reference = sharded_and_reference(rank, frozen=(name,) if frozen_first else ())
        step_both(rank, model, reference, 0)
        for trainable in (frozen_first, not frozen_first):
            for each in (model, reference):
                each.get_parameter(name).requires_grad_(trainable)
            step_both(rank, model, reference, 1)
            step_both(rank, model, reference, 2)


@on_ranks(2)
def test_a_parameter_frozen_after_an_evaluation_stays_frozen(rank: Rank) -> None:
    model, reference = sharded_and_reference(rank)
    step_both(rank, model, reference, 0)
    with torch.no_grad():
        model(batch_of(7, rank.rank))
    for each in (model, reference):
        each[4].weight.requires_grad_(False)
    for step in range(1, 4):
        step_both(rank, model, reference, step)
    assert not model[4].weight.requires_grad


@on_ranks(2)
def test_all_ranks_reduce_alike_in_low_precision(rank: Rank) -> None:
    # A 0-dim parameter is kept whole on every rank: its copies must not drift apart.
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(6))
            self.gain = nn.Parameter(torch.tensor(1.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight * self.gain

    model = Scaled()
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.bfloat16)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    for step in range(3):
        model.zero_grad()
        model(batch_of(step, rank.rank)).square().mean().backward()
        with torch.no_grad():
            model.gain.sub_(model.gain.grad, alpha=0.1)
    values = [torch.empty(()) for _ in range(rank.size)]
    dist.all_gather(values, model.gain.detach().to_local())
    assert values[0] != 1.0
    assert all(torch.equal(value, values[0]) for value in values)


# Torch's own objects


@on_ranks(2)
def test_torchs_policies_mean_for_fully_shard_what_ours_do(rank: Rank) -> None:
    settings = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}

    def torchs(model: Net) -> None:
        fully_shard(model.first, mesh=rank.mesh(), mp_policy=TorchPolicy(**settings))
        fully_shard(model, mesh=rank.mesh(), mp_policy=TorchPolicy(**settings))

    def ours(model: Net) -> None:
        fully_shard(model.first, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**settings))
        fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**settings))

    trained = assert_same_training(
        Net, torchs, Training(make_batch), oracle=ours, rtol=0.0, atol=0.0
    )
    for sharded in (trained.sharded, trained.reference):
        (unit,) = hooks_of(sharded).units
        assert unit.policy == MixedPrecisionPolicy(**settings)
    for given, expected in (
        (torch_fsdp.CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy(pin_memory=False)),
        (torch_fsdp.OffloadPolicy(), OffloadPolicy()),
    ):
        model = fully_shard(nn.Linear(4, 3), mesh=rank.mesh(), offload_policy=given)
        assert hooks_of(model).request.offload == expected
    with pytest.raises(
        ConfigError,
        match="this MixedPrecision is not a MixedPrecisionPolicy: it has no output_dtype",
    ):
        fully_shard(nn.Linear(4, 3), mesh=rank.mesh(), mp_policy=torch_fsdp.MixedPrecision())


@on_ranks(2)
def test_torchs_policies_mean_for_the_wrapper_what_ours_do(rank: Rank) -> None:
    settings = {"param_dtype": torch.bfloat16, "buffer_dtype": torch.bfloat16}

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def wrapped(model: nn.Module, precision: Any) -> nn.Module:
        with pytest.warns(UserWarning, match="the model has"):  # the batch norm stays in float32
            return FullyShardedDataParallel(
                model,
                auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
                mixed_precision=precision,
                device_id=torch.device("cpu"),
                use_orig_params=True,
            )

    trained = assert_same_training(
        build,
        lambda model: wrapped(model, torch_fsdp.MixedPrecision(**settings)),
        Training(make_batch),
        oracle=lambda model: wrapped(model, MixedPrecision(**settings)),
        rtol=0.0,
        atol=0.0,
    )
    assert trained.sharded.mixed_precision == MixedPrecision(**settings)
    assert hooks_of(trained.sharded.module[1]).request.policy == MixedPrecisionPolicy(
        cast_forward_inputs=False
    )
    with pytest.raises(ConfigError, match="this dict is not a MixedPrecision: it has no"):
        FullyShardedDataParallel(nn.Linear(4, 3), mixed_precision=settings)


@on_ranks(2)
def test_a_parameter_that_the_policy_leaves_alone_keeps_its_dtype(rank: Rank) -> None:
    asked = []

    def keep_norms(param: nn.Parameter) -> torch.dtype | None:
        asked.append(param.shape)
        return param.dtype if param.ndim == 1 else None

    kept = {"param_dtype": torch.bfloat16, "cast_forward_inputs": False}
    for shard, policy in ((fully_shard, MixedPrecisionPolicy), (torch_fully_shard, TorchPolicy)):
        if policy is TorchPolicy and TORCH < (2, 15):
            continue
        asked.clear()
        model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6))
        own = policy(**kept, param_dtype_override_fn=keep_norms)
        shard(model, mesh=rank.mesh(), mp_policy=own)
        assert len(asked) == 3
        model.unshard()
        assert model[0].weight.dtype == torch.bfloat16
        assert model[1].weight.dtype == model[1].bias.dtype == torch.float32
        model.reshard()
        wrong = policy(**kept, param_dtype_override_fn=lambda _: torch.float16)
        with pytest.raises(ValueError, match=r"float16"):
            shard(nn.Linear(2, 2), mesh=rank.mesh(), mp_policy=wrong)

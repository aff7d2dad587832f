"""Parameters and gradients that travel in eight bits, with a scale for each block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fullshard import (
    ConfigError,
    DisagreementError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.runtime.hooks import units_below
from fullshard.testing import Rank, on_ranks
from fullshard.wire import Fp8, Int4, Int8, Plain, Wire
from tests.layout.test_trial_values import WIDTH, Net
from tests.layout.test_wire import Probe, both_apis, full_gradient, new_group

WIRES = [
    *(Int8(block=16), Int8(block=64), Int8(block=32, stochastic=True), Fp8(block=32)),
    *(Int4(block=16), Int4(), Int4(block=32, stochastic=True)),
]


def sent(wire: Wire, segments: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Segments as they arrive."""
    rows, numel = segments.shape
    messages = torch.empty(rows, wire.message_numel(numel), dtype=wire.dtype)
    wire.encode(segments, messages)
    assert messages.nbytes % 16 == 0
    arrived = torch.full(segments.shape, 7.0, dtype=dtype)
    wire.decode(messages, arrived)
    return arrived


def by_block(wire: Any, values: torch.Tensor) -> torch.Tensor:
    return values.unflatten(1, (-1, wire.block))


def rounded_part(wire: Any, values: torch.Tensor) -> torch.Tensor:
    """By block, what a wire rounds: of four bits, the Hadamard transform of the values."""
    blocks = by_block(wire, values.double())
    if not isinstance(wire, Int4):
        return blocks
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < wire.block:
        matrix = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]]).double(), matrix)
    return blocks @ matrix / wire.block


@st.composite
def segments(draw: st.DrawFn, wire: Any) -> torch.Tensor:
    """Values of any magnitude, some blocks of zeros and some values that float32 barely has."""
    rows, count = draw(st.integers(1, 3)), draw(st.integers(0, 3))
    numel = count * wire.alignment_numel
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    values = torch.randn(rows, numel, generator=generator)
    exponents = draw(st.sampled_from([(0, 1), (-30, 30), (-44, -36)]))
    powers = torch.randint(*exponents, (rows, numel // wire.block, 1), generator=generator)
    scaled = by_block(wire, values) * 10.0 ** powers.double()
    scaled *= torch.rand(scaled.shape[:2], generator=generator).gt(0.2).unsqueeze(-1)
    return scaled.float().flatten(1)


@pytest.mark.parametrize("wire", WIRES, ids=str)
@given(data=st.data())
def test_values_arrive_rounded_by_block(wire: Any, data: st.DataObject) -> None:
    values = data.draw(segments(wire))
    found = sent(wire, values)
    given = rounded_part(wire, values)
    largest = given.abs().amax(-1, keepdim=True)
    error = (rounded_part(wire, found) - given).abs()
    if isinstance(wire, Int8 | Int4):
        limit = largest / (wire.largest if wire.stochastic else 2 * wire.largest) * 1.0001
    else:
        # Three bits after the point; below 2**-6 of what a scale stands for, fixed steps.
        limit = torch.maximum(given.abs() / 15.9, largest / 448 * 2**-9)
    # Scales that float32 has with few bits only are those of a block of zeros.
    limit = torch.where(largest < 448 * 1.2e-38, largest, limit)
    assert (error <= limit).all()
    for row in range(len(values)):
        torch.testing.assert_close(sent(wire, values[row : row + 1])[0], found[row])
    exact = found.to(torch.bfloat16)
    assert torch.equal(sent(wire, values, torch.bfloat16), exact)


def test_values_that_are_rounded_stochastically_are_right_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    near = torch.full((64, 1 << 12), 0.3)  # of a step, which the largest of each block decides
    near[:, ::64] = 127 * (1 + 1e-3 * torch.rand(64, 64, generator=generator))
    for wire, bias in ((Int8(block=64), 0.3), (Int8(block=64, stochastic=True), 0.0)):
        found = sent(wire, near).view(64, 64, 64)[..., 1:]
        # The mean of 258,048 values that are 0 or 1.
        assert 0.3 - float(found.mean()) == pytest.approx(bias, abs=0.005)
        assert torch.equal(sent(wire, near).view(64, 64, 64)[..., 1:], found)


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_arrives_as_nan_with_its_block_alone(
    wire: Any, value: float
) -> None:
    values = torch.randn(2, 2 * wire.alignment_numel)
    expected = sent(wire, values)
    values[1, wire.block + 3] = value
    found = by_block(wire, sent(wire, values))
    assert found[1, 1].isnan().all()
    found[1, 1] = by_block(wire, expected)[1, 1]
    assert torch.equal(found.flatten(1), expected)


def test_long_segments_are_cut_where_blocks_end() -> None:
    wire, values = Int8(), torch.randn(3, 1 << 18)
    found = sent(wire, values)
    for part, expected in zip(values.split(1024, 1), found.split(1024, 1), strict=True):
        assert torch.equal(sent(wire, part), expected)
    wire = Int8(stochastic=True)  # what a value rounds to depends on its place
    assert torch.equal(sent(wire, values)[:, : 1 << 16], sent(wire, values[:, : 1 << 16]))


def losses(rank: Rank, mesh: DeviceMesh, api: str, **wires: Any) -> list[float]:
    torch.manual_seed(0)
    model: Any = Net()
    if api == "wrapper":
        strategy: Any = {}
        if mesh.ndim == 2:
            strategy = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
        model = FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            use_orig_params=True,
            mixed_precision=MixedPrecision(**wires),
            **strategy,
        )
    else:
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**wires))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(rank.rank))
    found = []
    for _ in range(12):
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("wire", [Int8(block=16), Fp8(block=32)], ids=str)
@pytest.mark.parametrize("over_gloo", [False, True])
@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@on_ranks(2)
def test_training_is_nearly_the_same(rank: Rank, api: str, over_gloo: bool, wire: Wire) -> None:
    with new_group(over_gloo=over_gloo) as group:
        mesh = DeviceMesh.from_group(group, "cpu")
        expected = losses(rank, mesh, api)
        found = losses(rank, mesh, api, gather_wire=wire, reduce_wire=wire)
    assert expected[-1] < expected[0] / 2
    assert found != expected
    rounding = 0.05 if isinstance(wire, Fp8) else 0.02
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=rounding, atol=0)


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
@on_ranks(4)
def test_replicas_that_exchange_sums_in_eight_bits_stay_equal(rank: Rank, api: str) -> None:
    mesh = rank.mesh((2, 2), ("replicas", "shards"))
    wires = {"gather_wire": Int8(block=16), "reduce_wire": Int8(block=16)}
    expected, found = losses(rank, mesh, api), losses(rank, mesh, api, **wires)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=0.02, atol=0)


SHAPES = {"wide": (7, 33), "tall": (65, 17), "row": (1, 100), "cube": (3, 5, 11)}


class Seen(Probe):
    def forward(self, grads: dict[str, torch.Tensor]) -> torch.Tensor:
        self.seen = {name: param.detach().clone() for name, param in self.named_parameters()}
        return super().forward(grads)


@pytest.mark.parametrize("wire", [Int8(block=16), Int8(block=48), Fp8(block=64)], ids=str)
@on_ranks(2, 3, 4)
def test_shards_of_any_size_arrive_on_any_number_of_ranks(rank: Rank, wire: Any) -> None:
    """Of zeros and the largest of a block, a wire loses nothing."""

    def drawn(seed: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        signs = {n: torch.randint(-1, 2, shape, generator=generator) for n, shape in SHAPES.items()}
        return {name: wire.largest * each.float() for name, each in signs.items()}

    values, *grads = map(drawn, range(1 + rank.size))
    for shard in both_apis(rank):
        probe = Seen(**{name: each.clone() for name, each in values.items()})
        model = shard(probe, {"gather_wire": wire, "reduce_wire": wire})
        model(grads[rank.rank]).backward()
        for name, value in values.items():
            assert torch.equal(probe.seen[name], value), name
            mean = torch.stack([each[name] for each in grads]).mean(0)
            torch.testing.assert_close(full_gradient(model, name), mean)
    values["tall"][64, 16] = math.inf
    grads[-1]["wide"][6, 32] = math.nan  # of one rank
    for shard in both_apis(rank):
        probe = Seen(**{name: each.clone() for name, each in values.items()})
        model = shard(probe, {"gather_wire": wire, "reduce_wire": wire})
        model(grads[rank.rank]).backward()
        assert not probe.seen["tall"][64, 16].isfinite()
        assert not full_gradient(model, "wide")[6, 32].isfinite()
        assert full_gradient(model, "wide")[0, 0].isfinite()


@on_ranks(2)
def test_only_matrices_travel_in_eight_bits(rank: Rank) -> None:
    wire = Int8(block=16)
    model: Any = Net()
    fully_shard(
        model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(gather_wire=wire, reduce_wire=wire)
    )
    (unit,) = units_below(model)
    found = {p.name: (p.dtypes.gather_wire, p.dtypes.reduce_wire) for p in unit.params}
    plain = (Plain(torch.float32),) * 2
    assert found == {
        "first.weight": (wire, wire),
        "last.weight": (wire, wire),
        "first.bias": plain,
        "last.bias": plain,
        "gain": plain,
    }


@on_ranks(2)
def test_a_function_chooses_the_wire_of_each_matrix(rank: Rank) -> None:
    wire, seen = Int8(block=16), {}

    def chosen(name: str, shape: torch.Size) -> Wire | None:
        seen[name] = shape
        return wire if name.startswith("first") else None

    model: Any = Net()
    shapes = {name: param.shape for name, param in model.named_parameters()}
    fully_shard(model, mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(gather_wire=chosen))
    assert seen == shapes
    (unit,) = units_below(model)
    found = {p.name for p in unit.params if p.dtypes.gather_wire == wire}
    assert found == {"first.weight"}
    model(torch.randn(2, WIDTH)).sum().backward()
    policy = MixedPrecisionPolicy(gather_wire=lambda name, shape: "int8")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gain: a function that chooses wires must"):
        fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)
    policy = MixedPrecisionPolicy(gather_wire=lambda name, shape: Int4())
    with pytest.raises(ConfigError, match="weight: parameters cannot be gathered as"):
        fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)


@on_ranks(2)
def test_parameters_of_integers_travel_as_they_are(rank: Rank) -> None:
    def whole() -> nn.Module:
        model = nn.Linear(8, 4)
        model.table = nn.Parameter(torch.arange(64).view(8, 8), requires_grad=False)
        return model

    wires = {"gather_wire": Int8(block=16), "reduce_wire": Int4(block=16)}
    model: Any = fully_shard(whole(), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**wires))
    model.unshard()
    assert torch.equal(model.table, torch.arange(64).view(8, 8))
    policy = MixedPrecisionPolicy(gather_wire=lambda name, shape: Int8(block=16))
    words = "table: wires are for floating-point parameters, and this one is torch.int64"
    with pytest.raises(ConfigError, match=words):
        fully_shard(whole(), mesh=rank.mesh(), mp_policy=policy)


def test_a_wire_that_cannot_be_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="Int8: a block must have a multiple of 16 elements, not "
    ):
        Int8(block=24)
    for block in (8, 48):
        with pytest.raises(ConfigError, match=f"Int4: .* must be a power of two .*not {block}"):
            Int4(block=block)
    for kind in (MixedPrecisionPolicy, MixedPrecision):
        words = rf"^{kind.__name__}: gather_wire: parameters cannot be gathered as Int4\("
        with pytest.raises(ConfigError, match=words):
            kind(gather_wire=Int4())
        with pytest.raises(ConfigError, match="replica_wire must be a wire, such as"):
            kind(replica_wire="int4")
    with pytest.raises(ConfigError, match=r"gather_wire must be a wire, such as .*Int8\(\), not"):
        MixedPrecisionPolicy(gather_wire=torch.int8)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="gather_wire cannot be a function, because the param"):
        MixedPrecision(gather_wire=lambda name, shape: Int8())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="wire_dtype and reduce_wire both say how"):
        MixedPrecision(reduce_dtype=torch.float32, wire_dtype=torch.bfloat16, reduce_wire=Int8())


@on_ranks(2)
def test_collectives_of_a_users_own_are_given_values_only(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(gather_wire=Int8(block=16))
    model: Any = fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)
    with pytest.raises(ConfigError, match=r"cannot be combined with gather_wire=Int8\(block=16, "):
        model.set_custom_all_gather(object())
    policy = MixedPrecisionPolicy(reduce_wire=Int4(block=16))
    model = fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)
    with pytest.raises(ConfigError, match=r"cannot be combined with reduce_wire=Int4\(block=16, "):
        model.set_custom_reduce_scatter(object())
    wrapper = FullyShardedDataParallel(
        Net(), device_id=torch.device("cpu"), mixed_precision=MixedPrecision(reduce_wire=Int4())
    )
    with pytest.raises(ConfigError, match=r"register_comm_hook cannot be combined with reduce_wi"):
        wrapper.register_comm_hook(None, lambda *_: None)


@on_ranks(2)
def test_parameters_travel_in_eight_bits_in_memory_of_the_process_group(rank: Rank) -> None:
    found = []
    for in_group_memory in (False, True):
        policy = MixedPrecisionPolicy(gather_wire=Int8(block=16))
        torch.manual_seed(0)
        model: Any = fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)
        model.set_allocate_memory_from_process_group_for_comm(in_group_memory)
        found.append(model(torch.ones(2, WIDTH)))
    assert torch.equal(*found)
    model = fully_shard(
        Net(), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(reduce_wire=Int8(block=16))
    )
    with pytest.raises(ConfigError, match=r"_for_comm cannot be combined with reduce_wire=Int8\("):
        model.set_allocate_memory_from_process_group_for_comm(True)


@on_ranks(2)
def test_ranks_whose_functions_choose_other_wires_are_told_both(rank: Rank) -> None:
    """Messages of both have the same size, so that nothing else would notice."""
    wire: Wire = Int8(block=16) if rank.rank else Fp8(block=16)
    policy = MixedPrecisionPolicy(reduce_wire=lambda name, _: wire if "last" in name else None)
    model = fully_shard(Net(), mesh=rank.mesh(), mp_policy=policy)
    words = r"reduce_wire is .*, last.weight Int8\(.* on rank 1 .*, last.weight Fp8\(.* on rank 0"
    with pytest.raises(DisagreementError, match=words):
        model(torch.randn(2, WIDTH))
    dist.barrier()


@pytest.mark.parametrize("key", ["gather_wire", "reduce_wire", "replica_wire"])
@on_ranks(2)
def test_ranks_with_other_wires_are_told_both(rank: Rank, key: str) -> None:
    wire: Wire = Int8(block=16) if rank.rank else Fp8(block=16)
    model = fully_shard(Net(), mesh=rank.mesh(), mp_policy=MixedPrecisionPolicy(**{key: wire}))
    with pytest.raises(
        DisagreementError,
        match=rf"{key} is Int8\(block=16, .*\) on rank 1 .* Fp8\(block=16\) on rank 0",
    ):
        model(torch.randn(2, WIDTH))
    dist.barrier()

"""Gradients that travel in a narrower dtype than they are added up in (rule 6)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fullshard import (
    ConfigError,
    FullyShardedDataParallel,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardingStrategy,
    fully_shard,
)
from fullshard.comm.collectives import Collectives, GlooCollectives, ShmCollectives, collectives_for
from fullshard.comm.heap import SWITCH
from fullshard.comm.placement import full_tensor
from fullshard.comm.shm import link_of
from fullshard.comm.work import CollectiveWork
from fullshard.layout import CostModel, Plain
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, on_ranks
from tests.support.counted import CountedReduce

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CPU = torch.device("cpu")

Policy = dict[str, Any]
Shard = Callable[[nn.Module, Policy], nn.Module]


class Probe(nn.Module):
    """Parameters whose gradients are the values passed to forward, by name."""

    def __init__(self, **params: Tensor) -> None:
        super().__init__()
        for name, value in params.items():
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        products = [(self.get_parameter(name) * grad).sum() for name, grad in grads.items()]
        return torch.stack([product.double() for product in products]).sum()


def drawn(shape: int | tuple[int, ...], seed: int, dtype: torch.dtype = FP32) -> Tensor:
    """Values that no dtype of 16 bits can hold."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=FP64).to(dtype)


def full_gradient(model: nn.Module, name: str) -> Tensor:
    """The full gradient, on all ranks."""
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model, with_grads=True):
            grad = model.module.get_parameter(name).grad
            assert grad is not None
            return grad.clone()
    grad = model.get_parameter(name).grad
    assert isinstance(grad, DTensor)
    return full_tensor(grad)


def in_place(mesh: DeviceMesh) -> Shard:
    return lambda model, policy: fully_shard(
        model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy)
    )


def wrapped(**options: Any) -> Shard:
    return lambda model, policy: FullyShardedDataParallel(
        model,
        device_id=CPU,
        use_orig_params=True,
        mixed_precision=MixedPrecision(**policy),
        **options,
    )


def both_apis(rank: Rank) -> list[Shard]:
    return [in_place(rank.mesh()), wrapped()]


@contextmanager
def new_group(*, over_gloo: bool) -> Iterator[dist.ProcessGroup]:
    if over_gloo:
        os.environ[SWITCH] = "0"
    group = dist.new_group()
    try:
        assert (link_of(group) is None) == over_gloo
        yield group
    finally:
        os.environ.pop(SWITCH, None)
        dist.barrier()
        dist.destroy_process_group(group)


@contextmanager
def counted_bytes() -> Iterator[list[int]]:
    """The bytes that this rank sends, per reduce."""
    found: list[int] = []
    reduce = ShmCollectives.reduce_scatter

    def counted(
        self: ShmCollectives,
        outs: Sequence[Tensor],
        ins: Sequence[Tensor],
        *args: Any,
        **kwargs: Any,
    ) -> CollectiveWork:
        found.append(sum(inp.nbytes for inp in ins))
        return reduce(self, outs, ins, *args, **kwargs)

    with patch.object(ShmCollectives, "reduce_scatter", counted):
        yield found


# Computed in the dtype they travel in


def trained(rank: Rank, shard: Shard, policy: Policy) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and full parameters."""
    torch.manual_seed(0)
    layers = [nn.Linear(160, 160), nn.LayerNorm(160), nn.Tanh(), nn.Linear(160, 7)]
    model = shard(nn.Sequential(*layers), policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(3):
        loss = model(drawn((4, 160), 10 * step + rank.rank)).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if isinstance(model, FullyShardedDataParallel):
        with FullyShardedDataParallel.summon_full_params(model):
            return losses, {n: p.detach().clone() for n, p in model.module.named_parameters()}
    return losses, {name: full_tensor(p.detach()) for name, p in model.named_parameters()}


@pytest.mark.parametrize("over_gloo", [False, True], ids=["shared_memory", "gloo"])
@on_ranks(2, 4)
def test_gradients_computed_in_the_wire_dtype_train_the_same_to_the_last_bit_with_half_the_bytes(
    rank: Rank, over_gloo: bool
) -> None:
    with new_group(over_gloo=over_gloo) as group:
        # Meshes of the same ranks and names are the same mesh to torch, whatever the group.
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"wire_{over_gloo}",))
        for shard in (in_place(mesh), wrapped(process_group=group)):
            usual = {"param_dtype": BF16, "reduce_dtype": FP32}
            with counted_bytes() as expected_bytes:
                expected_losses, expected = trained(rank, shard, usual)
            with counted_bytes() as found_bytes:
                losses, found = trained(rank, shard, {**usual, "wire_dtype": BF16})
            assert losses == expected_losses
            for name, value in expected.items():
                assert torch.equal(found[name], value), name
            assert len(found_bytes) == 3
            assert [2 * num_bytes for num_bytes in found_bytes] == expected_bytes


@on_ranks(2)
def test_a_gradient_that_was_computed_in_the_wire_dtype_is_sent_without_a_copy(rank: Rank) -> None:
    is_copied = []
    reduce = ShmCollectives.reduce_scatter

    def noted(
        self: ShmCollectives, outs: Any, ins: Any, group: Any, **kwargs: Any
    ) -> CollectiveWork:
        link = link_of(group)
        assert link is not None
        # A gradient that has to be copied is copied into shared memory.
        is_copied.extend(link.heap.find(sent) is not None for sent in ins)
        return reduce(self, outs, ins, group, **kwargs)

    shape, own_buckets = (64, 256), CostModel(0.0, 0.0)
    for wire in (None, BF16):
        policy = {"param_dtype": BF16, "reduce_dtype": FP32, "wire_dtype": wire}
        with (
            patch.object(CostModel, "of_device", lambda _: own_buckets),
            patch.object(ShmCollectives, "reduce_scatter", noted),
        ):
            model = in_place(rank.mesh())(Probe(weight=torch.ones(shape)), policy)
            model({"weight": torch.ones(shape)}).backward()
    assert is_copied == [True, False]


# Cast on the way


def by_hand(grads: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """The mean of what arrives, added up in the order of ranks."""
    total = grads[0].to(wire).to(grads[0].dtype)
    for grad in grads[1:]:
        total = total + grad.to(wire).to(grad.dtype)
    return total / len(grads)


@on_ranks(2, 4)
def test_a_gradient_is_the_float32_mean_of_what_was_cast(rank: Rank) -> None:
    shape = (33, 5)
    grads = [drawn(shape, other) for other in range(rank.size)]
    grads[0][0, 0], grads[1][0, 0] = 256.0, 1.0
    for other in range(2, rank.size):
        grads[other][0, 0] = 0.0
    expected = by_hand(grads, BF16)
    in_bf16 = torch.stack([grad.to(BF16) for grad in grads]).sum(0).float() / rank.size
    assert expected[0, 0] == 257 / rank.size != in_bf16[0, 0]
    for shard in both_apis(rank):
        model = shard(Probe(weight=torch.ones(shape)), {"wire_dtype": BF16})
        model({"weight": grads[rank.rank]}).backward()
        found = full_gradient(model, "weight")
        assert found.dtype == FP32
        assert torch.equal(found, expected)
        assert not torch.equal(found, torch.stack(grads).mean(0)), "nothing was cast"


@on_ranks(4)
def test_a_float16_wire_carries_sums_that_float16_cannot_hold(rank: Rank) -> None:
    grads = [torch.tensor([60000.0, 1.0 + other / 7, -3e-6]) for other in range(rank.size)]
    for shard in both_apis(rank):
        model = shard(Probe(weight=torch.ones(3)), {"reduce_dtype": FP32, "wire_dtype": FP16})
        model({"weight": grads[rank.rank]}).backward()
        found = full_gradient(model, "weight")
        assert torch.equal(found, by_hand(grads, FP16))
        assert found[0] == 60000.0
        assert found[2] != 0.0


@on_ranks(2)
def test_every_lane_travels_as_its_dtype_allows(rank: Rank) -> None:
    shapes = {"wide": (6, 4), "usual": (5,), "scalar": (), "low": (9, 2)}
    dtypes = {"wide": FP64, "usual": FP32, "scalar": FP32, "low": BF16}
    arriving = {"wide": FP32, "usual": FP32, "scalar": FP32, "low": BF16}

    def grads(other: int) -> dict[str, Tensor]:
        return {name: drawn(shape, other, dtypes[name]) for name, shape in shapes.items()}

    for shard in both_apis(rank):
        params = {name: torch.ones(shape, dtype=dtypes[name]) for name, shape in shapes.items()}
        probe = Probe(**params, frozen=torch.ones(7))
        probe.frozen.requires_grad_(False)
        model = shard(probe, {"wire_dtype": FP32})
        given = grads(rank.rank)
        model({**given, "frozen": torch.ones(7)}).backward()
        for name in shapes:
            expected = by_hand([grads(other)[name] for other in range(2)], arriving[name])
            if name == "low":  # reduced as it is computed, and so as it travels
                both = [grads(other)[name].float() for other in range(2)]
                expected = (both[0] + both[1]).to(BF16) / 2
            found = full_gradient(model, name)
            assert found.dtype == dtypes[name], name
            assert torch.equal(found, expected), name
        assert model.get_parameter("frozen").grad is None


# Further ways to reduce


def over_replicas(sums: Sequence[Tensor], wire: torch.dtype) -> Tensor:
    """The mean of four ranks from the sums of two replicas, as these exchange and gather it."""
    if wire is FP16:  # does not hold every sum
        return (sums[0] + sums[1]) / 4
    return (sums[0].to(wire).float() + sums[1].to(wire).float()).to(wire).float() / 4


@on_ranks(4)
def test_replicas_exchange_their_sums_in_the_wire_unless_that_is_float16(rank: Rank) -> None:
    grads = [drawn((8, 3), other) for other in range(4)]
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    hybrid = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    # For each rank and exchange, two segments in 16 bits: of four rows and padding, then of two.
    sent = {BF16: [2 * 4 * 8, 2 * 2 * 8], FP16: [2 * 4 * 8]}
    for wire in (BF16, FP16):
        # Pairs of shards are {0, 1} and {2, 3}.
        pairs = [by_hand(grads[:2], wire) * 2, by_hand(grads[2:], wire) * 2]
        for shard in (in_place(mesh), hybrid):
            model = shard(Probe(weight=torch.ones(8, 3)), {"wire_dtype": wire})
            with counted_bytes() as num_bytes:
                model({"weight": grads[rank.rank]}).backward()
            assert num_bytes == sent[wire]
            found = full_gradient(model, "weight")
            assert torch.equal(found, over_replicas(pairs, wire))


@on_ranks(4)
def test_sums_that_wait_for_the_replicas_are_kept_in_the_reduce_dtype(rank: Rank) -> None:
    grads = [[drawn((8, 3), 10 * step + other) for other in range(4)] for step in range(2)]
    sums = [
        [by_hand(grads[step][start : start + 2], BF16) * 2 for start in (0, 2)] for step in range(2)
    ]
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    model = in_place(mesh)(Probe(weight=torch.ones(8, 3)), {"wire_dtype": BF16})
    for step in range(2):
        model.set_requires_all_reduce(step == 1)
        model({"weight": grads[step][rank.rank]}).backward()
    expected = over_replicas([sums[0][0] + sums[1][0], sums[0][1] + sums[1][1]], BF16)
    assert torch.equal(full_gradient(model, "weight"), expected)


@on_ranks(2)
def test_gradients_kept_without_sync_are_cast_once_with_all_that_was_added(rank: Rank) -> None:
    grads = [[drawn((5, 3), 10 * step + other) for other in range(2)] for step in range(3)]
    kept = [(grads[0][other] + grads[1][other]) + grads[2][other] for other in range(2)]
    for shard in both_apis(rank):
        model = shard(Probe(weight=torch.ones(5, 3)), {"wire_dtype": BF16})
        for step in range(3):
            with nullcontext() if step == 2 else model.no_sync():
                model({"weight": grads[step][rank.rank]}).backward()
        assert torch.equal(full_gradient(model, "weight"), by_hand(kept, BF16))


@on_ranks(2)
def test_settings_of_a_reduction_mean_the_same(rank: Rank) -> None:
    grads = [drawn((5, 3), other) for other in range(2)]
    mean = by_hand(grads, BF16)

    def found(prepare: Callable[[Any], None]) -> Tensor:
        model = in_place(rank.mesh())(Probe(weight=torch.ones(5, 3)), {"wire_dtype": BF16})
        prepare(model)
        model({"weight": grads[rank.rank]}).backward()
        return full_gradient(model, "weight")

    assert torch.equal(found(lambda m: m.set_gradient_divide_factor(3.0)), mean * 2 / 3.0)
    assert torch.equal(found(lambda m: m.set_force_sum_reduction_for_comms(True)), mean)
    assert torch.equal(found(lambda m: m.set_separate_reduce_scatter_group()), mean)
    in_group_memory = found(lambda m: m.set_allocate_memory_from_process_group_for_comm(True))
    assert torch.equal(in_group_memory, mean)


# Without effect


def gradient_and_stages(model: nn.Module, grad: Tensor) -> tuple[Tensor, set[torch.dtype]]:
    model({"weight": grad}).backward()
    hooks = hooks_of(model)
    assert hooks is not None
    return (
        full_gradient(model, "weight"),
        {lane.dtypes.reduce_wire.dtype for unit in hooks.units for lane in unit.layout.lanes},
    )


@on_ranks(1)
def test_a_world_of_one_casts_nothing(rank: Rank) -> None:
    grad = drawn((6, 3), 0)
    for shard in both_apis(rank):
        model = shard(Probe(weight=torch.ones(6, 3)), {"wire_dtype": BF16})
        found, wires = gradient_and_stages(model, grad)
        assert torch.equal(found, grad)
        assert wires == {FP32}


@on_ranks(2)
def test_what_is_not_sharded_or_reduced_in_the_wire_dtype_travels_as_without_it(rank: Rank) -> None:
    grads = [drawn((6, 3), other) for other in range(2)]
    whole = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    replicated = in_place(rank.mesh((2, 1), ("replicate", "shard")))
    for shard in (whole, replicated):
        model = shard(Probe(weight=torch.ones(6, 3)), {"wire_dtype": BF16})
        found, wires = gradient_and_stages(model, grads[rank.rank])
        assert torch.equal(found, (grads[0] + grads[1]) / 2)
        assert wires == {FP32}
    for policy in ({"wire_dtype": FP32}, {"reduce_dtype": FP32, "wire_dtype": FP32}):
        model = in_place(rank.mesh())(Probe(weight=torch.ones(6, 3)), policy)
        found, wires = gradient_and_stages(model, grads[rank.rank])
        assert torch.equal(found, (grads[0] + grads[1]) / 2)
        assert wires == {FP32}


# The collectives


@on_ranks(2, 4)
def test_every_collective_adds_up_in_the_dtype_of_its_outputs(rank: Rank) -> None:
    group = rank.mesh().get_group()
    shared = collectives_for(group, CPU)
    assert link_of(group) is not None
    cases = [
        (BF16, FP32, [300_001]),  # more than is summed at once
        (FP16, FP32, [3, 1000]),
        (FP32, FP64, [64, 1, 17]),
        (BF16, FP64, [9]),
    ]
    for wire, reduced, sizes in cases:
        sent = [
            [drawn(rank.size * numel, 7 * other + numel, wire) for numel in sizes]
            for other in range(rank.size)
        ]
        expected = []
        for index in range(len(sizes)):
            segments = [each[index].view(rank.size, -1)[rank.rank] for each in sent]
            expected.append(by_hand([s.to(reduced) for s in segments], reduced) * rank.size)
        for collectives in (shared, GlooCollectives(), Collectives()):
            outs = [torch.full((numel,), -1.0, dtype=reduced) for numel in sizes]
            collectives.reduce_scatter(
                outs, sent[rank.rank], group, average=False, wire=Plain(wire)
            ).wait()
            for out, total in zip(outs, expected, strict=True):
                torch.testing.assert_close(out, total, rtol=1e-6, atol=1e-6)
                assert rank.size > 2 or torch.equal(out, total)
            if collectives is shared:
                assert all(map(torch.equal, outs, expected)), "added up in the order of ranks"
        means = [torch.empty(numel, dtype=reduced) for numel in sizes]
        Collectives().reduce_scatter(
            means, sent[rank.rank], group, average=True, wire=Plain(wire)
        ).wait()
        for mean, total in zip(means, expected, strict=True):
            torch.testing.assert_close(mean, total / rank.size, rtol=1e-6, atol=1e-6)


@on_ranks(2)
def test_where_a_backend_averages_by_itself_the_mean_is_taken_after_the_exchange(
    rank: Rank,
) -> None:
    grads = [drawn((33, 5), other) for other in range(2)]
    with patch("fullshard.unit.unit.collectives_for", lambda *_: Collectives()):
        models = [
            shard(Probe(weight=torch.ones(33, 5)), {"wire_dtype": BF16})
            for shard in both_apis(rank)
        ]
    for model in models:
        model({"weight": grads[rank.rank]}).backward()
        assert torch.equal(full_gradient(model, "weight"), by_hand(grads, BF16))


# Refused


def test_a_wire_dtype_that_cannot_be_is_refused_where_it_is_written() -> None:
    cases: list[tuple[Policy, str]] = [
        (
            {"wire_dtype": torch.int32},
            "floating-point dtype of at least 16 bits .* but is torch.int3",
        ),
        (
            {"wire_dtype": torch.float8_e4m3fn},
            "at least 16 bits .* but is torch.float8_e4m3fn with",
        ),
        ({"wire_dtype": "bf16"}, "at least 16 bits .* but is bf16"),
        (
            {"reduce_dtype": BF16, "wire_dtype": FP32},
            "narrower than .* but is torch.float32 with torch.bfloat16; pass a wider reduce_dtype",
        ),
        ({"param_dtype": BF16, "wire_dtype": FP32}, "but is torch.float32 with torch.bfloat16"),
        ({"reduce_dtype": BF16, "wire_dtype": FP16}, "but is torch.float16 with torch.bfloat16"),
    ]
    for kind in (MixedPrecisionPolicy, MixedPrecision):
        for policy, words in cases:
            with pytest.raises(
                ConfigError, match=f"^{kind.__name__}: wire_dtype must be .*{words}"
            ):
                kind(**policy)
        assert kind(BF16, FP32, wire_dtype=BF16).wire_dtype is BF16
        assert kind(BF16, wire_dtype=BF16).wire_dtype is BF16


@on_ranks(2)
def test_a_reduce_of_the_users_own_is_refused_beside_a_wire_dtype(rank: Rank) -> None:
    policy = {"reduce_dtype": FP32, "wire_dtype": BF16}
    words = "cannot be combined with wire_dtype=torch.bfloat16"
    model = in_place(rank.mesh())(nn.Linear(4, 3), policy)
    with pytest.raises(ConfigError, match=f"^Linear: set_custom_reduce_scatter {words}"):
        model.set_custom_reduce_scatter(CountedReduce())
    wrapper = wrapped()(nn.Linear(4, 3), policy)
    with pytest.raises(ConfigError, match=f"register_comm_hook {words}"):
        wrapper.register_comm_hook(None, lambda *_: None)
    equal = in_place(rank.mesh())(nn.Linear(4, 3), {"reduce_dtype": BF16, "wire_dtype": BF16})
    equal.set_custom_reduce_scatter(CountedReduce())  # it changes nothing, so it is allowed
    for sharded in (model, wrapper):  # as they were
        sharded(drawn((2, 4), rank.rank)).sum().backward()
        assert all(param.grad is not None for param in sharded.parameters() if param.numel())

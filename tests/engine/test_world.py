"""A simulated world of 64 ranks: shapes, memory and a step that runs."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Adam

from fullshard import fully_shard
from fullshard.testing import Rank, fake_world

WORLD = 64


@pytest.fixture(autouse=True)
def _no_world_left_behind() -> Iterator[None]:
    assert not dist.is_initialized()
    yield
    assert not dist.is_initialized()


class Net(nn.Module):
    """Rows that divide by 64, rows that do not, fewer rows than ranks, and no dims."""

    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Linear(16, 128)
        self.uneven = nn.Linear(128, 100)
        self.few = nn.Linear(100, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.few(self.uneven(self.even(x))) * self.scale


def sharded(rank: Rank, model: Net | None = None) -> Net:
    model = model or Net()
    for layer in (model.even, model.uneven, model.few):
        fully_shard(layer, mesh=rank.mesh())
    fully_shard(model, mesh=rank.mesh())
    return model


def local_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    assert isinstance(parameter, DTensor)
    return tuple(parameter.to_local().shape)


@pytest.mark.parametrize("rank", [0, 3, 49, 50, 63])
def test_every_rank_of_64_holds_the_rows_that_dtensor_gives_it(rank: int) -> None:
    with fake_world(WORLD, rank) as place:
        whole = Net()
        model = sharded(place, copy.deepcopy(whole))
        own = whole.even.weight[2 * rank : 2 * rank + 2]
        assert torch.equal(model.even.weight.to_local(), own)
        assert local_shape(model.even.bias) == (2,)
        # 100 rows in chunks of 2: ranks 0 to 49 hold two, the others none.
        assert local_shape(model.uneven.weight) == ((2, 128) if rank < 50 else (0, 128))
        assert local_shape(model.few.weight) == ((1, 100) if rank < 3 else (0, 100))
        assert local_shape(model.scale) == ()
        assert model.scale.placements == (Replicate(),)
        for name, parameter in model.named_parameters():
            if parameter.ndim:
                assert parameter.placements == (Shard(0),), name
        shapes = {name: tuple(p.shape) for name, p in whole.named_parameters()}
        units = (model.even, model.uneven, model.few, model)
        for change in ("unshard", "reshard"):
            for module in units:
                getattr(module, change)()
            assert {name: tuple(p.shape) for name, p in model.named_parameters()} == shapes
            is_sharded = change == "reshard"
            assert all(isinstance(p, DTensor) == is_sharded for p in model.parameters())


@pytest.mark.parametrize("rank", [17, 63])
def test_a_step_runs_and_leaves_gradients_and_moments_sharded(rank: int) -> None:
    with fake_world(WORLD, rank) as place:
        model = sharded(place)
        optimizer = Adam(model.parameters(), lr=0.1)
        for _ in range(2):
            loss = model(torch.randn(4, 16)).square().mean()
            loss.backward()
            for name, parameter in model.named_parameters():
                assert isinstance(parameter.grad, DTensor), name
                assert parameter.grad.placements == parameter.placements, name
                assert local_shape(parameter.grad) == local_shape(parameter), name
            optimizer.step()
            for parameter in model.parameters():
                assert local_shape(optimizer.state[parameter]["exp_avg"]) == local_shape(parameter)
            optimizer.zero_grad()


def test_shards_take_a_64th_of_the_memory() -> None:
    with fake_world(WORLD, 5) as place:
        model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)])
        whole_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        for layer in model:
            fully_shard(layer, mesh=place.mesh())
        fully_shard(model, mesh=place.mesh())
        storages = {
            id(parameter): parameter.to_local().untyped_storage().size()
            for parameter in model.parameters()
        }
        assert sum(storages.values()) == whole_bytes // WORLD
        # After two rounds of unshard and reshard, only the shards are left.
        weights = []
        for layer in model:
            layer.unshard()
            weights.append(layer.weight)
            assert layer.weight.untyped_storage().size() >= 256 * 256 * 4
            layer.reshard()
        model(torch.randn(2, 256)).sum().backward()
        assert [weight.untyped_storage().size() for weight in weights] == [0] * 4
        grads = sum(p.grad.to_local().numel() for p in model.parameters())
        assert grads * 4 == whole_bytes // WORLD


@pytest.mark.parametrize("rank", [11, 63])
def test_an_8_by_8_mesh_shards_over_its_second_axis(rank: int) -> None:
    with fake_world(WORLD, rank) as place:
        mesh = place.mesh((8, 8), ("replicate", "shard"))
        model = nn.Linear(16, 128)
        whole = model.weight.detach().clone()
        fully_shard(model, mesh=mesh)
        assert model.weight.placements == (Replicate(), Shard(0))
        first = (rank % 8) * 16
        assert torch.equal(model.weight.to_local(), whole[first : first + 16])
        optimizer = Adam(model.parameters())
        model(torch.randn(4, 16)).square().mean().backward()
        assert local_shape(model.weight.grad) == (16, 16)
        assert model.weight.grad.placements == (Replicate(), Shard(0))
        optimizer.step()


def test_resharding_to_8_of_64_ranks_runs_a_step() -> None:
    with fake_world(WORLD, 9) as place:
        model = nn.Sequential(nn.Linear(16, 128), nn.Linear(128, 64))
        for layer in model:
            fully_shard(layer, mesh=place.mesh(), reshard_after_forward=8)
        fully_shard(model, mesh=place.mesh())
        model(torch.randn(4, 16)).square().mean().backward()
        assert local_shape(model[0].weight.grad) == (2, 16)

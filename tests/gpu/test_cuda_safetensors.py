"""Safetensors files of models on CUDA: written from there, and read to where shards belong."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from fullshard import CPUOffload, CPUOffloadPolicy, FullyShardedDataParallel, fully_shard
from fullshard.state import export_safetensors, load_safetensors
from fullshard.testing import Rank, on_ranks


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(33, 21)
        self.second = nn.Linear(21, 7)
        self.register_buffer("shift", torch.randn(7))
        self.register_buffer("angles", torch.arange(33.0), persistent=False)

    def reset_non_persistent_buffers(self) -> None:
        self.angles = torch.arange(33.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x + self.angles))) + self.shift


def built(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net()


def sharded(model: Net, rank: Rank, **options: object) -> nn.Module:
    fully_shard(model.first, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh(), **options)


def offloaded(model: Net, rank: Rank) -> nn.Module:
    model.shift, model.angles = model.shift.to(rank.device), model.angles.to(rank.device)
    return sharded(model, rank, offload_policy=CPUOffloadPolicy())


ARRANGEMENTS: dict[str, Callable[[Net, Rank], nn.Module]] = {
    "whole": lambda model, rank: model.to(rank.device),
    "sharded": lambda model, rank: sharded(model.to(rank.device), rank),
    "offloaded": offloaded,
    "wrapped": lambda model, rank: FullyShardedDataParallel(
        model.to(rank.device), use_orig_params=True
    ),
    "wrapped, offloaded": lambda model, rank: FullyShardedDataParallel(
        model.to(rank.device), cpu_offload=CPUOffload(offload_params=True)
    ),
}


def assert_holds(path: Path, model: Net) -> None:
    found = built(9)
    load_safetensors(path, found)
    for name, value in model.state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name


@on_ranks(2, backend="nccl")
def test_models_on_cuda_are_exported_and_loaded(rank: Rank, tmp_path: Path) -> None:
    batch = torch.randn(4, 33, device=rank.device)
    expected = built(0).to(rank.device)(batch)
    for name, arrange in ARRANGEMENTS.items():
        path = tmp_path / name
        export_safetensors(path, arrange(built(0), rank), max_shard_bytes=1000)
        assert_holds(path, built(0))
        model = arrange(built(1), rank)
        load_safetensors(path, model)
        torch.testing.assert_close(model(batch), expected)
        export_safetensors(path, model)
        assert_holds(path, built(0))


@on_ranks(2, backend="nccl")
def test_shards_on_meta_get_their_memory_where_they_belong(rank: Rank, tmp_path: Path) -> None:
    batch = torch.randn(4, 33, device=rank.device)
    export_safetensors(tmp_path / "out", built(0))
    for options, device in (({}, "cuda"), ({"offload_policy": CPUOffloadPolicy()}, "cpu")):
        with torch.device("meta"):
            model = sharded(Net(), rank, **options)
        load_safetensors(tmp_path / "out", model)
        assert {p.device.type for p in model.parameters()} == {device}
        assert model.shift.device == model.angles.device == rank.device
        if device == "cpu":
            assert model.first.weight.to_local().is_pinned()
        torch.testing.assert_close(model(batch), built(0).to(rank.device)(batch))

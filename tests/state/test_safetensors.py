"""Models as safetensors files: written from shards, read into shards, judged by `safetensors`."""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy, fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.errors import (
    CheckpointError,
    ConfigError,
    DisagreementError,
    LifecycleError,
    UnsupportedError,
)
from fullshard.state import LoadedWeights, export_safetensors, load_safetensors
from fullshard.testing import Rank, RankPool, RanksFailed, on_ranks

INDEX = "model.safetensors.index.json"


class Mixer(nn.Module):
    """Sizes that no number of ranks divides, a parameter without dims, and one of its own dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width + 3)
        self.down = nn.Linear(2 * width + 3, width, bias=False)
        self.scale = nn.Parameter(torch.ones(()))
        self.kernel = nn.Parameter(torch.ones(3, 2, 5))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x))) * self.scale * self.kernel.mean() + self.mean


class Net(nn.Module):
    """An embedding that is tied to the head, and a buffer that no file has."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.width = width
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList(Mixer(width) for _ in range(2))
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.shade = nn.Parameter(torch.ones(width, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("mask", torch.zeros(5, dtype=torch.bool))
        self.register_buffer("angles", torch.empty(width), persistent=False)
        self.reset_non_persistent_buffers()

    def reset_non_persistent_buffers(self) -> None:
        self.angles.copy_(torch.arange(self.width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.embed(x) + self.angles + self.shade
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


TIED = {"head.weight": "embed.weight"}


def net(seed: int | None = 0) -> Net:
    """A model with values drawn from a seed, or with all zeros."""
    model = Net()
    generator = torch.Generator().manual_seed(seed or 0)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor is not model.angles:
                values = torch.randn(tensor.shape, generator=generator) * 3
                tensor.copy_(values if seed is not None else torch.zeros(tensor.shape))
    return model


def contents(model: nn.Module) -> dict[str, Tensor]:
    """What files of an unsharded model hold."""
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return {name: value for name, value in found.items() if name not in TIED}


def by_rows(model: Net, rank: Rank, **options: Any) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=rank.mesh(), **options)
    return fully_shard(model, mesh=rank.mesh(), **options)


def by_columns(model: Net, rank: Rank) -> nn.Module:
    return by_rows(model, rank, shard_placement_fn=lambda p: Shard(1) if p.dim() > 1 else None)


def on_two_axes(model: Net, rank: Rank) -> nn.Module:
    shape = (2, rank.size // 2) if rank.size > 1 else (1, 1)
    return fully_shard(model, mesh=rank.mesh(shape, ("replicate", "shard")))


def wrapped(model: Net, rank: Rank, **options: Any) -> nn.Module:
    for index, block in enumerate(model.blocks):
        model.blocks[index] = FullyShardedDataParallel(block, **options)
    return FullyShardedDataParallel(model, **options)


def without_units(model: Net, rank: Rank) -> nn.Module:
    """A parameter that is a `DTensor` by itself."""
    weight = distribute_tensor(model.blocks[0].kernel.detach(), rank.mesh(), [Shard(1)])
    model.blocks[0].kernel = nn.Parameter(weight)
    return model


ARRANGEMENTS: dict[str, Callable[[Net, Rank], nn.Module]] = {
    "unsharded": lambda model, rank: model,
    "rows": by_rows,
    "columns": by_columns,
    "two axes": on_two_axes,
    "offloaded": lambda model, rank: by_rows(model, rank, offload_policy=CPUOffloadPolicy()),
    "without units": without_units,
    "in part": lambda model, rank: (fully_shard(model.blocks[1], mesh=rank.mesh()), model)[1],
    "wrapped": lambda model, rank: wrapped(model, rank, use_orig_params=True),
    "wrapped flat": lambda model, rank: wrapped(model, rank, use_orig_params=False),
    "wrapped whole": lambda model, rank: wrapped(
        model, rank, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD
    ),
}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        assert torch.equal(found[name], value), name


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a model of any arrangement, whole, on every rank."""
    if isinstance(model, FullyShardedDataParallel):
        return {name: value.clone() for name, value in model.state_dict().items()}
    return {
        name: (full_tensor(value) if isinstance(value, DTensor) else value).detach().clone()
        for name, value in model.state_dict().items()
    }


def assert_holds(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = full_values(model)
    for name, canonical in TIED.items():
        assert torch.equal(found.pop(name), expected[canonical])
    assert_same(found, expected)


def folder_contents(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors").exists():
        return load_file(folder / "model.safetensors")
    names = json.loads((folder / INDEX).read_text())["weight_map"]
    found: dict[str, Tensor] = {}
    for file in set(names.values()):
        found |= load_file(folder / file)
    assert sorted(found) == sorted(names)
    return found


# Writing, in every arrangement, and reading into every other


@pytest.mark.exhaustive
@on_ranks(1, 2, 4)
def test_what_any_arrangement_writes_any_other_reads(rank: Rank, tmp_path: Path) -> None:
    expected = contents(net())
    for name, arrange in ARRANGEMENTS.items():
        folder = tmp_path / name
        assert export_safetensors(folder, arrange(net(), rank), max_shard_bytes=400) == folder
        assert_same(folder_contents(folder), expected)
    for name, arrange in ARRANGEMENTS.items():
        model = arrange(net(seed=None), rank)
        for source in (name, "columns", "wrapped flat"):
            found = load_safetensors(tmp_path / source, model)
            assert found == LoadedWeights(tmp_path / source, tied=TIED)
            assert_holds(model, expected)


@on_ranks(2)
def test_a_model_exports_what_it_was_trained_to_and_trains_with_what_it_loaded(
    rank: Rank, tmp_path: Path
) -> None:
    tokens = torch.arange(11)
    for name in ("rows", "wrapped", "wrapped flat"):
        model = ARRANGEMENTS[name](net(), rank)
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        model(tokens).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            output = model(tokens)  # leaves the outermost unit unsharded
        export_safetensors(tmp_path / name, model)
        expected = full_values(model)
        del expected["head.weight"]
        assert not torch.equal(expected["embed.weight"], contents(net())["embed.weight"])
        assert_same(folder_contents(tmp_path / name), expected)
        other = ARRANGEMENTS[name](net(seed=1), rank)
        other(tokens)  # values gathered before must not be used again
        load_safetensors(tmp_path / name, other)
        found = other(tokens)
        torch.testing.assert_close(found, output)
        found.sum().backward()
        assert all(p.grad is not None for p in other.parameters() if p.requires_grad and p.numel())


@on_ranks(2)
def test_floating_point_numbers_are_converted_on_the_way(rank: Rank, tmp_path: Path) -> None:
    expected = {
        name: value.to(torch.bfloat16) if value.is_floating_point() else value
        for name, value in contents(net()).items()
    }
    for name, arrange in ARRANGEMENTS.items():
        export_safetensors(tmp_path / name, arrange(net(), rank), dtype=torch.bfloat16)
        assert_same(load_file(tmp_path / name / "model.safetensors"), expected)
    model = by_rows(net(seed=None), rank)
    load_safetensors(tmp_path / "rows", model)
    assert_holds(model, {k: v.to(contents(net())[k].dtype) for k, v in expected.items()})


@on_ranks(2)
def test_files_are_laid_out_like_those_of_transformers(rank: Rank, tmp_path: Path) -> None:
    limit = 500
    export_safetensors(tmp_path / "many", by_rows(net(), rank), max_shard_bytes=limit)
    export_safetensors(tmp_path / "one", by_rows(net(), rank))
    assert [p.name for p in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    with safe_open(tmp_path / "one" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    folder = tmp_path / "many"
    index = json.loads((folder / INDEX).read_text())
    expected = contents(net())
    assert index["metadata"]["total_size"] == sum(v.nbytes for v in expected.values())
    assert sorted(index["weight_map"]) == sorted(expected)
    files = sorted(set(index["weight_map"].values()))
    assert len(files) > 2 * rank.size  # several rounds
    assert files == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert sorted(p.name for p in folder.iterdir()) == sorted([*files, INDEX])
    for name in files:
        held = load_file(folder / name)
        assert len(held) == 1 or sum(v.nbytes for v in held.values()) <= limit
        with safe_open(folder / name, "pt") as file:
            assert file.metadata() == {"format": "pt"}
    dist.barrier()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
    torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8, torch.bool,
    torch.complex64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
]  # fmt: skip


def holder(dtypes: list[torch.dtype], fill: int | None = None) -> nn.Module:
    """A buffer of each dtype, with bytes that are all different, and one without elements."""
    module = nn.Module()
    for number, dtype in enumerate(dtypes):
        values = torch.arange(3 * 5 * dtype.itemsize, dtype=torch.int64) + number
        values = values % (2 if dtype is torch.bool else 120)
        if fill is not None:
            values = torch.full_like(values, fill)
        raw = values.to(torch.uint8)
        module.register_buffer(f"b{number}", raw.view(dtype).view(3, 5))
        module.register_buffer(f"empty{number}", torch.empty(0, 4, dtype=dtype))
    return module


def bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1).view(torch.uint8)


def test_every_dtype_of_the_format_is_written_and_read(tmp_path):
    model = holder(DTYPES)
    export_safetensors(tmp_path, model)
    found = load_file(tmp_path / "model.safetensors")
    other = holder(DTYPES, fill=0)
    load_safetensors(tmp_path, other)
    for name, value in model.state_dict().items():
        assert found[name].dtype == value.dtype
        assert torch.equal(bits(found[name]), bits(value)), name
        assert torch.equal(bits(other.state_dict()[name]), bits(value)), name


@on_ranks(2)
def test_adapters_are_exported_alone_and_loaded_onto_their_base(rank: Rank, tmp_path: Path) -> None:
    def adapted(seed: int | None) -> nn.Module:
        model = net(seed)
        model.requires_grad_(False)
        model.blocks[1].up.requires_grad_(True)
        return by_rows(model, rank)

    names = ["blocks.1.up.bias", "blocks.1.up.weight"]
    export_safetensors(tmp_path / "a", adapted(3), only="trainable")
    export_safetensors(tmp_path / "b", adapted(3), only=lambda name: name.startswith("blocks.1.up"))
    for folder in ("a", "b"):
        assert sorted(load_file(tmp_path / folder / "model.safetensors")) == names
    model = adapted(0)
    found = load_safetensors(tmp_path / "a", model, strict=False)
    assert sorted([*found.missing, *names]) == sorted(contents(net()))
    new = contents(net(3))
    assert_holds(model, contents(net()) | {name: new[name] for name in names})


# What is refused


def test_wrong_arguments_say_what_is_wrong(tmp_path):
    model = net()
    with pytest.raises(ConfigError, match="dtype"):
        export_safetensors(tmp_path, model, dtype=torch.int8)
    with pytest.raises(ConfigError, match="max_shard_bytes"):
        export_safetensors(tmp_path, model, max_shard_bytes=0)
    with pytest.raises(ConfigError, match="this is the name of a file"):
        export_safetensors(tmp_path / "model.safetensors", model)
    with pytest.raises(ConfigError, match="none of the model's"):
        export_safetensors(tmp_path, model, only=lambda name: False)
    with pytest.raises(LifecycleError, match="shade is on meta"):
        export_safetensors(tmp_path, Net().to("meta"))
    with pytest.raises(UnsupportedError, match=r"b0.*complex128"):
        export_safetensors(tmp_path / "out", holder([torch.complex128]))
    assert list(tmp_path.iterdir()) == []
    save_file({"other": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="nothing in the files fits"):
        load_safetensors(tmp_path, model, strict=False)


@on_ranks(2)
def test_ranks_that_export_different_things_all_hear_of_it(rank: Rank, tmp_path: Path) -> None:
    with pytest.raises(DisagreementError, match=r"tensors: .*shade.* on rank 0 and"):
        export_safetensors(tmp_path, net(), only=lambda name: rank.rank == 0 or "up" in name)
    with pytest.raises(DisagreementError, match="max_shard_bytes"):
        export_safetensors(tmp_path, net(), max_shard_bytes=100 + rank.rank)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []


@on_ranks(2)
def test_everything_that_does_not_fit_is_one_error_and_nothing_is_loaded(
    rank: Rank, tmp_path: Path
) -> None:
    stored = contents(net())
    stored["surplus.weight"] = torch.ones(3)
    del stored["blocks.0.up.bias"], stored["mask"]
    stored["blocks.0.down.weight"] = stored["blocks.0.down.weight"].t().contiguous()
    stored["blocks.1.seen"] = torch.ones(())  # not a whole number
    path = tmp_path / f"of_rank_{rank.rank}.safetensors"
    model = by_rows(net(seed=5), rank)
    if rank.rank == 0:
        save_file(contents(net()), path)  # which the other rank cannot read
    with pytest.raises(CheckpointError, match="does not exist"):
        load_safetensors(path, model)
    assert_holds(model, contents(net(seed=5)))
    dist.barrier()
    save_file(stored, path)
    for name in ("unsharded", "rows", "wrapped", "wrapped flat"):
        model = ARRANGEMENTS[name](net(seed=5), rank)
        before = contents(net(seed=5))
        with pytest.raises(CheckpointError) as caught:
            load_safetensors(path, model)
        for word in (
            "blocks.0.up.bias", "mask", "surplus.weight", "blocks.1.seen",
            r"blocks.0.down.weight: its shape is [7, 17], but [17, 7]",
            "nothing was loaded", "strict=False",
        ):  # fmt: skip
            assert word in str(caught.value)
        assert_holds(model, before)
        found = load_safetensors(path, model, strict=False)
        assert sorted(found.missing) == ["blocks.0.up.bias", "mask"]
        assert found.unexpected == ("surplus.weight",)
        assert sorted(found.mismatched) == ["blocks.0.down.weight", "blocks.1.seen"]
        kept = {*found.missing, *found.mismatched}
        assert_holds(model, {n: before[n] if n in kept else stored[n] for n in before})


# Tied parameters


@on_ranks(2)
def test_a_tied_parameter_is_read_under_any_of_its_names(rank: Rank, tmp_path: Path) -> None:
    expected = contents(net())
    both = expected | {"head.weight": expected["embed.weight"].clone()}
    other = {name: value for name, value in both.items() if name != "embed.weight"}
    for name, stored in (("both", both), ("other", other)):
        path = tmp_path / f"{name}_{rank.rank}.safetensors"
        save_file(stored, path)
        for arrange in (by_rows, ARRANGEMENTS["wrapped flat"], ARRANGEMENTS["unsharded"]):
            model = arrange(net(seed=None), rank)
            found = load_safetensors(path, model)
            assert found.tied == TIED
            assert not found.unexpected
            assert_holds(model, expected)


@on_ranks(2)
def test_tied_parameters_with_values_of_their_own_are_not_merged_in_silence(
    rank: Rank, tmp_path: Path
) -> None:
    stored = contents(net())
    stored["head.weight"] = stored["embed.weight"].clone()
    stored["head.weight"][-1, -1] += 1  # in the part of the last rank
    path = tmp_path / f"of_rank_{rank.rank}.safetensors"
    save_file(stored, path)
    model = by_rows(net(seed=5), rank)
    with pytest.raises(
        CheckpointError, match=r"head\.weight: its values are not those of 'embed\.weight'"
    ):
        load_safetensors(path, model)
    assert_holds(model, contents(net(seed=5)))
    found = load_safetensors(path, model, strict=False)
    assert list(found.mismatched) == ["head.weight"]
    assert_holds(model, contents(net()))


# Models on meta


def meta_net() -> Net:
    with torch.device("meta"):
        return Net()


@on_ranks(1, 4)
def test_a_model_on_meta_has_its_shards_values_and_buffers_after_loading(
    rank: Rank, tmp_path: Path
) -> None:
    export_safetensors(tmp_path / "out", net(), max_shard_bytes=500)
    tokens = torch.arange(11)
    for name in ("unsharded", "rows", "columns", "two axes", "offloaded", "in part"):
        model = ARRANGEMENTS[name](meta_net(), rank)
        assert all(p.is_meta for p in model.parameters())
        parameters = list(model.parameters())
        trained = [p for p in parameters if p.requires_grad]
        optimizer = torch.optim.SGD(trained, lr=0.1)
        found = load_safetensors(tmp_path / "out", model)
        assert found == LoadedWeights(tmp_path / "out", tied=TIED, recreated=("angles",))
        assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
        assert model.head.weight is model.embed.weight
        assert torch.equal(model.angles, net().angles)
        assert_holds(model, contents(net()))
        torch.testing.assert_close(model(tokens), net()(tokens))
        model(tokens).square().mean().backward()
        optimizer.step()
        reference = net()
        reference(tokens).square().mean().backward()
        torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.1).step()
        torch.testing.assert_close(full_values(model)["embed.weight"], reference.embed.weight.data)


@on_ranks(2)
def test_only_what_is_on_meta_is_given_memory_and_all_of_it_gets_values(
    rank: Rank, tmp_path: Path
) -> None:
    export_safetensors(tmp_path / "out", net())
    model = meta_net()
    model.blocks[0] = net(seed=4).blocks[0]
    by_rows(model, rank)
    before = model.blocks[0].up.weight.to_local().data_ptr()
    load_safetensors(tmp_path / "out", model)
    assert model.blocks[0].up.weight.to_local().data_ptr() == before
    assert_holds(model, contents(net()))
    stored = contents(net())
    del stored["blocks.0.up.weight"]
    path = tmp_path / f"of_rank_{rank.rank}.safetensors"
    save_file(stored, path)
    model = by_rows(meta_net(), rank)
    with pytest.raises(CheckpointError, match=r"on meta.*blocks\.0\.up\.weight.*to_empty"):
        load_safetensors(path, model, strict=False)
    assert all(p.is_meta for p in model.parameters())


class Angles(nn.Module):
    """Two buffers that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sin", torch.arange(4.0).sin(), persistent=False)
        self.register_buffer("cos", torch.arange(4.0).cos(), persistent=False)


class ResettableAngles(Angles):
    def reset_parameters(self) -> None:
        self.sin = torch.arange(4.0).sin()  # replaced
        self.cos.copy_(torch.arange(4.0).cos())  # written to


class HalfResettableAngles(Angles):
    def reset_parameters(self) -> None:
        self.sin.copy_(torch.arange(4.0).sin())


class Rotated(nn.Module):
    def __init__(self, angles: Callable[[], Angles]) -> None:
        super().__init__()
        self.angles = angles()
        self.linear = nn.Linear(4, 3)


class Initializing(Rotated):
    """Like the models of transformers."""

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Angles):
            module.sin.copy_(torch.arange(4.0).sin())
            module.cos.copy_(torch.arange(4.0).cos())


@on_ranks(2)
def test_buffers_that_no_file_has_are_computed_again(rank: Rank, tmp_path: Path) -> None:
    def fill(module: nn.Module) -> None:
        assert isinstance(module, Angles)
        module.sin.copy_(torch.arange(4.0).sin())
        module.cos.copy_(torch.arange(4.0).cos())

    export_safetensors(tmp_path / "out", Rotated(Angles))
    for build, options in (
        (lambda: Rotated(ResettableAngles), {}),
        (lambda: Initializing(Angles), {}),
        (lambda: nn.Sequential(Initializing(Angles))[0], {}),
        (lambda: Rotated(Angles), {"init_buffers": fill}),
    ):
        with torch.device("meta"):
            model = build()
        fully_shard(model, mesh=rank.mesh())
        found = load_safetensors(tmp_path / "out", model, **options)
        assert found.recreated == ("angles.sin", "angles.cos")
        assert torch.equal(model.angles.sin, torch.arange(4.0).sin())
        assert torch.equal(model.angles.cos, torch.arange(4.0).cos())


@on_ranks(2)
def test_a_buffer_that_nothing_computes_is_an_error_that_leaves_the_model_alone(
    rank: Rank, tmp_path: Path
) -> None:
    export_safetensors(tmp_path / "out", Rotated(Angles))
    for angles, names in (
        (Angles, r"angles\.sin, angles\.cos"),
        (HalfResettableAngles, r"^angles\.cos"),
    ):
        with torch.device("meta"):
            model = Rotated(angles)
        fully_shard(model, mesh=rank.mesh())
        with pytest.raises(LifecycleError, match=rf"{names}: .*init_buffers"):
            load_safetensors(tmp_path / "out", model)
        assert all(t.is_meta for t in (*model.parameters(), *model.buffers()))


# Appearing whole, or not at all


@contextmanager
def files_up_to(num_bytes: int) -> Iterator[None]:
    """Let writes beyond that fail, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@on_ranks(2)
def test_a_failing_write_on_one_rank_is_an_error_on_all_and_leaves_nothing(
    rank: Rank, tmp_path: Path
) -> None:
    model = by_rows(net(), rank)
    limit = 400 if rank.rank == 1 else 2**40
    with files_up_to(limit), pytest.raises(CheckpointError, match=r"model-\d+-of.*writing failed"):
        export_safetensors(tmp_path / "out", model, max_shard_bytes=500)
    dist.barrier()
    assert list(tmp_path.iterdir()) == []
    export_safetensors(tmp_path / "out", model, max_shard_bytes=500)
    assert_same(folder_contents(tmp_path / "out"), contents(net()))


def export_and_die(rank: Rank, folder: Path, num_bytes: int, max_shard_bytes: int) -> None:
    """Export until a file of the last rank has so many bytes; then the kernel ends that rank."""
    if rank.rank == rank.size - 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, num_bytes))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    export_safetensors(folder, by_rows(net(1), rank), max_shard_bytes=max_shard_bytes)


def test_a_rank_that_is_killed_leaves_no_half_result(tmp_path):
    with RankPool(2) as ranks:
        for num_bytes, has_older in ((0, False), (400, False), (400, True)):
            place = tmp_path / f"{num_bytes} {has_older}"
            folder = place / "out"
            place.mkdir()
            if has_older:
                export_safetensors(folder, net(), max_shard_bytes=500)
                (folder / "config.json").write_text("{}")
            with pytest.raises(RanksFailed):
                ranks.run(export_and_die, folder, num_bytes, 500, timeout_s=60)
            assert [p for p in place.iterdir() if p.name[0] != "."] == [folder] * has_older
            if has_older:
                assert_same(folder_contents(folder), contents(net()))


def test_older_weights_are_replaced_and_other_files_stay(tmp_path):
    folder = tmp_path / "out"  # a link to somewhere else
    (tmp_path / "disk" / "real").mkdir(parents=True)
    folder.symlink_to(tmp_path / "disk" / "real")
    others = {"config.json": "{}", "tokenizer.safetensors.txt": "x"}
    for name, text in others.items():
        (folder / name).write_text(text)
    for seed, limit in enumerate([10**9, 10**9, 300, 300, 900, 10**9]):
        export_safetensors(folder, net(seed), max_shard_bytes=limit)
        assert_same(folder_contents(folder), contents(net(seed)))
        load_safetensors(folder, net(seed=None))
        is_one = (folder / "model.safetensors").exists()
        assert is_one == (limit == 10**9)
        num_files = 1 if is_one else 1 + len(list(folder.glob("model-*")))
        assert len(list(folder.iterdir())) == len(others) + num_files
        assert all((folder / name).read_text() == text for name, text in others.items())
    assert sorted(tmp_path.iterdir()) == [tmp_path / "disk", folder]
    assert list((tmp_path / "disk").iterdir()) == [tmp_path / "disk" / "real"]


# Memory and bytes


class Wide(nn.Module):
    """64 MB, most of them in one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(12 * 1024, 1024)
        self.layers = nn.ModuleList(nn.Linear(1024, 1024, bias=False) for _ in range(4))


def fill(model: nn.Module) -> None:
    for number, param in enumerate(model.parameters()):
        local = param.to_local() if isinstance(param, DTensor) else param
        local.detach().fill_(number + dist.get_rank() / 8)


def growth_mb(action: Callable[[], object]) -> float:
    """How much more memory this process had at the peak of an action than before."""
    # Memory that is freed while `action` runs would hide what it takes.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forget the peaks of before
    before = _memory_kb("VmRSS")
    action()
    return (_memory_kb("VmHWM") - before) / 1024


def _memory_kb(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


@on_ranks(4)
def test_no_rank_ever_has_a_whole_tensor_in_memory(rank: Rank, tmp_path: Path) -> None:
    export_safetensors(tmp_path / "before", net())  # imports and groups are there now
    with torch.device("meta"):
        model = Wide()
    fully_shard(model, mesh=rank.mesh())
    model.to_empty(device="cpu")
    fill(model)
    whole_mb, shards_mb, constant_mb = 64, 16, 24
    # A whole tensor would be noticed, once gloo's threads have released what they held before.
    assert max(growth_mb(lambda: torch.ones(model.embed.weight.shape)) for _ in range(3)) > 40
    for dtype in (None, torch.float16):
        folder = tmp_path / str(dtype)
        assert (
            growth_mb(lambda f=folder, d=dtype: export_safetensors(f, model, dtype=d)) < constant_mb
        )
    wrapper = FullyShardedDataParallel(nn.Linear(4096, 2048, bias=False))
    assert growth_mb(lambda: export_safetensors(tmp_path / "wrapped", wrapper)) < constant_mb
    for folder in ("None", "torch.float16"):
        with torch.device("meta"):
            empty = Wide()
        fully_shard(empty, mesh=rank.mesh())
        grown = growth_mb(lambda f=folder, m=empty: load_safetensors(tmp_path / f, m))
        assert grown < shards_mb + constant_mb < whole_mb
        for one, other in zip(empty.parameters(), model.parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())


class OnePage(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("now", torch.zeros(()), persistent=False)
        self.weight = nn.Parameter(torch.ones(64, 4096))


@on_ranks(2)
def test_a_rank_does_not_touch_the_bytes_of_others(rank: Rank, tmp_path: Path) -> None:
    folder = tmp_path / f"of_rank_{rank.rank}"
    folder.mkdir()
    path = folder / "model.safetensors"
    values = torch.randn(64, 4096)
    save_file({"weight": values}, path)
    with torch.device("meta"):
        model = OnePage()
    fully_shard(model, mesh=rank.mesh())

    def cut_off(module: nn.Module) -> None:
        """Runs after all checks: the kernel ends a process that reads the part cut off."""
        module.now.zero_()
        if rank.rank == 0:
            os.truncate(path, path.stat().st_size - 31 * 4096 * 4)

    load_safetensors(folder, model, init_buffers=cut_off)
    assert torch.equal(model.weight.to_local(), values.chunk(2)[rank.rank])

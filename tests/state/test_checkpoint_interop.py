"""Checkpoints that torch opens, and torch's that we open; content that nobody should trust."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict

from fullshard import FullyShardedDataParallel, fully_shard
from fullshard.errors import CheckpointError
from fullshard.state import load, save
from fullshard.testing import Rank, on_ranks

WIDTH = 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH + 2)
        self.norm = nn.BatchNorm1d(WIDTH + 2)
        self.last = nn.Linear(WIDTH + 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def whole(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for step in range(2):
        batch = torch.randn(6, WIDTH, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().sum().backward()
        optimizer.step()
    return optimizer


def sharded(form: str, seed: int = 0) -> nn.Module:
    model = whole(seed)
    if form == "rows":
        return fully_shard(model)
    return FullyShardedDataParallel(model, use_orig_params=form == "slices")


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, dict[str, Any]]:
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: state for param, state in optimizer.state.items()}


@pytest.mark.parametrize("form", ["rows", "flat", "slices"])
@on_ranks(2)
def test_a_plain_torch_program_opens_our_checkpoints(rank: Rank, tmp_path: Path, form: str) -> None:
    model = sharded(form)
    save(tmp_path / "a", model, trained(model))
    expected = whole()
    optimizer = trained(expected)
    state = {name: torch.zeros_like(value) for name, value in expected.state_dict().items()}
    moments = {
        name: {key: torch.zeros_like(value) for key, value in each.items()}
        for name, each in by_name(expected, optimizer).items()
    }
    dcp.load({"model": state, "optimizer": {"state": moments}}, checkpoint_id=tmp_path / "a")
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(state[name], value, msg=name)
    for name, each in by_name(expected, optimizer).items():
        for key, value in each.items():
            torch.testing.assert_close(moments[name][key], value, msg=f"{name}.{key}")


def save_with_torchs_fully_shard(path: Path) -> None:
    model = torch_fsdp.fully_shard(whole())
    state, optimizer_state = get_state_dict(model, trained(model))
    dcp.save({"model": state, "optim": optimizer_state}, checkpoint_id=path)


def save_with_torchs_wrapper(path: Path) -> None:
    wrapper = torch_fsdp.FullyShardedDataParallel
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    model = wrapper(whole(), use_orig_params=True, device_mesh=mesh, device_id=torch.device("cpu"))
    optimizer = trained(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch calls its own deprecated function
        wrapper.set_state_dict_type(
            model,
            torch_fsdp.StateDictType.SHARDED_STATE_DICT,
            torch_fsdp.ShardedStateDictConfig(),
            torch_fsdp.ShardedOptimStateDictConfig(offload_to_cpu=False),
        )
        state = {"model": model.state_dict(), "optim": wrapper.optim_state_dict(model, optimizer)}
    dcp.save(state, checkpoint_id=path)


@pytest.mark.parametrize("writer", [save_with_torchs_fully_shard, save_with_torchs_wrapper])
@on_ranks(2)
def test_we_open_what_torch_wrote(rank: Rank, tmp_path: Path, writer: Any) -> None:
    path = tmp_path / "theirs"
    writer(path)
    expected = whole()
    its_optimizer = trained(expected)
    for form in ("rows", "flat", "slices", "whole"):
        model = whole(1) if form == "whole" else sharded(form, seed=1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=7.0, betas=(0.1, 0.2))
        loaded = load(path, model, optimizer)
        assert loaded.step is None
        assert [(group["lr"], group["betas"]) for group in optimizer.param_groups] == [
            (0.05, (0.9, 0.999))
        ]
        again = tmp_path / f"again {form}"
        save(again, model, optimizer)
        state = {n: torch.zeros_like(value) for n, value in expected.state_dict().items()}
        moments = {
            name: {key: torch.zeros_like(value) for key, value in each.items()}
            for name, each in by_name(expected, its_optimizer).items()
        }
        dcp.load({"model": state, "optimizer": {"state": moments}}, checkpoint_id=again)
        for name, value in expected.state_dict().items():
            torch.testing.assert_close(state[name], value, msg=f"{form} {name}")
        for name, each in by_name(expected, its_optimizer).items():
            for key, value in each.items():
                torch.testing.assert_close(moments[name][key], value, msg=f"{form} {name}.{key}")


@on_ranks(2)
def test_a_model_alone_without_nesting_is_opened_too(rank: Rank, tmp_path: Path) -> None:
    model = torch_fsdp.fully_shard(whole())
    dcp.save(get_model_state_dict(model), checkpoint_id=tmp_path / "bare")
    found = whole(1)
    load(tmp_path / "bare", found)
    for name, value in whole().state_dict().items():
        assert torch.equal(found.state_dict()[name], value), name
    with pytest.raises(CheckpointError, match="optimizer"):
        load(tmp_path / "bare", found, torch.optim.AdamW(found.parameters()))


class Tied(nn.Module):
    """What an earlier release saved into `data/checkpoint_of_two_ranks.zip` after one step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.body = nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("count", torch.tensor(0))


def test_a_checkpoint_of_an_earlier_release_opens(tmp_path: Path) -> None:
    shutil.unpack_archive(Path(__file__).parent / "data" / "checkpoint_of_two_ranks.zip", tmp_path)
    model = Tied()
    body = {"params": [*model.body.parameters()], "betas": (0.1, 0.1)}
    optimizer = torch.optim.AdamW([body, {"params": [model.embedding.weight]}], lr=1.0)
    loaded = load(tmp_path, model, optimizer)  # compares the checksums that were written then
    assert (loaded.step, loaded.extra) == (7, {"position": 10})
    assert loaded.missing == loaded.unexpected == ()
    assert model.count == 3
    assert model.embedding.weight[2].tolist() == pytest.approx(
        [0.7475, 0.8721875, 0.996875, 1.1215625]
    )
    momentum = optimizer.state[model.body.bias]["exp_avg"]
    assert momentum.tolist() == pytest.approx([47.199356, 17.300455, 8.032954, 3.4870396])
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.25]
    assert [group["betas"] for group in optimizer.param_groups] == [(0.5, 0.75), (0.9, 0.999)]
    assert all(state["step"] == 1 for state in optimizer.state.values())
    assert len(optimizer.state) == 3


def test_a_flipped_bit_a_missing_file_and_a_strange_file_are_named(tmp_path: Path) -> None:
    model = whole()
    for name in ("a", "b", "c", "d"):
        save(tmp_path / name, model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    [data] = (tmp_path / "a").glob("*.distcp")
    content = bytearray(data.read_bytes())
    needle = model.last.weight.detach().numpy().tobytes()
    content[content.index(needle) + 9] ^= 4
    data.write_bytes(content)
    [data] = (tmp_path / "b").glob("*.distcp")
    data.unlink()
    (tmp_path / "c" / "rank_00000.pt").write_bytes((tmp_path / "d" / "rank_00000.pt").read_bytes())
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    changed = {name: value.clone() for name, value in model.state_dict().items()}
    for name, words in (("a", r"last\.weight"), ("b", "__0_0"), ("c", "rank_00000")):
        with pytest.raises(CheckpointError, match=words):
            load(tmp_path / name, model)
        for key, value in model.state_dict().items():
            assert torch.equal(value, changed[key])
    load(tmp_path / "d", model)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])
    with pytest.raises(CheckpointError, match="latest"):
        load(tmp_path / "nothing", model)

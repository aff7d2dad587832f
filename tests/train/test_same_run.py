"""All ranks do the same run, or none starts; a launch that goes on with other hosts continues."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fullshard.comm.topology import Topology
from fullshard.errors import DisagreementError, OtherRankError
from fullshard.ranks import RankGroup
from fullshard.testing import Rank, on_ranks
from fullshard_train.config import ModelSection
from fullshard_train.config_file import config_as_toml
from fullshard_train.control import StopRequest
from fullshard_train.run import Run
from fullshard_train.same_run import Inputs, facts_of, require_same
from fullshard_train.world import World
from tests.support.programs import free_port
from tests.support.tiny_run import TEXT, configured

# What another rank does, and what is said about it.
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"optimizer": {"lr": 5e-3}}, "optimizer.lr (--lr): 0.004 on rank 0 ("),
    ({"optimizer": {"lr": 5e-3}}, "; 0.005 on rank 1 ("),
    ({"optimizer": {"steps": 7}}, "optimizer.steps (--steps): 6 on "),
    ({"run": {"seed": 1}}, "run.seed (--seed): 0 on "),
    ({"data": {"paths": ("other/text.txt",)}}, "data.paths (--data): text of "),
]


ENDLESS: dict[str, dict[str, Any]] = {
    "optimizer": {"steps": 100_000, "lr": 1e-4},
    "run": {"save_every": 1000},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {".": TEXT, "other": TEXT.replace("fox", "cat"), "same": TEXT}.items():
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "text.txt").write_text(text)
    return tmp_path


@on_ranks(2)
def test_a_rank_that_would_train_otherwise_is_named_with_both_values(
    rank: Rank, folder: Path
) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    for other, said in OTHERS:
        changes = {section: dict(values) for section, values in other.items() if rank.rank == 1}
        if "data" in changes:
            changes["data"] = {"paths": (str(folder / "other" / "text.txt"),)}
        config = configured(folder, "run", **changes)
        with pytest.raises(DisagreementError if rank.rank == 0 else OtherRankError) as caught:
            Run(config, world).run(StopRequest())
        assert said in str(caught.value)
        assert str(caught.value).count("\n  ") == 1, "nothing else differs"
        assert not (folder / "run").exists()


def test_paths_may_differ_where_contents_are_equal_and_weights_count_as_contents(
    folder: Path,
) -> None:
    def facts(text: str, model: str) -> dict[str, str]:
        for name in ("first", "copy", "tuned"):
            (folder / name).mkdir(exist_ok=True)
            (folder / name / "config.json").write_text("{}")
            (folder / name / "model.safetensors").write_bytes(b"12" if name == "tuned" else b"11")
        config = configured(folder, text, data={"paths": (str(folder / text / "text.txt"),)})
        inputs = Inputs.of(config)
        named = replace(config, model=ModelSection(name=str(folder / model), sequence=32))
        return facts_of(named, inputs, World(0, 1, 0, 1, torch.device("cpu")))

    def differing(other: dict[str, str]) -> set[str]:
        return {name for name, value in facts(".", "first").items() if other[name] != value}

    assert differing(facts("same", "copy")) == set()
    assert differing(facts("same", "tuned")) == {"model.name (--model)"}
    assert differing(facts("other", "copy")) == {"data.paths (--data)"}
    assert {"fullshard", "torch", "NVIDIA_TF32_OVERRIDE"} <= facts(".", "first").keys()


@on_ranks(4)
def test_all_that_differs_is_listed_with_every_value(rank: Rank) -> None:
    facts = {"torch": "2.13" if rank.rank < 3 else "2.14", "seed": str(rank.rank % 2), "lr": "1"}
    with pytest.raises(DisagreementError) as caught:
        require_same(RankGroup.world(), facts, is_told=True)
    _, torch_line, seed_line, _ = str(caught.value).split("\n")
    assert torch_line.startswith("  torch: 2.13 on ranks 0 to 2 (")
    assert "; 2.14 on rank 3 (" in torch_line
    assert seed_line.startswith("  seed: 0 on ranks 0, 2 (")


def test_ranks_are_named_with_their_hosts() -> None:
    few = Topology(tuple("123456"), ("a", "a", "a", "b", "b", "c"))
    assert few.named([0]) == "rank 0 (a)"
    assert few.named(range(6)) == "ranks 0 to 2 (a), ranks 3, 4 (b), rank 5 (c)"
    many = Topology(tuple("123456789"), tuple(f"host{number}" for number in range(9)))
    assert many.named(range(9)).endswith("rank 3 (host3), and those of 5 more hosts")


@pytest.mark.soak
@pytest.mark.long
def test_a_launch_that_another_host_joins_goes_on_from_what_it_saved(folder: Path) -> None:
    (folder / "run.toml").write_text(config_as_toml(configured(folder, "run", **ENDLESS)))
    meet = ["--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-conf", "last_call_timeout=1"]
    meet += ["--rdzv-endpoint", f"localhost:{free_port()}", "--rdzv-id", "job"]
    agent = [sys.executable, "-m", "torch.distributed.run", *meet, "--max-restarts", "0"]
    program = ["-m", "fullshard", "train", "--config", str(folder / "run.toml")]
    metrics, logs = folder / "run" / "metrics.jsonl", [folder / f"{n}.log" for n in range(2)]
    agents: list[subprocess.Popen[bytes]] = []
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

    def wait_until(is_so: Callable[[], bool]) -> None:
        while not is_so():
            assert agents[0].poll() is None, logs[0].read_text()
            with suppress(subprocess.TimeoutExpired):
                agents[0].wait(0.05)

    try:
        for log in logs:
            with log.open("wb") as output:
                agents.append(
                    subprocess.Popen([*agent, *program], env=env, stdout=output, stderr=output)
                )
            wait_until(lambda: metrics.exists() and metrics.stat().st_size > 0)
        wait_until(lambda: "on 2 CPU ranks, resuming from step " in logs[0].read_text())
        before = len(metrics.read_text().splitlines())
        wait_until(lambda: len(metrics.read_text().splitlines()) > before)
    finally:
        for each in agents:
            each.kill()
            each.wait()
    found = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [each["step"] for each in found] == list(range(1, len(found) + 1))
    assert sum(each["is_restart"] for each in found) == 1

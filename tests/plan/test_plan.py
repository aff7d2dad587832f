"""Whether a run fits, and what is said if it does not."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fullshard.errors import ConfigError, TopologyError
from fullshard.formatting import readable
from fullshard.plan import DeviceProfile, Machine, profile_named
from fullshard_train.config import (
    ModelSection,
    OptimizerSection,
    ShardingSection,
    TrainConfig,
)
from fullshard_train.models.architecture import Architecture
from fullshard_train.models.tokenizers import ByteTokenizer, Tokenizer
from fullshard_train.planning import Candidate, _estimated, capacity_of, require_fit

CPU = torch.device("cpu")
H100, CPUS = profile_named("H100"), profile_named("CPU")
WIDTH, VOCABULARY = 12, 19


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width - 1)
        self.down = nn.Linear(4 * width - 1, width)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """Sizes that divide by nothing, a scalar in each block, a head of its own."""

    def __init__(self, width: int = WIDTH, num_blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class SmallArchitecture(Architecture):
    name = "small"
    vocabulary = VOCABULARY
    max_sequence = None

    def __init__(self, width: int = WIDTH, num_blocks: int = 3) -> None:
        self.width, self.num_blocks = width, num_blocks

    def build(self) -> nn.Module:
        with torch.device("meta"):
            return Model(self.width, self.num_blocks)

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def fill(self, model: nn.Module, seed: int) -> None:
        raise NotImplementedError

    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        raise NotImplementedError

    def logits(self, model: nn.Module, tokens: Tensor, positions: Any = None) -> Tensor:
        logits: Tensor = model(tokens)
        return logits

    def tokenizer(self, kind: str) -> Tokenizer:
        return ByteTokenizer()


def config_of(**sharding: object) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(sequence=8),
        sharding=ShardingSection(**sharding),  # type: ignore[arg-type]
        optimizer=OptimizerSection(batch=2),
    )


def needed(
    config: TrainConfig, profile: DeviceProfile = H100, num_ranks: int = 2, **shape: int
) -> Candidate:
    bare = replace(profile, context_bytes=0, comm_bytes=0, workspace_bytes=0)
    return _estimated(
        config, SmallArchitecture(**shape), Machine(profile=bare, ranks_per_host=num_ranks)
    )


def refusal(config: TrainConfig, share: float, profile: DeviceProfile, **shape: int) -> str:
    own = needed(config, profile, **shape)
    require_fit(own, SmallArchitecture(**shape), own.peak_bytes)
    with pytest.raises(ConfigError) as found:
        require_fit(own, SmallArchitecture(**shape), int(own.peak_bytes * share))
    return str(found.value)


def test_a_mesh_of_other_ranks_is_refused():
    with pytest.raises(TopologyError, match="2x4 is a mesh of 8 ranks, but the run has 4"):
        needed(config_of(mesh="2x4"), num_ranks=4)
    meshed, four = needed(config_of(mesh="2x4"), num_ranks=8), needed(config_of(), num_ranks=4)
    assert meshed.kinds["parameter shards"] == four.kinds["parameter shards"]


def test_a_refusal_says_what_is_needed_and_what_would_fit():
    words = refusal(config_of(), 0.8, H100, width=256)
    assert words.startswith("small does not fit into memory: each of 2 ranks needs ")
    offloaded = needed(config_of(offload=True), width=256)
    assert f"--offload would need {readable(offloaded.peak_bytes)} and" in words
    assert f" and {readable(offloaded.host_bytes)} of host memory" in words
    wider = needed(config_of(), num_ranks=4, width=256)
    assert f"4 ranks would need {readable(wider.peak_bytes)}" in words
    # Parameters are what takes memory here: recomputing would not be enough.
    assert "checkpointing" not in words


def test_where_activations_take_the_memory_recomputing_is_offered():
    config = replace(config_of(), optimizer=OptimizerSection(batch=64))
    words = refusal(config, 0.6, CPUS, num_blocks=8)
    assert "--activation-checkpointing would need " in words
    assert "--batch 1 would need " in words
    assert "--offload" not in words
    assert "ranks would need" not in words


@pytest.mark.soak
def test_changes_are_offered_together_where_none_is_enough():
    shape = {"width": 256, "num_blocks": 8}
    config = replace(config_of(), optimizer=OptimizerSection(batch=32))
    both = replace(
        config_of(offload=True, activation_checkpointing=True), optimizer=config.optimizer
    )
    capacity = needed(both, **shape).peak_bytes
    own = needed(config, **shape)
    words = refusal(config, capacity / own.peak_bytes + 1e-6, H100, **shape)
    assert f"; --offload --activation-checkpointing would need {readable(capacity)} and" in words
    assert "ranks with --activation-checkpointing --batch 1 would need" in words


@pytest.mark.exhaustive
def test_where_nothing_would_be_enough_a_smaller_model_is_advised():
    words = refusal(config_of(), 0.001, H100)
    assert words.endswith("; choose a smaller model or a shorter --sequence.")


def test_ranks_of_a_machine_share_its_memory():
    available = next(
        int(line.split()[1]) * 1024
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable")
    )
    alone, shared = capacity_of(CPU, 1), capacity_of(CPU, 4)
    assert 0 < alone <= available * 1.2
    assert shared == pytest.approx(alone / 4, rel=0.2)


def test_the_limit_of_a_container_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("fullshard.doctor.machine._CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{50 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 3\ninactive_file {10 * 2**20}\n")
    assert capacity_of(CPU, 2) == 30 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity_of(CPU, 2) > 30 * 2**20

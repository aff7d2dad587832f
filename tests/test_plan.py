"""Compares what a plan says a run needs with what the run holds."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fullshard import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, auto_shard
from fullshard.api import MixedPrecision, ShardingStrategy
from fullshard.errors import ConfigError, TopologyError
from fullshard.models.architecture import Architecture
from fullshard.models.tokenizers import ByteTokenizer, Tokenizer
from fullshard.plan import (
    DeviceProfile,
    Machine,
    MemoryPlan,
    ParameterShape,
    Sharding,
    UnitShapes,
    Work,
    plan_memory,
    profile_named,
    readable,
    saved_activation_bytes,
)
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, fake_world, on_ranks
from fullshard.training.config import (
    ModelSection,
    OptimizerSection,
    ShardingSection,
    TrainConfig,
)
from fullshard.training.planning import Candidate, _estimated, capacity_of, require_fit
from fullshard.training.sharding import STRATEGIES, Dtypes
from fullshard.wrap import ModuleWrapPolicy, choose

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

    def __init__(self, width: int = WIDTH, num_blocks: int = 3, is_adapted: bool = False) -> None:
        self.width, self.num_blocks, self.is_adapted = width, num_blocks, is_adapted

    def build(self) -> nn.Module:
        with torch.device("meta"):
            model = Model(self.width, self.num_blocks)
        if self.is_adapted:
            for name, param in model.named_parameters():
                param.requires_grad_("up" in name)
        return model

    def block_classes(self) -> tuple[type[nn.Module], ...]:
        return (Block,)

    def fill(self, model: nn.Module, seed: int) -> None:
        raise NotImplementedError

    def write_config(self, folder: Path, dtype: str, tokenizer: Tokenizer) -> None:
        raise NotImplementedError

    def logits(self, model: nn.Module, tokens: Tensor) -> Tensor:
        logits: Tensor = model(tokens)
        return logits

    def tokenizer(self, kind: str) -> Tokenizer:
        return ByteTokenizer()


def units_of(*numels: int, is_trainable: bool = True) -> list[list[Tensor]]:
    """Units of one parameter each; the last is the root."""
    meta = torch.device("meta")
    return [[torch.empty(n, device=meta, requires_grad=is_trainable)] for n in numels]


def config_of(**sharding: object) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(sequence=8),
        sharding=ShardingSection(**sharding),  # type: ignore[arg-type]
        optimizer=OptimizerSection(batch=2),
    )


# Shards, gradients and optimizer state, as the engine holds them


def held_by(section: ShardingSection, num_ranks: int, *, is_adapted: bool = False) -> MemoryPlan:
    model, dtypes = (
        SmallArchitecture(is_adapted=is_adapted).build(),
        Dtypes.of(section.precision, CPU),
    )
    sharding = Sharding(
        num_shards=num_ranks,
        strategy=STRATEGIES[section.strategy][0],
        is_flat=section.api == "wrapper",
        is_offloaded=section.offload,
        param_dtype=dtypes.param,
        reduce_dtype=dtypes.reduce,
    )
    units = choose(model, ModuleWrapPolicy({Block}), needs_forward=True)
    return plan_memory([[param for _, param in unit.params] for unit in units], sharding)


def held(model: nn.Module) -> dict[str, int]:
    """What this rank holds after a step."""
    shard_buffers = gradients = 0
    for unit in {id(u): u for m in model.modules() if (r := hooks_of(m)) for u in r.units}.values():
        for lane, shard_buffer in zip(unit.layout.lanes, unit.shard_buffers.lanes, strict=True):
            shard_buffers += shard_buffer.numel() * shard_buffer.element_size()
            if lane.is_trainable:
                gradients += shard_buffer.numel() * shard_buffer.element_size()
    return {"parameters": shard_buffers, "gradients": gradients}


def moments_of(optimizer: torch.optim.Optimizer) -> int:
    found = 0
    for state in optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            local = state[name]
            local = local.to_local() if hasattr(local, "to_local") else local
            found += local.numel() * local.element_size()
    return found


def sharded(rank: Rank, section: ShardingSection, is_adapted: bool) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for name, param in model.named_parameters():
        param.requires_grad_(not is_adapted or "up" in name)
    policy = ModuleWrapPolicy({Block})
    low = torch.bfloat16 if section.precision == "bf16" else None
    reduced = torch.float32 if low else None
    mesh = rank.mesh(rank.size)
    if section.api == "wrapper":
        strategy = {
            "full": ShardingStrategy.FULL_SHARD,
            "grad-op": ShardingStrategy.SHARD_GRAD_OP,
            "none": ShardingStrategy.NO_SHARD,
        }[section.strategy]
        return FullyShardedDataParallel(
            model,
            device_mesh=mesh,
            sharding_strategy=strategy,
            auto_wrap_policy=policy,
            use_orig_params=True,
            mixed_precision=MixedPrecision(low, reduced),
        )
    if section.strategy == "none":
        mesh = rank.mesh((rank.size, 1), ("replicate", "shard"))
    options = {"offload_policy": CPUOffloadPolicy()} if section.offload else {}
    policies = MixedPrecisionPolicy(low, reduced)
    return auto_shard(model, policy, mesh=mesh, mp_policy=policies, **options)


SECTIONS = [
    ShardingSection(),
    ShardingSection(precision="bf16"),
    ShardingSection(strategy="none"),
    ShardingSection(offload=True),
    ShardingSection(api="wrapper"),
    ShardingSection(api="wrapper", strategy="grad-op", precision="bf16"),
    ShardingSection(api="wrapper", strategy="none"),
]


@pytest.mark.parametrize("is_adapted", [False, True], ids=["all trained", "a part trained"])
@on_ranks(2)
def test_a_plan_says_what_a_sharded_model_holds(rank: Rank, is_adapted: bool) -> None:
    for section in SECTIONS:
        plan = held_by(section, rank.size, is_adapted=is_adapted)
        model = sharded(rank, section, is_adapted)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
        model(torch.arange(8).view(2, 4)).float().sum().backward()
        optimizer.step()
        found = held(model)
        assert plan.parameter_shards == found["parameters"], section
        assert plan.gradient_shards == found["gradients"], section
        if rank.rank == 0:  # which has the most
            assert plan.optimizer_state == moments_of(optimizer), section
        else:
            assert plan.optimizer_state >= moments_of(optimizer), section


@pytest.mark.parametrize("size", [1, 3, 8, 64])
def test_a_plan_fits_any_number_of_ranks(size):
    with fake_world(size) as rank:
        model = sharded(rank, ShardingSection(), False)
        found = held(model)
    plan = held_by(ShardingSection(), size)
    assert (plan.parameter_shards, plan.gradient_shards) == (
        found["parameters"],
        found["gradients"],
    )


# What a plan is made of


@given(
    numels=st.lists(st.integers(0, 5000), min_size=1, max_size=6),
    num_shards=st.integers(1, 16),
    is_flat=st.booleans(),
)
def test_shards_of_all_ranks_hold_every_parameter_and_little_else(numels, num_shards, is_flat):
    plan = plan_memory(units_of(*numels), Sharding(num_shards=num_shards, is_flat=is_flat))
    assert plan.num_parameters == sum(numels)
    all_shards = plan.parameter_shards * num_shards
    assert 4 * sum(numels) <= all_shards <= 4 * sum(numels) + (4 * num_shards * 8) * len(numels)
    assert plan.gradient_shards == plan.parameter_shards
    replicated = plan_memory(
        units_of(*numels), Sharding(num_shards=num_shards, num_replicas=2, is_flat=is_flat)
    )
    assert replicated.device_bytes == plan.device_bytes
    assert f"on 2x{num_shards} ranks" in repr(replicated)
    assert 2 * plan.parameter_shards >= plan.optimizer_state >= 8 * sum(numels) / num_shards


def test_the_two_largest_neighbours_and_the_root_are_full_at_a_time():
    sizes = (1024, 4096, 2048, 8192, 512, 256)
    plan = plan_memory(units_of(*sizes), Sharding(num_shards=2, is_flat=True))
    assert plan.moving_full == plan.kept_full == 4 * (2048 + 8192 + 256)


def test_grad_op_keeps_all_units_full_until_backward_has_had_them():
    full = Sharding(num_shards=2, is_flat=True)
    kept = replace(full, strategy=ShardingStrategy.SHARD_GRAD_OP)
    sizes = (1024, 1024, 1024, 1024, 256)
    plan = plan_memory(units_of(*sizes), kept)
    assert plan.kept_full == 4 * sum(sizes)
    assert plan.moving_full == plan_memory(units_of(*sizes), full).moving_full


def test_what_is_not_sharded_needs_no_second_copy_unless_it_is_cast():
    whole = Sharding(num_shards=4, strategy=ShardingStrategy.NO_SHARD, is_flat=True)
    plan = plan_memory(units_of(1024, 1024), whole)
    assert plan.parameter_shards == 4 * 2048
    assert plan.kept_full == plan.moving_full == 0
    cast = plan_memory(units_of(1024, 1024), replace(whole, param_dtype=torch.bfloat16))
    assert cast.moving_full == 2 * 2048


def test_low_precision_halves_what_is_full_and_not_what_is_kept():
    sharding = Sharding(num_shards=2, is_flat=True)
    high = plan_memory(units_of(1024, 1024), sharding)
    low = plan_memory(units_of(1024, 1024), replace(sharding, param_dtype=torch.bfloat16))
    assert low.parameter_shards == high.parameter_shards
    assert 2 * low.moving_full == high.moving_full
    assert 2 * low.gradient_messages == high.gradient_messages


def test_a_narrower_wire_halves_messages_and_takes_what_arrives_where_it_is_not_read_in_place():
    units = units_of(1024, 4096, 512)
    usual = Sharding(
        num_shards=2, is_flat=True, param_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    narrow = replace(usual, wire_dtype=torch.bfloat16)
    # The root's gradients, one unit's being made, and the messages of the one before it.
    assert plan_memory(units, usual).gradient_messages == 2 * 512 + 2 * 1024 + 4 * 4096
    assert plan_memory(units, narrow).gradient_messages == 2 * 512 + 2 * 1024 + 2 * 4096
    on_gpu = replace(narrow, device_type="cuda")
    assert plan_memory(units, on_gpu).gradient_messages == 2 * 512 + 2 * 1024 + (2 + 2) * 4096
    alone = replace(on_gpu, num_shards=1)
    unchanged = replace(usual, device_type="cuda", num_shards=1)
    assert plan_memory(units, alone).gradient_messages == (
        plan_memory(units, unchanged).gradient_messages
    )


def test_a_frozen_parameter_takes_no_gradient_memory():
    plan = plan_memory(units_of(1024, 1024, is_trainable=False), Sharding(num_shards=2))
    assert plan.gradient_shards == plan.optimizer_state == plan.gradient_messages == 0
    assert plan.num_trainable == 0
    assert plan.parameter_shards == 4096


def test_offloading_moves_shards_to_host_memory_where_that_is_another():
    on_cpu = Sharding(num_shards=2, is_offloaded=True)
    on_gpu = replace(on_cpu, device_type="cuda")
    assert plan_memory(units_of(1024), on_cpu).host_bytes == 0
    plan = plan_memory(units_of(1024), on_gpu)
    assert plan.host_bytes == 4 * 4 * 512
    assert plan.device_bytes == plan.moving_full + plan.gradient_messages


def test_the_highest_of_two_moments_counts():
    sharding = Sharding(num_shards=2, is_flat=True)
    quiet = plan_memory(units_of(1024), sharding)
    busy = plan_memory(units_of(1024), sharding, Work(activation_bytes=10**6, logits_bytes=10))
    assert busy.after_backward_bytes == quiet.after_backward_bytes == quiet.device_bytes
    assert busy.device_bytes == quiet.device_bytes - quiet.gradient_shards + 10**6 + 10
    again = Work(activation_bytes=10**6, logits_bytes=10, accumulates=True)
    accumulating = plan_memory(units_of(1024), sharding, again)
    assert accumulating.device_bytes == busy.device_bytes + quiet.gradient_shards


def test_a_plan_prints_as_a_table():
    sharding = Sharding(num_shards=2, is_offloaded=True, device_type="cuda")
    lines = repr(plan_memory(units_of(2**20), sharding)).splitlines()
    assert lines[0] == "1,048,576 parameters, 1,048,576 trainable, on 1x2 ranks"
    assert lines[1].split() == ["on", "each", "rank", "before", "backward", "after", "backward"]
    assert lines[-1] == "and 8.0 MiB of host memory"
    assert len({len(line) for line in lines[1:-1]}) == 1
    found = [readable(n) for n in (0, 1023, 1024, 3 * 2**29, 5 * 2**40)]
    assert found == ["0 bytes", "1023 bytes", "1.0 KiB", "1.5 GiB", "5.0 TiB"]


def test_a_plan_without_units_or_ranks_is_refused():
    with pytest.raises(ConfigError, match="at least the root unit"):
        plan_memory([], Sharding(num_shards=2))
    with pytest.raises(ConfigError, match="found 1x0"):
        Sharding(num_shards=0)


def test_shapes_are_planned_as_tensors_are():
    weight, bias = torch.empty(6, 4, requires_grad=True), torch.empty(3, dtype=torch.bfloat16)
    shapes = ParameterShape("weight", (6, 4)), ParameterShape("bias", (3,), torch.bfloat16, False)
    sharding = Sharding(num_shards=2)
    plan = plan_memory([UnitShapes("root", shapes)], sharding)
    assert plan == plan_memory([[weight, bias]], sharding)
    assert plan.num_trainable == 24


# Activations


def test_what_a_small_mlp_saves_is_counted_by_hand():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        batch = torch.empty(5, 8)
    # The input of the first layer; the result of ReLU, once, though two layers save it.
    assert saved_activation_bytes(lambda: model(batch)) == 4 * 5 * (8 + 32)
    model.requires_grad_(False)
    assert saved_activation_bytes(lambda: model(batch)) == 0


def test_checkpointed_blocks_save_their_inputs_only():
    with torch.device("meta"):
        blocks = nn.ModuleList(Block() for _ in range(3))
        batch = torch.empty(5, WIDTH, requires_grad=True)

    def run() -> Tensor:
        x = batch
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert saved_activation_bytes(run) == 3 * 4 * 5 * WIDTH


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_mask", [False, True])
def test_attention_is_counted_as_it_is_on_a_real_device(dtype, has_mask):
    def run(device: str) -> Tensor:
        q, k, v = (
            torch.zeros(2, 4, 16, 8, device=device, dtype=dtype, requires_grad=True).sin()
            for _ in range(3)
        )
        mask = torch.zeros(16, 16, device=device, dtype=dtype) if has_mask else None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=not has_mask)

    real: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        real[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        kept = run("cpu")
    assert kept.grad_fn is not None
    assert saved_activation_bytes(lambda: run("meta")) == sum(s.nbytes() for s in real.values())


# Whether a run fits


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
    with pytest.raises(TopologyError, match="2x4 needs 8 ranks, found 4"):
        needed(config_of(mesh="2x4"), num_ranks=4)
    meshed, four = needed(config_of(mesh="2x4"), num_ranks=8), needed(config_of(), num_ranks=4)
    assert meshed.kinds["parameter shards"] == four.kinds["parameter shards"]


def test_a_refusal_says_what_is_needed_and_what_would_fit():
    words = refusal(config_of(), 0.8, H100, width=256)
    assert words.startswith("small: training on 2 ranks needs ")
    assert " on each, found " in words
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
    monkeypatch.setattr("fullshard.training.planning.CONTROL_GROUP", tmp_path)
    (tmp_path / "memory.max").write_text(f"{100 * 2**20}\n")
    (tmp_path / "memory.current").write_text(f"{50 * 2**20}\n")
    (tmp_path / "memory.stat").write_text(f"anon 3\ninactive_file {10 * 2**20}\n")
    assert capacity_of(CPU, 2) == 30 * 2**20
    (tmp_path / "memory.max").write_text("max\n")
    assert capacity_of(CPU, 2) > 30 * 2**20

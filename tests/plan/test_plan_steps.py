"""Simulated steps: their parts by themselves, and against what steps of the engine hold."""

import json
import sys
import tomllib
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from fullshard import CPUOffloadPolicy, MixedPrecisionPolicy, auto_shard
from fullshard.cli.commands import fullshard
from fullshard.doctor.bandwidth import LinkSpeed, Speeds
from fullshard.doctor.machine import gather_facts
from fullshard.doctor.profile import measured_profile
from fullshard.errors import ConfigError, FullshardError, LifecycleError, UnknownNameError
from fullshard.facts import PROCESS_KIND
from fullshard.plan import (
    DeviceProfile,
    Kind,
    Machine,
    StepPlan,
    count_flops,
    plan,
    profile_named,
    read_profile,
    step_plan,
    write_profile,
)
from fullshard.plan.device_profile import PROFILES, known_profile
from fullshard.plan.ledger import Ledger
from fullshard.plan.simulator import Fabric, Simulator, _free_from
from fullshard.testing import fake_world
from fullshard_train import planning
from fullshard_train.cli.plan import bytes_of, machine_of
from fullshard_train.config import (
    ModelSection,
    OptimizerSection,
    RunSection,
    ShardingSection,
    TrainConfig,
    validate,
)
from fullshard_train.models.transformer import BuiltinArchitecture, size_named
from fullshard_train.planning import (
    _estimated,
    choose_settings,
    chosen_for_this_machine,
    plan_run,
    predicted,
)
from fullshard_train.report.formatting import shown_bytes, shown_time
from fullshard_train.report.record import RunRecord
from fullshard_train.report.tables import memory_kinds, summary
from fullshard_train.run import run_rank

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import bench_plan  # noqa: E402

H100, CPU = profile_named("H100"), profile_named("CPU")
EIGHT = Machine(profile=H100)
MIB = 1 << 20


def config_of(*, batch: int = 2, accumulate: int = 1, **sharding: Any) -> TrainConfig:
    return TrainConfig(
        model=ModelSection(name="tiny", sequence=64),
        sharding=ShardingSection(**sharding),
        optimizer=OptimizerSection(batch=batch, accumulate=accumulate),
    )


def tiny(num_blocks: int = 4) -> BuiltinArchitecture:
    return BuiltinArchitecture(replace(size_named("tiny"), num_blocks=num_blocks))


def planned(machine: Machine = EIGHT, **settings: Any) -> StepPlan:
    return plan_run(config_of(**settings), tiny(), machine)


# Parts


def test_the_ledger_counts_storages_in_blocks_until_they_die():
    ledger = Ledger()
    ledger.begin_step()
    first = torch.empty(1000, dtype=torch.uint8, device="meta")
    ledger.allocated(first.untyped_storage(), Kind.ACTIVATIONS, "layers.0", "compute")
    assert ledger.num_bytes == 1024
    second = torch.empty(512, dtype=torch.uint8, device="meta")
    ledger.allocated(second.untyped_storage(), Kind.OTHER, "", "compute")
    ledger.set_kind(second.untyped_storage(), Kind.LOSS)
    view = first[10:]
    del first
    assert ledger.num_bytes == 1536
    del view
    assert ledger.num_bytes == 512
    second.untyped_storage().resize_(0)
    ledger.allocated(second.untyped_storage(), Kind.LOSS, "", "compute")
    assert ledger.num_bytes == 0
    peak = ledger.peak()
    assert peak.num_bytes == 1536
    assert {kind: size for kind, size in peak.kinds.items() if size} == {
        Kind.ACTIVATIONS: 1024,
        Kind.OTHER: 512,
    }
    assert peak.activations == {"layers.0": 1024}


def test_freed_addresses_are_given_out_again_on_their_stream_only():
    ledger = Ledger()
    tensors = [torch.empty(512, dtype=torch.uint8, device="meta") for _ in range(3)]
    for tensor, stream in zip(tensors, ("gather", "gather", "compute"), strict=True):
        ledger.allocated(tensor.untyped_storage(), Kind.FULL, "", stream)
    starts = [ledger.block_of(each.untyped_storage()).start for each in tensors]
    assert len(set(starts)) == 3
    del tensors[0], tensor
    again = torch.empty(100, dtype=torch.uint8, device="meta")
    ledger.allocated(again.untyped_storage(), Kind.FULL, "", "gather")
    assert ledger.block_of(again.untyped_storage()).start == starts[0]


def test_streams_wait_for_events_and_not_for_each_other():
    profile = replace(H100, launch_s=1.0)
    simulator = Simulator(profile, Fabric(profile, 8), is_offloaded=False)
    device = simulator.device
    streams = device.make_streams()
    simulator.run(10.0)  # issued after 1 s
    with device.on(streams.all_gather):
        simulator.run(3.0)
        gathered = device.record()
    assert (simulator.compute.time_s, streams.all_gather.time_s) == (11.0, 5.0)
    assert not gathered.query()
    device.wait(gathered)
    assert simulator.compute.time_s == 11.0  # it is behind already
    with device.on(streams.reduce_scatter):
        device.wait(gathered)
        simulator.run(1.0)
    assert streams.reduce_scatter.time_s == 6.0
    device.synchronize(gathered)
    assert simulator.host_s == 5.0


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 5))))
def test_a_link_sends_one_message_at_a_time_each_as_soon_as_it_is_free(
    messages: list[tuple[int, int]],
) -> None:
    taken: list[tuple[float, float]] = []
    busy: set[int] = set()
    for earliest, length in messages:
        start = next(t for t in count(earliest) if busy.isdisjoint(range(t, t + length)))
        assert _free_from(taken, earliest, length) == start
        busy.update(range(start, start + length))


def test_collectives_take_the_slower_of_links_and_network():
    profile = replace(H100, latency_s=0.0, hop_s=0.0, link_efficiency=1.0)
    fabric = Fabric(profile, ranks_per_host=8)
    assert fabric.shape(range(32)) == (4, 8)
    assert fabric.shape(range(0, 32, 8)) == (4, 1)
    inside = fabric.seconds_of(10**9, 1, 8)
    assert inside == pytest.approx(7 / 8 / profile.link_gbs)
    across = fabric.seconds_of(10**9, 4, 8)
    assert across == pytest.approx(max(31 / 32 / profile.link_gbs, 3 / 4 / 8 / 50))
    assert fabric.seconds_of(10**9, 4, 1) == pytest.approx(3 / 4 / 50)
    assert fabric.seconds_of(10**9, 1, 1) == 0
    # Ranks of a host that share an adapter: all groups of a step send at once.
    shared = Fabric(replace(profile, network_gbs=1.0, adapters_per_host=1), ranks_per_host=8)
    assert shared.seconds_of(10**9, 4, 8) == pytest.approx(3 / 4)
    assert shared.seconds_of(10**9, 4, 1) == pytest.approx(3 / 4 * 8)


# Steps


@pytest.mark.exhaustive
def test_memory_on_a_cpu_is_what_the_engine_holds(tmp_path):
    result = tmp_path / "plan.json"
    small = ("--model", "tiny", "--sequence", "64", "--configs", "4")
    bench_plan.main([*small, "--json", str(result)])
    (table,) = json.loads(result.read_text())["tables"]
    assert len(table["rows"]) == 4
    for name, planned_mib, measured, _ in table["rows"]:
        assert planned_mib == pytest.approx(measured, rel=0.03), name


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_memory_and_time_on_a_gpu_are_as_measured(is_wrapped):
    tables = json.loads((BENCHMARKS / "results" / "plan_h200.json").read_text())["tables"]
    given = {"model": "150m", "sequence": 1024, "batch": 8}
    sharding = {"sharding": {"api": "wrapper"}} if is_wrapped else {}
    config = bench_plan.config_of({**given, **sharding}, "", 0, 0)
    found = bench_plan.planned(config, 8, workspace_bytes=0)
    name = f"150m on 8, {'wrapper' if is_wrapped else '`fully_shard`'}, batch 8"
    rows = [next(row for row in table["rows"] if row[0] == name) for table in tables]
    (_, _, memory, _), (_, _, time_ms, _) = rows
    assert found.peak_bytes / MIB == pytest.approx(memory, rel=0.03)
    # Half of the step waits for the host, whose speed differs from machine to machine.
    assert 1e3 * found.step_s == pytest.approx(time_ms, rel=0.25)


def test_the_second_step_is_like_the_third(monkeypatch):
    settings = {"activation_checkpointing": True, "accumulate": 2}
    second = planned(**settings)
    monkeypatch.setattr(step_plan, "_WARMUP_STEPS", 2)
    third = planned(**settings)
    assert second.peak == replace(third.peak, at_s=second.peak.at_s)
    assert second.step_s == pytest.approx(third.step_s)
    assert second.sent_bytes == third.sent_bytes


def test_kinds_add_up_and_spans_lie_in_the_step():
    found = planned(accumulate=2)
    assert sum(found.peak.kinds.values()) == found.peak_bytes
    assert max(sum(held.values()) for _, held in found.memory) == found.peak_bytes
    kinds = found.peak.kinds
    for kind in (Kind.PARAMETERS, Kind.OPTIMIZER, Kind.FULL, Kind.ACTIVATIONS, Kind.GRADIENTS):
        assert kinds[kind] > 0, kind
    # Two moments of each shard, without padding but in blocks.
    assert kinds[Kind.OPTIMIZER] == pytest.approx(2 * kinds[Kind.PARAMETERS], rel=0.1)
    assert 0 <= found.exposed_s <= found.step_s
    assert all(0 <= span.start_s <= span.end_s <= found.step_s for span in found.timeline.spans)
    assert {span.activity.value for span in found.timeline.spans} >= {"forward", "gather", "reduce"}
    assert "total" in repr(found)
    assert f"on 8 {H100.name}" in repr(found)


def test_faster_links_are_never_slower_and_more_ranks_hold_less():
    slow, fast = (
        planned(Machine(profile=replace(H100, link_gbs=gbs, launch_s=0.0))) for gbs in (1.0, 400.0)
    )
    assert slow.step_s > fast.step_s
    assert slow.exposed_s > fast.exposed_s
    assert slow.peak_bytes == fast.peak_bytes
    large = planned(Machine(profile=H100, num_hosts=2048))
    assert large.machine.num_ranks == 16_384
    assert large.peak.kinds[Kind.PARAMETERS] < fast.peak.kinds[Kind.PARAMETERS]
    hybrid = planned(Machine(profile=H100, num_hosts=4), mesh="4x8")
    assert hybrid.peak.kinds[Kind.PARAMETERS] == fast.peak.kinds[Kind.PARAMETERS]
    assert hybrid.sent_bytes["all-reduce"] > 0


def test_quantized_gradients_cross_a_slow_network_as_sums_of_hosts():
    hosts = Machine(profile=replace(H100, network_gbs=0.01), ranks_per_host=4, num_hosts=2)
    wires = "plain", "bf16", "int8", "int4"
    times = {wire: planned(hosts, reduce_wire=wire, gather_wire="int8").step_s for wire in wires}
    assert times["int4"] < 0.9 * times["int8"] < 0.9 * times["bf16"] < 0.9 * times["plain"]
    alone = Machine(profile=hosts.profile, ranks_per_host=1, num_hosts=4)
    times = {wire: planned(alone, reduce_wire=wire).step_s for wire in wires}
    assert times["int4"] < times["int8"] < times["bf16"] < times["plain"]
    # Sums between replicas come back in eight bits.
    hybrid = {
        wire: planned(hosts, mesh="2x4", replica_wire=wire).sent_bytes["all-reduce"]
        for wire in ("plain", "int8", "int4")
    }
    assert hybrid["int8"] == pytest.approx(0.26 * hybrid["plain"], rel=0.1)
    assert hybrid["int4"] == pytest.approx(0.2 * hybrid["plain"], rel=0.1)


def test_recomputation_and_offload_save_what_they_should():
    usual = planned(batch=8)
    recomputed = planned(batch=8, activation_checkpointing=True)
    assert recomputed.peak.kinds[Kind.ACTIVATIONS] < usual.peak.kinds[Kind.ACTIVATIONS] / 2
    assert recomputed.tflop > 1.2 * usual.tflop
    selective = planned(batch=8, selective_checkpointing=True)
    assert selective.tflop == usual.tflop
    kinds = [each.peak.kinds[Kind.ACTIVATIONS] for each in (recomputed, selective, usual)]
    assert kinds[0] < kinds[1] < 0.9 * kinds[2]
    offloaded = planned(batch=8, offload=True)
    assert offloaded.peak.kinds.get(Kind.OPTIMIZER, 0) == 0
    shards = sum(usual.peak.kinds[kind] for kind in (Kind.PARAMETERS, Kind.OPTIMIZER))
    assert offloaded.host_bytes > shards
    assert offloaded.sent_bytes["host copies"] > 0


@pytest.mark.parametrize("api", ["fully_shard", "wrapper"])
def test_a_step_of_muon_sends_its_matrices_twice_in_bf16_and_keeps_one_moment(api):
    config = config_of(api=api, batch=8)
    muon = replace(config, optimizer=replace(config.optimizer, name="muon"))
    (usual, found) = (plan_run(each, tiny(), EIGHT) for each in (config, muon))
    params = dict(tiny().build().named_parameters())
    matrices = sum(p.numel() for name, p in params.items() if ".layers." in name and p.ndim == 2)
    share = found.sent_bytes["all-to-all"] / (2 * 2 * matrices / 8 * 7 / 8)
    # A wrapper sends only what the bounds between ranks cut.
    assert share == pytest.approx(1.0, rel=0.05) if api == "fully_shard" else 0 < share < 0.2
    assert found.tflop > usual.tflop
    assert found.step_s > usual.step_s
    kinds = usual.peak.kinds, found.peak.kinds
    saved = kinds[0][Kind.OPTIMIZER] - kinds[1][Kind.OPTIMIZER]
    assert saved == pytest.approx(4 * matrices / 8, rel=0.1)


@pytest.mark.parametrize("profile", [H100, CPU], ids=lambda each: each.name)
def test_all_ranks_of_a_host_exchange_matrices_of_muon_over_its_network(profile):
    slow = replace(profile, network_gbs=1e-4, link_gbs=1e6, adapters_per_host=1)
    hosts, config = Machine(profile=slow, ranks_per_host=4, num_hosts=2), config_of()
    muon = replace(config, optimizer=replace(config.optimizer, name="muon"))
    (usual, found) = (plan_run(each, tiny(), hosts) for each in (config, muon))
    # Half of what a host's ranks send is for the other one.
    num_bytes = 4 * found.sent_bytes["all-to-all"] * 8 / 7 / 2
    expected_s = num_bytes / (slow.network_gbs * slow.link_efficiency * 1e9)
    assert found.step_s - usual.step_s == pytest.approx(expected_s, rel=0.02)


def test_a_model_of_few_blocks_tells_of_one_with_many():
    config = config_of(strategy="grad-op", activation_checkpointing=True)
    whole, estimated = plan_run(config, tiny(8), EIGHT), _estimated(config, tiny(8), EIGHT)
    assert estimated.peak_bytes == pytest.approx(whole.device_bytes, rel=1e-3)
    assert estimated.step_s == pytest.approx(whole.step_s, rel=0.01)


# plan()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(3))
        )
        self.head = nn.Linear(64, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def test_any_model_on_meta_can_be_planned():
    with torch.device("meta"):
        model, batch = Net(), torch.empty(16, 64)
    before = [param.shape for param in model.parameters()]
    found = plan(model, [batch], EIGHT)
    assert [param.shape for param in model.parameters()] == before  # a copy was sharded
    assert found.num_parameters == sum(param.numel() for param in model.parameters())
    assert plan(Net, [batch], EIGHT).peak == found.peak

    def shard(model: nn.Module) -> nn.Module:
        policy = MixedPrecisionPolicy(torch.bfloat16)
        return auto_shard(model, mp_policy=policy, offload_policy=CPUOffloadPolicy())

    sgd = plan(
        Net,
        [batch],
        EIGHT,
        shard=shard,
        optimizer=lambda params: torch.optim.SGD(params, lr=0.1),
        is_offloaded=True,
    )
    assert Kind.OPTIMIZER not in sgd.peak.kinds
    assert sgd.host_bytes > 0
    assert not dist.is_initialized()


class Reading(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x.relu() if (x > 0).all() else x


class Listing(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)[x.numpy().argmax()]


def test_values_that_a_model_reads_are_true():
    batch = torch.empty(16, 64, device="meta")
    assert plan(Reading, [batch], EIGHT).step_s > plan(Net, [batch], EIGHT).step_s
    with pytest.raises(ConfigError, match="its step does not run on the meta device"):
        plan(Listing, [batch], EIGHT)
    assert not dist.is_initialized()


def test_what_cannot_be_planned_is_refused():
    batch = torch.empty(16, 64, device="meta")
    with pytest.raises(ConfigError, match=r"'0.weight' is on cpu, .*; build it under"):
        plan(nn.Sequential(nn.Linear(64, 8)), [batch], EIGHT)
    with fake_world(2), pytest.raises(LifecycleError, match="process group; plan before"):
        plan(Net, [batch], EIGHT)
    with pytest.raises(UnknownNameError, match=r"GPU .* is not one of .*; did you mean H100\?"):
        profile_named("H1000")
    assert plan(Net, [batch], EIGHT).peak_bytes > 0  # nothing is left of what failed


def test_count_flops_counts_matrix_products_and_says_nothing_of_a_step_that_fails():
    weight = torch.empty(8, 4, device="meta", requires_grad=True)

    def step() -> None:
        (torch.empty(16, 8, device="meta") @ weight).sum().backward()

    assert count_flops(step) == 2 * (2 * 16 * 8 * 4)  # forward, and the gradient of the weight

    def fails() -> None:
        raise ValueError

    assert count_flops(fails) is None


# Profiles


def test_profiles_are_found_by_the_names_of_drivers_and_in_files(tmp_path):
    assert known_profile("NVIDIA H200").tflops_16 == 989
    assert known_profile("NVIDIA H100 PCIe").tflops_16 == 756
    assert known_profile("Some GPU") is None
    assert profile_named("h100-pcie") is PROFILES["H100 PCIe"]
    file = tmp_path / "profile.json"
    write_profile(replace(H100, name="mine", tflops_16=500.0), file)
    assert read_profile(file) == replace(H100, name="mine", tflops_16=500.0)
    file.write_text('{"speed": 1}')
    with pytest.raises(ConfigError, match="a device profile has no speed"):
        read_profile(file)
    file.write_text("nonsense")
    with pytest.raises(ConfigError, match="is not a device profile in JSON"):
        read_profile(file)
    with pytest.raises(ConfigError, match=r"memory_gbs must be 0 or more, not -1.0"):
        replace(H100, memory_gbs=-1.0)
    assert isinstance(CPU, DeviceProfile)


# Settings for a budget


@pytest.mark.exhaustive
def test_the_fastest_settings_that_fit_are_chosen():
    config, architecture = config_of(batch=4), tiny(2)
    machine = Machine(profile=replace(H100, context_bytes=0, comm_bytes=0, launch_s=0.0))
    every = {
        name: plan_run(config_of(batch=4, **settings), architecture, machine)
        for name, settings in {
            "usual": {},
            "kept": {"strategy": "grad-op"},
            "recomputed": {"activation_checkpointing": True},
        }.items()
    }
    given = {("optimizer", "batch"), ("optimizer", "accumulate")}
    reported: list[tuple[int, int]] = []
    best, *others = choose_settings(
        config, architecture, machine, 1 << 40, given, lambda *counts: reported.append(counts)
    )
    assert reported == [(number, 0) for number in range(1, len(reported) + 1)]
    assert len(reported) > len(others)
    assert best.config.sharding.strategy == "grad-op"
    assert best.peak_bytes == every["kept"].device_bytes
    limit = every["recomputed"].device_bytes
    best, *others = choose_settings(config, architecture, machine, limit, given)
    assert best.config.sharding.activation_checkpointing
    assert best.flags == "--model tiny --sequence 64 --activation-checkpointing --batch 4"
    assert {each.verdict[:5] for each in others} == {"needs"}
    # With free micro-batches, one that needs no recomputation.
    best, *others = choose_settings(config, architecture, machine, limit)
    assert best.config.optimizer.batch * best.config.optimizer.accumulate == 4
    assert all(
        each.tokens_per_s <= best.tokens_per_s for each in others if "slower" in each.verdict
    )
    kept = {*given, ("sharding", "activation_checkpointing"), ("sharding", "offload")}
    with pytest.raises(
        ConfigError, match=r"no settings fit into .* on each of 8 ranks; the smallest need"
    ):
        choose_settings(config, architecture, machine, limit, kept)


@pytest.mark.soak
def test_selective_recomputation_is_chosen_where_it_fits_and_is_faster():
    config, architecture = config_of(batch=4), tiny(2)
    given = {("optimizer", "batch"), ("optimizer", "accumulate")}
    for launch_s, is_chosen in ((0.0, True), (1e-3, False)):
        profile = replace(H100, context_bytes=0, comm_bytes=0, launch_s=launch_s)
        machine = Machine(profile=profile)
        selective = config_of(batch=4, selective_checkpointing=True)
        limit = plan_run(selective, architecture, machine).device_bytes
        best, *_ = choose_settings(config, architecture, machine, limit, given)
        assert best.config.sharding.selective_checkpointing is is_chosen
        assert best.config.sharding.activation_checkpointing is not is_chosen
        # Settings that were passed stay.
        for name in ("selective_checkpointing", "activation_checkpointing"):
            own = config_of(batch=4, **{name: True})
            kept = {*given, ("sharding", name)}
            for each in choose_settings(own, architecture, machine, limit, kept):
                assert getattr(each.config.sharding, name)
                validate(each.config)


@pytest.mark.exhaustive
def test_resharding_to_a_host_and_deeper_prefetch_are_chosen_where_they_are_faster():
    config, architecture = config_of(batch=4), tiny(4)
    given = {("optimizer", "batch"), ("optimizer", "accumulate"), ("sharding", "mesh")}
    given |= {("sharding", "strategy"), ("sharding", "activation_checkpointing")}
    # A slow network, which gathers for backward need not cross.
    network = replace(CPU, network_gbs=0.02)  # one adapter for four ranks
    hosts = Machine(profile=network, ranks_per_host=4, num_hosts=2)
    best, *others = choose_settings(config, architecture, hosts, 1 << 40, given)
    assert best.config.sharding.reshard_to == 4
    assert "--reshard-to 4" in best.flags
    assert "reshard_after_forward=4" in best.python
    # A narrower wire is named, but not chosen: it changes what is computed.
    narrow = [each for each in others if "--gather-wire int8" in each.flags]
    assert all(each.verdict.startswith("changes rounding") for each in narrow)
    assert "gather_wire=Int8(block=256, stochastic=False), reduce_wire=" in narrow[0].python
    exact = [each for each in others if each not in narrow]
    assert [each.config.sharding.reshard_to for each in exact] == [0]
    # Messages that take longer than the compute of one unit, and less than that of two.
    slow = Machine(profile=replace(CPU, latency_s=4e-3), ranks_per_host=2)
    best, other = choose_settings(config, architecture, slow, 1 << 40, given)
    assert (best.config.sharding.prefetch, other.config.sharding.prefetch) == (2, 1)
    assert "--prefetch 2" in best.flags
    assert "2 modules in set_modules_to_forward_prefetch" in best.python
    limit = other.peak_bytes if other.peak_bytes < best.peak_bytes else 0
    best, *_ = choose_settings(config, architecture, slow, limit, given)
    assert best.config.sharding.prefetch == 1


@pytest.mark.exhaustive
def test_parts_of_blocks_become_units_where_blocks_do_not_fit():
    config, architecture = config_of(batch=1), tiny(4)
    recomputed = config_of(batch=1, activation_checkpointing=True)
    blocks = plan_run(recomputed, architecture, EIGHT)
    limit = blocks.peak_bytes + blocks.context_bytes - 1
    best, *_ = choose_settings(config, architecture, EIGHT, limit, {("sharding", "offload")})
    assert best.config.sharding.units == ("Attention", "SwiGLU")
    assert "--unit Attention --unit SwiGLU" in best.flags
    assert best.python.startswith("auto_shard(model, ModuleWrapPolicy({Attention, SwiGLU}), ")
    assert best.peak_bytes <= limit


# The command


def run(*args: Any, expected: int = 0) -> str:
    result = CliRunner().invoke(fullshard, [str(arg) for arg in args])
    assert result.exit_code == expected, result.output
    return result.output


def test_the_command_prints_a_plan_and_draws_it(tmp_path):
    page = tmp_path / "plan.html"
    said = run("plan", "--model", "tiny", "--sequence", "64", "--gpus", "4xA100", "--html", page)
    assert "on 4 A100" in said
    assert "parameter shards" in said
    assert "wait for communication" in said
    assert "Plan of tiny" in page.read_text()
    options = ("--model", "tiny", "--sequence", "64", "--batch", "1", "--nodes", "2")
    said = run("plan", *options, "--budget", "2GiB")
    assert "fullshard train --model tiny" in said
    assert "auto_shard(model, mesh=init_device_mesh(" in said
    assert "why not" in said


def test_the_command_plans_the_model_of_a_function(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def small():\n"
        "    return nn.Sequential(nn.Embedding(99, 32), *(nn.Linear(32, 32) for _ in range(4)),"
        " nn.Linear(32, 99))\n"
        "def wrong():\n    return nn.Linear(torch.ones(3).numpy().size, 3)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "parameters" in run("plan", "--model", "my_models:small", "--sequence", "16")
    for model, message in {
        "my_models:wrong": "does not build on the meta device",
        "my_models:other": "cannot be loaded",
    }.items():
        assert message in run("plan", "--model", model, expected=2)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        (("--gpus", "H100"), "a number and a name, as in 8xH100"),
        (("--gpus", "8xH77"), "GPU 'H77' is not one of"),
        (("--fabric", "fast"), "Gb/s, as in 400Gb"),
        (("--budget", "much"), "a size, as in 70GiB"),
        (("--mesh", "3x3"), "3x3 is a mesh of 9 ranks"),
    ],
)
def test_requests_that_make_no_sense_are_refused(option, message):
    said = run("plan", "--model", "tiny", "--sequence", "16", *option, expected=2)
    assert message in said
    assert said.startswith("fullshard: ")


def test_measured_speeds_become_a_profile(tmp_path):
    links = (LinkSpeed(1, 2.0, 1.0), LinkSpeed(64, 4.0, 3.0))
    speeds = Speeds(num_ranks=2, backend="gloo", links=links, copy=8.0, matmul=0.3)
    profile = measured_profile(gather_facts(), speeds)
    write_profile(profile, tmp_path / "profile.json")
    assert profile.link_gbs == 4.0
    assert profile.tflops_32 * profile.matmul_efficiency == pytest.approx(0.3)
    assert profile.memory_gbs * profile.memory_efficiency == pytest.approx(16.0)
    options = ("--model", "tiny", "--sequence", "16", "--gpus", "2xthis")
    said = run("plan", *options, "--device-profile", tmp_path / "profile.json")
    assert f"on 2 {profile.name}" in said


def test_train_prints_what_it_would_choose_around_what_a_file_sets(tmp_path):
    file = tmp_path / "config.toml"
    file.write_text("[sharding]\nactivation_checkpointing = true\n")
    options = ("--model", "tiny", "--sequence", "16", "--device", "cpu", "--config", str(file))
    said = CliRunner().invoke(fullshard, ["train", "--auto", "--print-config", *options])
    assert said.exit_code == 0, said.output
    found = tomllib.loads(said.stdout)
    assert found["model"]["name"] == "tiny"
    assert found["sharding"]["activation_checkpointing"]
    assert found["sharding"]["strategy"] == "grad-op"
    assert "chosen for" in said.stderr


def test_sizes_and_machines_are_read():
    assert bytes_of("70GiB") == 70 << 30
    assert bytes_of("1.5 MiB") == 3 << 19
    machine = machine_of("8xh200", 4, "400Gb/s", None)
    assert (machine.num_ranks, machine.profile.network_gbs, machine.profile.name) == (
        32,
        50.0,
        "H200",
    )
    with pytest.raises(FullshardError):
        machine_of("0xH100", 1, "400Gb", None)


def test_a_report_shows_what_was_predicted():
    record = RunRecord(
        "run", (), (), None, (), {}, {}, predicted={"step_s": 0.5, "peak_bytes": 3 << 30}
    )
    notes = {fact.name: fact.note for fact in summary(record)}
    assert notes["Step time"].endswith(f"; predicted {shown_time(0.5)}")
    assert notes["Peak memory"] == f"most on any rank; predicted {shown_bytes(3 << 30)}"
    # Every kind has a color of its own. On a CPU, memory of the process is measured.
    measured = {PROCESS_KIND: 5 << 30, **{kind.value: 1 << 20 for kind in Kind}}
    held = {**measured, "driver and libraries": 1 << 20}
    del held[PROCESS_KIND]
    record = replace(record, memory=measured, predicted={**record.predicted, "memory": held})
    (_, own), (heading, foreseen) = memory_kinds(record).items()
    assert heading == "Predicted for tensors alone, at the peak of a simulated step:"
    colors = {name: color for name, _, _, color in (*own, *foreseen)}
    assert len({*colors.values()}) == len(colors) == len(Kind) + 2
    notes = {fact.name: fact.note for fact in summary(record)}
    assert notes["Peak memory"].endswith(f"{shown_bytes(3 << 30)} for tensors alone")


@pytest.mark.exhaustive
def test_train_chooses_settings_for_this_machine(capsys, monkeypatch):
    given = {("optimizer", "batch"), ("optimizer", "accumulate"), ("sharding", "strategy")}
    config = replace(config_of(strategy="full"), run=RunSection(device="cpu", ranks=2))
    chosen = chosen_for_this_machine(config, given)
    assert chosen == config  # there is enough memory
    own_bytes = _estimated(config, tiny(), planning.this_machine("cpu", 2, 2)).peak_bytes
    assert "chosen for" in capsys.readouterr().err
    step = predicted(config, 2, 2)
    assert step["step_s"] > 0
    assert step["peak_bytes"] == sum(step["memory"].values())
    assert step["remedies"] == ""  # there is much more
    monkeypatch.setattr(planning, "capacity_of", lambda *_: own_bytes + 1)
    words = predicted(config, 2, 2)["remedies"]
    assert words.startswith("This run was predicted to need ")
    assert ", with --batch 1 " in words
    monkeypatch.setattr(planning, "capacity_of", lambda *_: own_bytes - 1)
    with pytest.raises(ConfigError, match="tiny does not fit into memory: each of 2 ranks needs"):
        predicted(config, 2, 2)


def test_what_cannot_be_simulated_is_trained_without_a_prediction(capsys, monkeypatch):
    monkeypatch.setattr(planning, "architecture_for", lambda *_: Unplanned())
    assert predicted(replace(config_of(), run=RunSection(device="cpu")), 2, 2) == {}
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("memory and time of this run are not predicted (")


def test_under_torchrun_the_first_rank_refuses_what_does_not_fit(capsys, monkeypatch):
    monkeypatch.delenv("FULLSHARD_STATUS_FOLDER", raising=False)  # of a launch in this process
    config = config_of(batch=1, activation_checkpointing=True)
    config = replace(config, model=ModelSection(name="405b"), run=RunSection(device="cpu"))
    assert run_rank(config) == 2
    assert "fullshard: 405b does not fit into memory: the rank needs " in capsys.readouterr().err
    assert not dist.is_initialized()


class Unplanned(BuiltinArchitecture):
    def __init__(self) -> None:
        super().__init__(size_named("tiny"))

    def loss(self, model: nn.Module, tokens: torch.Tensor, *others: Any) -> torch.Tensor:
        return super().loss(model, torch.from_numpy(tokens.numpy()), *others)

"""`fullshard train` in one piece: what a run leaves behind, and that settings change no losses."""

import contextlib
import functools
import gzip
import io
import json
import math
import resource
import shutil
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from fullshard import FSDPModule
from fullshard.errors import CheckpointError, ConfigError, FullshardError
from fullshard.runtime.hooks import hooks_of
from fullshard.runtime.names import clean_name
from fullshard.state import checkpoints, verify
from fullshard.testing import Rank, on_ranks, pool
from fullshard_train.config import ModelSection, ShardingSection, TrainConfig
from fullshard_train.control import PREDICTED, StopRequest
from fullshard_train.report import read_record
from fullshard_train.run import Run
from fullshard_train.sharding import architecture_for, build_sharded_model
from fullshard_train.trainer import Parts
from fullshard_train.world import World
from tests.support.made_once import made_once
from tests.support.stored import damage
from tests.support.tiny_run import TEXT, configured, estimate_once, losses


@pytest.mark.exhaustive
def test_a_profiled_step_has_the_engines_collectives_by_unit(folder: Path) -> None:
    for rank in (0, 1):
        with gzip.open(folder / "reference" / "profile" / f"rank{rank}.json.gz", "rt") as file:
            events = json.load(file)["traceEvents"]
        step = next(each for each in events if each.get("name") == "fullshard step")
        found = {each["name"]: each for each in events if each.get("cat") == "fullshard"}
        for name in ("all_gather", "forward", "backward", "reduce_scatter"):
            each = found[f"{name} model.layers.1"]
            assert 0 < each["dur"] < step["dur"]
            assert step["ts"] <= each["ts"] < step["ts"] + step["dur"]
        # Beside the operators that torch's profiler sees.
        assert any(each.get("name") == "aten::mm" for each in events)


class StopsAfter(StopRequest):
    """Asks to stop after some steps, on one rank."""

    def __init__(self, num_steps: int, is_asking: bool) -> None:
        super().__init__()
        self.num_left, self.is_asking = num_steps, is_asking

    @property
    def is_requested(self) -> bool:
        self.num_left -= 1
        return self.num_left <= 0 and self.is_asking

    @is_requested.setter
    def is_requested(self, value: bool) -> None: ...


def run_of(rank: Rank, config: TrainConfig, kind: type[Run] = Run) -> Any:
    estimate_once()
    return kind(config, World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu")))


def trained(rank: Rank, config: TrainConfig, num_steps: int | None = None) -> list[float]:
    """The losses of a run, or of its first steps, after which it is stopped."""
    if num_steps is None:
        assert run_of(rank, config).run(StopRequest()) is True
    else:
        assert run_of(rank, config).run(StopsAfter(num_steps, rank.rank == 1)) is False
    dist.barrier()  # the first rank writes when the others are done
    return losses(Path(config.run.out))


def kept(run: Path) -> list[str]:
    return [path.name for path in checkpoints(run / "checkpoints")]


def train_reference(rank: Rank, folder: Path) -> None:
    run = {"report": True, "save_every": 2, "keep": 2, "tensorboard": True, "sample_tokens": 4}
    run |= {"profile": 3}
    trained(rank, configured(folder, "reference", run=run))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text, and a run of six steps on it."""

    def make(path: Path) -> None:
        (path / "text.txt").write_text(TEXT)
        # This becomes less likely as the text is learned, so the first validation is the best.
        (path / "other.txt").write_text("~" * 2000)
        pool(2).run(train_reference, path)

    return made_once(tmp_path_factory, "reference_run", make)


def test_a_run_leaves_metrics_a_checkpoint_a_sample_and_a_report(folder: Path) -> None:
    run = folder / "reference"
    found = losses(run)
    assert len(found) == 6
    assert found[-1] < found[0] - 0.5
    record = read_record(run)
    assert [each.step for each in record.metrics] == [1, 2, 3, 4, 5, 6]
    assert all(each.tokens == 2 * 2 * 32 for each in record.metrics)
    assert all(each.step_s > 0 and each.memory_bytes > 0 for each in record.metrics)
    # Six FLOP per parameter and token, of a million parameters, and those of attention.
    tflop = [each.tflops * each.step_s for each in record.metrics]
    assert tflop == pytest.approx([6 * 1_017_984 * 2 * 32 / 1e12] * 6, rel=0.05)
    assert all(math.isnan(each.mfu) for each in record.metrics)
    assert [timeline.rank for timeline in record.timelines] == [0, 1]
    assert record.traced_step == 6
    # Half of a million parameters, and of their gradients and moments; all of a block at a time.
    memory = record.memory
    shards = memory["parameter shards"]
    assert shards == memory["gradient shards"] == pytest.approx(2 * 1_017_984, rel=0.01)
    assert memory["optimizer state"] == pytest.approx(2 * shards, rel=0.01)
    peak = max(m.allocated_bytes for each in record.timelines for m in each.memory)
    assert memory["full parameters"] == max(m.full_bytes for m in record.timelines[0].memory) > 0
    assert sum(memory.values()) == peak
    assert [path.name for path in checkpoints(run / "checkpoints")] == ["step_4", "step_6"]
    assert list(verify(run / "checkpoints" / "step_6")) == []
    assert (run / "sample.txt").read_text().startswith("def ")
    assert "</html>" in (run / "report.html").read_text()
    assert len(list((run / "tensorboard").glob("events.out.tfevents.*"))) == 1


SAME_LOSSES: dict[str, dict[str, Any]] = {
    "wrapper, recomputed selectively": {
        "sharding": {"api": "wrapper", "selective_checkpointing": True}
    },
    "wrapper grad-op, accumulated": {
        "sharding": {"api": "wrapper", "strategy": "grad-op"},
        "optimizer": {"accumulate": 2, "batch": 1},
    },
    "wrapper none": {"sharding": {"api": "wrapper", "strategy": "none"}},
    "grad-op, recomputed": {"sharding": {"strategy": "grad-op", "activation_checkpointing": True}},
    "none, linear units": {"sharding": {"strategy": "none", "units": ("Linear",)}},
    "replicas": {"sharding": {"mesh": "2x1"}},
    "offload": {"sharding": {"offload": True}},
}


@pytest.mark.exhaustive
@on_ranks(2)
def test_apis_strategies_and_memory_savers_change_no_losses(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    expected = losses(folder / "reference")[:2]
    for name, changes in SAME_LOSSES.items():
        out = {"run": {"out": str(tmp_path / name)}}
        found = trained(rank, configured(folder, name, **changes, **out), num_steps=2)
        assert found == pytest.approx(expected, rel=2e-4), name


@pytest.mark.soak
@on_ranks(4)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_selective_recomputation_resharding_and_prefetch_change_no_losses(rank: Rank) -> None:
    world = World(rank.rank, rank.size, rank.rank, rank.size, torch.device("cpu"))
    architecture = architecture_for(ModelSection(name="tiny"))
    tokens = torch.randint(256, (1, 32), generator=torch.Generator().manual_seed(rank.rank))

    def built(**sharding: Any) -> Any:
        model = build_sharded_model(architecture, ShardingSection(**sharding), world)
        architecture.fill(model, 0)
        return model

    def losses_of(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        found = []
        for _ in range(3):
            loss = F.cross_entropy(architecture.logits(model, tokens).flatten(0, 1), tokens[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    expected = losses_of(built())
    assert expected[-1] < expected[0] - 0.01
    together = {"reshard_to": 2, "prefetch": 2, "selective_checkpointing": True}
    model = built(**together)
    assert losses_of(model) == pytest.approx(expected, rel=1e-5)
    blocks = [module for module in model.modules() if isinstance(module, FSDPModule)][1:]
    seen: list[list[str]] = []
    blocks[2].register_forward_pre_hook(
        lambda *_: seen.append([type(hooks_of(each).units[0].state).__name__ for each in blocks])
    )
    architecture.logits(model, tokens)
    resharded, gathering = ["Kept"] * 2, {"Arriving", "Present"}
    assert seen[0][:2] == resharded
    assert gathering.issuperset(seen[0][2:4])  # it was gathered while the one before the last ran
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
        compiled = built(**together, compile=True)
        assert losses_of(compiled) == pytest.approx(expected, rel=1e-5)
    torch._dynamo.reset()


@on_ranks(2)
def test_a_run_that_is_stopped_goes_on_with_the_losses_of_one_that_was_not(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    whole = losses(folder / "reference")
    data = {"paths": (str(folder / "text.txt"),), "eval_paths": (str(folder / "other.txt"),)}
    run = {"out": str(tmp_path / "parts"), "save_every": 2, "keep": 1, "eval_every": 1}
    config = configured(folder, "parts", data=data, run=run)
    assert trained(rank, config, num_steps=3) == whole[:3]
    assert kept(tmp_path / "parts") == ["step_1", "step_3"]
    if rank.rank == 0:
        shutil.copytree(tmp_path / "parts", tmp_path / "others")
    dist.barrier()
    resumed = replace(config, run=replace(config.run, resume=True))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert trained(rank, resumed) == whole
    assert kept(tmp_path / "parts") == ["step_1", "step_6"]
    found = read_record(tmp_path / "parts").metrics
    evaluated = [each.eval_loss for each in found]
    assert sorted(evaluated) == evaluated
    assert evaluated[0] < evaluated[-1]
    assert [each.step for each in found if each.is_restart] == [4]
    if rank.rank == 0:
        assert f"step 6: validation loss {evaluated[-1]:.4f}, perplexity" in said.getvalue()
        best = tmp_path / "parts" / "checkpoints" / "step_1"
        assert f"best        {best} (validation loss {evaluated[0]:.4f})" in said.getvalue()
    # By the other API, and with parameters in host memory.
    sharding = replace(config.sharding, api="wrapper", offload=True)
    run = replace(resumed.run, out=str(tmp_path / "others"))
    other = replace(resumed, sharding=sharding, run=run)
    assert trained(rank, other) == pytest.approx(whole, rel=2e-4)
    others = [each.eval_loss for each in read_record(tmp_path / "others").metrics]
    assert others == pytest.approx(evaluated, rel=2e-4)


@pytest.mark.exhaustive
@on_ranks(2)
def test_bf16_and_wires_of_eight_bits_follow_float32_closely(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    coarser: dict[str, dict[str, str]] = {
        "float32": {},
        "bf16": {"precision": "bf16"},
        "wires": {"gather_wire": "int8", "reduce_wire": "int8"},
        "wrapper": {"gather_wire": "fp8", "reduce_wire": "bf16", "api": "wrapper"},
    }
    found = {}
    with warnings.catch_warnings():
        # torch, on a CPU without instructions for bf16.
        warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
        for name, sharding in coarser.items():
            config = configured(
                folder,
                name,
                model={"name": "tiny", "sequence": 8},
                sharding=sharding,
                run={"out": str(tmp_path / name)},
            )
            found[name] = trained(rank, config, num_steps=2)
    exact = found.pop("float32")
    for coarse in found.values():
        assert coarse != exact
        assert coarse == pytest.approx(exact, rel=0.02)


@pytest.mark.exhaustive
@on_ranks(2)
def test_lora_trains_adapters_and_saves_only_them(rank: Rank, folder: Path, tmp_path: Path) -> None:
    config = configured(
        folder,
        "lora",
        model={"lora_rank": 4},
        optimizer={"lr": 2e-2},
        run={"out": str(tmp_path / "lora")},
    )
    found = trained(rank, config)
    assert found[-1] < found[0]
    # Frozen weights have no gradients.
    adapted, whole = (read_record(run).metrics for run in (tmp_path / "lora", folder / "reference"))
    assert adapted[0].tflops * adapted[0].step_s < 0.9 * whole[0].tflops * whole[0].step_s
    small, large = (
        sum(path.stat().st_size for path in (run / "checkpoints" / "step_6").iterdir())
        for run in (tmp_path / "lora", folder / "reference")
    )
    assert small < large / 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("base, api", [("int8", "fully_shard"), ("nf4", "wrapper")])
@on_ranks(2)
def test_a_run_on_a_quantized_base_is_close_to_one_on_a_plain_base_and_resumes(
    rank: Rank, folder: Path, tmp_path: Path, base: str, api: str
) -> None:
    def tuned(name: str, base: str, num_steps: int | None = None, **run: Any) -> list[float]:
        model = {"lora_rank": 4, "lora_base": base}
        changes = {"model": model, "sharding": {"api": api}, "optimizer": {"lr": 2e-2}}
        run |= {"out": str(tmp_path / name)}
        return trained(rank, configured(folder, name, **changes, run=run), num_steps)

    found = tuned("whole", base)
    assert found[-1] < found[0]
    plain = tuned("plain", "plain")
    assert found[0] == pytest.approx(plain[0], rel=1e-3 if base == "int8" else 5e-3)
    assert found[-1] == pytest.approx(plain[-1], rel=0.05)
    tuned("stopped", base, 3)
    with pytest.raises(ConfigError, match=f"the adapters are for {base}, not plain"):
        tuned("stopped", "plain", resume=True)
    assert tuned("stopped", base, resume=True) == found


@on_ranks(2)
def test_a_folder_of_hugging_face_is_fine_tuned_by_either_api(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    if rank.rank == 0:
        from transformers import LlamaConfig, LlamaForCausalLM  # takes seconds

        shape = LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
        torch.manual_seed(0)
        LlamaForCausalLM(shape).save_pretrained(tmp_path / "llama")
    dist.barrier()

    def tuned(name: str, num_steps: int | None, lora_rank: int = 0, **sharding: Any) -> list[float]:
        model = {"name": str(tmp_path / "llama"), "lora_rank": lora_rank}
        run = {"out": str(tmp_path / name)}
        return trained(
            rank, configured(folder, name, model=model, sharding=sharding, run=run), num_steps
        )

    found = tuned("tuned", None)
    assert found[-1] < found[0] - 0.3
    assert tuned("wrapped", 2, api="wrapper") == pytest.approx(found[:2], rel=2e-4)
    # Adapters begin as nothing: the first loss is that of the model itself.
    assert tuned("adapted", 1, lora_rank=4)[0] == pytest.approx(found[0], rel=1e-6)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a folder with a run": ({}, "pass --resume to continue it"),
    "a checkpoint of another model": (
        {"model": {"name": "10m", "sequence": 32}, "run": {"resume": True}},
        "do not have the same parameters",
    ),
    "a unit that is no class of the model": (
        {"sharding": {"units": ("Blok",)}},
        r"tiny has no module class 'Blok'; choose one of .*Block",
    ),
}


@on_ranks(2)
def test_what_cannot_be_run_is_refused_and_the_run_before_is_left_alone(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    before = losses(folder / "reference")
    for what, (changes, words) in REFUSED.items():
        out = {"run": {"out": str(tmp_path)}} if "sharding" in changes else {}
        with pytest.raises((ConfigError, FullshardError, RuntimeError), match=words) as refusal:
            run_of(rank, configured(folder, "reference", **changes, **out)).run(StopRequest())
        assert len(str(refusal.value).splitlines()) == 1, what
    assert losses(folder / "reference") == before


@on_ranks(2)
def test_a_folder_without_room_or_permission_is_refused_before_the_first_step(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    endless = {"save_every": 1, "keep": 10**9, "out": str(tmp_path / "endless")}
    with pytest.raises(CheckpointError, match="but the checkpoints of this run need"):
        run_of(rank, configured(folder, "", optimizer={"steps": 10**9}, run=endless)).run(
            StopRequest()
        )
    assert not (tmp_path / "endless" / "metrics.jsonl").exists()
    out = str(folder / "text.txt" / "run")  # in a file
    with pytest.raises(FullshardError, match="cannot write to"):
        run_of(rank, configured(folder, "", run={"out": out})).run(StopRequest())


class LimitsFiles(StopRequest):
    """Keeps files that a rank writes from growing after a step, as on a full disk."""

    def __init__(self, is_limited: bool) -> None:
        super().__init__()
        self.num_asked, self.is_limited = 0, is_limited
        self.before = resource.getrlimit(resource.RLIMIT_FSIZE)

    @property
    def is_requested(self) -> bool:
        self.num_asked += 1
        if self.num_asked == 2 and self.is_limited:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, self.before[1]))
        return False

    @is_requested.setter
    def is_requested(self, value: bool) -> None: ...


@on_ranks(2)
def test_a_save_that_fails_in_the_background_ends_the_run_soon(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    run = {"save_every": 2, "out": str(tmp_path / "full")}
    config = configured(folder, "full", optimizer={"steps": 60}, run=run)
    limits = LimitsFiles(rank.rank == 1)
    try:
        with pytest.raises(
            CheckpointError, match=r"the save before .* rank 1: OSError: .*too large"
        ):
            run_of(rank, config).run(limits)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits.before)
    dist.barrier()
    # Nothing was saved after it; nor was the run trained to its end.
    assert len(losses(tmp_path / "full")) < 60
    assert checkpoints(tmp_path / "full" / "checkpoints") == []


@on_ranks(2)
def test_a_damaged_newest_checkpoint_is_put_aside_and_an_older_one_resumed_from(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    if rank.rank == 0:
        shutil.copytree(folder / "reference", out)
        newest = out / "checkpoints" / "step_6"
        shutil.copytree(newest, out / "checkpoints" / "step_8")
        (out / "checkpoints" / "step_8" / "rank_00000.pt").unlink()
        damage(newest / "__1_0.distcp")
    dist.barrier()
    run = {"out": str(out), "resume": True, "save_every": 0}
    strict = configured(folder, "run", run={**run, "resume_strict": True})
    with pytest.raises(FullshardError, match=r"--resume-strict: .*step_8 .*leave out"):
        run_of(rank, strict).run(StopRequest())
    if rank.rank == 0:
        shutil.rmtree(out / "checkpoints" / "step_8")
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"step_6: its content is not what was saved"):
        run_of(rank, strict).run(StopRequest())
    assert (out / "checkpoints" / "step_6").is_dir()

    with contextlib.redirect_stdout(io.StringIO()) as said:
        found = trained(rank, configured(folder, "run", run=run))
    assert found == losses(folder / "reference")
    line = f"step_6: damaged and moved to {out / 'damaged'}; resuming from step_4"
    assert said.getvalue().splitlines().count(line) == (rank.rank == 0)
    assert len(list((out / "damaged").iterdir())) == 1
    assert verify(out / "checkpoints" / "step_6") == []


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_run_learns_what_an_assistant_says(rank: Rank, folder: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    if rank.rank == 0:
        turn = [{"role": "user", "content": TEXT[:600]}, {"role": "assistant", "content": "aaaa"}]
        chats.write_text("".join(json.dumps({"messages": turn}) + "\n" for _ in range(9)))
    dist.barrier()
    settings = {"data": {"paths": (str(chats),)}, "run": {"out": str(tmp_path / "chats")}}
    # Most sequences have no token that is trained, and their loss is none.
    found = trained(rank, configured(folder, "chats", **settings))
    assert 0.0 in found
    assert all(loss == loss for loss in found)
    assert max(found) > 0
    # The loss of a validation is a mean over tokens, however they are spread over ranks.
    settings["data"]["eval_share"] = 0.7
    evaluated = []
    for batch in (1, 7):
        optimizer = {"lr": 1e-30, "steps": 1, "batch": batch, "warmup": 0}
        run = {"out": str(tmp_path / f"batch {batch}"), "eval_batches": 99}
        trained(rank, configured(folder, "", data=settings["data"], optimizer=optimizer, run=run))
        evaluated.append(read_record(Path(run["out"])).metrics[0].eval_loss)
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert 4 < evaluated[0] < 7


class Poisoned(Run):
    """On rank 1, an output or gradient is not finite in some steps, and when sampling."""

    steps: tuple[int, ...] = ()
    is_gradient = False

    def _build(self, architecture: Any) -> Parts:
        parts = super()._build(architecture)
        found = {clean_name(name): each for name, each in parts.model.named_modules()}
        per_step = self._config.optimizer.batch * self._world.size

        def poison(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            is_due = parts.batches.position // per_step in self.steps and self._world.rank == 1
            if not is_due and (module.training or not self._config.run.sample_tokens):
                return output
            if self.is_gradient and module.training:
                output.register_hook(lambda grad: grad * torch.nan)
                return output
            return output * torch.nan

        found["model.layers.1.mlp"].register_forward_hook(poison)
        return parts


def poisoned(
    rank: Rank, config: TrainConfig, *steps: int, is_gradient: bool = False
) -> tuple[str, list[float]]:
    """What a run says, and its losses."""
    run = run_of(rank, config, Poisoned)
    run.steps, run.is_gradient = steps, is_gradient
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            assert run.run(StopRequest()) is True
        except FullshardError as error:
            print(error)
    dist.barrier()
    return said.getvalue(), losses(Path(config.run.out))


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_step_that_is_not_finite_is_reported_and_not_applied(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    def settings(name: str, **run: Any) -> TrainConfig:
        out = {"out": str(tmp_path / name), "save_every": 1, "keep": 1, "nan_limit": 2}
        return configured(folder, name, run={**out, **run})

    # One such step is survived, or several are skipped; their data is as if it had not been there.
    for api, is_gradient in (("fully_shard", False), ("wrapper", True), ("muon", True)):
        on_nan = "skip" if api == "wrapper" else "stop"
        config = settings(api, sample_tokens=2, save_every=3, on_nan=on_nan)
        if api == "muon":
            config = replace(config, optimizer=replace(config.optimizer, name="muon"))
        else:
            config = replace(config, sharding=ShardingSection(api=api))
        steps = (3, 4, 5) if api == "wrapper" else (3,)
        said, found = poisoned(rank, config, *steps, is_gradient=is_gradient)
        assert [step for step, loss in enumerate(found, 1) if loss != loss] == (
            [] if is_gradient else [3]
        )
        assert found[5] < found[0]
        if rank.rank == 0:
            what = "gradient of the output of" if is_gradient else "output of"
            assert f"on rank 1 the {what} model.layers.1.mlp is the first" in said
            assert said.count("not finite") == 1
            # The model that samples is poisoned, too; this does not fail the run that is trained.
            assert "sample: failed (" in said
        assert kept(tmp_path / api) == ["step_6"]

    # Too many in a row stop the run; what was saved before them stays.
    said, found = poisoned(rank, settings("stop"), 3, 4, 5, 6)
    assert len(found) == 4
    assert kept(tmp_path / "stop") == ["step_1", "step_2"]
    assert "not finite in 2 steps in a row (step 3: loss nan" in said
    assert len(said.splitlines()[-1]) > 100

    # Or the run goes back, and on with other data.
    config = settings("rollback", on_nan="rollback", eval_every=1)
    config = replace(config, data=replace(config.data, eval_paths=(str(folder / "other.txt"),)))
    said, found = poisoned(rank, config, 3, 4)
    assert len(found) == 6
    assert all(loss == loss for loss in found)
    assert kept(tmp_path / "rollback") == ["step_1", "step_6"]
    # Not forever.
    said, found = poisoned(rank, settings("forever", on_nan="rollback"), *range(3, 99))
    assert len(found) == 4
    assert "it was rolled back 2 times to one checkpoint" in said
    assert kept(tmp_path / "forever") == ["step_1", "step_2"]


class Starved(Run):
    """On some ranks, more than `most` sequences do not fit into memory, `times` times."""

    most, times, at_step, ranks = 0, 0, 1, (1,)

    def _build(self, architecture: Any) -> Parts:
        parts = super()._build(architecture)
        found = {clean_name(name): each for name, each in parts.model.named_modules()}
        section = self._config.optimizer
        per_step = section.batch * section.accumulate * self._world.size

        def allocate(module: Any, args: tuple[torch.Tensor]) -> None:
            is_due = parts.batches.position // per_step >= self.at_step
            if (
                is_due
                and self._world.rank in self.ranks
                and len(args[0]) > self.most
                and self.times
            ):
                self.times -= 1
                torch.empty(1 << 50)

        found["model.layers.1.mlp"].register_forward_pre_hook(allocate)
        return parts


def starved(
    rank: Rank, config: TrainConfig, **starvation: Any
) -> tuple[str, list[float], BaseException | None]:
    """What a run says, its losses, and its error."""
    run = run_of(rank, config, Starved)
    vars(run).update(starvation)
    raised = None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            assert run.run(StopRequest()) is True
        except FullshardError as error:
            raised = error
    dist.barrier()
    return said.getvalue(), losses(Path(config.run.out)), raised


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_step_for_which_there_is_no_memory_is_repeated_as_a_whole_or_in_parts(
    rank: Rank, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def settings(name: str, on_oom: str, **sharding: Any) -> TrainConfig:
        run = {"out": str(tmp_path / name), "on_oom": on_oom}
        optimizer = {"batch": 3, "accumulate": 2, "steps": 3}
        return configured(folder, name, optimizer=optimizer, run=run, sharding=sharding)

    remedies = "This run was predicted to need 9.0 MiB, with --batch 1 4.0 MiB."
    monkeypatch.setenv(PREDICTED, json.dumps({"remedies": remedies}))
    whole = trained(rank, settings("whole", "stop"))
    said, found, _ = starved(rank, settings("retry", "retry"), times=1, at_step=3)
    assert found == whole
    assert (said.count("step 3: rank 1 ran out of memory; it is repeated\n") == 1) == (
        rank.rank == 0
    )
    # From the first step on: in two parts, and then in three.
    said, found, _ = starved(rank, settings("split", "split", api="wrapper"), most=1, times=99)
    assert found == pytest.approx(whole, rel=1e-4)
    assert found != whole
    if rank.rank == 0:
        for number in (2, 3):
            parts = f"it is repeated, with micro-batches in {number} parts from now on"
            assert said.count(f"step 1: rank 1 ran out of memory; {parts}") == 1
    # If that fails or is not tried, the run ends on all ranks, and says why and what would help.
    for on_oom, at_step in (("retry", 2), ("split", 1), ("stop", 2)):
        config = settings(f"{on_oom} in vain", on_oom)
        ranks = (0, 1) if on_oom == "stop" else (1,)
        _, found, error = starved(rank, config, times=99, at_step=at_step, ranks=ranks)
        assert found == whole[: at_step - 1]
        assert isinstance(error, torch.OutOfMemoryError) == (rank.rank in ranks)
        first = rank.rank if on_oom == "stop" else 1
        for words in (
            f"rank {first}: a step ran out of memory",
            "parameter shards 1.9 MiB",
            ", full parameters ",
        ):
            assert words in str(error), error
        assert ("with --batch 1 " in str(error)) == (rank.rank in ranks)
        assert ("optimizer state 3.9 MiB" in str(error)) == (at_step > 1)


@pytest.mark.exhaustive
@on_ranks(2)
def test_a_run_with_muon_is_resumed_to_the_last_bit(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    def settings(name: str, **run: Any) -> TrainConfig:
        run = {"out": str(tmp_path / name), **run}
        return configured(folder, name, optimizer={"name": "muon", "steps": 4}, run=run)

    whole = trained(rank, settings("whole"))
    assert whole[-1] < whole[0] - 0.5
    assert trained(rank, settings("parts"), num_steps=2) == whole[:2]
    assert trained(rank, settings("parts", resume=True)) == whole
    other = settings("parts", resume=True)
    other = replace(other, optimizer=replace(other.optimizer, name="adamw"))
    with pytest.raises(ConfigError, match="the run was started with muon, not adamw"):
        run_of(rank, other).run(StopRequest())


@on_ranks(2)
def test_a_learning_rate_that_is_far_too_large_stops_a_run(
    rank: Rank, folder: Path, tmp_path: Path
) -> None:
    config = configured(
        folder,
        "large",
        optimizer={"lr": 1e30, "clip": 0.0, "warmup": 0},
        run={"out": str(tmp_path / "large")},
    )
    with pytest.raises(FullshardError, match="not finite in 3 steps in a row"):
        run_of(rank, config).run(StopRequest())
    assert checkpoints(tmp_path / "large" / "checkpoints") == []

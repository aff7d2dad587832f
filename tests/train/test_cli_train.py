"""`fullshard train` and `fullshard generate`: their options, the effect of these, and failures."""

import os
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from fullshard.cli import wants_tracebacks
from fullshard.cli.commands import fullshard
from fullshard.console import printable
from fullshard.errors import CheckpointError
from fullshard.state import checkpoint_at, save, stored_shapes
from fullshard.testing import Rank, pool
from fullshard_train import launcher
from fullshard_train.config import (
    KEYS,
    ModelSection,
    RunSection,
    ShardingSection,
    TrainConfig,
    value_of,
)
from fullshard_train.config_file import config_as_toml, config_of
from fullshard_train.generation import GenerateRequest, find_checkpoint, launch_generation
from fullshard_train.models import architecture_of
from fullshard_train.models.adapters import LoraSettings
from fullshard_train.sharding import build_sharded_model
from fullshard_train.world import World

RANK_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "FULLSHARD_DEBUG")


@pytest.fixture(autouse=True)
def _no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run(*args: Any, expected: int = 0, **options: Any) -> Result:
    result = CliRunner().invoke(fullshard, [str(arg) for arg in args], **options)
    assert result.exit_code == expected, result.output
    return result


def refused(*args: Any) -> str:
    """The single line of the error, with exit code 2."""
    result = run(*args, expected=2)
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("fullshard: ")
    return line


def printed(tmp_path: Path, *args: Any) -> TrainConfig:
    """The configuration that results from these options."""
    file = tmp_path / "printed.toml"
    file.write_text(run("train", "--print-config", *args).stdout, encoding="utf-8")
    return config_of(file, {})


# Options


def test_every_key_has_an_option_that_sets_it(tmp_path):
    typed: list[str] = []
    expected = {}
    others: dict[type, Any] = {int: 7, float: 1.5e-4, str: 'a "b"\n', tuple: ("x y", "z")}
    fitting = {
        ("sharding", "mesh"): "7x1",
        ("optimizer", "lr"): 0.5,
        ("optimizer", "lr_end"): 0.25,
        # Not together with the others.
        ("optimizer", "name"): "adamw",
        ("data", "eval_share"): 0.0,
        ("run", "on_nan"): "skip",
        ("run", "loggers"): ("wandb", "mlflow"),
        ("run", "rendezvous"): "host1:29500",
        ("sharding", "selective_checkpointing"): False,
        ("sharding", "precision"): "fp16",
        ("sharding", "reshard_to"): 0,
        ("sharding", "prefetch"): 1,
    }
    for at, key in KEYS.items():
        value = fitting.get(at, others.get(key.kind))
        if key.choices and at not in fitting:
            value = key.choices[-1] if key.choices[-1] != "none" else key.choices[-2]
        if key.kind is bool:
            value = fitting.get(at, not key.default)
            typed.append(f"--{key.option}" if value else f"--no-{key.option}")
        else:
            each = value if key.kind is tuple else (value,)
            typed += [part for one in each for part in (f"--{key.option}", str(one))]
        expected[at] = value
    config = printed(tmp_path, *typed)
    assert {at: value_of(config, key) for at, key in KEYS.items()} == expected
    config = printed(tmp_path, "--optimizer", "muon", "--eval-share", 0.25)
    assert (config.optimizer.name, config.data.eval_share) == ("muon", 0.25)


def test_what_is_typed_wins_over_the_file_and_the_file_over_defaults(tmp_path):
    assert printed(tmp_path) == TrainConfig()
    file = tmp_path / "run.toml"
    file.write_text("[optimizer]\nsteps = 7\nbatch = 8\n[run]\nreport = false\n")
    config = printed(tmp_path, "--config", file, "--steps", 9, "--data", "a", "--data", "b")
    assert (config.optimizer.steps, config.optimizer.batch) == (9, 8)
    assert config.run.report is False
    assert config.data.paths == ("a", "b")
    assert printed(tmp_path, "--config", file, "--report").run.report is True


def test_the_help_shows_every_option_under_its_section():
    shown = run("train", "--help").stdout
    place = -1
    for section in ("Model", "Data", "Sharding", "Optimizer", "Run"):
        found = shown.index(f"\n{section}, [{section.lower()}] in a file:\n")
        assert found > place
        place = found
    for key in KEYS.values():
        assert f"  --{key.option} " in shown
    assert shown.index("--config FILE") > place


# Errors


@pytest.mark.parametrize(
    "args, said",
    [
        (["tran"], "no command 'tran'; did you mean 'train'? See fullshard --help."),
        (["--debg"], "no option '--debg'; did you mean '--debug'? See fullshard --help."),
        (["train", "--lrr", 3], "'--lrr'; did you mean '--lr'? See fullshard train --help."),
        (["checkpoint", "inf"], "'inf'; did you mean 'info'? See fullshard checkpoint --help."),
        (["train", "--steps"], "requires an argument. See fullshard train --help."),
        (["train", "--steps", "x"], "'--steps': 'x' is not a valid integer."),
        (["train", "--api", "wraper"], "did you mean 'wrapper'?"),
        (["train", "more"], "unexpected extra argument (more)"),
        (["train", "--steps", 0], "optimizer.steps (--steps) must be 1 or more, not 0."),
        (["train", "--seed", 2**70], "more than 64 bits"),
        (["train", "--resume"], "name it with run.out (--out)"),
        (["train", "--config", "none.toml"], "none.toml: there is no such configuration file"),
        (["generate", "nowhere", "--prompt", "x"], "nowhere does not exist"),
        (["generate", "nowhere", "--prompt", "x", "--tokens", 0], "--tokens must be 1 or more"),
        (
            ["generate", "nowhere", "--prompt", "x", "--temperature", "nan"],
            "--temperature must be 0 or more",
        ),
        (["generate", "nowhere"], "Missing option '--prompt'"),
    ],
)
def test_what_was_typed_wrong_is_one_sentence_and_exit_code_2(args, said):
    assert said in refused(*args)


def test_a_wrong_file_is_named_with_its_line(tmp_path):
    (tmp_path / "run.toml").write_text("[optimizer]\n\nsteps = 'many'\n")
    line = refused("train", "--config", tmp_path / "run.toml")
    assert line.endswith("run.toml, line 3: steps must be a whole number, not 'many'.")


@pytest.mark.parametrize(
    "args",
    [
        ["--debug", "train", "--config", "none.toml"],
        ["train", "--config", "none.toml", "--debug"],
        ["checkpoint", "info", "--debug", "none"],
        ["checkpoint", "--debug", "info", "none"],
    ],
)
def test_debug_shows_the_traceback_wherever_it_stands(args):
    result = run(*args, expected=2)
    lines = result.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[-1].startswith("fullshard: ")
    assert "FULLSHARD_DEBUG" not in os.environ


def test_debug_can_be_asked_for_in_the_environment(monkeypatch):
    for value in (None, "", "0"):
        if value is not None:
            monkeypatch.setenv("FULLSHARD_DEBUG", value)
        assert not wants_tracebacks()  # as its ranks are told
        refused("train", "--config", "none.toml")
    monkeypatch.setenv("FULLSHARD_DEBUG", "1")
    assert wants_tracebacks()
    assert "Traceback" in run("train", "--config", "none.toml", expected=2).stderr


@pytest.mark.parametrize(
    "error, status, said",
    [
        (CheckpointError("it is damaged."), 2, "fullshard: it is damaged.\n"),
        (
            PermissionError(13, "Permission denied", "out"),
            2,
            "fullshard: out: Permission denied.\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_run_ends_with_a_sentence_and_a_status(monkeypatch, error, status, said):
    def fail(config: TrainConfig) -> int:
        raise error

    monkeypatch.setattr(launcher, "launch", fail)
    assert run("train", expected=status).stderr == said


# Handing over


def test_train_hands_the_configuration_to_the_launcher(monkeypatch):
    taken = []
    monkeypatch.setattr(launcher, "launch", lambda config: taken.append(config) or 3)
    run("train", "--steps", 5, expected=3)
    run("train", "--steps", 0, expected=2)
    assert taken == [config_of(None, {("optimizer", "steps"): 5})]


@pytest.mark.parametrize("with_what", ["TORCHELASTIC_RUN_ID", "MASTER_ADDR"])
def test_a_process_that_is_a_rank_trains_as_one(monkeypatch, with_what):
    for name in ("RANK", "WORLD_SIZE", with_what):
        monkeypatch.setenv(name, "1")
    taken = []
    monkeypatch.setattr("fullshard_train.run.run_and_leave", taken.append)
    run("train", "--steps", 5)
    assert taken == [config_of(None, {("optimizer", "steps"): 5})]


# Text


def saved_run(rank: Rank, folder: Path, lora_rank: int) -> None:
    """A run of two checkpoints; the newer one has another model's values."""
    model = ModelSection(name="tiny", lora_rank=lora_rank)
    config = TrainConfig(model=model, run=RunSection(out=str(folder)))
    (folder / "config.toml").write_text(config_as_toml(config), encoding="utf-8")
    lora = LoraSettings(lora_rank, model.lora_alpha) if lora_rank else None
    architecture = architecture_of("tiny", lora)
    world = World(rank.rank, rank.size, rank.rank, rank.size, rank.device)
    sharded = build_sharded_model(architecture, ShardingSection(), world)
    only = "trainable" if lora_rank else None
    for step in (1, 2):
        architecture.fill(sharded, seed=step - 1)
        save(folder / "checkpoints" / f"step_{step}", sharded, step=step, only=only)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    pool(2).run(saved_run, folder, 0)
    return folder


def generated(path: Path, **options: Any) -> str:
    request = GenerateRequest(checkpoint=path, prompt="def ", tokens=12, device="cpu", **options)
    return launch_generation(request)


def test_a_run_its_checkpoints_and_its_newest_one_say_the_same(made):
    newest = generated(made / "checkpoints" / "step_2")
    assert len(newest) > 0
    assert generated(made) == newest
    assert generated(made / "checkpoints" / "..") == newest
    assert generated(made / "checkpoints") == newest
    assert generated(made / "checkpoints" / "step_1") != newest
    assert generated(made, seed=1) != newest


def test_checkpoint_at_finds_the_newest_one_and_stored_shapes_are_those_of_the_model(made):
    newest = made / "checkpoints" / "step_2"
    assert checkpoint_at(made) == checkpoint_at(newest.parent) == checkpoint_at(newest) == newest
    assert checkpoint_at(made / "config.toml") is None
    assert checkpoint_at(made / "nothing") is None
    params = dict(architecture_of("tiny", None).build().named_parameters())
    shapes = {f"model.{name}": param.shape for name, param in params.items()}
    assert stored_shapes(newest) == shapes


@pytest.mark.exhaustive
def test_the_text_is_the_same_on_two_ranks_and_on_one(made):
    assert generated(made, ranks=2) == generated(made)


def test_the_command_prints_the_prompt_and_what_follows(made):
    options = ("--tokens", 12, "--device", "cpu")
    text = "def " + generated(made)
    shown = run("generate", made, "--prompt", "def ", *options).stdout
    assert shown == "".join(c if c in "\n\t" else printable(c) for c in text) + "\n"
    assert run("generate", made, "--prompt", "-", *options, input="def ").stdout == shown


@pytest.mark.exhaustive
def test_adapters_are_put_on_what_they_were_trained_on(made, tmp_path):
    pool(2).run(saved_run, tmp_path, 4)
    # Adapters add nothing at first: the text is that of the base weights, from the run's seed.
    assert generated(tmp_path) == generated(made / "checkpoints" / "step_1")


def test_a_checkpoint_of_another_model_is_refused_in_a_sentence(made, tmp_path):
    (tmp_path / "config.toml").write_text('[model]\nname = "10m"\n')
    (tmp_path / "checkpoints").symlink_to(made / "checkpoints")
    line = refused("generate", tmp_path, "--prompt", "x", "--device", "cpu")
    assert "is not a checkpoint of '10m'" in line
    assert len(line) < 500 + len(str(tmp_path))


def test_a_checkpoint_without_the_configuration_of_its_run_is_refused(made, tmp_path):
    (tmp_path / "checkpoints").symlink_to(made / "checkpoints")
    with pytest.raises(CheckpointError, match="the configuration of its run"):
        find_checkpoint(tmp_path)
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="contains no complete checkpoint"):
        find_checkpoint(tmp_path / "empty")
    with pytest.raises(CheckpointError, match="is a file"):
        find_checkpoint(made / "config.toml")

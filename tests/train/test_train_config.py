"""The configuration of a run: its file, its checks, and that both say where something is wrong."""

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fullshard.errors import ConfigError, TopologyError
from fullshard_train.config import (
    KEYS,
    SECTIONS,
    Key,
    ShardingSection,
    TrainConfig,
    mesh_shape,
    parse_mesh,
    validate,
    value_of,
)
from fullshard_train.config_file import config_as_toml, config_of, read_config

BITS = st.integers(-(2**63) + 1, 2**63 - 1)
FLOATS = st.floats(allow_nan=False)
KINDS: dict[type, st.SearchStrategy[Any]] = {
    str: st.text(),
    bool: st.booleans(),
    int: BITS,
    float: FLOATS,
    tuple: st.lists(st.text(), max_size=3).map(tuple),
}


few = settings(deadline=None, max_examples=40)


def values_for(key: Key) -> st.SearchStrategy[Any]:
    return st.sampled_from(key.choices) if key.choices else KINDS[key.kind]


GIVEN = st.fixed_dictionaries({}, optional={at: values_for(key) for at, key in KEYS.items()})


def written(folder: Path, text: str) -> Path:
    path = folder / "run.toml"
    path.write_bytes(text.encode())
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("configs")


# The file


@few
@given(GIVEN, GIVEN)
def test_what_is_typed_wins_over_the_file_and_the_file_over_defaults(folder, in_file, typed):
    file = written(folder, config_as_toml(config_of(None, in_file)))
    assert config_of(file, {}) == config_of(None, in_file)  # it reads back as the same
    config = config_of(file, typed)
    for at, key in KEYS.items():
        assert value_of(config, key) == typed.get(at, in_file.get(at, key.default))


def test_a_file_may_leave_out_whatever_it_likes(tmp_path):
    file = written(tmp_path, "\ufeff[optimizer]\r\nlr = 1\r\nbeta1 = 0.5\r\n")
    assert read_config(file) == {"optimizer": {"lr": 1.0, "beta1": 0.5}}
    assert isinstance(config_of(file, {}).optimizer.lr, float)
    assert config_of(written(tmp_path, ""), {}) == TrainConfig()


def test_a_written_file_explains_every_key():
    text = " ".join(config_as_toml(TrainConfig()).replace("\n# ", " ").split())
    for key in KEYS.values():
        assert key.help in text
        assert all(choice in text for choice in key.choices)


def test_every_field_is_a_key_with_help_and_an_option_of_its_own():
    assert [section.name for section in fields(TrainConfig)] == list(SECTIONS)
    assert len(KEYS) == sum(len(fields(getattr(TrainConfig(), name))) for name in SECTIONS)
    assert len({key.option for key in KEYS.values()}) == len(KEYS)
    assert all(key.help.endswith(".") for key in KEYS.values())


@pytest.mark.parametrize(
    "text, line, said",
    [
        ("[model]\nname = x\n", "line 2, column 8", "this is not valid TOML"),
        ("[model]\nname = 'x\n", "line 2", "this is not valid TOML"),
        ("[model]\n\n[model]\n", "line 3", "this is not valid TOML"),
        ("[model]\nname = [\n'a',\n", "line 3", "this is not valid TOML"),
        ("[run]\nseed = " + "9" * 5000, "line 2", "this is not valid TOML"),
        ("a = " + "[" * 9999, "run.toml", "nested too deeply"),
        ("[run]\n" + ".".join(50_000 * ["a"]) + " = 1", "line 2", "more than 50 parts"),
        ("[run]\n[" + 50_000 * "'a' . " + "a]", "line 2", "more than 50 parts"),
        ("[modle]\nname = 'x'\n", "line 1", "'modle'; did you mean 'model'?"),
        ("[zzz]\n", "line 1", "known are model, data, sharding, optimizer, run"),
        ("# first\n\nlr = 1\n", "line 3", "put it under [optimizer]"),
        ("model = 3\n", "line 1", "model is a section"),
        ("[model]\n# a name\nnam = 'x'\n", "line 3", "'nam'; did you mean 'name'?"),
        ("[run]\nprompt = '''\nnope = 1\n'''\nnope = 2\n", "line 5", "[run] has no key 'nope'"),
        ("[run]\nsteps = 3\n", "line 2", "it belongs under [optimizer]"),
        ("optimizer.steps = 1.5\n", "line 1", "steps must be a whole number, not 1.5"),
        ("run = {\nseed = 1,\nkeep = true}\n".replace("\n", " "), "line 1", "not true"),
        ("[optimizer]\nlr = 'fast'\n", "line 2", "lr must be a number, not 'fast'"),
        ("[optimizer]\nlr = 0.1\nclip = [\n1,\n2]\n", "line 3", "a number, not [1, 2]"),
        ("[run]\nresume = 1\n", "line 2", "resume must be true or false, not 1"),
        ("[run]\nseed = 0x" + "f" * 6000, "line 2", "not one of more than 64 bits"),
        ("[data]\npaths = 'a'\n", "line 2", "paths must be a list of strings, not 'a'"),
        ("[data]\npaths = ['a', 1]\n", "line 2", "paths must be a list of strings"),
        ("[run]\nout = 2026-01-01\n", "line 2", "out must be a string, not 2026-01-01"),
        ("[sharding.api]\nx = 1\n", "line 1", "api must be a string, not a table"),
        ("[sharding]\ndoor = 'wraper'\n", "line 2", "'wraper'; did you mean 'wrapper'?"),
    ],
)
def test_what_is_wrong_in_a_file_is_a_sentence_with_its_line(tmp_path, text, line, said):
    with pytest.raises(ConfigError) as caught:
        read_config(written(tmp_path, text))
    message = str(caught.value)
    assert line in message
    assert said in message
    assert "\n" not in message
    assert len(message) < 400 + len(str(tmp_path))


def test_a_file_that_is_no_text_or_none_at_all_is_refused(tmp_path):
    (tmp_path / "latin.toml").write_bytes(b"[run]\nout = 'caf\xe9'\n")
    with pytest.raises(ConfigError, match=r"latin.toml, line 2: the byte 0xe9 is not UTF-8"):
        read_config(tmp_path / "latin.toml")
    with pytest.raises(ConfigError, match="there is no such configuration file"):
        read_config(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="is a folder"):
        read_config(tmp_path)


@few
@given(
    st.lists(
        st.sampled_from([f"[{s}]" for s in SECTIONS] + [f"{k.name} = 1" for k in KEYS.values()])
        | st.text(),
        max_size=6,
    )
)
def test_a_line_that_is_named_is_one_of_the_file(folder, lines):
    message = refusal(written(folder, "\n".join(lines)))
    assert message == "" or "run.toml" in message
    for number in re.findall(r"run.toml, line (\d+)", message):
        assert 1 <= int(number) <= len("\n".join(lines).split("\n"))


def refusal(path: Path) -> str:
    """The error about a file; empty if it can be read."""
    try:
        assert read_config(path).keys() <= set(SECTIONS)
    except ConfigError as error:
        return str(error)
    return ""


# What can be run


def changed(section: str, **values: Any) -> TrainConfig:
    config = TrainConfig()
    return replace(config, **{section: replace(getattr(config, section), **values)})


WRONG = {
    "model": {
        "name": " ",
        "sequence": 1,
        "lora_rank": -1,
        "lora_alpha": 0.0,
        "lora_targets": ("q", ""),
    },
    "data": {"paths": ("",), "eval_paths": ("",), "eval_share": 1.0, "text_field": ""},
    "sharding": {"mesh": "2*4", "units": ("",), "reshard_to": -1, "prefetch": 0},
    "optimizer": {
        "steps": 0,
        "batch": 0,
        "accumulate": 0,
        "lr": 0.0,
        "lr_end": -1.0,
        "decay": 1.1,
        "warmup": -1,
        "weight_decay": float("inf"),
        "beta1": 1.0,
        "beta2": -0.1,
        "clip": float("nan"),
    },
    "run": {
        "out": "a\0b",
        "ranks": -1,
        "port": 65536,
        "max_restarts": -1,
        "seed": -1,
        "save_every": -1,
        "keep": 0,
        "eval_every": -1,
        "eval_batches": 0,
        "trace_step": -1,
        "profile": -1,
        "prompt": "\udcff",
        "sample_tokens": -1,
    },
}


@pytest.mark.parametrize(
    "section, name, value",
    [(section, name, value) for section, keys in WRONG.items() for name, value in keys.items()],
)
def test_a_value_out_of_range_is_a_sentence_with_key_and_option(section, name, value):
    with pytest.raises(ConfigError) as caught:
        validate(changed(section, **{name: value}))
    message = str(caught.value)
    assert message.startswith(f"{section}.{name} (--{KEYS[section, name].option}) must be ")
    assert ", not " in message


@pytest.mark.parametrize(
    "values, said",
    [
        (
            {("model", "lora_base"): "int8"},
            "only weights that are frozen are quantized, but model.lora_rank (--lora-rank) is 0",
        ),
        (
            {("sharding", "precision"): "fp8", ("model", "lora_rank"): 4},
            "fp8 trains all weights, but model.lora_rank (--lora-rank) is 4",
        ),
        (
            {("sharding", "precision"): "fp8-rowwise", ("model", "sequence"): 100},
            "sequences of a multiple of 16 tokens, but model.sequence (--sequence) is 100",
        ),
        (
            {("sharding", "precision"): "fp16", ("run", "device"): "cpu"},
            "fp16 needs a GPU, but run.device (--device) is 'cpu'",
        ),
        ({("sharding", "strategy"): "none", ("sharding", "offload"): True}, "--offload"),
        (
            {("run", "capture"): "on", ("run", "device"): "cpu"},
            "because run.device (--device) is 'cpu'",
        ),
        (
            {("run", "capture"): "on", ("sharding", "offload"): True},
            "because sharding.offload (--offload) is True",
        ),
        (
            {("run", "capture"): "on", ("run", "on_oom"): "split"},
            "run.on_oom (--on-oom) is 'split'",
        ),
        ({("sharding", "mesh"): "2x4", ("run", "ranks"): 3}, "2x4 has 8 ranks"),
        (
            {("sharding", "prefetch"): 2, ("sharding", "api"): "wrapper"},
            "but sharding.api (--api) is",
        ),
        ({("sharding", "reshard_to"): 2, ("sharding", "api"): "wrapper"}, "is for fully_shard"),
        (
            {("sharding", "reshard_to"): 2, ("sharding", "strategy"): "none"},
            "for the strategy 'full'",
        ),
        (
            {
                ("sharding", "selective_checkpointing"): True,
                ("sharding", "activation_checkpointing"): True,
            },
            "two kinds of recomputation",
        ),
        ({("run", "trace_step"): 201}, "from 1 to 200"),
        ({("optimizer", "name"): "adamw8bit", ("sharding", "api"): "wrapper"}, "--api fully_shard"),
        (
            {("optimizer", "name"): "adamw8bit", ("run", "capture"): "on"},
            "because optimizer.name (--optimizer)",
        ),
        ({("run", "eval_every"): 5}, "pass data.eval_paths (--eval-data)"),
        ({("data", "eval_share"): 0.1, ("data", "eval_paths"): ("a",)}, "leave out one of them"),
        ({("run", "resume"): True}, "name it with run.out (--out)"),
    ],
)
def test_values_that_are_impossible_together_are_refused(values, said):
    with pytest.raises(ConfigError) as caught:
        validate(config_of(None, values))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {("sharding", "precision"): "fp16"},
        {("sharding", "strategy"): "none"},
        {("sharding", "mesh"): "2x4", ("run", "ranks"): 4},  # on two machines
        {("optimizer", "steps"): 1, ("optimizer", "warmup"): 10},
        {("optimizer", "lr"): 1e-4, ("optimizer", "lr_end"): 0.0},
        {("run", "resume"): True, ("run", "out"): "runs/mine"},
        {("run", "prompt"): "", ("run", "sample_tokens"): 0},
    ],
)
def test_what_is_only_unusual_is_let_through(values):
    validate(config_of(None, values))


@few
@given(st.integers(1, 999), st.integers(1, 999))
def test_a_mesh_is_replicas_by_shards(replicas, shards):
    validate(changed("sharding", mesh=f"{replicas}x{shards}"))
    assert parse_mesh(f"{replicas}x{shards}") == (replicas, shards)


@pytest.mark.parametrize(
    "mesh", ["", "x", "2x", "0x4", "2x0", "2x4x2", "-1x2", "2X4", " 2x4", "٢x٤", "2x1٢"]
)
def test_what_is_no_mesh_is_refused(mesh):
    with pytest.raises(ConfigError, match="'auto' or replicas x shards"):
        validate(changed("sharding", mesh=mesh))


def test_parameters_are_resharded_to_a_divisor_of_the_ranks_that_share_them():
    section = ShardingSection(mesh="2x6", reshard_to=3)
    assert mesh_shape(section, 12) == (2, 6)
    with pytest.raises(TopologyError, match="4 does not divide the 6 ranks"):
        mesh_shape(replace(section, reshard_to=4), 12)

"""The configuration of `fullshard train`: its sections, its keys and their validation.

Each field of a section is a key of the configuration file, in the table of that section, and an
option of the command. `KEYS` lists them for the file, the command line and the validation.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from typing import Any, get_type_hints

from fullshard.errors import ConfigError, TopologyError

DEVICES = ("auto", "cpu", "cuda")

_BPE = re.compile(r"bpe:([1-9]\d{2,6})", re.ASCII)
_MESH = re.compile(r"([1-9]\d{0,8})x([1-9]\d{0,8})", re.ASCII)

# What a value must be, in words and as a predicate; for a list, what each entry must be.
_Rule = tuple[str, Callable[[Any], bool]]
_COUNT: _Rule = ("1 or more", lambda value: value >= 1)
_NATURAL: _Rule = ("0 or more", lambda value: value >= 0)
_POSITIVE: _Rule = ("a number above 0", lambda value: isfinite(value) and value > 0)
_NOT_NEGATIVE: _Rule = ("a number of 0 or more", lambda value: isfinite(value) and value >= 0)
_FRACTION: _Rule = ("0 or more and below 1", lambda value: 0 <= value < 1)
_UNIT_INTERVAL: _Rule = ("0 to 1", lambda value: 0 <= value <= 1)
_SEQUENCE: _Rule = ("2 tokens or more", lambda value: value >= 2)
_PORT: _Rule = ("0 to 65535", lambda value: 0 <= value <= 65535)
_ADDRESS: _Rule = (
    "an address and a port, as in host1:29500",
    lambda value: not value or re.fullmatch(r".+:[1-9]\d{0,4}", value) is not None,
)
_MESH_SHAPE: _Rule = (
    "'auto' or replicas x shards, as in 2x4",
    lambda value: value == "auto" or _MESH.fullmatch(value) is not None,
)
_TOKENIZER: _Rule = (
    "auto, bytes, model, bpe:N with N from 257 to 9999999, or a path",
    lambda value: (
        bool(value.strip())
        and (not value.startswith("bpe:") or int((_BPE.fullmatch(value) or "00")[1]) > 256)
    ),
)
_LOGGER: _Rule = (
    "tensorboard, wandb or mlflow",
    lambda value: value in ("tensorboard", "wandb", "mlflow"),
)
_ANY: _Rule = ("anything", lambda value: True)


def _text(words: str) -> _Rule:
    return words, lambda value: bool(value.strip())


def _key(
    default: Any, help: str, rule: _Rule = _ANY, *, option: str = "", choices: tuple[str, ...] = ()
) -> Any:
    """Declare a key; `option` is the name of its option if it differs from the key's."""
    about = {"help": help, "option": option, "choices": choices, "rule": rule}
    return field(default=default, metadata=about)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]: the model to train."""

    name: str = _key(
        "10m",
        "A built-in size, such as tiny, 150m or 8b, or a folder in Hugging Face's layout.",
        _text("a built-in size or a folder"),
        option="model",
    )
    sequence: int = _key(128, "Tokens in a sequence.", _SEQUENCE)
    lora_rank: int = _key(
        0, "Rank of the low-rank adapters to train; 0 trains all weights.", _NATURAL
    )
    lora_alpha: float = _key(32.0, "Scale of the adapters, as peft's lora_alpha.", _POSITIVE)
    lora_targets: tuple[str, ...] = _key(
        (),
        "Modules that get adapters, by the end of their names.",
        _text("the end of a module's name"),
        option="lora-target",
    )
    lora_base: str = _key(
        "plain",
        "How the frozen linear layers of blocks are stored and travel: plain, in int8, or in four "
        "bits (nf4).",
        choices=("plain", "int8", "nf4"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """[data]: the text to train on."""

    paths: tuple[str, ...] = _key(
        (),
        "Text files, .jsonl, .parquet or .arrow files of texts or conversations, or folders of "
        "them, with a weight as name=0.3:path; by default the source of Python's standard library.",
        _text("a file or a folder"),
        option="data",
    )
    mask_documents: bool = _key(
        False,
        "Documents that share a sequence do not attend to each other; conversations never do.",
    )
    strict_data: bool = _key(False, "Refuse files that are damaged, instead of skipping them.")
    eval_paths: tuple[str, ...] = _key(
        (), "Files or folders for validation.", _text("a file or a folder"), option="eval-data"
    )
    eval_share: float = _key(0.0, "Share of the sequences held out for validation.", _FRACTION)
    tokenizer: str = _key(
        "auto",
        "How text is converted to tokens: bytes, model (its own), bpe:N (trained on the data, with "
        "N tokens), or the path of a tokenizer.json or its folder; auto is the model's own, bytes "
        "for small built-in sizes, and otherwise a BPE with the vocabulary of the model.",
        _TOKENIZER,
    )
    cache: str = _key(
        "",
        "Folder of tokens and tokenizers that runs share; by default ~/.cache/fullshard, and with "
        "several hosts the folder of the run.",
    )
    text_field: str = _key(
        "text", "The field of a .jsonl line that contains the text.", _text("the name of a field")
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    """[sharding]: how the model is distributed over the ranks."""

    api: str = _key(
        "fully_shard", "The API that shards the model.", choices=("fully_shard", "wrapper")
    )
    strategy: str = _key(
        "full",
        "What to shard: full shards everything, grad-op keeps parameters unsharded from forward "
        "to backward, none replicates.",
        choices=("full", "grad-op", "none"),
    )
    mesh: str = _key(
        "auto", "Ranks as replicas x shards, as in 2x4; by default one replica.", _MESH_SHAPE
    )
    elastic_replicas: bool = _key(
        False, "Continue without a replica of the mesh that dies, and restart it meanwhile."
    )
    units: tuple[str, ...] = _key(
        (),
        "Module classes that become units; by default the repeated blocks.",
        _text("the name of a class"),
        option="unit",
    )
    precision: str = _key(
        "auto",
        "The compute dtype: bf16 reduces in float32, bf16-reduce in bf16; fp8 and fp8-rowwise "
        "multiply in float8 in the linear layers of blocks, and compute the rest in bf16; auto is "
        "bf16 on a GPU.",
        choices=("auto", "float32", "bf16", "bf16-reduce", "fp16", "fp8", "fp8-rowwise"),
    )
    gather_wire: str = _key(
        "plain",
        "How parameters travel between ranks: in the dtype that computes, or in eight bits.",
        choices=("plain", "int8", "fp8"),
    )
    reduce_wire: str = _key(
        "plain",
        "How gradients travel between ranks: in the dtype that they are summed in, in bf16, in "
        "eight bits, or between hosts in four.",
        choices=("plain", "bf16", "int8", "fp8", "int4"),
    )
    replica_wire: str = _key(
        "auto",
        "How replicas of the mesh exchange sums of gradients; auto is as reduce-wire.",
        choices=("auto", "plain", "bf16", "int8", "fp8", "int4"),
    )
    offload: bool = _key(False, "Keep shards, gradients and optimizer state in host memory.")
    reshard_to: int = _key(
        0,
        "How many neighboring ranks share a unit's parameters between forward and backward; 0: as "
        "the strategy says.",
        _NATURAL,
    )
    prefetch: int = _key(1, "Units that are gathered ahead of the one that computes.", _COUNT)
    activation_checkpointing: bool = _key(False, "Recompute each block's activations in backward.")
    selective_checkpointing: bool = _key(
        False, "Recompute each block in backward, except its matrix products and attention."
    )
    compile: bool = _key(False, "Compile each block.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: the optimizer and its learning rate."""

    name: str = _key(
        "adamw",
        "The optimizer; muon is for the matrices of blocks, and AdamW for the rest.",
        option="optimizer",
        choices=("adamw", "adamw8bit", "muon"),
    )
    steps: int = _key(200, "Number of steps.", _COUNT)
    batch: int = _key(2, "Sequences per rank in a micro-batch.", _COUNT)
    accumulate: int = _key(1, "Micro-batches per step.", _COUNT)
    lr: float = _key(1e-3, "Learning rate after the warmup.", _POSITIVE)
    lr_end: float = _key(0.1, "Final learning rate, as a fraction of lr.", _UNIT_INTERVAL)
    schedule: str = _key(
        "cosine",
        "The learning rate after the warmup; wsd decays late.",
        choices=("cosine", "linear", "constant", "wsd"),
    )
    decay: float = _key(0.2, "The share of steps in which wsd decays.", _UNIT_INTERVAL)
    warmup: int = _key(20, "Steps of the warmup.", _NATURAL)
    weight_decay: float = _key(
        0.1, "Weight decay of matrices other than embeddings.", _NOT_NEGATIVE
    )
    beta1: float = _key(0.9, "Decay of the running mean of gradients.", _FRACTION)
    beta2: float = _key(0.95, "Decay of the running mean of squared gradients.", _FRACTION)
    clip: float = _key(1.0, "Largest gradient norm; 0 disables clipping.", _NOT_NEGATIVE)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """[run]: processes, duration and output."""

    out: str = _key("", "Folder of the run; by default a new one under runs/.")
    resume: bool = _key(False, "Resume from the newest undamaged checkpoint of the folder.")
    resume_strict: bool = _key(False, "Refuse to resume if the newest checkpoint is damaged.")
    ranks: int = _key(
        0,
        "Processes on this machine; 0: one per GPU, or 2 on a CPU; with --rendezvous, one replica.",
        _NATURAL,
    )
    device: str = _key("auto", "Device to train on.", choices=DEVICES)
    capture: str = _key(
        "auto",
        "Replay whole steps as CUDA graphs; auto does if the GPU waits for the host.",
        choices=("auto", "on", "off"),
    )
    rendezvous: str = _key(
        "",
        "Address and port of the first host, as in host1:29500, with --elastic-replicas; run the "
        "same command on every host.",
        _ADDRESS,
    )
    port: int = _key(0, "Port of the rendezvous; 0: a free one.", _PORT)
    max_restarts: int = _key(2, "How often the ranks are restarted after one has died.", _NATURAL)
    seed: int = _key(0, "Seed of the initial weights and the order of the data.", _NATURAL)
    save_every: int = _key(50, "Steps between checkpoints; 0: only at the end.", _NATURAL)
    keep: int = _key(2, "Checkpoints to keep, beside the one of the best validation.", _COUNT)
    eval_every: int = _key(0, "Steps between validations; 0: only at the end.", _NATURAL)
    eval_batches: int = _key(
        16, "The most micro-batches that a rank evaluates in a validation.", _COUNT
    )
    on_nan: str = _key(
        "stop",
        "When steps in a row have a loss or gradient that is not finite: stop, skip them, or roll "
        "back to the newest checkpoint.",
        choices=("stop", "skip", "rollback"),
    )
    on_oom: str = _key(
        "stop",
        "When a rank runs out of memory: stop, retry the step once, or split micro-batches.",
        choices=("stop", "retry", "split"),
    )
    nan_limit: int = _key(
        3, "How many steps in a row that are not finite make --on-nan act; none is applied.", _COUNT
    )
    report: bool = _key(True, "Write report.html.")
    trace_step: int = _key(0, "Step that the report shows in detail; 0: an early one.", _NATURAL)
    profile: int = _key(0, "Step to profile with torch's profiler; 0: none.", _NATURAL)
    tensorboard: bool = _key(False, "The same as --log tensorboard.")
    loggers: tuple[str, ...] = _key(
        (), "Give metrics to tensorboard, wandb or mlflow, too.", _LOGGER, option="log"
    )
    prompt: str = _key("def ", "Prompt of the text sampled at the end.")
    sample_tokens: int = _key(160, "Tokens to sample at the end; 0: none.", _NATURAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """The configuration of a run."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)


# Keys

Value = str | bool | int | float | tuple[str, ...]

_LARGEST = 2**63 - 1  # the range of TOML, and of torch's seeds
_MAX_SHOWN = 40
_KINDS: Mapping[type, str] = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    tuple: "a list of strings",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One field of a section. `kind` is str, bool, int, float, or tuple for several strings."""

    section: str
    name: str
    kind: type
    default: Value
    help: str
    option: str
    choices: tuple[str, ...]
    rule: tuple[str, Callable[[Any], bool]]

    @property
    def subject(self) -> str:
        """The key and its option, as errors name them."""
        return f"{self.section}.{self.name} (--{self.option})"

    def checked(self, value: object, where: str) -> Value:
        """Return the value as the section stores it; `where` is the beginning of an error."""
        if not self._has_kind(value):
            raise ConfigError(
                f"{where}: {self.name} must be {_KINDS[self.kind]}, not {_shown(value)}."
            )
        if self.choices and value not in self.choices:
            raise ConfigError(
                f"{where}: {self.name} cannot be {value!r}{suggestion(str(value), self.choices)}"
            )
        if isinstance(value, list | tuple):
            return tuple(value)
        assert isinstance(value, str | int | float)
        return float(value) if self.kind is float else value

    def _has_kind(self, value: object) -> bool:
        if self.kind is tuple:
            return isinstance(value, list | tuple) and all(isinstance(v, str) for v in value)
        if type(value) is int and self.kind in (int, float):
            return -_LARGEST <= value <= _LARGEST
        return type(value) is self.kind


def suggestion(name: str, known: tuple[str, ...]) -> str:
    """Return the end of an error about an unknown name: the closest match, and all names."""
    found = get_close_matches(name, known, n=1, cutoff=0.5)
    meant = f"did you mean {found[0]!r}? " if found else ""
    return f"; {meant}{'Known' if found else 'known'} are {', '.join(known)}."


def _shown(value: object) -> str:
    """Format a value of the wrong type for an error."""
    if isinstance(value, dict):
        return "a table"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int):
        return str(value) if abs(value) <= _LARGEST else "one of more than 64 bits"
    shown = repr(value) if isinstance(value, str | list) else str(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _keys() -> dict[tuple[str, str], Key]:
    found = {}
    for section in fields(TrainConfig):
        cls: Any = section.default_factory
        assert is_dataclass(cls)
        hints = get_type_hints(cls)
        for each in fields(cls):
            kind, default = hints[each.name], each.default
            assert default is not MISSING
            found[section.name, each.name] = Key(
                section=section.name,
                name=each.name,
                kind=kind if isinstance(kind, type) and kind in _KINDS else tuple,
                default=default,
                help=each.metadata["help"],
                option=each.metadata["option"] or each.name.replace("_", "-"),
                choices=each.metadata["choices"],
                rule=each.metadata["rule"],
            )
    return found


KEYS: Mapping[tuple[str, str], Key] = _keys()
SECTIONS = tuple(dict.fromkeys(section for section, _ in KEYS))


def keys_of(section: str) -> tuple[Key, ...]:
    return tuple(key for key in KEYS.values() if key.section == section)


def value_of(config: TrainConfig, key: Key) -> Value:
    value: Value = getattr(getattr(config, key.section), key.name)
    return value


# Validation


def validate(config: TrainConfig) -> None:
    """Raise if no machine could run a configuration; the message names the key and the option."""
    for key in KEYS.values():
        words, is_met = key.rule
        value = value_of(config, key)
        for each in value if isinstance(value, tuple) else (value,):
            if isinstance(each, str):
                _require_utf8(key.subject, each)
            if not is_met(each):
                raise ConfigError(f"{key.subject} must be {words}, not {each!r}.")
    for problem in _contradictions(config):
        raise ConfigError(problem)


def parse_mesh(text: str) -> tuple[int, int] | None:
    """Return replicas and shards, or None for "auto". The text must have passed `validate`."""
    match = _MESH.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]))


def mesh_shape(section: ShardingSection, num_ranks: int) -> tuple[int, int]:
    """Return the number of replicas, and the number of ranks that share each."""
    replicas, shards = parse_mesh(section.mesh) or (1, num_ranks)
    if replicas * shards != num_ranks:
        raise TopologyError(
            f"--mesh: {section.mesh} is a mesh of {replicas * shards} ranks, but the run has "
            f"{num_ranks}; pass replicas x shards whose product is the number of ranks."
        )
    if section.reshard_to and shards % section.reshard_to:
        raise TopologyError(
            f"--reshard-to: {section.reshard_to} does not divide the {shards} ranks that share "
            "parameters; pass one of their divisors, or leave it out."
        )
    return replicas, shards


def _require_utf8(subject: str, text: str) -> None:
    """Raise unless the text can be written to a file and passed to other processes."""
    is_text = "\0" not in text
    try:
        text.encode()
    except UnicodeEncodeError:
        is_text = False
    if not is_text:
        raise ConfigError(f"{subject} must be UTF-8 text without null characters, not {text!r}.")


def _contradictions(config: TrainConfig) -> Iterator[str]:
    """Yield a message for values that are valid alone but not together."""
    data, sharding, optimizer, run = config.data, config.sharding, config.optimizer, config.run
    mesh = parse_mesh(sharding.mesh)

    def named(place: str) -> str:
        section, name = place.split(".")
        return KEYS[section, name].subject

    def given(place: str) -> str:
        return f"{named(place)} is {value_of(config, KEYS[tuple(place.split('.'))])!r}"  # type: ignore[index]

    if sharding.precision == "fp16" and run.device == "cpu":
        wrong = f"{named('sharding.precision')}: fp16 needs a GPU, but {given('run.device')}"
        yield f"{wrong}; choose bf16 or float32."
    if config.model.lora_base != "plain" and not config.model.lora_rank:
        wrong = f"{named('model.lora_base')}: only weights that are frozen are quantized"
        yield f"{wrong}, but {given('model.lora_rank')}; pass a rank, or leave out the base."
    if sharding.precision.startswith("fp8") and config.model.lora_rank:
        wrong = f"{named('sharding.precision')}: {sharding.precision} trains all weights"
        yield f"{wrong}, but {given('model.lora_rank')}; choose bf16."
    if sharding.precision.startswith("fp8") and config.model.sequence % 16:
        wrong = f"{named('sharding.precision')}: {sharding.precision} needs sequences of a multiple"
        yield f"{wrong} of 16 tokens, but {given('model.sequence')}; choose another, or bf16."
    is_8bit = optimizer.name == "adamw8bit"
    if run.capture == "on" and (run.device == "cpu" or sharding.offload or is_8bit):
        place = "optimizer.name" if is_8bit else "run.device"
        place = "sharding.offload" if sharding.offload else place
        wrong = f"{named('run.capture')}: steps cannot be captured, because {given(place)}"
        yield f"{wrong}; choose auto or off."
    if is_8bit and (sharding.api == "wrapper" or sharding.offload):
        place = "sharding.offload" if sharding.offload else "sharding.api"
        wrong = f"{named('optimizer.name')}: adamw8bit does not train this model: {given(place)}"
        yield f"{wrong}; choose another optimizer, or --api fully_shard and --no-offload."
    if sharding.strategy == "none" and sharding.offload:
        wrong = f"{named('sharding.offload')}: only shards are offloaded"
        remedy = "choose full or grad-op, or do not offload"
        yield f"{wrong}, but {given('sharding.strategy')}; {remedy}."
    for name in ("prefetch", "reshard_to"):
        is_set = getattr(sharding, name) != KEYS["sharding", name].default
        if is_set and sharding.api == "wrapper":
            wrong = f"{named(f'sharding.{name}')} is for fully_shard, but {given('sharding.api')}"
            yield f"{wrong}; leave out one of them."
    if sharding.reshard_to and sharding.strategy != "full":
        wrong = f"{named('sharding.reshard_to')} is for the strategy 'full'"
        yield f"{wrong}, but {given('sharding.strategy')}; leave out one of them."
    if sharding.selective_checkpointing and sharding.activation_checkpointing:
        one, other = "sharding.selective_checkpointing", "sharding.activation_checkpointing"
        yield f"{named(one)} and {named(other)} are two kinds of recomputation; leave out one."
    if mesh is not None and run.ranks and mesh[0] * mesh[1] % run.ranks:
        wrong = f"{named('sharding.mesh')}: {sharding.mesh} has {mesh[0] * mesh[1]} ranks, which is"
        wrong = f"{wrong} not a multiple of the {run.ranks} ranks per machine"
        yield f"{wrong}; change it or {named('run.ranks')}."
    if run.capture == "on" and run.on_oom != "stop":
        wrong = f"{named('run.capture')}: steps that may be repeated cannot be captured"
        yield f"{wrong}, but {given('run.on_oom')}; choose auto or off, or --on-oom stop."
    yield from _elastic_contradictions(config, named, given)
    if run.trace_step > optimizer.steps:
        wrong = f"{named('run.trace_step')}: there is no step {run.trace_step}"
        yield f"{wrong}; choose one from 1 to {optimizer.steps}."
    if run.eval_every and not (data.eval_paths or data.eval_share):
        wrong = f"{named('run.eval_every')} needs data for validation"
        yield f"{wrong}; pass {named('data.eval_paths')} or {named('data.eval_share')}."
    if data.eval_paths and data.eval_share:
        both = f"{named('data.eval_paths')} and {named('data.eval_share')}"
        yield f"{both} both say what validates; leave out one of them."
    if run.resume_strict and not run.resume:
        yield f"{named('run.resume_strict')} works only with {named('run.resume')}; pass that, too."
    if run.resume and not run.out:
        yield f"{named('run.resume')} needs the folder of a run; name it with {named('run.out')}."


def _elastic_contradictions(
    config: TrainConfig, named: Callable[[str], str], given: Callable[[str], str]
) -> Iterator[str]:
    sharding, run = config.sharding, config.run
    mesh = parse_mesh(sharding.mesh)
    if sharding.elastic_replicas:
        if mesh is None or mesh[0] == 1:
            wrong = f"{named('sharding.elastic_replicas')} needs replicas"
            yield f"{wrong}, but {given('sharding.mesh')}; pass a mesh as in 2x4."
        elif run.rendezvous and run.ranks % mesh[1]:
            wrong = f"{given('run.ranks')}, and a replica of {sharding.mesh} has {mesh[1]} ranks"
            yield f"{wrong}, which are on one host; pass a multiple."
        unfit = {"run.on_nan": "rollback", "run.capture": "on", "optimizer.name": "adamw8bit"}
        for place, value in unfit.items():
            if value_of(config, KEYS[tuple(place.split("."))]) == value:  # type: ignore[index]
                both = f"{named('sharding.elastic_replicas')} does not work with {named(place)}"
                yield f"{both} {value!r}; change one."
    elif run.rendezvous:
        wrong = f"{named('run.rendezvous')} is for {named('sharding.elastic_replicas')}"
        yield f"{wrong}; pass that, too, or start other runs on several hosts with torchrun."
    if run.rendezvous and not run.out:
        yield f"{named('run.rendezvous')} needs a folder that all hosts share; pass --out."

"""What a run of `fullshard train` is asked to do: one frozen value.

Each field is a key of the configuration file, in the table of its section, and an option of the
command: `option` says which.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DOORS = ("fully_shard", "wrapper")
STRATEGIES = ("full", "grad-op", "none")
PRECISIONS = ("auto", "float32", "bf16", "bf16-reduce", "fp16")
TOKENIZERS = ("auto", "bytes", "model")
DEVICES = ("auto", "cpu", "cuda")


def _key(default: Any, help: str, *, option: str = "", choices: tuple[str, ...] = ()) -> Any:
    """A field; `option` where the option's name is not the key's."""
    return field(default=default, metadata={"help": help, "option": option, "choices": choices})


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSection:
    """[model]: what is trained."""

    name: str = _key(
        "10m", "A built-in size, or a folder in Hugging Face's layout.", option="model"
    )
    sequence: int = _key(128, "Tokens in a sequence.")
    lora_rank: int = _key(0, "Train low-rank adapters of this rank; 0 trains all weights.")
    lora_alpha: float = _key(32.0, "Scale of the adapters.")
    lora_targets: tuple[str, ...] = _key(
        (), "Modules that get adapters, by the end of their names.", option="lora-target"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSection:
    """[data]: what it learns from."""

    paths: tuple[str, ...] = _key(
        (),
        "Text files, .jsonl files, or folders of them; the source of Python's standard library "
        "if there are none.",
        option="data",
    )
    tokenizer: str = _key("auto", "How text becomes tokens.", choices=TOKENIZERS)
    text_field: str = _key("text", "The field of a .jsonl line that is its text.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingSection:
    """[sharding]: how it is spread over the ranks."""

    door: str = _key("fully_shard", "Which of the two doors shards the model.", choices=DOORS)
    strategy: str = _key(
        "full",
        "What is sharded: everything, everything but parameters between forward and backward, "
        "nothing.",
        choices=STRATEGIES,
    )
    mesh: str = _key("auto", "Ranks as replicas x shards, as in 2x4; by default one replica.")
    units: tuple[str, ...] = _key(
        (), "Classes of modules that become units; the repeated blocks if none.", option="unit"
    )
    precision: str = _key(
        "auto",
        "What is computed in: bf16 reduces in float32, bf16-reduce in bf16; auto is bf16 on a GPU.",
        choices=PRECISIONS,
    )
    offload: bool = _key(False, "Keep shards, gradients and optimizer state in host memory.")
    activation_checkpointing: bool = _key(False, "Recompute each block's activations in backward.")
    compile: bool = _key(False, "Compile each block.")


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerSection:
    """[optimizer]: AdamW, with a warm-up and a cosine."""

    steps: int = _key(200, "Steps in all.")
    batch: int = _key(2, "Sequences on each rank in a micro-batch.")
    accumulate: int = _key(1, "Micro-batches in a step.")
    lr: float = _key(1e-3, "Learning rate after the warm-up.")
    lr_end: float = _key(0.1, "Learning rate at the end, as a share of lr.")
    warmup: int = _key(20, "Steps until the learning rate is reached.")
    weight_decay: float = _key(0.1, "Of matrices; vectors and embeddings take none.")
    beta1: float = _key(0.9, "Decay of the mean of gradients.")
    beta2: float = _key(0.95, "Decay of the mean of their squares.")
    clip: float = _key(1.0, "Largest norm of the gradients; 0 for any.")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSection:
    """[run]: where and how long, and what is left behind."""

    out: str = _key("", "Folder of the run; a new one under runs/ if it is not given.")
    resume: bool = _key(False, "Go on from the newest checkpoint of the folder.")
    ranks: int = _key(0, "Processes on this machine; 0: one per GPU, or 2 on a CPU.")
    device: str = _key("auto", "Where it runs.", choices=DEVICES)
    port: int = _key(0, "Port on which the ranks find each other; 0: a free one.")
    max_restarts: int = _key(2, "How often ranks are started again after one died.")
    seed: int = _key(0, "Of the initial weights and the order of the data.")
    save_every: int = _key(50, "Steps between checkpoints; 0: one at the end.")
    keep: int = _key(2, "Checkpoints to keep.")
    report: bool = _key(True, "Write report.html.")
    trace_step: int = _key(0, "Step that the report shows in detail; 0: one in the middle.")
    tensorboard: bool = _key(False, "Write metrics for TensorBoard.")
    prompt: str = _key("def ", "What the sample at the end begins with.")
    sample_tokens: int = _key(160, "Tokens of the sample; 0 for none.")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """All of it."""

    model: ModelSection = field(default_factory=ModelSection)
    data: DataSection = field(default_factory=DataSection)
    sharding: ShardingSection = field(default_factory=ShardingSection)
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    run: RunSection = field(default_factory=RunSection)

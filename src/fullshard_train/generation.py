"""Generates text from the checkpoint of a run, on any number of ranks of this machine.

A single rank is this process. Several ranks are started by torch's elastic launcher, and run this
module.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from fullshard.cli import wants_tracebacks
from fullshard.errors import CheckpointError, ConfigError, FullshardError, TopologyError
from fullshard.state import checkpoint_at, load, stored_shapes, tensor_shards
from fullshard_train.config import ShardingSection, TrainConfig
from fullshard_train.control import (
    StatusFolder,
    end_with_launcher,
    forget_launcher,
    name_launcher,
)
from fullshard_train.launcher import local_launch, prepare_environment
from fullshard_train.models.float8 import PRECISIONS
from fullshard_train.models.sampling import sample
from fullshard_train.output import config_beside, folder_beside
from fullshard_train.run_tokenizer import tokenizer_of_run
from fullshard_train.sharding import architecture_for, build_sharded_model
from fullshard_train.world import World, best_device, joined, leave, require_devices

_REQUEST, _TEXT = "request.json", "text.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """What to generate.

    `checkpoint` is a checkpoint of a run, the folder of its checkpoints, or the folder of the run;
    the newest checkpoint is used. A temperature of 0 chooses the most likely token; a `top_k` of 0
    samples from all tokens.
    """

    checkpoint: Path
    prompt: str
    tokens: int = 160
    temperature: float = 0.7
    top_k: int = 40
    seed: int = 0
    ranks: int = 1
    device: str = "auto"


def launch_generation(request: GenerateRequest) -> str:
    """Return the text that follows the prompt; raise for an invalid request, on any rank."""
    _validate(request)
    find_checkpoint(request.checkpoint)  # fail before ranks are started
    require_devices(best_device(request.device), request.ranks)
    if request.ranks == 1:
        with _single_rank(best_device(request.device)) as world:
            return _generated(request, world)
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        return _on_ranks(request, Path(folder))


def find_checkpoint(path: Path) -> tuple[Path, TrainConfig]:
    """Find the checkpoint in a run's folder, in the folder of its checkpoints, or at this path.

    Returns its path, and the configuration of the run that wrote it.
    """
    found = checkpoint_at(path)
    if found is None and not path.is_dir():
        raise CheckpointError(
            f"{path} {'is a file' if path.exists() else 'does not exist'}; pass the folder of a "
            "run or of a checkpoint."
        )
    if found is None:
        raise CheckpointError(
            f"{path} contains no complete checkpoint; train to the end, or pass --save-every to "
            "save before."
        )
    config = config_beside(found)
    if config is None:
        raise CheckpointError(
            f"{found}: the configuration of its run, which defines the model, is not next to the "
            "folder of its checkpoints; pass a checkpoint in its original folder."
        )
    return found, config


def _validate(request: GenerateRequest) -> None:
    least = {"tokens": 1, "top_k": 0, "seed": 0, "ranks": 1, "temperature": 0}
    for name, minimum in least.items():
        value = getattr(request, name)
        if not (isfinite(value) and value >= minimum):
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} must be {minimum} or more, not {value}.")
    if request.seed >= 2**63:
        raise ConfigError(f"--seed must be below 2**63, not {request.seed}.")


@contextmanager
def _single_rank(device_type: str) -> Iterator[World]:
    """Initialize a process group that consists of this process."""
    device = torch.device(device_type, 0) if device_type == "cuda" else torch.device("cpu")
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    with tempfile.TemporaryDirectory(prefix="fullshard-") as folder:
        store = Path(folder) / "store"
        if device_type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=0, world_size=1)
        try:
            yield World(0, 1, 0, 1, device)
        finally:
            dist.destroy_process_group()


def _generated(request: GenerateRequest, world: World) -> str:
    """Load the model and sample from it, on every rank."""
    path, config = find_checkpoint(request.checkpoint)
    architecture = architecture_for(config.model, config.data.tokenizer)
    # The units and the precision are those of the run; other settings concern training.
    is_possible = world.device.type == "cuda" or config.sharding.precision != "fp16"
    precision = config.sharding.precision if is_possible else "float32"
    precision = "auto" if precision in PRECISIONS else precision
    sharding = ShardingSection(units=config.sharding.units, precision=precision)
    model = build_sharded_model(architecture, sharding, world)
    # A checkpoint may lack the base weights of adapters, and buffers that are computed.
    architecture.fill(model, config.run.seed)
    _require_same_model(path, config, architecture.name, model)
    loaded = load(path, model, random_state=False)
    trained_with = loaded.extra.get("tokenizer", "")
    tokenizer = tokenizer_of_run(architecture, config, folder_beside(path), trained_with)
    tokens = sample(
        architecture,
        model,
        tokenizer.encode_prompt(request.prompt),
        request.tokens,
        temperature=request.temperature,
        top_k=request.top_k,
        seed=request.seed,
        end=tokenizer.end,
        device=world.device,
    )
    return tokenizer.decode_after(request.prompt, tokens)


def _require_same_model(path: Path, config: TrainConfig, name: str, model: nn.Module) -> None:
    """Raise a short error for a checkpoint of another model; `load` would list every parameter."""
    stored = {key.removeprefix("model."): shape for key, shape in stored_shapes(path).items()}
    is_partial = bool(config.model.lora_rank)
    others, is_any = [], False
    for shard in tensor_shards(model):
        shapes = [stored[each] for each in shard.names if each in stored]
        is_any = is_any or bool(shapes)
        if (not shapes and not is_partial) or any(shape != shard.shape for shape in shapes):
            others.append(f"{shard.name} {list(shapes[0]) if shapes else 'is missing'}")
    if others or not is_any:
        shown = f"{others[0]} and {len(others) - 1} more" if others else "none of its parameters"
        raise CheckpointError(
            f"{path} is not a checkpoint of {name!r}, the model in config.toml of its run: "
            f"{shown}; pass a checkpoint in its original folder."
        )


# Several ranks


def _on_ranks(request: GenerateRequest, folder: Path) -> str:
    asked = {**asdict(request), "checkpoint": os.path.abspath(request.checkpoint)}
    (folder / _REQUEST).write_text(json.dumps(asked))
    prepare_environment(request.ranks)
    name_launcher()
    try:
        elastic_launch(local_launch(request.ranks), sys.executable)("-m", __name__, str(folder))
    except ChildFailedError as error:
        message = StatusFolder(folder).error
        if message is not None:
            raise CheckpointError(message) from None
        rank, failure = error.get_first_failure()
        raise TopologyError(
            f"rank {rank} exited with status {failure.exitcode}; its output is above."
        ) from None
    finally:
        forget_launcher()
    text: str = json.loads((folder / _TEXT).read_text())
    return text


def _run_rank(folder: Path) -> int:
    asked = json.loads((folder / _REQUEST).read_text())
    request = GenerateRequest(**{**asked, "checkpoint": Path(asked["checkpoint"])})
    try:
        with joined(request.device) as world:
            text = _generated(request, world)
            if world.is_first:
                (folder / _TEXT).write_text(json.dumps(text))
    except (FullshardError, OSError) as error:
        if wants_tracebacks():
            traceback.print_exc()
        StatusFolder(folder).report_error(str(error))
        return 2
    return 0


if __name__ == "__main__":
    end_with_launcher()
    leave(_run_rank(Path(sys.argv[1])))

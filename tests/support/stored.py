"""Small checkpoints on disk, written without ranks."""

from pathlib import Path

import torch

from fullshard.layout.split import Box
from fullshard.state.checkpoint.manifest import Manifest, read_manifest
from fullshard.state.checkpoint.reader import open_checkpoint
from fullshard.state.checkpoint.save import write_checkpoint
from fullshard.state.shards import LocalPart
from fullshard.state.stored import TensorSource

OPTIMIZER = {"param_groups": [{"lr": 0.1, "params": ["weight", "bias"]}], "values": {}}


def content(seed: int) -> dict[str, torch.Tensor]:
    """A seed below zero has little content."""
    generator = torch.Generator().manual_seed(abs(seed))
    if seed < 0:
        return {"model.weight": torch.randn(6, 4, generator=generator)}
    return {
        "model.weight": torch.randn(6, 4, generator=generator),
        "model.bias": torch.randn(3, generator=generator).bfloat16(),
        "optimizer.state.weight.exp_avg": torch.randn(6, 4, generator=generator),
    }


def write(
    path: Path, seed: int = 0, step: int | None = None, num_files: int = 2, padding: int = 0
) -> Manifest:
    """A checkpoint of `content(seed)`, as ranks with rows of it would write it.

    Its manifest is larger by `padding`, its ranks' files by half of that.
    """
    tensors = {}
    for key, tensor in content(seed).items():
        parts, row = [], 0
        for values in tensor.chunk(num_files):
            box = Box((row, *(0,) * (tensor.dim() - 1)), tuple(values.shape))
            parts.append(LocalPart(box, values))
            row += len(values)
        tensors[key] = TensorSource.of_parts(tensor.shape, tensor.dtype, parts)
    states = [
        {"extra": {"position": 10 * rank, "note": "-" * (padding // 2)}}
        for rank in range(num_files)
    ]
    like = Manifest(step=step, optimizer=OPTIMIZER, selection="all" + "-" * padding)
    write_checkpoint(path, tensors, like, num_files=num_files, rank_states=states)
    return read_manifest(path)


def holds(path: Path, seed: int) -> bool:
    opened = open_checkpoint(path)
    expected = content(seed)
    return set(opened.keys) == set(expected) and all(
        torch.equal(opened.read(key), value) for key, value in expected.items()
    )


def damage(path: Path) -> None:
    """Change the middle of a file; its size stays."""
    content = path.read_bytes()
    part = slice(len(content) // 4, len(content) // 2)
    path.write_bytes(
        content[: part.start] + bytes(b ^ 255 for b in content[part]) + content[part.stop :]
    )

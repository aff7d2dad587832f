"""The losses that a run of elastic replicas must have, and what it says of its steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fullshard.state.materialize import give_memory
from fullshard_train.batches import Batches
from fullshard_train.config import TrainConfig
from fullshard_train.corpus import prepare_corpus
from fullshard_train.optimizer import build_optimizer, learning_rate
from fullshard_train.sharding import architecture_for
from fullshard_train.sources import Documents


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The metrics that are there; the last line may not be complete yet."""
    path = folder / "metrics.jsonl"
    whole = path.read_text().rpartition("\n")[0] if path.exists() else ""
    return [json.loads(line) for line in whole.splitlines()]


def expected_losses(
    config: TrainConfig, lines: list[dict[str, Any]], cache: Path, num_shards: int
) -> list[float]:
    """The losses of one unsharded process that takes the parts of the replicas of each step."""
    architecture, device = architecture_for(config.model), torch.device("cpu")
    model = architecture.build()
    give_memory(model)
    architecture.fill(model, config.run.seed)
    section, losses = config.optimizer, []
    optimizer = build_optimizer(model, section, device)
    tokenizer = architecture.tokenizer(config.data.tokenizer)
    corpus = prepare_corpus(
        Documents.of(config.data.paths, config.data.text_field),
        tokenizer,
        cache,
        vocabulary=architecture.vocabulary,
    )
    corpus.folder.clean()
    shape = {"sequence": config.model.sequence, "batch": section.batch, "seed": config.run.seed}
    batches = Batches((corpus,), rank=0, num_ranks=1, **shape)
    for line in lines:
        position, num_ranks = batches.position, len(line["replicas"]) * num_shards
        found = []
        for rank in range(num_ranks):
            batches.position = position
            batches.rank, batches.num_ranks = rank, num_ranks
            inputs, targets = batches.next()
            if line["replicas"][rank // num_shards] is not None:
                logits = architecture.logits(model, inputs, None)
                found.append(F.cross_entropy(logits.flatten(0, 1), targets.flatten()))
        loss = torch.stack(found).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), section.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(line["step"] - 1, section)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

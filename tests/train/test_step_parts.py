"""Where the time of a step goes."""

import pytest
import torch
import torch.nn.functional as F

from fullshard_train.models.transformer import BuiltinArchitecture, Size
from fullshard_train.step_parts import timed_parts
from tests.train.test_models import filled

SMALL = Size("small", 512, 64, 2, 4, 2, 128, 10_000.0, 64)
PARTS = {"optimizer", "loss", "attention", "matrix products", "other"}


@pytest.mark.parametrize("way", ["without logits", "plain"])
def test_every_part_of_a_step_has_its_time(way: str) -> None:
    architecture = BuiltinArchitecture(SMALL)
    model = filled(architecture)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.arange(65)[None] * 7 % 500
    inputs, targets = tokens[:, :-1], tokens[:, 1:]

    def step() -> None:
        if way == "plain":
            logits = architecture.logits(model, inputs)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        else:
            loss = architecture.loss(model, inputs, targets)
        loss.backward()
        optimizer.step()

    step()
    with timed_parts(torch.device("cpu")) as parts:
        step()
    assert set(parts) == PARTS
    assert all(seconds > 0 for seconds in parts.values())


def test_what_has_no_such_parts_is_something_else() -> None:
    with timed_parts(torch.device("cpu")) as parts:
        torch.ones(1000).cumsum(0)
    assert set(parts) == {"other"}

"""Which parameters decay does not depend on how the model is sharded."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fullshard import FullyShardedDataParallel, auto_shard
from fullshard.comm.placement import full_tensor
from fullshard.errors import ConfigError
from fullshard.state.shards import tensor_shards
from fullshard.testing import Rank, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from fullshard_train.config import OptimizerSection
from fullshard_train.optimizer import build_optimizer

CPU = torch.device("cpu")
SECTION = OptimizerSection(lr=0.05, weight_decay=0.2, beta1=0.8, beta2=0.9)
WIDTH = 6


class OwnNorm(nn.Module):
    """A norm of the model's own, with a shape that matrices have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own_norm = OwnNorm()
        self.bias = nn.Parameter(torch.zeros(1, WIDTH))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.own_norm(self.linear(self.norm(x))) + self.bias


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.head = nn.Linear(WIDTH, 7, bias=False)
        self.tied = nn.Linear(WIDTH, 7, bias=False)
        self.tied.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x)) + self.tied(x)


DECAYED = {"blocks.0.linear.weight", "blocks.1.linear.weight", "head.weight"}
OTHERS = {
    "embedding.weight",
    *(
        f"blocks.{index}.{name}"
        for index in range(2)
        for name in (
            "norm.weight", "norm.bias", "linear.bias", "own_norm.weight", "bias", "scale",
        )
    ),
}  # fmt: skip


def built(rank: Rank | None, form: str) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    policy = ModuleWrapPolicy({Block})
    if rank is None or form == "none":
        return model
    if form == "rows":
        return auto_shard(model, policy, mesh=rank.mesh(rank.size))
    return FullyShardedDataParallel(
        model,
        device_mesh=rank.mesh(rank.size),
        auto_wrap_policy=policy,
        use_orig_params=True,
    )


def names_by_decay(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[float, set[str]]:
    names = {id(shard.tensor): shard.name for shard in tensor_shards(model)}
    return {
        group["weight_decay"]: {names[id(param)] for param in group["params"]}
        for group in optimizer.param_groups
    }


def trained(model: nn.Module, num_steps: int, optimizer: Any = None) -> list[float]:
    optimizer = optimizer or build_optimizer(model, SECTION, CPU)
    tokens, losses = torch.arange(6).view(2, 3), []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@on_ranks(2)
def test_matrices_decay_in_every_form_and_each_trains_as_the_model_alone(rank: Rank) -> None:
    expected = trained(built(None, "none"), 4)
    assert expected[-1] < expected[0]
    for form in ("none", "rows", "slices"):
        model = built(rank, form)
        optimizer = build_optimizer(model, SECTION, rank.device)
        assert names_by_decay(model, optimizer) == {0.2: DECAYED, 0.0: OTHERS}
        assert optimizer.defaults["fused"]
        assert optimizer.defaults["betas"] == (0.8, 0.9)
        assert trained(model, 4) == pytest.approx(expected, rel=1e-5), form


class Alone:
    """torch's own Muon and AdamW, one after the other."""

    def __init__(self, model: Model) -> None:
        matrices = [block.linear.weight for block in model.blocks]
        ids = {id(each) for each in (*matrices, model.head.weight)}
        others = [p for p in model.parameters() if p.requires_grad and id(p) not in ids]
        decay = {"lr": SECTION.lr, "weight_decay": SECTION.weight_decay}
        muon = torch.optim.Muon(matrices, **decay, adjust_lr_fn="match_rms_adamw")
        betas = (SECTION.beta1, SECTION.beta2)
        groups = [{"params": others, "weight_decay": 0.0}, {"params": [model.head.weight]}]
        adamw = torch.optim.AdamW(groups, **decay, betas=betas)
        self.both = (muon, adamw)

    def zero_grad(self) -> None:
        for each in self.both:
            each.zero_grad()

    def step(self) -> None:
        for each in self.both:
            each.step()


@on_ranks(2, 3)
def test_muon_trains_hidden_matrices_as_torchs_does_unsharded(rank: Rank) -> None:
    section = replace(SECTION, name="muon")
    model = built(None, "none")
    assert isinstance(model, Model)
    expected = trained(model, 4, Alone(model))
    assert expected[-1] < expected[0]
    slices = built(rank, "slices")
    optimizer = build_optimizer(slices, section, rank.device)
    assert trained(slices, 4, optimizer) == pytest.approx(expected, rel=1e-3)
    for form in ("none", "rows"):
        sharded = built(rank, form)
        optimizer = build_optimizer(sharded, section, rank.device)
        found = trained(sharded, 4, optimizer)
        assert found == pytest.approx(expected, rel=1e-3), form
        names = {id(shard.tensor): shard.name for shard in tensor_shards(sharded)}
        with_momentum = {names[id(p)] for p, s in optimizer.state.items() if "momentum_buffer" in s}
        assert with_momentum == DECAYED - {"head.weight"}
        assert {names[id(p)] for p, s in optimizer.state.items() if "exp_avg" in s} == (
            OTHERS | {"head.weight"}
        )
        for shard in tensor_shards(sharded):
            value = shard.tensor
            whole = full_tensor(value) if isinstance(value, DTensor) else value
            torch.testing.assert_close(
                whole, model.get_parameter(shard.name), rtol=1e-3, atol=1e-4, msg=shard.name
            )


def test_a_frozen_model_is_refused_and_one_without_matrices_has_one_group():
    with pytest.raises(ConfigError, match="No parameter of Model requires a gradient"):
        build_optimizer(Model().requires_grad_(False), SECTION, CPU)
    optimizer = build_optimizer(nn.LayerNorm(3), SECTION, CPU)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.0]

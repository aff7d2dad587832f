"""`auto_shard` and `explain`: the blocks of a model become units, automatically or by a policy."""

from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from fullshard import ConfigError, auto_shard, explain, fully_shard
from fullshard.runtime.hooks import hooks_of
from fullshard.testing import Rank, Training, assert_same_training, fake_world, on_ranks
from fullshard.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)

WIDTH, VOCABULARY = 8, 12


class Attention(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value(torch.sigmoid(self.query(x)))


class Block(nn.Module):
    """As in GPT: a norm, attention, and a Sequential with two Linears."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), Attention(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


class GPT(nn.Module):
    def __init__(self, num_blocks: int = 3, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in (*self.blocks, *self.norms):
            x = block(x)
        return self.head(x)


class LanguageModel(nn.Module):
    """As in Llama: the layers are two modules down, beside a larger embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(100, WIDTH)
        self.model.layers = nn.ModuleDict({str(index): Block() for index in range(4)})
        self.lm_head = nn.Linear(WIDTH, 100)


class Experts(nn.Module):
    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.attention = Attention()
        self.experts = nn.ModuleList(Block() for _ in range(num_experts))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts[0](self.attention(x))


class MixtureOfExperts(nn.Module):
    """The first layer is dense, so one of the layers holds most of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Experts(0), Experts(0), Experts(4)])


class Bottleneck(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(width, width, 3), nn.Conv2d(width, width, 3)
        self.downsample = nn.Sequential(nn.Conv2d(width, width, 1), nn.BatchNorm2d(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 7)
        self.layer1 = nn.Sequential(Bottleneck(4))
        self.layer2 = nn.Sequential(Bottleneck(8), Bottleneck(8))
        self.layer3 = nn.Sequential(Bottleneck(16), Bottleneck(16))
        self.fc = nn.Linear(16, 2)


class Stage(nn.Module):
    """As in ConvNeXt: blocks in a Sequential, behind a convolution."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.downsample = nn.Conv2d(width, width, 1)
        self.blocks = nn.Sequential(*(Bottleneck(width) for _ in range(depth)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class LooseList(nn.Module):
    """Every layer is a list of an attention and a Linear: lists have no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleList([Attention(), nn.Linear(WIDTH, WIDTH)]) for _ in range(3)
        )


def two_towers() -> nn.Module:
    """As in LLaVA: a small vision tower beside a language model."""
    model = nn.Module()
    model.vision = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 2, enable_nested_tensor=False
    )
    model.language = GPT(4)
    return model


FOUND = {
    "gpt": (GPT, ["blocks.0", "blocks.1", "blocks.2"]),
    "llama": (LanguageModel, [f"model.layers.{index}" for index in range(4)]),
    "bert": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 8), 2, enable_nested_tensor=False
        ),
        ["layers.0", "layers.1"],
    ),
    "encoder_decoder": (
        lambda: nn.Transformer(8, 2, 2, 2, 16, batch_first=True),
        ["encoder.layers.0", "encoder.layers.1", "decoder.layers.0", "decoder.layers.1"],
    ),
    "experts_stay_in_their_layer": (MixtureOfExperts, ["layers.0", "layers.1", "layers.2"]),
    "resnet": (ResNet, ["layer1.0", "layer2.0", "layer2.1", "layer3.0", "layer3.1"]),
    "unequal_stages": (
        lambda: nn.Sequential(Stage(4, 1), Stage(8, 2), Stage(16, 2), nn.Linear(16, 2)),
        ["0.blocks.0", "1.blocks.0", "1.blocks.1", "2.blocks.0", "2.blocks.1"],
    ),
    "equal_stages": (lambda: nn.Sequential(Stage(8, 3), Stage(8, 3)), ["0", "1"]),
    "mlp": (
        lambda: nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Dropout(), nn.ReLU()),
        ["0", "2"],
    ),
    "sequential_blocks": (
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2))),
        ["0", "1"],
    ),
    "lists_of_lists": (
        LooseList,
        [f"layers.{index}.{part}" for index in range(3) for part in range(2)],
    ),
    "two_towers": (
        two_towers,
        [f"vision.layers.{i}" for i in range(2)] + [f"language.blocks.{i}" for i in range(4)],
    ),
    "one_linear": (lambda: nn.Linear(2, 2), []),
    "no_parameters": (nn.ReLU, []),
    "one_block_used_thrice": (lambda: nn.Sequential(*[Attention()] * 3), []),
}


@pytest.mark.parametrize("name", FOUND)
def test_repeated_blocks_are_found(name):
    build, expected = FOUND[name]
    with torch.device("meta"):
        model = build()
    units = explain(model).units
    assert [unit.name for unit in units] == [*expected, "(root)"]
    assert sum(unit.numel for unit in units) == sum(p.numel() for p in model.parameters())


def test_an_explanation_says_what_why_and_how_large():
    model = GPT(2).to(torch.bfloat16)
    model.norms.float()
    model.blocks[0].requires_grad_(False)
    model.embed.requires_grad_(False)
    explanation = explain(model)
    frozen, trainable, root = explanation.units
    assert frozen.numel == trainable.numel == sum(p.numel() for p in model.blocks[1].parameters())
    assert frozen.num_bytes == 2 * frozen.numel
    assert (frozen.training, trainable.training) == ("frozen", "trainable")
    assert root.training == "4 trainable, 1 frozen"
    assert root.dtypes == (torch.bfloat16, torch.float32)
    assert root.numel == VOCABULARY * WIDTH + 4 * WIDTH  # the tied weight counts once
    assert explanation.total.num_bytes == sum(unit.num_bytes for unit in explanation.units)
    assert "one of 2 Block" in frozen.why
    with pytest.raises(FrozenInstanceError):
        explanation.units = ()


def test_an_explanation_prints_as_a_table():
    text = str(explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))))
    assert text == repr(explain(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))))
    expected = """
unit    class       parameters  bytes  dtype    training   why
------  ----------  ----------  -----  -------  ---------  ----------------------------------------
0       Linear              20   80 B  float32  trainable  one of 2 Linear with 100% of the model
2       Linear              20   80 B  float32  trainable  one of 2 Linear with 100% of the model
(root)  Sequential           0    0 B  -        -          the model itself: what no other unit has
------  ----------  ----------  -----  -------  ---------  ----------------------------------------
total   Sequential          40  160 B  float32  trainable  3 units
"""
    assert text == expected.strip()
    with torch.device("meta"):
        large = str(explain(nn.Linear(2**20, 2**17, bias=False)))
    assert "137,438,953,472  512.0 GiB" in large


def test_an_explanation_follows_a_policy_its_options_and_what_is_ignored():
    model = GPT()

    def blocks(module: nn.Module) -> bool | dict[str, Any]:
        if module is model.blocks[0]:
            return {"reshard_after_forward": False}
        return isinstance(module, Block)

    first, second, *_ = explain(model, CustomPolicy(blocks)).units
    assert first.why == "chosen by blocks; with reshard_after_forward=False"
    assert second.why == "chosen by blocks"
    ignored = set(model.blocks[0].parameters())
    units = explain(model, ModuleWrapPolicy({Block}), ignored_params=ignored).units
    assert units[0].numel == 0
    large = partial(size_based_auto_wrap_policy, min_num_params=100)
    assert "blocks.0" not in [u.name for u in explain(model, large, ignored_params=ignored).units]


def test_a_policy_that_chooses_nothing_leaves_the_model_as_one_unit():
    units = explain(GPT(), ModuleWrapPolicy({nn.Conv2d})).units
    assert [unit.name for unit in units] == ["(root)"]
    assert units[0].why == "ModuleWrapPolicy chose nothing: the whole model is one unit"
    why = explain(nn.Linear(2, 2)).units[0].why
    assert why == "found no repeated blocks: the whole model is one unit"


@pytest.mark.parametrize("function", [auto_shard, explain])
@pytest.mark.parametrize(
    "policy, options, message",
    [
        (3, {}, r"policy must be a function .* not 3"),
        (
            lambda module, recurse, nonwrapped_numel: "yes",
            {},
            "returned 'yes' instead of True or False",
        ),
        (
            None,
            {"reshard": True},
            "options: 'reshard' is not an option of fully_shard; choose from mesh, ",
        ),
        (
            CustomPolicy(lambda m: {"sharding": 1} if isinstance(m, Attention) else False),
            {},
            "blocks.0.attention: overrides: 'sharding' is not an option",
        ),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_sharded(
    function, policy, options, message
):
    model = GPT()
    with pytest.raises(ConfigError, match=message):
        function(model, policy, **options)
    assert all(hooks_of(module) is None for module in model.modules())


@pytest.mark.parametrize("model", [nn.ModuleList([nn.Linear(2, 2)]), {}])
def test_a_model_that_cannot_be_called_is_refused(model):
    with pytest.raises(ConfigError, match=r"model must be an nn.Module with a forward"):
        auto_shard(model)


def test_auto_shard_makes_the_units_that_explain_names():
    with fake_world(2):
        model = GPT()
        expected = [unit.name for unit in explain(model).units]
        assert auto_shard(model) is model
        names = [name for name, module in model.named_modules() if hooks_of(module)]
        assert sorted(name or "(root)" for name in names) == sorted(expected)
        # And a sharded model is explained as it was before.
        assert [unit.name for unit in explain(model).units] == expected
        model = GPT()
        fully_shard(model.blocks[1])
        with pytest.raises(RuntimeError, match=r"blocks\.1: auto_shard expects .* sharded already"):
            auto_shard(model)
        assert hooks_of(model.blocks[0]) is None


def test_options_reach_every_unit_and_those_of_the_policy_win():
    def half(module: nn.Module) -> bool | dict[str, Any]:
        is_root = isinstance(module, GPT)
        return {"reshard_after_forward": True} if is_root else isinstance(module, Block)

    with fake_world(4):
        model = auto_shard(GPT(2), CustomPolicy(half), reshard_after_forward=2)
        found = [
            hooks_of(module).units[0].settings.reshard_after_forward
            for module in (*model.blocks, model)
        ]
    assert found == [2, 2, True]


def make_tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (2, 3), generator=generator)


POLICIES = {
    "none": None,
    "everything": always_wrap_policy,
    "by_size": partial(size_based_auto_wrap_policy, min_num_params=150),
    "nothing": ModuleWrapPolicy({nn.Conv2d}),
}


@on_ranks(2)
def test_a_model_trains_as_unsharded(rank: Rank) -> None:
    for policy in POLICIES.values():
        expected = explain(GPT(), policy)
        trained = assert_same_training(
            GPT, lambda m, p=policy: auto_shard(m, p, mesh=rank.mesh()), Training(make_tokens)
        )
        # Once the model has run, ties are settled: the engine's units are the explained ones.
        for unit in expected.units:
            module = trained.sharded.get_submodule(unit.name.replace("(root)", ""))
            members = [member for unit in hooks_of(module).units for member in unit.params]
            assert sum(member.shard.numel() for member in members) == unit.numel

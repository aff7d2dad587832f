"""Tied parameters: inside a unit, across units, made before sharding and after it."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.support.counted import CountedGather, CountedReduce
from tests.support.wrapped import (
    APIS,
    OURS,
    Lesson,
    ShardUnit,
    assert_api_trains_alike,
    assert_same_step,
    full,
    shard_parts,
)

VOCABULARY, WIDTH = 11, 6


class Language(nn.Module):
    """Embedding and output head share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(tokens))))


# Which parts become units before the root does.
SHARDINGS = {
    "in_one_unit": (),
    "head_apart": ("head",),
    "embedding_apart": ("embed",),
    "both_apart": ("embed", "head"),
    "both_apart_head_first": ("head", "embed"),
    "both_apart_and_a_unit_between": ("embed", "middle", "head"),
}


def shard_language(rank: Rank, model: nn.Module, sharding: str, **options: Any) -> None:
    for part in SHARDINGS[sharding]:
        fully_shard(model.get_submodule(part), mesh=rank.mesh(), **options)
    fully_shard(model, mesh=rank.mesh(), **options)


def make_tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(VOCABULARY, (3, 4), generator=generator)


def tokens_of(step: int, rank: int) -> torch.Tensor:
    return make_tokens(torch.Generator().manual_seed(10 * step + rank))


def counted(model: nn.Module, sharding: str) -> tuple[CountedGather, CountedReduce]:
    gather, reduce = CountedGather(), CountedReduce()
    for part in (*SHARDINGS[sharding], ""):
        model.get_submodule(part).set_custom_all_gather(gather)
        model.get_submodule(part).set_custom_reduce_scatter(reduce)
    return gather, reduce


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_tied_model_trains_as_unsharded(rank: Rank, sharding: str) -> None:
    is_tied: list[bool] = []

    def shard(model: Language, *, ties_again: bool) -> None:
        names = [name for name, _ in model.named_parameters()]
        every_name = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        shard_language(rank, model, sharding, reshard_after_forward=not ties_again)
        if ties_again:  # as transformers' tie_weights() does after every change of the model
            model.head.weight = model.embed.weight
        assert isinstance(model.embed.weight, DTensor)
        assert model.embed.weight is model.head.weight
        assert [name for name, _ in model.named_parameters()] == names
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == every_name
        for part in (model.embed, model.head):
            part.register_forward_pre_hook(
                lambda *_: is_tied.append(model.embed.weight is model.head.weight)
            )

    for ties_again in (False, True):
        trained = assert_same_training(
            Language, partial(shard, ties_again=ties_again), Training(make_tokens)
        )
        assert trained.sharded.embed.weight is trained.sharded.head.weight
        assert len(list(trained.sharded.parameters())) == 3
        assert trained.sharded.embed.weight.to_local().shape == ((6, 5)[rank.rank], WIDTH)
    assert is_tied == [True] * 12


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_tied_weight_is_gathered_once_in_forward_and_reduced_once(
    rank: Rank, sharding: str
) -> None:
    model = Language()
    shard_language(rank, model, sharding)
    gather, reduce = counted(model, sharding)
    hooked: list[torch.Tensor] = []
    model.embed.weight.register_hook(hooked.append)
    tied = 6 * WIDTH  # the larger shard of 11 rows
    for step in range(3):
        gather.numels.clear()
        reduce.numels.clear()
        loss = model(tokens_of(step, rank.rank)).sum()
        assert sum(numel >= tied for numel in gather.numels) == 1, gather.numels
        loss.backward()
        assert sum(numel >= tied for numel in reduce.numels) == 1, reduce.numels
        # It belongs to the root, which is not resharded between forward and backward.
        assert sum(numel >= tied for numel in gather.numels) == 1, gather.numels
        assert len(hooked) == step + 1


@on_ranks(2)
def test_a_module_used_twice_is_one_set_of_parameters(rank: Rank) -> None:
    def build() -> nn.Module:
        shared = nn.Linear(WIDTH, WIDTH)
        return nn.Sequential(shared, nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), shared)

    def shard(model: nn.Module) -> None:
        fully_shard(model[0], mesh=rank.mesh())
        fully_shard(model[2], mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())

    def make_batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=generator)

    trained = assert_same_training(build, shard, Training(make_batch))
    assert trained.sharded[0] is trained.sharded[4]
    assert len(list(trained.sharded.parameters())) == 4


@on_ranks(2)
def test_a_parameter_tied_inside_one_module_trains_as_unsharded(rank: Rank) -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Parameter(torch.randn(5, WIDTH))
            self.second = self.first
            self.other = nn.Parameter(torch.randn(5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x @ self.first.T + self.other) @ self.second

    def make_batch(generator: torch.Generator) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=generator)

    trained = assert_same_training(
        Twice, lambda m: fully_shard(m, mesh=rank.mesh()), Training(make_batch)
    )
    assert trained.sharded.first is trained.sharded.second


@pytest.mark.parametrize("sharding", ["in_one_unit", "head_apart", "both_apart"])
@on_ranks(2)
def test_weights_tied_only_after_sharding_train_as_tied(rank: Rank, sharding: str) -> None:
    def build() -> nn.Module:
        model = Language()
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return model

    def shard(model: Language) -> None:
        shard_language(rank, model, sharding)
        model.head.weight = model.embed.weight

    torch.manual_seed(0)
    model, reference = build(), Language()
    reference.load_state_dict(model.state_dict())
    shard(model)
    seen: list[bool] = []
    model.head.register_forward_pre_hook(
        lambda *_: seen.append(model.embed.weight is model.head.weight)
    )
    for step in range(2):
        assert_same_step(rank, model, reference, partial(tokens_of, step))
        assert model.head.weight is model.embed.weight
    assert seen == [True, True]


@pytest.mark.parametrize("sharding", ["head_apart", "both_apart", "both_apart_head_first"])
@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(2)
def test_the_head_alone_can_be_evaluated_and_trained(
    rank: Rank, sharding: str, has_run: bool
) -> None:
    torch.manual_seed(5)
    model = Language()
    reference = copy.deepcopy(model)
    shard_language(rank, model, sharding)
    if has_run:
        model(tokens_of(0, rank.rank)).sum().backward()
        model.zero_grad()
    hidden = torch.randn(rank.size, 2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(model.head(hidden), reference.head(hidden))
        if "embed" in SHARDINGS[sharding]:
            tokens = tokens_of(1, 0)
            torch.testing.assert_close(model.embed(tokens), reference.embed(tokens))
    model.head(hidden[rank.rank]).square().mean().backward()
    reference.head(hidden).square().mean().backward()
    torch.testing.assert_close(full(model.head.weight.grad), reference.head.weight.grad)
    assert model.middle.weight.grad is None
    # A whole step afterwards is not disturbed by it.
    model.zero_grad()
    reference.zero_grad()
    assert_same_step(rank, model, reference, partial(tokens_of, 1))
    assert model.head.weight is model.embed.weight


def without_a_root(shard_unit: ShardUnit, model: Language) -> Language:
    for name in ("head", "middle", "embed"):
        setattr(model, name, shard_unit(getattr(model, name)))
    return model


@pytest.mark.parametrize("api", APIS)
@on_ranks(2)
def test_tied_units_without_a_unit_around_them_train_as_unsharded(rank: Rank, api: str) -> None:
    lesson = Lesson(make_tokens)
    assert_api_trains_alike(api, Language, without_a_root, lesson, torch_too=False)


@pytest.mark.parametrize("sharding", ["in_one_unit", "head_apart", "both_apart_head_first"])
@pytest.mark.parametrize("api", ["flat", "orig"])
@on_ranks(2)
def test_a_tied_weight_of_wrappers_trains_as_one(rank: Rank, api: str, sharding: str) -> None:
    def shard(shard_unit: ShardUnit, model: Language) -> Any:
        return shard_parts(shard_unit, model, *SHARDINGS[sharding])

    # Torch unties weights of different units.
    torch_too = sharding == "in_one_unit"
    lesson = Lesson(make_tokens)
    model = assert_api_trains_alike(api, Language, shard, lesson, torch_too=torch_too).model
    with OURS.FSDP.summon_full_params(model, writeback=False):
        assert model.embed.weight is model.head.weight


@on_ranks(2)
def test_two_models_that_share_a_weight_train_in_turns_as_unsharded(rank: Rank) -> None:
    torch.manual_seed(6)
    first, second = Language(), Language()
    second.embed.weight = second.head.weight = first.embed.weight
    copies = copy.deepcopy((first, second))
    shard_language(rank, first, "both_apart")
    shard_language(rank, second, "head_apart")
    for step in range(4):
        model, reference = ((first, copies[0]), (second, copies[1]))[step % 2]
        assert_same_step(rank, model, reference, partial(tokens_of, step))
    assert first.embed.weight is second.head.weight

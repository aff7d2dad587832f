"""Tied parameters: inside a unit, across units, made before sharding and after it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fullshard import fully_shard
from fullshard.comm.placement import full_tensor
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from tests.counted import CountedGather, CountedReduce

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


def shard_parts(rank: Rank, model: nn.Module, sharding: str, **options: Any) -> None:
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
    trained = assert_same_training(
        Language, lambda m: shard_parts(rank, m, sharding), Training(make_tokens)
    )
    assert trained.sharded.embed.weight is trained.sharded.head.weight


@pytest.mark.parametrize("reshard", [True, False])
@on_ranks(2)
def test_a_tied_model_trains_alike_whether_units_are_resharded_after_forward(
    rank: Rank, reshard: bool
) -> None:
    assert_same_training(
        Language,
        lambda m: shard_parts(
            rank, m, "both_apart_and_a_unit_between", reshard_after_forward=reshard
        ),
        Training(make_tokens),
    )


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_tie_is_one_shard_from_the_beginning(rank: Rank, sharding: str) -> None:
    model = Language()
    names = [name for name, _ in model.named_parameters()]
    every_name = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    shard_parts(rank, model, sharding)
    for _ in range(2):
        assert model.embed.weight is model.head.weight
        assert isinstance(model.embed.weight, DTensor)
        assert [name for name, _ in model.named_parameters()] == names
        assert [name for name, _ in model.named_parameters(remove_duplicate=False)] == every_name
        assert len(list(model.parameters())) == 3
        shard = model.embed.weight
        model(tokens_of(0, rank.rank)).sum().backward()
        assert model.embed.weight is shard
    assert shard.to_local().shape == ((6, 5)[rank.rank], WIDTH)


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_tie_holds_while_the_model_computes(rank: Rank, sharding: str) -> None:
    model = Language()
    shard_parts(rank, model, sharding)
    seen: list[bool] = []
    for part in (model.embed, model.head):
        part.register_forward_pre_hook(
            lambda *_: seen.append(model.embed.weight is model.head.weight)
        )
    for step in range(2):
        model(tokens_of(step, rank.rank)).sum().backward()
    assert seen == [True] * 4


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_a_tied_weight_is_gathered_once_in_forward_and_reduced_once(
    rank: Rank, sharding: str
) -> None:
    model = Language()
    shard_parts(rank, model, sharding)
    gather, reduce = counted(model, sharding)
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


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_the_gradient_of_a_tied_weight_is_the_sum_of_its_uses(rank: Rank, sharding: str) -> None:
    torch.manual_seed(3)
    model = Language()
    with torch.no_grad():
        model.middle.weight.copy_(torch.eye(WIDTH))
        model.middle.bias.zero_()
    reference = copy.deepcopy(model)
    shard_parts(rank, model, sharding)
    calls: list[torch.Tensor] = []
    model.embed.weight.register_hook(lambda grad: calls.append(full_tensor(grad)))
    model(tokens_of(0, rank.rank)).square().sum().backward()
    for other in range(rank.size):
        (reference(tokens_of(0, other)).square().sum() / rank.size).backward()
    torch.testing.assert_close(full_tensor(model.embed.weight.grad), reference.embed.weight.grad)
    assert len(calls) == 1
    assert torch.equal(calls[0], full_tensor(model.embed.weight.grad))


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


@pytest.mark.parametrize("sharding", SHARDINGS)
@on_ranks(2)
def test_tying_again_after_sharding_changes_nothing(rank: Rank, sharding: str) -> None:
    # What transformers' tie_weights() does after every change of the model.
    def shard(model: Language) -> None:
        shard_parts(rank, model, sharding)
        model.head.weight = model.embed.weight

    trained = assert_same_training(Language, shard, Training(make_tokens))
    model = trained.sharded
    model.head.weight = model.embed.weight
    assert len(list(model.parameters())) == 3
    model(tokens_of(0, rank.rank)).sum().backward()
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("sharding", ["in_one_unit", "head_apart", "both_apart"])
@on_ranks(2)
def test_weights_tied_only_after_sharding_train_as_tied(rank: Rank, sharding: str) -> None:
    def build() -> nn.Module:
        model = Language()
        model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
        return model

    def shard(model: Language) -> None:
        shard_parts(rank, model, sharding)
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
        model(tokens_of(step, rank.rank)).square().mean().backward()
        for other in range(rank.size):
            (reference(tokens_of(step, other)).square().mean() / rank.size).backward()
        assert model.head.weight is model.embed.weight
        torch.testing.assert_close(
            full_tensor(model.embed.weight.grad), reference.embed.weight.grad
        )
        with torch.no_grad():
            for each in (model, reference):
                for param in each.parameters():
                    param.sub_(param.grad, alpha=0.1)
                each.zero_grad()
    assert seen == [True, True]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return full_tensor(tensor) if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize("sharding", ["head_apart", "both_apart", "both_apart_head_first"])
@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(2)
def test_the_head_alone_can_be_evaluated(rank: Rank, sharding: str, has_run: bool) -> None:
    torch.manual_seed(4)
    model = Language()
    reference = copy.deepcopy(model)
    shard_parts(rank, model, sharding)
    if has_run:
        model(tokens_of(0, rank.rank)).sum().backward()
    hidden = torch.randn(2, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(model.head(hidden), reference.head(hidden))
        torch.testing.assert_close(
            model.embed(tokens_of(1, 0)) if "embed" in SHARDINGS[sharding] else model.head(hidden),
            reference.embed(tokens_of(1, 0))
            if "embed" in SHARDINGS[sharding]
            else reference.head(hidden),
        )
        torch.testing.assert_close(model(tokens_of(1, 0)), reference(tokens_of(1, 0)))
    assert model.head.weight is model.embed.weight


@pytest.mark.parametrize("sharding", ["head_apart", "both_apart", "both_apart_head_first"])
@pytest.mark.parametrize("has_run", [False, True])
@on_ranks(2)
def test_the_head_alone_can_be_trained(rank: Rank, sharding: str, has_run: bool) -> None:
    torch.manual_seed(5)
    model = Language()
    reference = copy.deepcopy(model)
    shard_parts(rank, model, sharding)
    if has_run:
        model(tokens_of(0, rank.rank)).sum().backward()
        model.zero_grad()
    hidden = torch.randn(rank.size, 2, WIDTH)
    model.head(hidden[rank.rank]).square().mean().backward()
    reference.head(hidden).square().mean().backward()
    torch.testing.assert_close(whole(model.head.weight.grad), reference.head.weight.grad)
    assert model.middle.weight.grad is None
    # And a whole step afterwards is not disturbed by it.
    model.zero_grad()
    reference.zero_grad()
    model(tokens_of(1, rank.rank)).square().mean().backward()
    for other in range(rank.size):
        (reference(tokens_of(1, other)).square().mean() / rank.size).backward()
    torch.testing.assert_close(whole(model.head.weight.grad), reference.head.weight.grad)
    torch.testing.assert_close(whole(model.middle.weight.grad), reference.middle.weight.grad)


@on_ranks(2)
def test_a_loss_computed_on_the_head_outside_of_the_model_trains_as_unsharded(rank: Rank) -> None:
    # Chunked losses: the body runs first, then the head, piece by piece, in one backward.
    class Body(Language):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.middle(self.embed(tokens)))

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        hidden = model(tokens)
        return torch.stack([model.head(part).square().mean() for part in hidden.split(1)]).sum()

    assert_same_training(
        Body,
        lambda m: shard_parts(rank, m, "both_apart"),
        Training(make_tokens, loss=loss),
    )


@pytest.mark.parametrize("parts", [("embed", "head"), ("head", "middle", "embed")])
@on_ranks(2)
def test_tied_units_without_a_unit_around_them_train_as_unsharded(
    rank: Rank, parts: tuple[str, ...]
) -> None:
    def shard(model: Language) -> None:
        for part in parts:
            fully_shard(model.get_submodule(part), mesh=rank.mesh())
        if "middle" not in parts:
            fully_shard(model.middle, mesh=rank.mesh())

    trained = assert_same_training(Language, shard, Training(make_tokens))
    assert trained.sharded.embed.weight is trained.sharded.head.weight


@on_ranks(2)
def test_two_models_that_share_a_weight_train_in_turns_as_unsharded(rank: Rank) -> None:
    torch.manual_seed(6)
    first, second = Language(), Language()
    second.embed.weight = second.head.weight = first.embed.weight
    copies = copy.deepcopy((first, second))
    shard_parts(rank, first, "both_apart")
    shard_parts(rank, second, "head_apart")
    for step in range(4):
        model, reference = ((first, copies[0]), (second, copies[1]))[step % 2]
        model(tokens_of(step, rank.rank)).square().mean().backward()
        for other in range(rank.size):
            (reference(tokens_of(step, other)).square().mean() / rank.size).backward()
        expected = dict(reference.named_parameters())
        with torch.no_grad():
            for name, param in model.named_parameters():
                torch.testing.assert_close(whole(param.grad), expected[name].grad, msg=name)
                param.sub_(param.grad, alpha=0.1)
                expected[name].sub_(expected[name].grad, alpha=0.1)
        model.zero_grad()
        reference.zero_grad()
    assert first.embed.weight is second.head.weight

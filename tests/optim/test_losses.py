"""The loss of a linear head without its logits: beside the plain loss, sharded and unsharded."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fullshard import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from fullshard.errors import ConfigError, UnsupportedError
from fullshard.losses import LinearCrossEntropyHead, head_loss, linear_cross_entropy
from fullshard.testing import Rank, Training, assert_same_training, on_ranks
from fullshard.wrap import ModuleWrapPolicy
from tests.engine.test_large_gradients import ordered_and_small

VOCABULARY, WIDTH = 64, 8


def given(dtype: torch.dtype, *, has_bias: bool) -> tuple[list[Tensor], Tensor]:
    """Hidden states, a weight and perhaps a bias, and targets of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(5, 7, 16), (50, 16)] + [(50,)] * has_bias
    tensors = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    targets = torch.randint(0, 50, (5, 7), generator=generator)
    targets[0, :3] = -100
    return [each.requires_grad_() for each in tensors], targets


def plain(
    hidden: Tensor, weight: Tensor, target: Tensor, bias: Tensor | None = None, **options: Any
) -> Tensor:
    logits = F.linear(hidden, weight, bias).flatten(0, -2)
    logits = logits if logits.dtype is torch.float64 else logits.float()
    return F.cross_entropy(logits, target.flatten(), **options)


@pytest.mark.parametrize("chunk", [1, 8, None])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_the_loss_and_its_gradients_are_those_of_cross_entropy(
    dtype: torch.dtype, reduction: Any, has_bias: bool, chunk: int | None
) -> None:
    (hidden, weight, *bias), target = given(dtype, has_bias=has_bias)
    tensors = [hidden, weight, *bias]
    expected = plain(hidden, weight, target, *bias, reduction=reduction)
    found = linear_cross_entropy(hidden, weight, target, *bias, reduction=reduction, chunk=chunk)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    tolerance = 1e-2 if dtype is torch.bfloat16 else 1e-5
    for one, other in zip(
        torch.autograd.grad(3 * found, tensors, retain_graph=True),
        torch.autograd.grad(3 * expected, tensors),
        strict=True,
    ):
        largest = other.abs().max().item()
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * largest)
    again = torch.autograd.grad(found, tensors[:1])  # the first one left what was saved as it was
    assert again[0].isfinite().all()


def test_the_loss_is_that_of_torch_which_has_one_since_2_13() -> None:
    (hidden, weight), target = given(torch.float32, has_bias=False)
    rows, words = hidden.flatten(0, 1), target.flatten()
    torchs: Any = getattr(F, "linear_cross_entropy", plain)
    expected = torchs(rows, weight, words, ignore_index=-100)
    found = linear_cross_entropy(hidden, weight, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, (hidden, weight)) for each in (found, expected))
    )


class Shapes(TorchDispatchMode):
    """Counts products, and keeps the size of the largest result."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.num_products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, Tensor):
            self.largest = max(self.largest, found.untyped_storage().nbytes())
        self.num_products += func._overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm)
        return found


def test_neither_logits_nor_their_gradient_exist_as_a_whole() -> None:
    hidden = torch.randn(4096, 8, requires_grad=True)
    weight = torch.randn(500, 8, requires_grad=True)
    target = torch.randint(0, 500, (4096,))
    with Shapes() as shapes:
        linear_cross_entropy(hidden, weight, target, chunk=128).backward()
    assert shapes.largest <= 128 * 500 * 4 < hidden.nbytes * 4
    assert shapes.num_products == 3 * 4096 // 128


def test_a_forward_without_gradients_computes_none_and_a_frozen_weight_has_none() -> None:
    hidden, weight = torch.randn(256, 8, requires_grad=True), torch.randn(50, 8)
    target = torch.randint(0, 50, (256,))
    with Shapes() as frozen:
        linear_cross_entropy(hidden, weight, target, chunk=128).backward()
    with torch.no_grad(), Shapes() as evaluated:
        linear_cross_entropy(hidden, weight, target, chunk=128)
    assert (frozen.num_products, evaluated.num_products) == (4, 2)


def test_tokens_of_which_none_counts_have_no_gradient() -> None:
    (hidden, weight), target = given(torch.float32, has_bias=False)
    none = torch.full_like(target, 7)
    found = linear_cross_entropy(hidden, weight, none, ignore_index=7, reduction="sum")
    found.backward()
    assert found == 0
    assert not any(each.grad is None or each.grad.any() for each in (hidden, weight))
    empty = linear_cross_entropy(hidden[:0], weight, target[:0], reduction="sum")
    assert empty == 0
    assert not torch.autograd.grad(empty, weight)[0].any()


def test_under_autocast_products_are_of_its_dtype_and_gradients_of_the_parameters() -> None:
    (hidden, weight), target = given(torch.float32, has_bias=False)
    with torch.autocast("cpu", torch.bfloat16):
        found = linear_cross_entropy(hidden, weight, target)
        expected = plain(hidden, weight, target)
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    grads = torch.autograd.grad(found, (hidden, weight))
    assert [each.dtype for each in grads] == [torch.float32] * 2


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own
def test_compiled_without_a_break_it_is_the_same() -> None:
    head = LinearCrossEntropyHead(16, 50)
    (hidden, _), target = given(torch.float32, has_bias=False)
    compiled = torch.compile(partial(head, chunk=8), backend="aot_eager", fullgraph=True)
    found, expected = compiled(hidden, target), head(hidden, target)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        *(torch.autograd.grad(each, (hidden, head.weight)) for each in (found, expected))
    )


def test_shapes_that_do_not_fit_and_heads_that_are_not_linear_are_refused() -> None:
    (hidden, weight), target = given(torch.float32, has_bias=False)
    with pytest.raises(ConfigError, match="do not fit"):
        linear_cross_entropy(hidden, weight, target[:, 1:])
    with pytest.raises(ConfigError, match="A weight of one dimension is sharded"):
        linear_cross_entropy(hidden, weight.flatten(), target)
    with pytest.raises(ConfigError, match="'mean' or 'sum'"):
        linear_cross_entropy(hidden, weight, target, reduction="none")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="chunk=0 must be 1 or more"):
        linear_cross_entropy(hidden, weight, target, chunk=0)
    with pytest.raises(ConfigError, match="a Tanh and must be"), head_loss(nn.Tanh(), target):
        pass
    with pytest.raises(RuntimeError, match="out of bounds"):
        linear_cross_entropy(hidden, weight, target.where(target.ge(0), 50))


def test_a_head_has_its_own_forward_again_when_the_context_ends() -> None:
    head = nn.Linear(16, 50, bias=False)
    (hidden, _), target = given(torch.float32, has_bias=False)
    with pytest.raises(RuntimeError, match="they are 0D and 3D"), head_loss(head, target):
        head(hidden) @ hidden
    assert head(hidden).shape == (5, 7, 50)
    own = head.forward = lambda hidden: hidden  # type: ignore[method-assign, assignment]
    with head_loss(head, target):
        assert head(hidden).ndim == 0
    assert head.forward is own


# Sharded heads


class Model(nn.Module):
    """A language model that computes its loss in one of several ways."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = "plain"
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.middle = nn.Linear(WIDTH, WIDTH)
        self.head = LinearCrossEntropyHead(WIDTH, VOCABULARY, bias="tied" not in way)
        if "tied" in way:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, target: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.embed(tokens)))
        if self.way == "plain":
            return F.cross_entropy(self.head(x).flatten(0, 1).float(), target.flatten())
        if "recomputed" in self.way:
            return checkpoint(self.head, x, target, use_reentrant="reentrant" in self.way)  # type: ignore[no-any-return]
        if "context" in self.way:
            with head_loss(self.head, target, chunk=4):
                return self.head(x)  # type: ignore[no-any-return]
        return self.head(x, target, chunk=4)  # type: ignore[no-any-return]


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens, target = torch.randint(0, VOCABULARY, (2, 3, 5), generator=generator)
    target[0, 0] = -100
    return tokens, target


WAYS = ("head", "tied", "context", "tied context", "recomputed", "recomputed, reentrant")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("has_own_unit", [False, True])
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_sharded_head_has_the_gradients_of_the_plain_loss(
    rank: Rank, way: str, has_own_unit: bool
) -> None:
    def shard(model: Model) -> None:
        model.way = way
        fully_shard(model.middle, mesh=rank.mesh())
        if has_own_unit:
            fully_shard(model.head, mesh=rank.mesh(), reshard_after_forward=True)
        fully_shard(model, mesh=rank.mesh())

    assert_same_training(partial(Model, way), shard, Training(batch, micro_batches=2))  # type: ignore[arg-type]


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("way", ["head", "tied", "context"])
@on_ranks(2)
def test_a_wrapped_head_has_the_gradients_of_the_plain_loss(
    rank: Rank, way: str, use_orig_params: bool
) -> None:
    def shard(model: Model) -> nn.Module:
        classes = {nn.Linear} if "tied" in way else {nn.Linear, LinearCrossEntropyHead}
        return FullyShardedDataParallel(
            model,
            process_group=rank.mesh().get_group(),
            auto_wrap_policy=ModuleWrapPolicy(classes),
            use_orig_params=use_orig_params,
        )

    def shard_and_set(model: Model) -> nn.Module:
        model.way = way
        return shard(model)

    training = Training(batch, micro_batches=2)
    assert_same_training(partial(Model, way), shard_and_set, training, oracle=shard)  # type: ignore[arg-type]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_a_large_head_has_the_gradients_of_the_plain_loss(rank: Rank, way: str) -> None:
    def shard(model: Model) -> None:
        model.way = way
        fully_shard(model.middle, mesh=rank.mesh())
        fully_shard(model, mesh=rank.mesh())

    with ordered_and_small():
        assert_same_training(
            partial(Model, way),
            shard,
            Training(batch, micro_batches=2),
            rtol=1e-4,
            atol=1e-5,  # type: ignore[arg-type]
        )


@on_ranks(2)
def test_a_sharded_model_is_evaluated_and_trained_in_turns(rank: Rank) -> None:
    model: Any = Model("head")
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for module in (model.head, model):
        fully_shard(module, mesh=rank.mesh(), mp_policy=policy)
    tokens, target = batch(torch.Generator().manual_seed(rank.rank))
    losses = []
    for way in ("plain", "head"):
        model.way = way
        with torch.no_grad():
            losses.append(model(tokens, target))
        model(tokens, target).backward()
        model.zero_grad()
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)


@on_ranks(2)
def test_weights_that_are_not_whole_are_refused(rank: Rank) -> None:
    model: Any = Model("head")
    fully_shard(model, mesh=rank.mesh())
    x, target = torch.randn(3, WIDTH), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(UnsupportedError, match=r"weight is a DTensor .* call the loss in the forw"):
        linear_cross_entropy(x, model.head.weight, target)
    over_words = distribute_tensor(torch.randn(VOCABULARY, WIDTH), rank.mesh(), [Shard(0)])
    with pytest.raises(UnsupportedError, match="loss_parallel for tensor-parallel heads"):
        linear_cross_entropy(x, over_words, target)

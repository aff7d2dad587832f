"""Tensor subclasses that bring their own gather: fsdp_pre_all_gather and fsdp_post_all_gather."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.optim import SGD
from torch.utils import _pytree as pytree

from fullshard import MixedPrecisionPolicy, fully_shard
from fullshard.testing import Rank, on_ranks

SHARDERS: tuple[Callable[..., Any], ...] = (fully_shard, torch_fsdp.fully_shard)

aten = torch.ops.aten
KEEPS_CLASS = {
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.narrow.default,
    aten.copy_.default,
    aten.view.default,
    aten.as_strided.default,
    aten._to_copy.default,
    aten.split.Tensor,
    aten.clone.default,
    aten.detach.default,
    aten.alias.default,
}


class Wrapped(torch.Tensor):
    """A float32 tensor whose class only views and copies keep; other operations return plain ones.

    `calls` counts what the engine asked for: gathers, first results, results written in place.
    """

    inner: torch.Tensor
    calls: dict[str, Any]

    @staticmethod
    def __new__(cls, inner: torch.Tensor, calls: dict[str, Any] | None = None) -> "Wrapped":
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor, calls: dict[str, Any] | None = None) -> None:
        self.inner = inner
        self.calls = {"pre": 0, "post": 0, "out": 0} if calls is None else calls

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.calls

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, calls: Any, size: Any, stride: Any) -> "Wrapped":
        return cls(tensors["inner"], calls)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls: dict[str, Any] | None = None

        def unwrap(tensor: "Wrapped") -> torch.Tensor:
            nonlocal calls
            calls = tensor.calls if calls is None else calls
            return tensor.inner

        args, kwargs = pytree.tree_map_only(Wrapped, unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func not in KEEPS_CLASS:
            return out
        return pytree.tree_map_only(torch.Tensor, lambda tensor: cls(tensor, calls), out)

    def finish(self, made: torch.Tensor, out: torch.Tensor | None) -> Any:
        """The first result, or one that is written into it."""
        if out is None:
            self.calls["post"] += 1
            return made, (made,)
        self.calls["out"] += 1
        assert out.dtype == made.dtype
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(made)
        return None


class Quantised(Wrapped):
    """Sends int8 values and a scale per row; the old signature."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        self.calls["pre"] += 1
        self.calls["mesh"] = mesh
        scale = self.inner.abs().amax(dim=1, keepdim=True).clamp(min=1e-6) / 127.0
        values = (self.inner / scale).round().to(torch.int8)
        return (values, scale), ("metadata", tuple(values.shape[1:]))

    def fsdp_post_all_gather(
        self, all_gather_flat: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scale = self.calls["gathered"] = all_gather_flat
        assert values.dtype == torch.int8
        assert scale.dtype == torch.float32
        assert metadata == ("metadata", tuple(values.shape[1:]))
        return self.finish((values.float() * scale).to(param_dtype), out)


class InBlocks(Quantised):
    """Only `chunk` cuts it, and a clone is another tensor: as torchao's weights of 4 bits."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        is_cut = func is aten.slice.Tensor and out.shape != args[0].shape
        if is_cut or func in (aten.clone.default, aten.narrow.default):
            raise NotImplementedError(f"{func} of whole blocks")
        return out


class Float8(Quantised):
    """Sends float8 values and one scale per shard; the signature with all arguments."""

    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        self.calls["pre"] += 1
        self.calls.update(
            mesh=mesh, outer=(outer_size, outer_stride), module=module, policy=mp_policy
        )
        scale = (self.inner.abs().amax() / 448.0).clamp(min=1e-6).view(1)
        values = (self.inner / scale).to(torch.float8_e4m3fn)
        return (values, scale), None

    def fsdp_post_all_gather(
        self, all_gather_flat: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        values, scales = all_gather_flat
        assert values.dtype == torch.float8_e4m3fn
        assert metadata is None
        rows = values.shape[0] // scales.shape[0]
        scale = scales.repeat_interleave(rows).view(-1, 1)
        return self.finish((values.float() * scale).to(param_dtype), out)


class Released(Quantised):
    """Makes a full weight that does not need what was gathered, and says so."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Viewed(Quantised):
    """On one rank, a weight that is not trained needs no memory but the shard's."""

    def fsdp_get_unsharded_view(self, mesh: Any, module: Any, mp_policy: Any) -> torch.Tensor:
        assert (mesh.size(), type(module)) == (1, nn.Linear)
        return self.inner.view(self.inner.shape)


class Halved(Wrapped):
    """Sends bfloat16, padded where the shards are uneven; computes in what was gathered."""

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        self.calls["pre"] += 1
        rows = -(-outer_size[0] // mesh.size())
        sent = self.inner.new_zeros(rows, *outer_size[1:], dtype=torch.bfloat16)
        sent[: self.inner.shape[0]].copy_(self.inner)
        return (sent,), outer_size

    def fsdp_post_all_gather(
        self, all_gather_flat: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,) = all_gather_flat
        assert data.dtype == torch.bfloat16
        if param_dtype != torch.bfloat16:
            made = data if out is None else data[: metadata[0]]
            return self.finish(made.to(param_dtype), out)
        if out is None:
            self.calls["post"] += 1
            return data, ()
        self.calls["out"] += 1
        assert out.data_ptr() == data.data_ptr()
        return None


class Sent(Halved):
    """Sends its shard as it is, whatever dim it is cut along."""

    def fsdp_pre_all_gather(self, mesh: Any) -> Any:  # type: ignore[override]
        self.calls["pre"] += 1
        return (self.inner.bfloat16(),), None

    def fsdp_post_all_gather(
        self, all_gather_flat: Any, metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> Any:
        (data,) = all_gather_flat
        # torch puts columns together but keeps the shape
        made = data if out is None else data.view(out.shape)
        return self.finish(made.to(param_dtype), out)


class Net(nn.Module):
    """Each layer has a wrapped weight and a plain bias; a plain norm lies between them."""

    def __init__(self, kind: type[Wrapped], hidden: int = 8) -> None:
        super().__init__()
        self.first = nn.Linear(4, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.second = nn.Linear(hidden, 4)
        for layer in (self.first, self.second):
            layer.weight = nn.Parameter(kind(layer.weight.detach().clone()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def built(kind: type[Wrapped], hidden: int = 8) -> Net:
    torch.manual_seed(0)
    return Net(kind, hidden)


def batch(step: int, rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return tensor.inner if isinstance(tensor, Wrapped) else tensor


def trained(
    kind: type[Wrapped],
    shard: Callable[..., Any],
    rank: Rank,
    mesh: Any,
    *,
    nested: bool = False,
    hidden: int = 8,
    **options: Any,
) -> tuple[Net, list[torch.Tensor]]:
    """Three steps of two forwards each; losses and gradients of all of them."""
    model = built(kind, hidden)
    if nested:
        shard(model.first, mesh=mesh, **options)
        shard(model.second, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    seen: list[torch.Tensor] = []
    for step in range(3):
        for micro in range(2):
            loss = model(batch(2 * step + micro, rank.rank)).float().square().mean()
            loss.backward()
            seen.append(loss.detach())
        seen += [local(parameter.grad).clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        seen += [local(parameter.detach()).clone() for parameter in model.parameters()]
    with torch.no_grad():
        seen.append(model(batch(9, rank.rank)).float())
    return model, seen


def assert_trains_as_in_torch(kind: type[Wrapped], rank: Rank, mesh: Any, **options: Any) -> Net:
    ours, found = trained(kind, fully_shard, rank, mesh, **options)
    theirs, expected = trained(kind, torch_fsdp.fully_shard, rank, mesh, **options)
    for index, (actual, wanted) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(actual, wanted, msg=lambda m, i=index: f"value {i}: {m}")
    for model in (ours, theirs):
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
    weight, other = ours.first.weight, theirs.first.weight
    assert type(weight.to_local()) is type(other.to_local()) is kind
    return ours


def calls_of(model: Net) -> dict[str, Any]:
    weight: Any = model.first.weight
    return weight.to_local().calls  # type: ignore[no-any-return]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("nested", [True, False], ids=["nested", "one unit"])
@pytest.mark.parametrize("kind", [Quantised, InBlocks, Released, Float8, Halved])
@on_ranks(2)
def test_an_extended_weight_trains_as_in_torch(
    rank: Rank, kind: type[Wrapped], nested: bool
) -> None:
    ours = assert_trains_as_in_torch(
        kind, rank, rank.mesh(), nested=nested, reshard_after_forward=nested is not (kind is Halved)
    )
    calls = calls_of(ours)
    # Made once, then written in place, once per gather.
    assert calls["post"] == 1
    assert calls["pre"] == calls["out"] + 1
    assert calls["out"] >= 6


@pytest.mark.parametrize("kind", [Quantised, Float8, Halved])
@on_ranks(2)
def test_an_extended_weight_is_asked_for_the_dtype_of_the_policy(
    rank: Rank, kind: type[Wrapped]
) -> None:
    dtypes = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    seen = []
    for shard, policy in zip(
        SHARDERS, (MixedPrecisionPolicy, torch_fsdp.MixedPrecisionPolicy), strict=True
    ):
        model, values = trained(kind, shard, rank, rank.mesh(), mp_policy=policy(**dtypes))
        seen.append(values)
        model.unshard()
        assert model.first.weight.dtype == model.first.bias.dtype == torch.bfloat16
        model.reshard()
        assert local(model.first.weight).dtype == torch.float32
    for actual, wanted in zip(*seen, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-3)


@on_ranks(2)
def test_an_unevenly_sharded_extended_weight_is_gathered_padded_and_cut_to_size(
    rank: Rank,
) -> None:
    ours = assert_trains_as_in_torch(Halved, rank, rank.mesh(), hidden=5)
    ours.unshard()
    assert ours.first.weight.shape == (5, 4)


@on_ranks(2)
def test_an_extended_weight_cut_along_columns_trains_as_in_torch(rank: Rank) -> None:
    ours = assert_trains_as_in_torch(
        Sent, rank, rank.mesh(), shard_placement_fn=lambda p: Shard(1) if p.ndim == 2 else None
    )
    assert local(ours.first.weight).shape == (8, 2)


@on_ranks(4)
def test_on_a_2d_mesh_the_extension_is_given_the_shard_axis(rank: Rank) -> None:
    mesh = rank.mesh((2, 2), ("replicate", "shard"))
    ours = assert_trains_as_in_torch(Quantised, rank, mesh)
    given = calls_of(ours)["mesh"]
    assert given.ndim == 1
    assert given.size() == 2
    assert given.mesh.tolist() == mesh["shard"].mesh.tolist()


@on_ranks(2)
def test_the_long_signature_is_told_size_stride_module_and_policy(rank: Rank) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.float32)
    model = built(Float8)
    fully_shard(model, mesh=rank.mesh(), mp_policy=policy)
    model(batch(0, rank.rank))
    model.reshard()
    calls = calls_of(model)
    assert calls["outer"] == (torch.Size([8, 4]), (4, 1))
    assert calls["module"] is model.first
    assert calls["policy"] == policy
    assert calls["mesh"] == rank.mesh()


@on_ranks(1, 2)
def test_the_full_weight_is_what_the_extension_made_of_all_shards(rank: Rank) -> None:
    model = built(Quantised)
    whole = model.first.weight.detach().inner.clone()
    fully_shard(model, mesh=rank.mesh())
    assert torch.equal(local(model.first.weight), whole.chunk(rank.size)[rank.rank])
    scale = whole.abs().amax(dim=1, keepdim=True) / 127.0
    model.unshard()
    torch.testing.assert_close(model.first.weight.detach(), (whole / scale).round() * scale)
    assert type(model.first.weight) is nn.Parameter


@pytest.mark.parametrize("kind", [Quantised, Released])
@on_ranks(2)
def test_memory_of_an_extended_full_weight_is_given_back(rank: Rank, kind: type[Wrapped]) -> None:
    model = built(kind)
    fully_shard(model, mesh=rank.mesh())
    calls, weights = calls_of(model), set()
    for _ in range(2):
        model.unshard()
        weight = model.first.weight
        weights.add(weight)
        gathered = [each.untyped_storage().size() for each in calls["gathered"]]
        assert gathered == ([8 * 4, 8 * 4] if kind is Quantised else [0, 0])
        assert weight.untyped_storage().size() == 8 * 4 * 4
        model.reshard()
        assert weight.untyped_storage().size() == 0
    assert len(weights) == 1


@on_ranks(1)
def test_on_one_rank_a_frozen_weight_may_be_a_view_of_its_shard(rank: Rank) -> None:
    model, reference = built(Viewed), built(Viewed)
    model.first.weight.requires_grad_(False)
    fully_shard(model, mesh=rank.mesh())
    memory = local(model.first.weight).data_ptr()
    for step in range(3):
        values = {name: local(value) + step for name, value in reference.state_dict().items()}
        with torch.no_grad():
            for name, param in model.named_parameters():
                local(param).copy_(values[name])
        model.unshard()
        assert model.first.weight.data_ptr() == memory
        torch.testing.assert_close(model.first.weight, values["first.weight"])
        model.reshard()
        model(batch(step, 0)).sum().backward()
        assert model.first.weight.grad is None
        assert model.second.weight.grad is not None
    assert calls_of(model)["pre"] == 0


@pytest.mark.parametrize("assign", [False, True])
@on_ranks(2)
def test_a_state_dict_of_extended_weights_is_loaded(rank: Rank, assign: bool) -> None:
    source, _ = trained(Quantised, fully_shard, rank, rank.mesh())
    model = built(Quantised)
    fully_shard(model, mesh=rank.mesh())
    x = batch(5, rank.rank)
    with torch.no_grad():
        model(x)
        state = source.state_dict()
        assert type(state["first.weight"].to_local()) is Quantised
        model.load_state_dict(state, assign=assign)
        torch.testing.assert_close(model(x), source(x))
    for found, expected in zip(model.parameters(), source.parameters(), strict=True):
        assert torch.equal(local(found), local(expected))
    optimizer = SGD(model.parameters(), lr=0.1)
    model.reshard()
    before = local(model.first.weight).clone()
    model(x).square().mean().backward()
    optimizer.step()
    assert not torch.equal(local(model.first.weight), before)


@on_ranks(2)
def test_a_weight_that_a_user_changes_is_gathered_anew(rank: Rank) -> None:
    model = built(Quantised)
    fully_shard(model, mesh=rank.mesh(), reshard_after_forward=False)
    x = batch(0, rank.rank)
    with torch.no_grad():
        first = model(x)
        model.reshard()
        model.second.weight.mul_(0.0)
        model.second.bias.zero_()
        assert first.any()
        assert not model(x).any()


@on_ranks(2)
def test_gradients_accumulate_without_sync_for_extended_weights(rank: Rank) -> None:
    synced, other = built(Halved), built(Halved)
    for model in (synced, other):
        fully_shard(model, mesh=rank.mesh())
    for step in range(2):
        synced(batch(step, rank.rank)).square().mean().backward()
    with other.no_sync():
        other(batch(0, rank.rank)).square().mean().backward()
    other(batch(1, rank.rank)).square().mean().backward()
    for found, expected in zip(other.parameters(), synced.parameters(), strict=True):
        torch.testing.assert_close(local(found.grad), local(expected.grad))


# What is refused


class OnlyPre(Wrapped):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.inner,), None


class OnlyPost(Wrapped):
    def fsdp_post_all_gather(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("never called")


class ThreeArguments(Halved):
    def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any) -> Any:  # type: ignore[override]
        return (self.inner,), None


class Unpadded(Halved):
    def fsdp_pre_all_gather(  # type: ignore[override]
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        return (self.inner.bfloat16(),), outer_size


@pytest.mark.parametrize("kind", [OnlyPre, OnlyPost])
@on_ranks(2)
def test_one_method_without_the_other_is_refused(rank: Rank, kind: type[Wrapped]) -> None:
    for shard in SHARDERS:
        with pytest.raises(AssertionError, match="fsdp_pre_all_gather and fsdp_post_all_gather"):
            shard(built(kind), mesh=rank.mesh())
    with pytest.raises(ValueError, match=rf"first\.weight: .* but {kind.__name__} has only one"):
        fully_shard(built(kind), mesh=rank.mesh())


@on_ranks(2)
def test_another_number_of_arguments_is_refused(rank: Rank) -> None:
    model = built(ThreeArguments)
    torch_fsdp.fully_shard(model, mesh=rank.mesh())
    with pytest.raises(AssertionError, match="fsdp_pre_all_gather"):
        model(batch(0, rank.rank))
    with pytest.raises(AssertionError, match=r"first\.weight: Invalid fsdp_pre_all_gather"):
        fully_shard(built(ThreeArguments), mesh=rank.mesh())


@on_ranks(2)
def test_a_shard_that_is_not_padded_is_refused_on_every_rank(rank: Rank) -> None:
    model = built(Unpadded, hidden=5)
    fully_shard(model, mesh=rank.mesh())
    with pytest.raises((ValueError, RuntimeError), match=r"first\.weight.*pad"):
        model(batch(0, rank.rank))


@on_ranks(4)
def test_resharding_to_fewer_ranks_is_refused_by_fully_shard_and_by_the_setter(rank: Rank) -> None:
    with pytest.raises(NotImplementedError, match=r"weight.*reshard_after_forward=True"):
        fully_shard(built(Quantised), mesh=rank.mesh(), reshard_after_forward=2)
    model = built(Quantised)
    fully_shard(model, mesh=rank.mesh())
    with pytest.raises(NotImplementedError, match=r"weight.*reshard_after_forward=True"):
        model.set_reshard_after_forward(2)
    model(batch(0, rank.rank)).square().mean().backward()
    assert model.first.weight.grad is not None

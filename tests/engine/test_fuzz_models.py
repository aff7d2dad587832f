"""Models that nobody would write by hand, sharded in ways that nobody would choose."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from fullshard import fully_shard
from fullshard.testing import Rank, Training, assert_same_training, pool

WIDTH = 6


@dataclass(frozen=True)
class Leaf:
    """A module with parameters of its own."""

    kind: str
    dtype: torch.dtype
    rows: int
    frozen: str  # "none", "first" parameter, or "all"
    is_tied: bool  # shares its first parameter with an earlier leaf of the same kind, if any
    runs: str  # "once", "twice", "never", or as a "checkpoint"
    unit: str  # "none", "own", or one unit "with next" sibling


@dataclass(frozen=True)
class Node:
    """A module of modules, with a 0-dim gain of its own."""

    children: tuple[Leaf | Node, ...]
    runs: str
    unit: str


@dataclass(frozen=True)
class Spec:
    root: Node
    mesh: tuple[int, ...]
    reshard: tuple[bool | int | None, ...]  # of one unit after another, in turns
    cuts_last_dim: bool
    micro_batches: int


class LeafModule(nn.Module):
    def __init__(self, spec: Leaf) -> None:
        super().__init__()
        self.spec = spec
        rows = spec.rows
        if spec.kind == "linear":
            self.inner = nn.Linear(WIDTH, rows)
            self.outer = nn.Linear(rows, WIDTH, bias=False)
        elif spec.kind == "norm":
            self.norm = nn.LayerNorm(WIDTH)
        elif spec.kind == "table":
            self.table = nn.Parameter(torch.randn(rows, WIDTH))
        elif spec.kind == "scalar":
            self.scale = nn.Parameter(torch.tensor(0.9))
        elif spec.kind == "cube":
            self.cube = nn.Parameter(torch.randn(1, rows, WIDTH))
        elif spec.kind == "empty":
            self.nothing = nn.Parameter(torch.empty(0, WIDTH))
            self.shift = nn.Parameter(torch.zeros(1))
        else:
            self.unused = nn.Parameter(torch.randn(rows))
            self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.to(spec.dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._apply_to(x.to(self.spec.dtype)).to(x.dtype)

    def _apply_to(self, x: torch.Tensor) -> torch.Tensor:
        kind = self.spec.kind
        if kind == "linear":
            return self.outer(torch.tanh(self.inner(x)))
        if kind == "norm":
            return self.norm(x)
        if kind == "table":
            return x + self.table[torch.arange(len(x)) % self.spec.rows]
        if kind == "scalar":
            return x * self.scale
        if kind == "cube":
            return x + self.cube.mean((0, 1))
        if kind == "empty":
            return x + self.nothing.sum() + self.shift
        return x + self.shift


class NodeModule(nn.Module):
    def __init__(self, spec: Node) -> None:
        super().__init__()
        self.spec = spec
        self.gain = nn.Parameter(torch.tensor(0.8))
        self.children_ = nn.ModuleList(
            LeafModule(child) if isinstance(child, Leaf) else NodeModule(child)
            for child in spec.children
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children_:
            runs = module.spec.runs
            if runs == "never":
                continue
            if runs == "checkpoint":
                x = x + checkpoint(module, x, use_reentrant=False)
            else:
                x = x + module(x)
            if runs == "twice":
                x = x + 0.5 * module(x)
        return torch.tanh(x * self.gain)


def build(spec: Spec) -> NodeModule:
    model = NodeModule(spec.root)
    seen: dict[tuple[Any, ...], LeafModule] = {}
    for module in model.modules():
        if not isinstance(module, LeafModule):
            continue
        leaf = module.spec
        first = seen.setdefault((leaf.kind, leaf.dtype, leaf.rows), module)
        if leaf.is_tied and first is not module:
            name, shared = next(first.named_parameters())
            path, _, own_name = name.rpartition(".")
            setattr(module.get_submodule(path), own_name, shared)
    for module in model.modules():
        if isinstance(module, LeafModule) and module.spec.frozen != "none":
            parameters = list(module.parameters())
            for parameter in parameters if module.spec.frozen == "all" else parameters[:1]:
                parameter.requires_grad_(False)
    return model


def shard(model: NodeModule, spec: Spec, rank: Rank) -> None:
    names = ("replicate", "shard") if len(spec.mesh) == 2 else None
    mesh, reshard = rank.mesh(spec.mesh, names), cycle(spec.reshard)

    def last_dim(parameter: nn.Parameter) -> Shard | None:
        return Shard(parameter.ndim - 1) if parameter.ndim else None

    def make_unit(module: Any) -> None:
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=next(reshard),
            shard_placement_fn=last_dim if spec.cuts_last_dim else None,
        )

    def walk(node: NodeModule) -> None:
        for child in node.children_:
            if isinstance(child, NodeModule):
                walk(child)
        waiting: list[nn.Module] = []
        for child in node.children_:
            if child.spec.unit == "none" and not waiting:
                continue
            waiting.append(child)
            if child.spec.unit != "with next":
                make_unit(waiting if len(waiting) > 1 else child)
                waiting = []
        if waiting:
            make_unit(waiting)

    walk(model)
    make_unit(model)


def batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=generator, dtype=torch.float64)


def train(rank: Rank, spec: Spec) -> None:
    def sync_last(model: Any, micro_batch: int) -> None:
        model.set_requires_gradient_sync(micro_batch == spec.micro_batches - 1)

    training = Training(
        batch,
        loss=lambda model, x: model(x).square().mean(),
        steps=2,
        micro_batches=spec.micro_batches,
        before_forward=sync_last,
    )
    assert_same_training(lambda: build(spec), lambda model: shard(model, spec, rank), training)


runs = st.sampled_from(["once", "once", "once", "twice", "never", "checkpoint"])
unit_kinds = st.sampled_from(["own", "none", "with next"])
kinds = ("linear", "norm", "table", "scalar", "cube", "empty", "unused")
dtypes = (torch.float32, torch.float32, torch.float32, torch.float64)
leaf_specs = st.builds(
    Leaf,
    kind=st.sampled_from(kinds),
    dtype=st.sampled_from(dtypes),
    rows=st.sampled_from([1, 3, 4, 7]),
    frozen=st.sampled_from(["none", "none", "none", "first", "all"]),
    is_tied=st.booleans(),
    runs=runs,
    unit=unit_kinds,
)
node_specs = st.recursive(
    leaf_specs,
    lambda inner: st.builds(
        Node,
        children=st.lists(inner, min_size=1, max_size=4).map(tuple),
        runs=runs,
        unit=unit_kinds,
    ),
    max_leaves=7,
)


@st.composite
def specs(draw: st.DrawFn, meshes: tuple[tuple[int, ...], ...]) -> Spec:
    children = draw(st.lists(node_specs, min_size=1, max_size=4))
    mesh = draw(st.sampled_from(meshes))
    reshard: list[bool | int | None] = [True, True, False, None]
    if mesh[-1] == 4:
        reshard.append(2)
    return Spec(
        root=Node(tuple(children), "once", "own"),
        mesh=mesh,
        reshard=tuple(draw(st.lists(st.sampled_from(reshard), min_size=1, max_size=3))),
        cuts_last_dim=draw(st.booleans()),
        micro_batches=draw(st.sampled_from([1, 1, 2])),
    )


def check(spec: Spec) -> None:
    size = 1
    for axis in spec.mesh:
        size *= axis
    pool(size).run(train, spec, timeout_s=60.0, expect_failure=True)


few = settings(derandomize=True, deadline=None, max_examples=8)
fewer = settings(derandomize=True, deadline=None, max_examples=4)


@few
@given(specs(((2,),)))
def test_any_model_trains_like_the_unsharded_one_on_one_axis(spec: Spec) -> None:
    check(spec)


@pytest.mark.exhaustive
@fewer
@given(specs(((2, 2), (4,))))
def test_any_model_trains_like_the_unsharded_one_on_four_ranks(spec: Spec) -> None:
    check(spec)

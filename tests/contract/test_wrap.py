"""Policies, `wrap`, and what a policy chooses: the same modules that torch's own wrapping takes."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp.wrap as theirs
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import fullshard.wrap as ours
from fullshard import ConfigError
from fullshard.wrap import choose, wrap_chosen

NAMES = [*theirs.__all__, "_or_policy"]


class Node(nn.Module):
    """A module with a parameter of its own and any children."""

    def __init__(self, children: Iterable[nn.Module] = (), numel: int = 3) -> None:
        super().__init__()
        self.own = nn.Parameter(torch.empty(numel, device="meta"))
        for index, child in enumerate(children):
            self.add_module(f"child{index}", child)


class Block(Node):
    pass


class Wrapped(nn.Module):
    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__()
        self.module = module
        self.options = options


def transformer() -> nn.Module:
    return nn.Transformer(8, 2, 2, 2, 16, batch_first=True, device="meta")


def convolutional() -> nn.Module:
    def stage(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(3, width, 3, device="meta"), nn.BatchNorm2d(width), Block())

    return nn.Sequential(*map(stage, (4, 8, 16)), nn.Flatten(), nn.Linear(16, 2, device="meta"))


def lists_of_lists() -> nn.Module:
    inner = [nn.ModuleList([Block([Node()]), Node(numel=50)]) for _ in range(3)]
    return Node([nn.ModuleList(inner), nn.ModuleDict({"a": Block(), "b": nn.Dropout()})])


def tied() -> nn.Module:
    model = Node([Block(numel=20), Node([Block(numel=20)])])
    model.child1.child0.own = model.child0.own
    return model


MODELS = [transformer, convolutional, lists_of_lists, tied]
CLASSES = [Block, Node, nn.Linear, nn.Sequential, nn.ModuleList, nn.TransformerEncoderLayer]


def is_even(module: nn.Module) -> bool:
    return len(list(module.parameters())) % 2 == 0


def custom_options(module: nn.Module) -> bool | dict[str, Any]:
    return {"size": len(list(module.parameters()))} if isinstance(module, Node) else is_even(module)


# Each makes the same policy of either library.
POLICIES: dict[str, Callable[[Any], Any]] = {
    "always": lambda of: of.always_wrap_policy,
    "even": lambda of: functools.partial(of.lambda_auto_wrap_policy, lambda_fn=is_even),
    "classes": lambda of: functools.partial(
        of.transformer_auto_wrap_policy, transformer_layer_cls={Block, nn.Linear}
    ),
    "small": lambda of: functools.partial(of.size_based_auto_wrap_policy, min_num_params=7),
    "large": lambda of: functools.partial(of.size_based_auto_wrap_policy, min_num_params=100),
    "leaves": lambda of: functools.partial(
        of.size_based_auto_wrap_policy,
        min_num_params=5,
        force_leaf_modules={Block, nn.ModuleDict},
        exclude_wrap_modules={nn.Linear},
    ),
    "either": lambda of: functools.partial(
        of._or_policy,
        policies=[
            functools.partial(of.size_based_auto_wrap_policy, min_num_params=60),
            of.ModuleWrapPolicy({Block}),
        ],
    ),
    "object": lambda of: of.ModuleWrapPolicy({Block, nn.LayerNorm, nn.ModuleList}),
    "custom": lambda of: of.CustomPolicy(custom_options),
}


def theirs_chooses(
    model: nn.Module,
    policy: Any,
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> list[tuple[nn.Module, dict[str, Any]]]:
    """The modules that torch wraps, in order, with their options. Wraps them."""
    order: list[tuple[nn.Module, dict[str, Any]]] = []

    class Noted(Wrapped):
        def __init__(self, module: nn.Module, **options: Any) -> None:
            super().__init__(module, **options)
            order.append((module, options))

    if isinstance(policy, theirs._Policy):
        targets = policy._run_policy(model, ignored_modules, {"size": 0})
        theirs._post_order_apply(model, theirs._construct_wrap_fn(model, targets, Noted))
    else:
        theirs._recursive_wrap(
            model, policy, Noted, ignored_modules, ignored_params, only_wrap_children=True, size=0
        )
    return order


def assert_same_choice(
    model: nn.Module, policy: Callable[[Any], Any], ignored: Iterable[nn.Module] = ()
) -> None:
    all_ignored = {inner for module in ignored for inner in module.modules()}
    params = {param for module in all_ignored for param in module.parameters()}
    names = {module: name for name, module in model.named_modules()}
    choice = choose(model, policy(ours), ignored_modules=ignored, options={"size": 0})
    chosen = [(unit.module, {"size": 0, **unit.overrides}) for unit in choice[:-1]]
    assert [names[unit.module] for unit in choice[:-1]] == [unit.name for unit in choice[:-1]]

    # Every parameter belongs to exactly one unit.
    own = [param for unit in choice for _, param in unit.params]
    assert len(own) == len(set(own))
    assert set(own) == set(model.parameters()) - params
    named = dict(model.named_parameters())
    assert all(named[name] is param for unit in choice for name, param in unit.params)

    assert chosen == theirs_chooses(model, policy(theirs), all_ignored, params)


@pytest.mark.parametrize("name", NAMES)
def test_arguments_and_defaults_are_torchs(name):
    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        parameters = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, each.default) for each in parameters]

    assert arguments(getattr(ours, name)) == arguments(getattr(theirs, name))
    for name in ("EXCLUDE_WRAP_MODULES", "FORCE_LEAF_MODULES"):
        found = getattr(ours.size_based_auto_wrap_policy, name)
        assert found == getattr(theirs.size_based_auto_wrap_policy, name)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("build", MODELS)
def test_a_policy_chooses_what_torchs_does(build, policy):
    assert_same_choice(build(), POLICIES[policy])
    model = build()
    before = {name: id(module) for name, module in model.named_modules()}
    choose(model, POLICIES[policy](ours))
    assert {name: id(module) for name, module in model.named_modules()} == before
    assert_same_choice(model, POLICIES[policy], ignored=list(model.children())[:1])


@pytest.mark.parametrize("policy", ["object", "custom"])
def test_torchs_own_policy_objects_are_taken(policy):
    model = transformer()
    by_theirs = choose(model, POLICIES[policy](theirs))
    by_ours = choose(model, POLICIES[policy](ours))
    assert [unit.module for unit in by_theirs] == [unit.module for unit in by_ours]
    assert [unit.overrides for unit in by_theirs] == [unit.overrides for unit in by_ours]


def container(children: list[nn.Module], kind: str) -> nn.Module:
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    return Block(children) if kind == "block" else Node(children)


LEAVES = st.one_of(
    st.integers(1, 40).map(lambda numel: lambda: Node(numel=numel)),
    st.integers(1, 9).map(lambda width: lambda: nn.Linear(width, 3, device="meta")),
    st.just(nn.ReLU),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.tuples(
        st.lists(inner, max_size=4), st.sampled_from(["list", "sequential", "block", "node"])
    ).map(lambda it: lambda: container([make() for make in it[0]], it[1])),
    max_leaves=14,
)
FUNCTIONS = st.one_of(
    st.sampled_from(list(POLICIES.values())),
    st.integers(0, 120).map(
        lambda numel: (
            lambda of: functools.partial(of.size_based_auto_wrap_policy, min_num_params=numel)
        )
    ),
    st.sets(st.sampled_from(CLASSES)).map(lambda classes: lambda of: of.ModuleWrapPolicy(classes)),
)


@settings(max_examples=150, deadline=None)
@given(st.lists(TREES, min_size=1, max_size=4), FUNCTIONS, st.data())
def test_any_tree_and_policy_give_torchs_choice(trees, policy, data):
    model = Node([make() for make in trees])
    modules = list(model.modules())[1:]
    nodes = [module for module in modules if isinstance(module, Node)]
    if len(nodes) > 1 and data.draw(st.booleans(), label="tie"):
        nodes[0].own = nodes[-1].own
    ignored = data.draw(st.sets(st.sampled_from(range(len(modules))), max_size=2), label="ignored")
    assert_same_choice(model, policy, [modules[index] for index in ignored])


def test_a_module_used_at_several_places_is_chosen_once_and_replaced_at_all():
    shared = Block([Block()])
    model = Node([Node([shared]), Node([shared]), shared])
    choice = choose(model, functools.partial(ours.lambda_auto_wrap_policy, lambda_fn=is_block))
    assert [unit.name for unit in choice[:-1]] == ["child0.child0.child0", "child0.child0"]
    wrap_chosen(model, choice[:-1], Wrapped)
    assert isinstance(shared.child0, Wrapped)
    assert model.child2 is model.child0.child0 is model.child1.child0
    assert model.child2.module is shared


def is_block(module: nn.Module) -> bool:
    return isinstance(module, Block)


def test_a_parameter_of_several_units_belongs_to_the_innermost_unit_around_them():
    inside = Block([Block(), Block()])
    inside.child0.own = inside.child1.own
    choice = choose(Node([inside]), ours.ModuleWrapPolicy({Block}))
    own = {unit.name: [name for name, _ in unit.params] for unit in choice}
    assert own == {
        "child0.child0": [],
        "child0.child1": [],
        "child0": ["child0.own", "child0.child0.own"],
        "": ["own"],
    }


def test_options_of_a_custom_policy_win_over_those_of_all():
    model = Node([Block(), Node()])
    options = {"size": 1, "other": 2}
    policy = ours.CustomPolicy(lambda m: {"size": 5} if isinstance(m, Block) else m is not model)
    choice = choose(model, policy, options=options)
    wrap_chosen(model, choice[:-1], Wrapped, **options)
    assert model.child0.options == {"size": 5, "other": 2}
    assert model.child1.options == {"size": 1, "other": 2}
    with pytest.raises(ConfigError, match="FSDP applied but found child0"):
        wrap_chosen(model, choice[:-1], Wrapped)


def test_modules_without_a_forward_can_be_left_out():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]), nn.ParameterList([torch.ones(2)]))
    choice = choose(model, ours.always_wrap_policy, needs_forward=True)
    assert [unit.name for unit in choice[:-1]] == ["0.0"]
    assert [name for name, _ in choice[-1].params] == ["1.0"]


@pytest.mark.parametrize(
    "policy, why",
    [
        ("always", "chosen by always_wrap_policy, 200 elements left"),
        ("large", "chosen by size_based_auto_wrap_policy, 200 elements left"),
        ("object", "is a Block"),
        ("custom", "chosen by custom_options"),
    ],
)
def test_every_choice_has_a_reason(policy, why):
    unit, _ = choose(Node([Block(numel=200)]), POLICIES[policy](ours))
    assert unit.why == why


def test_users_own_policy_classes_are_asked():
    class First(ours._Policy):
        def _run_policy(self, root_module, ignored_modules, root_kwargs):
            root_kwargs["seen"] = True
            return {next(root_module.children()): root_kwargs}

    unit = choose(Node([Block(), Block()]), First())[0]
    assert (unit.name, unit.overrides, unit.why) == ("child0", {"seen": True}, "chosen by First")


class ReturnsNoDict(ours.Policy):
    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        return [root_module]


class ReturnsNoOptions(ours.Policy):
    def _run_policy(self, root_module, ignored_modules, root_kwargs):
        return dict.fromkeys(root_module.modules(), True)


@pytest.mark.parametrize(
    "policy, message",
    [
        (3, "policy must be a function .* not 3"),
        ({Block}, "pass for example ModuleWrapPolicy"),
        (ours.ModuleWrapPolicy, "not <class"),
        (None, "not None"),
        (lambda module, recurse, nonwrapped_numel: 1, "returned 1 instead of True or False"),
        (
            lambda module, recurse, nonwrapped_numel: None,
            "returned None instead of True or False; return a bool",
        ),
        (ours.CustomPolicy(lambda module: 1), "Node: The lambda_fn .* returned 1"),
        (ours.CustomPolicy(lambda module: None), "returned None"),
        (ReturnsNoDict(), "must return a dict from modules to dicts of options"),
        (ReturnsNoOptions(), "must return a dict from modules to dicts of options"),
    ],
)
def test_a_policy_that_is_none_or_answers_wrongly_is_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        choose(Node([Block()]), policy)


@pytest.mark.parametrize("classes", [Block, [Block()], ["Block"], 3, None])
def test_classes_that_are_none_are_refused(classes):
    with pytest.raises(ConfigError, match=r"takes a set of module classes, not .*; pass"):
        ours.ModuleWrapPolicy(classes)
    with pytest.raises(ConfigError, match="transformer_auto_wrap_policy takes"):
        ours.transformer_auto_wrap_policy(Block(), True, 0, transformer_layer_cls=classes)
    if classes is not None:  # which means the default
        with pytest.raises(ConfigError, match="size_based_auto_wrap_policy takes"):
            ours.size_based_auto_wrap_policy(Block(), True, 0, force_leaf_modules=classes)
    with pytest.raises(ConfigError, match="CustomPolicy takes a function of a module"):
        ours.CustomPolicy({Block})
    assert repr(ours.ModuleWrapPolicy([Block, nn.Linear])) == "ModuleWrapPolicy({Block, Linear})"


def fail_inside_enable_wrap() -> None:
    with ours.enable_wrap(wrapper_cls=Wrapped):
        raise KeyError


def test_wrap_wraps_inside_of_enable_wrap_alone_which_does_not_nest():
    module = Block()
    assert ours.wrap(module, size=1) is module
    with pytest.raises(KeyError):
        fail_inside_enable_wrap()
    assert ours.wrap(module) is module
    with ours.enable_wrap(wrapper_cls=Wrapped, size=1, other=2):
        with pytest.raises(NotImplementedError, match="already within an autowrap context"):
            fail_inside_enable_wrap()
        wrapped = ours.wrap(module, size=3)
    assert isinstance(wrapped, Wrapped)
    assert wrapped.module is module
    assert wrapped.options == {"size": 3, "other": 2}
    with (
        pytest.raises(ConfigError, match="wrapper_cls must be a class"),
        ours.enable_wrap(wrapper_cls=None),
    ):
        pass

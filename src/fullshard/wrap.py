"""Which modules become units: policies, `wrap` for use while a model is built, and choosing.

Names, arguments, defaults and meaning are those of `torch.distributed.fsdp.wrap`. A policy is one
of two kinds:

- a function `(module, recurse, nonwrapped_numel) -> bool`, called twice per module on the way
  through the tree. With `recurse=True` it says whether to visit the children. After them, with
  `recurse=False`, it says whether to take the module, given the number of elements below it that no
  module inside it has taken. Bind further arguments with `functools.partial`.
- a `Policy` object, called once for the whole model. It may also give modules their own options.

`choose` runs either kind, and `RepeatedBlocks` is the policy if none is given.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.errors import ConfigError, UnsupportedError
from fullshard.runtime.ties import chains_of, innermost

__all__ = [
    "CustomPolicy",
    "ModuleWrapPolicy",
    "Policy",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "repeated_blocks",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]


_Options = dict[str, Any]


class Policy(ABC):
    """A policy that is called once for a whole model."""

    @abstractmethod
    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: _Options
    ) -> dict[nn.Module, _Options]:
        """Return the modules to take, each with its options: those of the root, or changed ones."""

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Act as a policy of the other kind, for helpers of torch that know only their own classes.

        Options of a module are stored where torch looks for those of a function.
        """
        inside = {*module.modules()} - {module}
        options = None if recurse else self._run_policy(module, inside, {}).get(module)
        if options:
            module._wrap_overrides = options  # type: ignore[assignment]
        return recurse or options is not None

    def why(self, module: nn.Module) -> str:
        """Say why this policy took a module, for people to read."""
        return f"chosen by {type(self).__name__}"


class CustomPolicy(Policy):
    """Takes the modules that your function selects, with the options that it returns.

    `lambda_fn(module)` returns False or an empty dict to skip the module, True to take it with the
    root's options, or a dict of options that override the root's.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | _Options]) -> None:
        if not callable(lambda_fn):
            raise ConfigError(
                f"CustomPolicy takes a function of a module, not {lambda_fn!r}; pass for example "
                "lambda module: isinstance(module, Block)."
            )
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: _Options
    ) -> dict[nn.Module, _Options]:
        taken: dict[nn.Module, _Options] = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ConfigError(
                    f"{name or type(module).__name__}: The lambda_fn passed to CustomPolicy should "
                    f"return False/True or a kwarg dict, but it returned {answer!r}; "
                    "return one of these."
                )
            if answer:
                taken[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return taken

    def why(self, module: nn.Module) -> str:
        return f"chosen by {getattr(self._lambda_fn, '__name__', 'a CustomPolicy')}"


class ModuleWrapPolicy(CustomPolicy):
    """Takes every module that is an instance of one of the classes, with the root's options."""

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._classes = _checked_classes("ModuleWrapPolicy", module_classes)

    def _lambda_fn(self, module: nn.Module) -> bool:
        return isinstance(module, self._classes)

    def why(self, module: nn.Module) -> str:
        return f"is a {next(each.__name__ for each in self._classes if isinstance(module, each))}"

    def __repr__(self) -> str:
        return f"ModuleWrapPolicy({{{', '.join(each.__name__ for each in self._classes)}}})"


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Take every module."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Take the modules for which `lambda_fn(module)` is True, anywhere in the tree."""
    return True if recurse else lambda_fn(module)


def transformer_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    transformer_layer_cls: set[type[nn.Module]],
) -> bool:
    """Take the modules that are instances of one of the classes, anywhere in the tree."""
    classes = _checked_classes("transformer_auto_wrap_policy", transformer_layer_cls)
    return recurse or isinstance(module, classes)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: set[type[nn.Module]] | None = None,
    exclude_wrap_modules: set[type[nn.Module]] | None = None,
) -> bool:
    """Take a module once `min_num_params` elements inside it are not taken yet.

    Args:
        module: The module in question.
        recurse: Whether the question is to visit its children or to take it.
        nonwrapped_numel: The number of elements below it that no other module has taken.
        min_num_params: The least number of elements of a module that is taken.
        force_leaf_modules: Classes whose children are not visited. By default the attribute
            FORCE_LEAF_MODULES of this function.
        exclude_wrap_modules: Classes that are not taken themselves. By default the attribute
            EXCLUDE_WRAP_MODULES of this function.
    """
    if force_leaf_modules is None:
        force_leaf_modules = size_based_auto_wrap_policy.FORCE_LEAF_MODULES  # type: ignore[attr-defined]
    if exclude_wrap_modules is None:
        exclude_wrap_modules = size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES  # type: ignore[attr-defined]
    unwanted = force_leaf_modules if recurse else exclude_wrap_modules
    classes = _checked_classes("size_based_auto_wrap_policy", unwanted)
    return nonwrapped_numel >= min_num_params and not isinstance(module, classes)


# Functions read its parameters without running the modules inside it.
size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
# They have no forward.
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Take what any of several functions takes."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel)
        for policy in policies
    )


_wrapping: ContextVar[Callable[..., nn.Module] | None] = ContextVar("wrapping", default=None)


@contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Let `wrap` wrap modules in `wrapper_cls`, with these options, until the block ends.

        with enable_wrap(wrapper_cls=FullyShardedDataParallel, mixed_precision=precision):
            self.first = wrap(nn.Linear(5, 5))

    Blocks do not nest.
    """
    if not callable(wrapper_cls):
        raise ConfigError(
            "enable_wrap: wrapper_cls must be a class or a function of a module, not "
            f"{wrapper_cls!r}; pass for example FullyShardedDataParallel."
        )
    if _wrapping.get() is not None:
        raise UnsupportedError(
            "enable_wrap: You are already within an autowrap context; end that one first, or "
            "pass the options that differ to wrap()."
        )
    token = _wrapping.set(functools.partial(wrapper_cls, **wrapper_kwargs))
    try:
        yield
    finally:
        _wrapping.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Wrap a module as the enclosing `enable_wrap` says; outside one, return it unchanged.

    Options given here override those of `enable_wrap`.
    """
    wrapped = _wrapping.get()
    return module if wrapped is None else wrapped(module, **wrap_overrides)


def _checked_classes(subject: str, classes: Any) -> tuple[type, ...]:
    is_set = isinstance(classes, Iterable) and not isinstance(classes, type)
    checked = tuple(dict.fromkeys(classes)) if is_set else ()
    if not is_set or not all(isinstance(each, type) for each in checked):
        raise ConfigError(
            f"{subject} takes a set of module classes, not {classes!r}; pass for example {{Block}}."
        )
    return checked


# Private names that users of torch import all the same. PEFT imports `_or_policy` above.

_Policy = Policy


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: set[type[nn.Module]]
) -> bool:
    return transformer_auto_wrap_policy(module, recurse, nonwrapped_numel, module_classes)


def _wrap_module_cls_individually(
    module: nn.Module, module_classes: Sequence[type], recurse: bool, *args: Any, **kwargs: Any
) -> bool:
    return recurse or isinstance(module, tuple(module_classes))


def _recursive_wrap(
    module: nn.Module,
    auto_wrap_policy: Callable[..., bool],
    wrapper_cls: Callable[..., nn.Module],
    ignored_modules: set[nn.Module],
    ignored_params: set[nn.Parameter],
    only_wrap_children: bool = False,
    **kwargs: Any,
) -> tuple[nn.Module, int]:
    """Wrap what a function takes; return the module or its wrapper, and how much is wrapped."""
    *units, root = choose(
        module, auto_wrap_policy, ignored_modules=ignored_modules, ignored_params=ignored_params
    )
    left = sum(param.numel() for _, param in root.params)
    total = left + sum(param.numel() for unit in units for _, param in unit.params)
    wrap_chosen(module, units, wrapper_cls, **kwargs)
    answer = {"module": module, "recurse": False, "nonwrapped_numel": left}
    if only_wrap_children or not auto_wrap_policy(**answer):
        return module, total - left
    return wrapper_cls(module, **kwargs), total


# Choosing


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A module that is to become a unit.

    `params` are the parameters that the unit would own, with their names in the model: those below
    the module that no unit inside it owns. A parameter that several units use belongs to the
    innermost unit around all of them. `overrides` are the options that the policy has for this
    module alone.
    """

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    overrides: _Options
    why: str


# What a policy takes: modules, children before parents, each with its own options and the reason.
_Taken = dict[nn.Module, tuple[_Options, str]]


def choose(
    model: nn.Module,
    policy: Any,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    options: Mapping[str, Any] | None = None,
    needs_forward: bool = False,
) -> list[Chosen]:
    """Return the modules that a policy of either kind chooses. Changes nothing.

    They are the modules that torch's automatic wrapping would wrap, children before parents, and
    last the model itself. A module that is used in several places is chosen once.

    Args:
        model: Always chosen, whatever the policy says.
        policy: A function or a policy object, also one of torch's own.
        ignored_modules: Not chosen, nor anything inside them; no unit owns their parameters.
        ignored_params: Parameters that no unit owns, and that do not count.
        options: The options of every unit, which a policy object may look at.
        needs_forward: Skip modules without a forward: nothing would gather their parameters.
    """
    ignored = {inner for module in ignored_modules for inner in module.modules()}
    left_out = {*ignored_params, *(p for module in ignored for p in module.parameters())}
    # An object is called once for a whole model: ours, torch's, or any other with this method.
    is_object = callable(getattr(policy, "_run_policy", None))
    if isinstance(policy, type) or not (is_object or callable(policy)):
        raise ConfigError(
            "policy must be a function (module, recurse, nonwrapped_numel) -> bool or a policy "
            f"object, not {policy!r}; pass for example ModuleWrapPolicy({{Block}})."
        )
    if is_object:
        taken = _run_object(model, policy, ignored, dict(options or {}))
    else:
        taken = _run_function(model, policy, ignored, left_out)
    # A policy object may have options for the model itself.
    overrides, _ = taken.pop(model, ({}, ""))
    taken = {m: each for m, each in taken.items() if not needs_forward or has_forward(m)}
    why = "the model itself: what no other unit has" if taken else "the whole model is one unit"
    taken[model] = overrides, why
    names = {module: name for name, module in model.named_modules()}
    params = _own_params(model, taken, left_out)
    return [Chosen(names[m], m, tuple(params[m]), *each) for m, each in taken.items()]


def wrap_chosen(
    model: nn.Module, units: Sequence[Chosen], wrapper_cls: Callable[..., nn.Module], **options: Any
) -> None:
    """Replace the chosen modules by `wrapper_cls(module, **options)`, wherever they are used."""
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for name, module in model.named_modules():
        if isinstance(wrapper_cls, type) and isinstance(module, wrapper_cls):
            raise ConfigError(
                f"{type(model).__name__}: FSDP auto wrapping requires modules to not already have "
                f"FSDP applied but found {name or 'it'}; wrap either by hand or by a policy."
            )
        for child_name, child in module._modules.items():
            if child is not None:
                places.setdefault(child, []).append((module, child_name))
    for unit in units:
        wrapped = wrapper_cls(unit.module, **{**options, **unit.overrides})
        for parent, name in places[unit.module]:
            setattr(parent, name, wrapped)


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. A ModuleList, for example, cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def name_of(policy: Any) -> str:
    """The name of a policy in messages."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    return str(getattr(policy, "__name__", type(policy).__name__))


def _run_object(
    model: nn.Module, policy: Any, ignored: set[nn.Module], options: dict[str, Any]
) -> _Taken:
    wanted = policy._run_policy(model, ignored, dict(options))  # a policy may write to its copy
    is_dict = isinstance(wanted, Mapping)
    if not is_dict or not all(isinstance(own, Mapping) for own in wanted.values()):
        raise ConfigError(
            f"{name_of(policy)}._run_policy must return a dict from modules to dicts of options, "
            f"not {wanted!r}; return root_kwargs for the options of the root, {{}} for no module."
        )
    taken: _Taken = {}
    for module in _post_order(model, set()):
        if module in wanted:
            overrides = {
                key: value
                for key, value in wanted[module].items()
                if key not in options or options[key] is not value
            }
            is_ours = isinstance(policy, Policy)
            why = policy.why(module) if is_ours else f"chosen by {name_of(policy)}"
            taken[module] = overrides, why
    return taken


def _run_function(
    model: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> _Taken:
    taken: _Taken = {}
    taken_numels: dict[nn.Module, int] = {}

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if not isinstance(answer, bool):
            raise ConfigError(
                f"{type(module).__name__}: the policy {name_of(policy)} returned {answer!r} "
                "instead of True or False; return a bool."
            )
        return answer

    def visit(module: nn.Module) -> int:
        """The number of elements below the module that are taken, including its own."""
        if module in taken_numels:
            return taken_numels[module]
        taken_numels[module] = 0
        numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
        if not ask(module, True, numel):
            return 0
        taken_numel = sum(visit(child) for child in module.children() if child not in ignored)
        left = numel - taken_numel
        if module is not model and ask(module, False, left):
            taken[module] = {}, f"chosen by {name_of(policy)}, {left:,} elements left"
            taken_numel = numel
        taken_numels[module] = taken_numel
        return taken_numel

    visit(model)
    return taken


def _own_params(
    model: nn.Module, chosen: Collection[nn.Module], ignored_params: set[nn.Parameter]
) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """Assign each parameter to the innermost unit around all modules that use it."""
    around = chains_of([model], lambda module: module if module in chosen else None)
    users: dict[nn.Parameter, list[tuple[nn.Module, ...]]] = {}
    for module, chain in around.items():
        for param in module._parameters.values():
            if param is not None and param not in ignored_params:
                users.setdefault(param, []).append(chain)
    names = {param: name for name, param in model.named_parameters()}
    owned: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {module: [] for module in chosen}
    for param, chains in users.items():
        owned[innermost(chains)].append((names[param], param))
    return owned


def _post_order(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules, each once, children before parents."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _post_order(child, seen)
    yield module


# Repeated blocks: the units of a model for which no policy is given.
#
# A family is the modules of one class side by side in the containers of one module. Families are
# looked for from the root inwards, and not inside a family: the experts of a block are part of the
# block, which is also the only safe choice, since ranks may run different experts. Families of one
# class anywhere in the model count as one: the layers of an encoder and of a decoder, or the blocks
# of all stages of a ResNet.

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# A family with a smaller share of the model's elements gains nothing from units of its own.
_LEAST_SHARE = 0.02
# Single layers (a list of norms, a classifier) are units only if the model is made of them.
_LEAST_SHARE_OF_LAYERS = 0.2


class RepeatedBlocks(CustomPolicy):
    """Takes the blocks that a model repeats. Made for one model."""

    def __init__(self, model: nn.Module) -> None:
        self._reasons: dict[nn.Module, str] = {}
        for members in repeated_blocks(model):
            name, share = type(members[0]).__name__, _numel(members) / _numel([model])
            reason = f"one of {len(members)} {name} with {share:.0%} of the model"
            self._reasons.update(dict.fromkeys(members, reason))

    def _lambda_fn(self, module: nn.Module) -> bool:
        return module in self._reasons

    def why(self, module: nn.Module) -> str:
        return self._reasons[module]


def repeated_blocks(model: nn.Module) -> list[list[nn.Module]]:
    """The families of a model that are worth units of their own, the largest first."""

    def is_worthwhile(members: list[nn.Module]) -> bool:
        is_composite = any(map(_is_composite, members))
        least_share = _LEAST_SHARE if is_composite else _LEAST_SHARE_OF_LAYERS
        return _numel(members) >= least_share * _numel([model])

    return sorted(filter(is_worthwhile, _by_class(_members(model))), key=_numel, reverse=True)


def _members(model: nn.Module) -> list[nn.Module]:
    """The members of all outermost families, in the order of the model."""
    members: list[nn.Module] = []
    seen: set[nn.Module] = set()

    def walk(module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        siblings = [each for each in _siblings(module) if each not in seen]
        families = _families(siblings)
        members.extend(member for family in families for member in _blocks(family))
        seen.update(member for family in families for member in family)
        for child in module.children():
            if not isinstance(child, _CONTAINERS):
                walk(child)
        for sibling in siblings:
            walk(sibling)

    walk(model)
    return members


def _siblings(module: nn.Module) -> Iterator[nn.Module]:
    """The modules in the containers of a module, and in lists inside them."""
    containers = [module] if isinstance(module, _CONTAINERS) else module.children()
    for container in containers:
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if isinstance(child, _CONTAINERS) and not has_forward(child):
                    yield from _siblings(child)
                else:
                    yield child


def _blocks(family: list[nn.Module]) -> list[nn.Module]:
    """The family, or the blocks inside if it consists of unequal stages.

    The last stage of a convolutional network often has most of its parameters, and a unit of that
    size would save no memory. Only blocks in a Sequential are taken: all ranks run all of it.
    """
    numel = _numel(family)
    if 2 * max(_numel([member]) for member in family) <= numel:
        return family
    sequentials = [
        each
        for member in family
        for each in ([member] if isinstance(member, nn.Sequential) else member.children())
        if isinstance(each, nn.Sequential)
    ]
    inside = [each for sequential in sequentials for each in _siblings(sequential)]
    composite = [each for each in inside if _is_composite(each)]
    blocks = [block for inner in _families(composite) for block in _blocks(inner)]
    return blocks if 2 * _numel(blocks) > numel else family


def _families(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    able = [each for each in modules if has_forward(each) and any(True for _ in each.parameters())]
    return [members for members in _by_class(able) if len(members) > 1]


def _by_class(modules: Iterable[nn.Module]) -> list[list[nn.Module]]:
    grouped: dict[type, list[nn.Module]] = {}
    for module in dict.fromkeys(modules):
        grouped.setdefault(type(module), []).append(module)
    return list(grouped.values())


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _numel(modules: Iterable[nn.Module]) -> int:
    return sum(param.numel() for param in {p for each in modules for p in each.parameters()})

"""Run a policy on a model: the modules that it chooses, as a frozen value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fullshard.errors import ConfigError
from fullshard.wrap import Policy


@dataclass(frozen=True, slots=True, eq=False)
class Chosen:
    """A module that is to become a unit.

    `params` are the parameters that would be its own, by their names in the model: those below it
    that no unit inside it has. One that several units use belongs to the innermost unit around
    all of them. `overrides` are the options that its policy has for this module alone.
    """

    name: str
    module: nn.Module
    params: tuple[tuple[str, nn.Parameter], ...]
    overrides: Mapping[str, Any]
    why: str


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What a policy makes of a model: units, children before parents, and the model itself."""

    units: tuple[Chosen, ...]
    root: Chosen

    def __iter__(self) -> Iterator[Chosen]:
        yield from self.units
        yield self.root


@dataclass(frozen=True, slots=True)
class _Pick:
    """One module that a policy takes, before it is known what else is taken."""

    module: nn.Module
    why: str
    overrides: Mapping[str, Any] = field(default_factory=dict)


def choose(
    model: nn.Module,
    policy: Any,
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    options: Mapping[str, Any] | None = None,
    needs_forward: bool = False,
) -> Choice:
    """The modules that a policy of either kind chooses. Changes nothing.

    They are the modules that torch's automatic wrapping would wrap; one that is used at several
    places is chosen once.

    Args:
        model: Is always chosen, as the root, whatever the policy says.
        policy: A function or a policy object; torch's own are welcome.
        ignored_modules: Not chosen, nor anything inside them; their parameters are nobody's.
        ignored_params: Are nobody's, and do not count.
        options: What every unit is asked for. A policy object may look at them.
        needs_forward: Leave out modules without a forward: nothing would gather their parameters.
    """
    ignored = {inner for module in ignored_modules for inner in module.modules()}
    left_alone = {*ignored_params, *(p for module in ignored for p in module.parameters())}
    if isinstance(policy, type) or not (callable(policy) or is_policy_object(policy)):
        raise ConfigError(
            "policy: a function (module, recurse, nonwrapped_numel) -> bool or a policy object is "
            f"expected, found {policy!r}; pass for example ModuleWrapPolicy({{Block}})."
        )
    if is_policy_object(policy):
        picks = _ask_object(model, policy, ignored, dict(options or {}))
    else:
        picks = _ask_function(model, policy, ignored, left_alone)
    if needs_forward:
        picks = [each for each in picks if each.module is model or has_forward(each.module)]
    return _choice(model, picks, left_alone)


def wrap_chosen(
    model: nn.Module,
    units: Sequence[Chosen],
    wrapper_cls: Callable[..., nn.Module],
    **options: Any,
) -> None:
    """Replace the chosen modules by `wrapper_cls(module, **options)`, wherever they are used."""
    if isinstance(wrapper_cls, type):
        for name, module in model.named_modules():
            if isinstance(module, wrapper_cls):
                raise ConfigError(
                    f"{name or type(module).__name__}: modules that are not wrapped yet are "
                    f"expected, found a {wrapper_cls.__name__}; wrap either by hand or by a policy."
                )
    places: dict[nn.Module, list[tuple[nn.Module, str]]] = {}
    for parent in model.modules():
        for name, child in parent._modules.items():
            if child is not None:
                places.setdefault(child, []).append((parent, name))
    for unit in units:
        wrapped = wrapper_cls(unit.module, **{**options, **unit.overrides})
        for parent, name in places[unit.module]:
            setattr(parent, name, wrapped)


def is_policy_object(policy: Any) -> bool:
    """Whether it is asked about a whole model: ours, torch's, or any that is shaped like them."""
    return not isinstance(policy, type) and callable(getattr(policy, "_run_policy", None))


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called. A ModuleList, for one, cannot."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def name_of(policy: Any) -> str:
    """What to call a policy in a sentence."""
    while isinstance(policy, functools.partial):
        policy = policy.func
    return str(getattr(policy, "__name__", type(policy).__name__))


def _ask_object(
    model: nn.Module, policy: Any, ignored: set[nn.Module], options: dict[str, Any]
) -> list[_Pick]:
    taken = policy._run_policy(model, ignored, dict(options))  # a policy may write to its copy
    subject = f"{name_of(policy)}._run_policy"
    if not isinstance(taken, Mapping):
        raise ConfigError(
            f"{subject}: a dict from modules to their options is expected, found {taken!r}; "
            "return {} to choose nothing."
        )
    picks = []
    for name, module in _post_order(model):
        if module not in taken:
            continue
        wanted = taken[module]
        if not isinstance(wanted, Mapping):
            raise ConfigError(
                f"{subject}: a dict of options per module is expected, found {wanted!r} for "
                f"{name or type(module).__name__}; return root_kwargs for the options of the root."
            )
        overrides = {
            key: value
            for key, value in wanted.items()
            if key not in options or options[key] is not value
        }
        why = policy.why(module) if isinstance(policy, Policy) else f"chosen by {name_of(policy)}"
        picks.append(_Pick(module, why, overrides))
    return picks


def _ask_function(
    model: nn.Module,
    policy: Callable[..., bool],
    ignored: set[nn.Module],
    ignored_params: set[nn.Parameter],
) -> list[_Pick]:
    names = {module: name for name, module in model.named_modules()}
    picks: list[_Pick] = []
    taken_numels: dict[nn.Module, int] = {}

    def ask(module: nn.Module, recurse: bool, numel: int) -> bool:
        answer = policy(module=module, recurse=recurse, nonwrapped_numel=numel)
        if not isinstance(answer, bool):
            raise ConfigError(
                f"{names[module] or type(module).__name__}: the policy {name_of(policy)} must "
                f"return True or False, found {answer!r}; return a bool."
            )
        return answer

    def visit(module: nn.Module) -> int:
        """The number of elements below the module that are taken, itself included."""
        if module in taken_numels:
            return taken_numels[module]
        taken_numels[module] = 0
        numel = sum(p.numel() for p in module.parameters() if p not in ignored_params)
        if not ask(module, True, numel):
            return 0
        taken_numel = sum(visit(child) for child in module.children() if child not in ignored)
        left = numel - taken_numel
        if module is not model and ask(module, False, left):
            picks.append(_Pick(module, f"chosen by {name_of(policy)}, {left:,} elements left"))
            taken_numel = numel
        taken_numels[module] = taken_numel
        return taken_numel

    visit(model)
    return picks


def _choice(model: nn.Module, picks: list[_Pick], ignored_params: set[nn.Parameter]) -> Choice:
    names = {module: name for name, module in model.named_modules()}
    params = _own_params(model, {pick.module for pick in picks}, ignored_params)

    def chosen(pick: _Pick) -> Chosen:
        own = tuple(params.get(pick.module, ()))
        return Chosen(names[pick.module], pick.module, own, pick.overrides, pick.why)

    units = tuple(chosen(pick) for pick in picks if pick.module is not model)
    # A policy object may have options for the model itself.
    overrides = next((pick.overrides for pick in picks if pick.module is model), {})
    why = "the model itself: what no other unit has" if units else "the whole model is one unit"
    return Choice(units, chosen(_Pick(model, why, overrides)))


def _own_params(
    model: nn.Module, chosen: set[nn.Module], ignored_params: set[nn.Parameter]
) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """Every parameter under the innermost unit around all modules that use it."""
    around: dict[nn.Module, tuple[nn.Module, ...]] = {}
    users: dict[nn.Parameter, list[nn.Module]] = {}
    names: dict[nn.Parameter, str] = {}

    def walk(path: str, module: nn.Module, units: tuple[nn.Module, ...]) -> None:
        if module in around:
            return
        around[module] = units = (*units, module) if module in chosen else units
        for name, param in module._parameters.items():
            if param is not None and param not in ignored_params:
                users.setdefault(param, []).append(module)
                names.setdefault(param, path + name)
        for name, child in module.named_children():
            walk(f"{path}{name}.", child, units)

    chosen = {*chosen, model}
    walk("", model, ())
    owned: dict[nn.Module, list[tuple[str, nn.Parameter]]] = {}
    for param, modules in users.items():
        owner = model
        for level in zip(*(around[module] for module in modules), strict=False):
            if any(unit is not level[0] for unit in level):
                break
            owner = level[0]
        owned.setdefault(owner, []).append((names[param], param))
    return owned


def _post_order(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """All modules, each once, children before parents."""
    seen: set[nn.Module] = {model}

    def walk(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        for name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                yield from walk(f"{path}.{name}" if path else name, child)
        yield path, module

    yield from walk("", model)

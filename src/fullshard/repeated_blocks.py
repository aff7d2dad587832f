"""Find the blocks that a model repeats: what to make units of when nobody says.

A family is the modules of one class that lie side by side in the containers (Sequential,
ModuleList, ModuleDict) of one module. Families are looked for from the root inwards, and not inside
of one that was found: the experts of a block are part of the block, which is also the only safe
choice, since ranks may run different experts. Families of one class anywhere in the model are one,
so the layers of an encoder and of a decoder are found together, and so are the blocks of all stages
of a ResNet.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from fullshard.choosing import has_forward
from fullshard.wrap import Policy

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)

# A family with less of the model's elements than this gains nothing by units of its own.
_LEAST_SHARE = 0.02
# Single layers (a list of norms, a classifier) are units only where the model is made of them.
_LEAST_SHARE_OF_LAYERS = 0.2


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """The modules of one class that a model repeats, and their share of its elements."""

    members: tuple[nn.Module, ...]
    share: float

    @property
    def is_worthwhile(self) -> bool:
        is_composite = any(_is_composite(member) for member in self.members)
        return self.share >= (_LEAST_SHARE if is_composite else _LEAST_SHARE_OF_LAYERS)

    def __str__(self) -> str:
        name = type(self.members[0]).__name__
        return f"{len(self.members)} {name} with {self.share:.0%} of the model"


class RepeatedBlocks(Policy):
    """Takes the blocks that a model repeats. Made for one model, and for policy=None."""

    def __init__(self, model: nn.Module) -> None:
        self._families = {
            member: family for family in repeated_blocks(model) for member in family.members
        }

    def _run_policy(
        self,
        root_module: nn.Module,
        ignored_modules: set[nn.Module],
        root_kwargs: dict[str, Any],
    ) -> dict[nn.Module, dict[str, Any]]:
        return {each: dict(root_kwargs) for each in self._families if each not in ignored_modules}

    def why(self, module: nn.Module) -> str:
        return f"one of {self._families[module]}"


def repeated_blocks(model: nn.Module) -> tuple[Family, ...]:
    """The families of a model that are worth units of their own, the largest first."""
    model_numel = _numel([model])
    found = [
        Family(tuple(members), _numel(members) / model_numel)
        for members in _by_class(_members(model)).values()
    ]
    worthwhile = [family for family in found if family.is_worthwhile]
    return tuple(sorted(worthwhile, key=lambda family: -family.share))


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
    """The modules in the containers of a module, and in lists inside these."""
    containers = [module] if isinstance(module, _CONTAINERS) else module.children()
    for container in containers:
        if isinstance(container, _CONTAINERS):
            for child in container.children():
                if isinstance(child, _CONTAINERS) and not has_forward(child):
                    yield from _siblings(child)
                else:
                    yield child


def _blocks(family: list[nn.Module]) -> list[nn.Module]:
    """The family, or the blocks inside it if it is one of unequal stages.

    The last stage of a convolutional network often holds most of it, and a unit of that size would
    save no memory. Only a Sequential is looked into: all ranks run all of it.
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
    return [members for members in _by_class(able).values() if len(members) > 1]


def _by_class(modules: Iterable[nn.Module]) -> dict[type, list[nn.Module]]:
    grouped: dict[type, list[nn.Module]] = {}
    for module in dict.fromkeys(modules):
        grouped.setdefault(type(module), []).append(module)
    return grouped


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


def _numel(modules: Iterable[nn.Module]) -> int:
    params = {param for module in modules for param in module.parameters()}
    return sum(param.numel() for param in params)

"""What modules see of a unit's parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fullshard.device.storage import swift_attributes
from fullshard.unit.member import Member


class Register:
    """Shows modules the shards of a unit, or its full parameters.

    Everything that does not change from step to step is looked up once (rule 7): whoever changes
    where members are registered, or as what, makes a new one.
    """

    def __init__(self, members: Sequence[Member]) -> None:
        self.params = [member.param for member in members]
        self.fulls = [_made(member) for member in members]
        self._members = list(members)
        self._written = [(member.param, member.local) for member in members]
        self._trained: list[bool] = []
        self._places = [
            (location.registry, location.name, member.shard, full)
            for member, full in zip(members, self.fulls, strict=True)
            for location in member.locations
        ]

    def follow_training(self) -> int:
        """Let full parameters be trained as the shards are; how many are."""
        with swift_attributes():
            self._trained = trained = [param.requires_grad for param in self.params]
        if trained != [full.requires_grad for full in self.fulls]:
            for full, is_trained in zip(self.fulls, trained, strict=True):
                full.requires_grad_(is_trained)
        return sum(trained)

    def versions(self) -> list[int]:
        """Change whenever an optimizer, or anyone else, has written to a shard."""
        with swift_attributes():
            return [param._version + local._version for param, local in self._written]

    def shows_shards(self) -> bool:
        """Whether every module sees the shard that was put there."""
        return all(registry.get(name) is shard for registry, name, shard, _ in self._places)

    def show_fulls(self) -> None:
        for registry, name, _, full in self._places:
            registry[name] = full

    def show_shards(self) -> None:
        """Also let the shards be trained as the full parameters are, which users may change."""
        trained = [full.requires_grad for full in self.fulls]
        if trained != self._trained:
            for member, before, after in zip(self._members, self._trained, trained, strict=True):
                if before != after:
                    member.freeze_or_thaw(after)
            self._trained = trained
        for registry, name, shard, _ in self._places:
            registry[name] = shard

    @property
    def has_gradients(self) -> bool:
        """Whether some of the full parameters have a gradient that was not taken yet."""
        return any(full.grad is not None for full in self.fulls)


def _made(member: Member) -> Any:
    assert member.full is not None  # made at the first unshard, before anything is shown
    return member.full

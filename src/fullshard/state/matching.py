"""Which tensors of a model are written, and which stored tensor each of them is read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fullshard.errors import CheckpointError, ConfigError, LifecycleError
from fullshard.state.shards import TensorShard


def selection(
    only: str | Callable[[str], bool] | None,
) -> tuple[Callable[[TensorShard], bool], str]:
    """Return a function that tells whether a tensor was chosen, and what was chosen in words."""
    if only is None:
        return lambda _: True, "all"
    if only == "trainable":
        return lambda shard: shard.is_trainable, "trainable parameters"
    if callable(only):
        name = getattr(only, "__name__", type(only).__name__)
        return lambda shard: bool(only(shard.name)), f"names that {name} accepts"
    raise ConfigError(
        f"only: pass 'trainable' or a function of a name, not {only!r}; leave it out to save "
        "everything."
    )


def require_values(shard: TensorShard, purpose: str) -> None:
    if shard.tensor.is_meta:
        raise LifecycleError(
            f"{shard.name} is on meta and has no values to be {purpose}; load or initialize the "
            "model first, or call model.to_empty(device=...)."
        )


class NameMatch:
    """Which stored tensor each parameter and buffer is read from.

    `key_of` maps a name of the model to its key among the stored `keys`, and `misfit` returns why a
    stored tensor does not fit. `sources` and `mismatched` are keyed by canonical names.
    """

    def __init__(
        self,
        shards: Sequence[TensorShard],
        keys: Iterable[str],
        key_of: Callable[[str], str],
        misfit: Callable[[str, TensorShard], str],
    ) -> None:
        self.sources: dict[str, str] = {}
        self.missing: list[str] = []
        self.mismatched: dict[str, str] = {}
        stored, known = dict.fromkeys(keys), set[str]()
        for shard in shards:
            names = [key_of(name) for name in shard.names]
            known.update(names)
            source = next((name for name in names if name in stored), None)
            if source is None:
                self.missing.append(shard.name)
            elif reason := misfit(source, shard):
                self.mismatched[shard.name] = reason
            else:
                self.sources[shard.name] = source
        self.unexpected = [key for key in stored if key not in known]

    def require(
        self, subject: str, where: str, *, missing: bool, unexpected: bool, mismatched: bool
    ) -> None:
        """Raise for names of the given kinds, if there are any."""
        problems = []
        if missing and self.missing:
            problems.append(f"missing in the {where}: {self.missing}")
        if unexpected and self.unexpected:
            problems.append(f"not in the model: {self.unexpected}")
        if mismatched:
            problems += [f"{name}: {reason}" for name, reason in self.mismatched.items()]
        if not self.sources:
            problems.append(f"nothing in the {where} fits a parameter of the model")
        if problems:
            raise CheckpointError(
                f"{subject}: the {where} and the model do not have the same parameters; nothing "
                f"was loaded: {'; '.join(problems)}. Pass strict=False to load what fits."
            )

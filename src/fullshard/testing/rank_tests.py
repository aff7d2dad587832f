"""pytest tests whose body runs on every rank."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from fullshard.errors import ConfigError
from fullshard.testing.rank_pool import pool

SIZE_ARGUMENT = "on_num_ranks"


def on_ranks(
    *sizes: int, backend: str = "gloo", timeout_s: float = 120.0
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a pytest test's body on every rank of the shared pool of each of these sizes.

    The body's first parameter is its `Rank`; pytest sees the others. Their values (of
    `pytest.mark.parametrize`, or picklable fixtures) travel to the ranks.

        @pytest.mark.parametrize("dim", [0, 1])
        @on_ranks(2, 4)
        def test_a_shard_keeps_its_rows(rank: Rank, dim: int) -> None: ...
    """
    if not sizes:
        raise ConfigError(
            "on_ranks: expected at least one world size, found none; try on_ranks(2)."
        )

    def decorate(body: Callable[..., None]) -> Callable[..., None]:
        first, *others = inspect.signature(body).parameters.values()
        if first.name == "self":
            raise ConfigError(
                f"{body.__qualname__}: on_ranks runs module-level functions, found a method; "
                "move it out of its class."
            )

        @functools.wraps(body)
        def test(**arguments: Any) -> None:
            __tracebackhide__ = True
            num_ranks = arguments.pop(SIZE_ARGUMENT, sizes[0])
            pool(num_ranks, backend).run(body, timeout_s=timeout_s, **arguments)

        test.rank_body = body  # type: ignore[attr-defined]
        if len(sizes) > 1:
            others = [inspect.Parameter(SIZE_ARGUMENT, inspect.Parameter.KEYWORD_ONLY), *others]
        test.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [other.replace(kind=inspect.Parameter.KEYWORD_ONLY) for other in others]
        )
        return _parametrized(test, sizes)

    return decorate


def _parametrized(test: Callable[..., None], sizes: tuple[int, ...]) -> Callable[..., None]:
    if len(sizes) == 1:
        return test
    import pytest

    ids = [f"{size}ranks" for size in sizes]
    marked: Callable[..., None] = pytest.mark.parametrize(SIZE_ARGUMENT, sizes, ids=ids)(test)
    return marked

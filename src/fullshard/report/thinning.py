"""Fewer points for a curve, without losing what the eye looks for."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

MOST_POINTS = 2000


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[int]:
    """The indices of at most `most` values, in order: all of them if there are no more.

    The first and the last stay. Of every stretch in between, the lowest and the highest stay and
    one value that is not finite, if there is any: a spike or a gap of one step is still seen.
    """
    if len(values) <= most:
        return list(range(len(values)))
    num_stretches = max(1, (most - 2) // 3)
    kept = {0, len(values) - 1}
    for index in range(num_stretches):
        start = index * len(values) // num_stretches
        end = (index + 1) * len(values) // num_stretches
        stretch = range(start, end)
        finite = [each for each in stretch if isfinite(values[each])]
        if finite:
            kept.add(min(finite, key=values.__getitem__))
            kept.add(max(finite, key=values.__getitem__))
        if len(finite) < len(stretch):
            kept.add(next(each for each in stretch if not isfinite(values[each])))
    return sorted(kept)


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """The mean of the finite values among the `window` nearest; not a number where there are none.

    At both ends the window is what there is of it.
    """
    sums, counts = [0.0], [0]
    for value in values:
        sums.append(sums[-1] + (value if isfinite(value) else 0.0))
        counts.append(counts[-1] + isfinite(value))
    found = []
    for index in range(len(values)):
        start = max(0, index - window // 2)
        end = min(len(values), index + window // 2 + 1)
        count = counts[end] - counts[start]
        found.append((sums[end] - sums[start]) / count if count else float("nan"))
    return found

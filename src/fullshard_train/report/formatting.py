"""Formatting of numbers, and of text from files, for a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isfinite
from statistics import median

DASH = "\N{EN DASH}"
# Separates a number from its unit without a line break.
_NARROW = "\N{NARROW NO-BREAK SPACE}"
_PREFIXES = ("", "Ki", "Mi", "Gi", "Ti")
# Controls of Latin-1, surrogates, and the last two code points of every plane (noncharacters).
_REPLACED = (*range(0x80, 0xA0), *range(0xD800, 0xE000), *range(0xFFFE, 0x110000, 0x10000))
_SYMBOLS = dict.fromkeys((*_REPLACED, *range(0xFFFF, 0x110000, 0x10000)), 0xFFFD)
_SYMBOLS |= {code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"}
_SYMBOLS[0x7F] = ord("\N{SYMBOL FOR DELETE}")


@dataclass(frozen=True, slots=True)
class ByteScale:
    """A common unit for several numbers of bytes."""

    name: str
    num_bytes: int

    @classmethod
    def fitting(cls, largest: float) -> ByteScale:
        """Return the unit in which `largest` is between 1 and 1024, if there is such a unit."""
        power = 0
        while power < len(_PREFIXES) - 1 and largest >= 1024 ** (power + 1):
            power += 1
        return cls(f"{_PREFIXES[power]}B" if power else "bytes", 1024**power)


def shown_bytes(num_bytes: float) -> str:
    """Format bytes as in "1.50 GiB"."""
    scale = ByteScale.fitting(abs(num_bytes))
    if scale.num_bytes == 1:
        return f"{num_bytes:,.0f}{_NARROW}bytes"
    return f"{_three_digits(num_bytes / scale.num_bytes)}{_NARROW}{scale.name}"


def shown_time(seconds: float) -> str:
    """Format seconds as in "812 ms" and "1.24 s"."""
    if not isfinite(seconds):
        return DASH
    if seconds >= 1:
        return f"{_three_digits(seconds)}{_NARROW}s"
    if seconds >= 1e-3:
        return f"{_three_digits(seconds * 1e3)}{_NARROW}ms"
    return f"{_three_digits(seconds * 1e6)}{_NARROW}µs"


def shown_share(share: float) -> str:
    """Format a fraction as in "4.2 %"."""
    return f"{share * 100:.1f}{_NARROW}%" if isfinite(share) else DASH


def shown_number(value: float) -> str:
    """Format a measured number; NaN and infinity are shown as such."""
    if not isfinite(value):
        return {"nan": "NaN", "inf": "∞", "-inf": "\N{MINUS SIGN}∞"}[str(float(value))]
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.3g}" if abs(value) < 1 else f"{value:.4g}"
    return f"{value:.4f}" if abs(value) < 10 else f"{value:,.2f}"


def shown_count(number: float) -> str:
    """Format a count as in "12.6 M"; numbers below ten thousand are exact."""
    for size, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if number >= size:
            return f"{_three_digits(number / (1e3 if name == 'k' else size))}{_NARROW}{name}"
    return f"{number:,.0f}"


def finite_median(values: Iterable[float]) -> float:
    """Return the median of the finite values, or NaN if there are none."""
    finite = [value for value in values if isfinite(value)]
    return median(finite) if finite else float("nan")


def plain(text: object) -> str:
    """Make text safe for a page: control characters become visible symbols.

    Line feeds and tabs are kept; a lone surrogate, which UTF-8 cannot encode, becomes a
    replacement character.
    """
    return str(text).replace("\r\n", "\n").translate(_SYMBOLS)


def _three_digits(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"

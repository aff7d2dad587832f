"""The colors of a report, for the light and the dark scheme.

The colors of activities, ranks and runs, from the palette of Okabe and Ito, can be told apart with
color blindness; waiting is also hatched. Each activity has two tones, for alternating units, and a
text color that is legible on both.
"""

from __future__ import annotations

from fullshard.trace import Activity

KEYS = {
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.AWAIT_GATHER: "await-gather",
    Activity.AWAIT_REDUCE: "await-reduce",
    Activity.GATHER: "gather",
    Activity.REDUCE: "reduce",
}

# The first tone, the second tone and the text of each activity.
_ACTIVITIES = {
    "forward": ("#5aa9dd", "#82c0e8", "#08202f"),
    "backward": ("#1f69a6", "#2c77b4", "#ffffff"),
    "optimizer": ("#868d98", "#868d98", "#0d0f12"),
    "gather": ("#16a07a", "#4cb996", "#03150f"),
    "reduce": ("#cb78a6", "#dc9cc0", "#2a0a1c"),
    "await-gather": ("#d55e00", "#d55e00", "#d55e00"),
    "await-reduce": ("#d55e00", "#d55e00", "#d55e00"),
}
_TONES = {
    f"{key}{suffix}": color
    for key, colors in _ACTIVITIES.items()
    for suffix, color in zip(("", "-next", "-ink"), colors, strict=True)
}


NUM_SERIES = 12


def _series(*colors: str, first: int = 0) -> dict[str, str]:
    """Name the colors of ranks, runs and kinds of memory; the page adds dashes for more ranks."""
    return {f"series-{index}": f"#{color}" for index, color in enumerate(colors, first)}


PALETTES = {
    "light": {
        "page": "#f6f6f4",
        "card": "#ffffff",
        "ink": "#1b1e23",
        "muted": "#575d67",
        "line": "#d9dbdf",
        "grid": "#e8e9ec",
        "accent": "#0b62a4",
        "alarm": "#b34700",
        **_series("0072b2", "d55e00", "009e73", "c0609a", "a08f00", "3a9ad9", "6a3fa8", "3d434d"),
        **_series("b8003a", "2e7d1a", "8a4b12", "1f1fbf", first=8),
        **_TONES,
    },
    "dark": {
        "page": "#101216",
        "card": "#181b20",
        "ink": "#e8eaed",
        "muted": "#a3a9b3",
        "line": "#343942",
        "grid": "#282c33",
        "accent": "#74b9f2",
        "alarm": "#ff9d57",
        **_series("4aa3df", "f07f2e", "2fc197", "dd94bd", "f0e442", "a5d8f7", "9479ea", "868e9c"),
        **_series("e0305f", "6f9a1a", "b9855a", "5de05d", first=8),
        **_TONES,
    },
}

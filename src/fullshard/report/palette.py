"""The colours of a page, by light and dark: for its style sheet and for its figures.

Activities are told apart by people who see colours differently: sky, blue, green, pink and orange
of Okabe and Ito's set, and what waits is hatched, too. Each activity has two tones for units that
follow each other, and an ink that can be read on both.
"""

from __future__ import annotations

from fullshard.trace.seam import Activity

KEYS = {
    Activity.FORWARD: "forward",
    Activity.BACKWARD: "backward",
    Activity.OPTIMIZER: "optimizer",
    Activity.AWAIT_GATHER: "await-gather",
    Activity.AWAIT_REDUCE: "await-reduce",
    Activity.GATHER: "gather",
    Activity.REDUCE: "reduce",
}

_ACTIVITIES = {
    "forward": "#5aa9dd",
    "forward-next": "#82c0e8",
    "forward-ink": "#08202f",
    "backward": "#1f69a6",
    "backward-next": "#2c77b4",
    "backward-ink": "#ffffff",
    "optimizer": "#868d98",
    "optimizer-next": "#868d98",
    "optimizer-ink": "#0d0f12",
    "gather": "#16a07a",
    "gather-next": "#4cb996",
    "gather-ink": "#03150f",
    "reduce": "#cb78a6",
    "reduce-next": "#dc9cc0",
    "reduce-ink": "#2a0a1c",
    "await-gather": "#d55e00",
    "await-gather-next": "#d55e00",
    "await-gather-ink": "#d55e00",
    "await-reduce": "#d55e00",
    "await-reduce-next": "#d55e00",
    "await-reduce-ink": "#d55e00",
}

PALETTES = {
    "light": {
        "page": "#f6f6f4",
        "card": "#ffffff",
        "ink": "#1b1e23",
        "muted": "#575d67",
        "line": "#d9dbdf",
        "grid": "#e8e9ec",
        "accent": "#0b62a4",
        "accent-soft": "#a8cbe6",
        "alarm": "#b34700",
        **_ACTIVITIES,
    },
    "dark": {
        "page": "#101216",
        "card": "#181b20",
        "ink": "#e8eaed",
        "muted": "#a3a9b3",
        "line": "#343942",
        "grid": "#282c33",
        "accent": "#74b9f2",
        "accent-soft": "#33597b",
        "alarm": "#ff9d57",
        **_ACTIVITIES,
    },
}

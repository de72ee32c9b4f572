"""Colours of the pictures and of the page: one light set, one dark set, each colour used for one thing only.

The data colours follow Okabe and Ito (2008), which people with the common colour blindnesses can tell apart; the
pictures also give every line its own dash and every mark its own shape, so that they survive a grey printer.
Every colour that is used for text has a contrast of at least 4.5 against its background (WCAG 2.2, 1.4.3).
"""

from __future__ import annotations

from typing import Literal

Theme = Literal["light", "dark"]

PALETTES: dict[Theme, dict[str, str]] = {
    "light": {
        "background": "#ffffff",
        "panel": "#f5f7f9",
        "text": "#1a1d21",
        "muted": "#59626d",
        "grid": "#e2e6ea",
        "data": "#0068a6",
        "samples": "#8fc0dd",
        "fit": "#6a717a",
        "compute_roof": "#23282e",
        "bandwidth_roof": "#8c5a00",
        "overhead": "#a03a6d",
        "ridge": "#77409a",
        "use": "#00704c",
        "avoid": "#c24e00",
        "target": "#b3261e",
        "beside": "#4a4f12",
        "forward": "#1f5fbf",
        "input_gradient": "#b04a00",
        "weight_gradient": "#1a7a3c",
        "backward": "#8a3d8f",
    },
    "dark": {
        "background": "#14171b",
        "panel": "#1d2227",
        "text": "#e8eaed",
        "muted": "#a7b0bb",
        "grid": "#2d343b",
        "data": "#5fb9ec",
        "samples": "#2c6a91",
        "fit": "#98a1ab",
        "compute_roof": "#f2f4f6",
        "bandwidth_roof": "#e6a532",
        "overhead": "#f08fbd",
        "ridge": "#cf9fe8",
        "use": "#34d6a4",
        "avoid": "#ff8d42",
        "target": "#ff7f77",
        "beside": "#d9d76a",
        "forward": "#7aa8ff",
        "input_gradient": "#ffab66",
        "weight_gradient": "#5fd68a",
        "backward": "#d58fdc",
    },
}
"""Hex colours by name. Within one set all are different, so that a picture's colours can be mapped back to names."""

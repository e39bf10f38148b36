"""How pictures look: colours that colour-blind people tell apart, on paper, on a light screen and on a dark one."""

from __future__ import annotations

import base64
import io
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Series colours are those of Okabe and Ito (2008), chosen so that each differs from every other under protanopia,
# deuteranopia and in grey; they stand on white and on near-black.
BLUE = "#0072b2"
ORANGE = "#e69f00"
GREEN = "#009e73"
VERMILLION = "#d55e00"
PURPLE = "#cc79a7"

INK = "#24292f"
MUTED = "#57606b"
GRID = "#d5dae0"
EMPTY = "#e6eaee"
"""What is not in use."""

DARK = {INK: "#e6edf3", MUTED: "#9aa4af", GRID: "#3a424c", EMPTY: "#2b323b", BLUE: "#3b9fd8"}
"""What the colours become where a reader prefers dark."""

PNG_DOTS_PER_INCH = 150


def new_figure(width_in: float, height_in: float) -> Figure:
    """An empty figure that belongs to no window and no global state."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width_in, height_in), layout="constrained", facecolor="white")


def dress(axes: Axes, y_label: str, x_label: str = "") -> None:
    """Quiet axes: two spines, a light grid across, labels with units."""
    axes.set_facecolor("none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(MUTED)
    axes.tick_params(colors=MUTED, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_ylabel(y_label, color=INK, fontsize=10)
    if x_label:
        axes.set_xlabel(x_label, color=INK, fontsize=10)


def say(axes: Axes, text: str) -> None:
    """Words in place of a picture that has nothing to show."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=MUTED, fontsize=11)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(False)


def png(figure: Figure) -> bytes:
    """For plots/*.png and for paper: on white."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=PNG_DOTS_PER_INCH, facecolor="white", metadata={"Software": None})
    return buffer.getvalue()


def svg(figure: Figure) -> str:
    """A small picture with a transparent ground whose colours follow the reader's preference for light or dark."""
    import matplotlib as mpl

    buffer = io.StringIO()
    # Text stays text: a setting that savefig takes from nowhere else.
    with mpl.rc_context({"svg.fonttype": "none"}):
        figure.savefig(
            buffer,
            format="svg",
            transparent=True,
            metadata={"Date": None, "Creator": None, "Type": None, "Format": None},
        )
    text = _plain_ids(buffer.getvalue())
    text = text[text.index("<svg") :]
    names = {colour: f"--c{i}" for i, colour in enumerate(DARK)}
    for colour, name in names.items():
        text = text.replace(colour, f"var({name})")
    light = ";".join(f"{name}:{colour}" for colour, name in names.items())
    dark = ";".join(f"{names[colour]}:{other}" for colour, other in DARK.items())
    style = f"<style>svg{{{light}}}@media(prefers-color-scheme:dark){{svg{{{dark}}}}}</style>"
    end = text.index(">") + 1
    return text[:end] + style + text[end:]


def _plain_ids(text: str) -> str:
    """Ids by order of appearance, and only where something refers to them: matplotlib derives some from memory
    addresses, which would make every picture a little different."""
    used = set(re.findall(r"(?:url\(|xlink:href=\")#([^\")]+)", text))
    names = {name: f"i{i}" for i, name in enumerate(n for n in re.findall(r' id="([^"]+)"', text) if n in used)}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{names[m[1]]}"' if m[1] in names else "", text)
    return re.sub(r"(url\(|xlink:href=\")#([^\")]+)", lambda m: f"{m[1]}#{names[m[2]]}", text)


def data_url(picture: str) -> str:
    """An SVG as an address that needs no network."""
    return "data:image/svg+xml;base64," + base64.b64encode(picture.encode()).decode()

"""Draw what an experiment describes: matplotlib for paper and README, Plotly for the page. No
torch, none of our modules.

A description is plain: {"title", "x_label", "y_label", "reference": {"label", "y"}, "columns":
panels a row, "panels": [ {"title", "lines": [{"label", "colour", "style": "solid" | "dashed" |
"dots", "x", "y", and maybe "low", "high", "text"}]}]}. In labels d^2.5 has its exponent raised.
Panels share their axes, with "own_y" only the x axis.

With "kind": "heat" it is a table of colours: {"title", "x_label", "y_label", "x", "y": what stands
at the axes, "columns", "panels": [ {"title", "z": rows of numbers or None, "least", "most": the
ends of its colours, "paths": [{"label", "colour", "x", "y": places}], and maybe "marks": [{"label",
"symbol": "star" | "diamond", "x", "y": a place}]}]}.

With "kind": "ranges" it is a list of intervals beside their names: {"title", "columns", "panels":
[{"title", "x_label", "rows": [{"name", "label": what its colour means, "colour", "mean", "low",
"high"}]}]}; rows without an interval have low and high None.
"""

from __future__ import annotations

import html
import math
import re
from pathlib import Path
from typing import Any

COLOURS = ("#3b6fb6", "#d9812b", "#3f9b63", "#a4509b", "#8a6d3b", "#c0392b", "#2a9d9d", "#6c5ce0")
GREY = "#8b919a"
HEAT, BEST = "viridis", "#c0392b"
SYMBOLS = {"star": "*", "diamond": "D"}


def save(description: dict[str, Any], path: Path) -> None:
    """Write the figure as an image; the ending decides (png, pdf, svg)."""
    if description.get("kind") == "heat":
        return _save_heat(description, path)
    if description.get("kind") == "ranges":
        return _save_ranges(description, path)
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    panels, floor, reference = (
        description["panels"],
        _floor(description),
        description.get("reference"),
    )
    columns = min(description["columns"], len(panels))
    rows = -(-len(panels) // columns)
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 9,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 9.5,
        "svg.hashsalt": "headwise",
    }
    with plt.rc_context(style):
        size = (3.6 * columns + 2.2, 3.0 * rows + 0.7)
        figure, axes = plt.subplots(
            rows,
            columns,
            figsize=size,
            sharex=True,
            sharey=not description.get("own_y"),
            squeeze=False,
        )
        ticks, (x_scale, y_scale) = _ticks(panels), _scales(description)
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        for i, (ax, panel) in enumerate(zip(axes.flat, panels, strict=False)):
            for line in panel["lines"]:
                _draw(ax, line, floor, y_scale)
            if reference:
                ax.axhline(reference["y"], color=GREY, lw=0.8, ls=(0, (1, 2)))
            ax.set(xscale=x_scale, yscale=y_scale, title=_math(panel["title"]))
            if y_scale == "log" and _open(panel, floor):
                ax.set_ylim(bottom=floor)
            if i + columns >= len(panels):
                ax.set_xlabel(description["x_label"])
                ax.tick_params(labelbottom=True)
            if i % columns == 0:
                ax.set_ylabel(description["y_label"])
            if x_scale == "log":
                ax.xaxis.set_major_locator(FixedLocator(ticks))
                ax.xaxis.set_minor_locator(NullLocator())
                ax.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _fraction(x)))
            ax.grid(axis="y", color="#e6e8eb", lw=0.6)
            ax.set_axisbelow(True)
        if reference:
            for ax in (
                axes.flat[: len(panels)] if y_scale == "log" else ()
            ):  # its name stands above it
                ax.set_ylim(top=max(ax.get_ylim()[1], 2 * reference["y"]))
            axes[0][0].annotate(
                reference["label"], (0.02, reference["y"]), xycoords=("axes fraction", "data"),
                xytext=(0, 3), textcoords="offset points", color=GREY, fontsize=8,
            )  # fmt: skip
        drawn = axes.flat[: len(panels)]
        handles = {
            label: h
            for ax in drawn
            for h, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        figure.suptitle(description["title"], x=0.01, ha="left", fontweight="bold", fontsize=10)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="center left",
            bbox_to_anchor=(1.0, 0.5),
            frameon=False,
            fontsize=8,
        )
        figure.tight_layout()
        figure.savefig(path, dpi=160, bbox_inches="tight", metadata=_no_date(path))
        plt.close(figure)


def _save_heat(description: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Rectangle

    panels = description["panels"]
    columns = min(description["columns"], len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    wide, tall = 0.62 * len(description["x"]) + 0.5, 0.46 * len(description["y"]) + 0.7
    with plt.rc_context(
        {
            "font.family": "DejaVu Sans",
            "font.size": 8,
            "axes.titlesize": 9.5,
            "svg.hashsalt": "headwise",
        }
    ):
        figure, axes = plt.subplots(
            rows, columns, figsize=(wide * columns + 1.2, tall * rows + 0.6), squeeze=False
        )
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        for i, (ax, panel) in enumerate(zip(axes.flat, panels, strict=False)):
            z = [[math.nan if v is None else v for v in row] for row in panel["z"]]
            ax.imshow(
                z, origin="lower", cmap=HEAT, vmin=panel["least"], vmax=panel["most"], aspect="auto"
            )
            for y, row in enumerate(panel["z"]):
                for x, value in enumerate(row):
                    if value is not None:
                        ax.text(
                            x,
                            y,
                            _short(value),
                            ha="center",
                            va="center",
                            fontsize=6.5,
                            color=_ink(value, panel),
                        )
                        if value == panel["least"]:
                            ax.add_patch(
                                Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, ec=BEST, lw=1.8)
                            )
            for line in panel["paths"]:
                colour = COLOURS[line["colour"] % len(COLOURS)]
                shift = 0.13 * (line["colour"] - 1)  # paths that share cells stay apart
                at = [x + shift for x in line["x"]], [y - 0.3 + shift for y in line["y"]]
                ax.plot(
                    *at,
                    "-o",
                    color=colour,
                    ms=3 if len(line["x"]) > 1 else 5,
                    lw=1.3,
                    label=line["label"],
                )
            for mark in panel.get("marks", ()):
                at = mark["x"] + 0.33, mark["y"] + 0.28
                ax.plot(
                    *at,
                    SYMBOLS[mark["symbol"]],
                    color="white",
                    mec="black",
                    mew=0.7,
                    ms=7,
                    ls="none",
                    label=mark["label"],
                )
            ax.set(
                title=panel["title"],
                xticks=range(len(description["x"])),
                yticks=range(len(description["y"])),
            )
            ax.set_xticklabels(description["x"])
            ax.set_yticklabels(description["y"])
            ax.tick_params(length=0)
            if i + columns >= len(panels):
                ax.set_xlabel(description["x_label"])
            if i % columns == 0:
                ax.set_ylabel(description["y_label"])
        handles = {
            label: h
            for ax in axes.flat[: len(panels)]
            for h, label in zip(*ax.get_legend_handles_labels(), strict=True)
        }
        order = {line["label"]: line["colour"] for panel in panels for line in panel["paths"]}
        handles = {
            label: handles[label]
            for label in sorted(handles, key=lambda label: (order.get(label, len(COLOURS)), label))
        }
        figure.suptitle(description["title"], x=0.01, ha="left", fontweight="bold", fontsize=10)
        if handles:
            figure.legend(
                handles.values(),
                handles.keys(),
                loc="center left",
                bbox_to_anchor=(1.0, 0.5),
                frameon=False,
                fontsize=8,
            )
        figure.tight_layout()
        figure.savefig(path, dpi=160, bbox_inches="tight", metadata=_no_date(path))
        plt.close(figure)


def _save_ranges(description: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import MaxNLocator

    panels = description["panels"]
    columns = min(description["columns"], len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    longest = max((len(panel["rows"]) for panel in panels), default=1)
    style = {
        "font.family": "DejaVu Sans",
        "font.size": 8.5,
        "axes.titlesize": 9.5,
        "svg.hashsalt": "headwise",
    }
    with plt.rc_context(
        {**style, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False}
    ):
        tall = max(1.8, 0.24 * longest + 0.3)
        figure, axes = plt.subplots(
            rows, columns, figsize=(4.4 * columns + 0.6, (tall + 0.7) * rows + 0.4), squeeze=False
        )
        told: list[set[str]] = []
        for ax in axes.flat[len(panels) :]:
            ax.remove()
        for ax, panel in zip(axes.flat, panels, strict=False):
            for y, row in enumerate(panel["rows"]):
                colour = COLOURS[row["colour"] % len(COLOURS)]
                ax.plot(row["mean"], y, "o", ms=4.5, color=colour, label=row["label"])
                if row["low"] is not None:
                    ax.plot(
                        [row["low"], row["high"]],
                        [y, y],
                        "-",
                        lw=1.8,
                        color=colour,
                        solid_capstyle="butt",
                    )
                if y and row["name"] != panel["rows"][y - 1]["name"]:
                    ax.axhline(y - 0.5, color="#e6e8eb", lw=0.8)
            ax.axvline(0, color=GREY, lw=0.8)
            ax.set(
                title=_math(panel["title"]),
                xlabel=panel["x_label"],
                yticks=range(len(panel["rows"])),
            )
            ax.set_yticklabels(_once([_math(row["name"]) for row in panel["rows"]]))
            ax.xaxis.set_major_locator(MaxNLocator(5))
            ax.tick_params(axis="y", length=0)
            ax.invert_yaxis()
            ax.grid(axis="x", color="#e6e8eb", lw=0.6)
            ax.set_axisbelow(True)
            handles = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
            if set(handles) not in told:  # panels that mean the same by their colours are told once
                ax.legend(
                    handles.values(),
                    handles.keys(),
                    loc="upper left",
                    bbox_to_anchor=(0.0, -0.6 / tall),
                    frameon=False,
                    fontsize=8,
                )
                told.append(set(handles))
        figure.suptitle(description["title"], x=0.01, ha="left", fontweight="bold", fontsize=10)
        figure.tight_layout()
        figure.savefig(path, dpi=160, bbox_inches="tight", metadata=_no_date(path))
        plt.close(figure)


def _once(names: list[str]) -> list[str]:
    """A name that stands for several rows, at the first of them."""
    return [name if i == 0 or name != names[i - 1] else "" for i, name in enumerate(names)]


def _short(value: float) -> str:
    return f"{value:.3f}" if value < 10 else f"{value:.3g}"


def _ink(value: float, panel: dict[str, Any]) -> str:
    """White on dark cells, which are the better ones."""
    least, most = panel["least"], panel["most"]
    return "white" if value - least < 0.45 * (most - least) else "black"


def _math(text: str) -> str:
    """d^2.5 for matplotlib; a dollar is a dollar."""
    return re.sub(r"(\w)\^([\d.]+)", r"$\1^{\2}$", text.replace("$", r"\$"))


def _html(text: str) -> str:
    """d^2.5 for Plotly, which reads HTML."""
    return re.sub(r"\^([\d.]+)", r"<sup>\1</sup>", html.escape(text, quote=False))


def _no_date(path: Path) -> dict[str, Any]:
    """Metadata without a date, so that the same rows give the same file."""
    return {".png": {"Software": None}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(
        path.suffix, {}
    )


def _floor(description: dict[str, Any]) -> float:
    """Half the smallest value: where the picture ends if an interval reaches zero, which a log axis
    has not."""
    values = [
        y for panel in description["panels"] for line in panel["lines"] for y in line["y"] if y
    ]
    return min(values, default=1.0) / 2


def _open(panel: dict[str, Any], floor: float) -> bool:
    """Whether an interval runs out of the picture."""
    return any(v is not None and v < floor for line in panel["lines"] for v in line.get("low", ()))


def _seen(low: float, floor: float, scale: str) -> float:
    """An interval's lower end, on a log axis not far beyond the picture's."""
    return max(low, floor / 10) if scale == "log" else low


def _draw(ax: Any, line: dict[str, Any], floor: float, scale: str) -> None:
    colour = COLOURS[line["colour"] % len(COLOURS)]
    values = [math.nan if y is None else y for y in line["y"]]  # a gap
    if line["style"] == "dots":
        ax.plot(
            line["x"],
            values,
            ls="none",
            marker="x",
            ms=4,
            mew=1,
            color=colour,
            label=_math(line["label"]),
        )
    elif line["style"] == "dashed":
        ax.plot(
            line["x"],
            values,
            ls="--",
            lw=1,
            marker="s",
            ms=2.5,
            color=colour,
            alpha=0.45,
            label=_math(line["label"]),
        )
    else:
        mark = {"lw": 1.8, "marker": "o", "ms": 4} if line["style"] == "solid" else {"lw": 1.2}
        ax.plot(line["x"], values, color=colour, label=_math(line["label"]), **mark)
        low = [math.nan if v is None else _seen(v, floor, scale) for v in line["low"]]
        high = [math.nan if v is None else v for v in line["high"]]
        ax.fill_between(line["x"], low, high, color=colour, alpha=0.18, lw=0)  # a gap too
        for i, (x, bottom, top) in enumerate(zip(line["x"], low, high, strict=True)):
            if all(
                math.isnan(v) for v in low[max(i - 1, 0) : i] + low[i + 1 : i + 2]
            ):  # no neighbour: an interval is a line
                ax.vlines(x, bottom, top, color=colour, alpha=0.4, lw=1.2)


def _scales(description: dict[str, Any]) -> tuple[str, str]:
    """The axes' scales; both logarithmic unless said otherwise."""
    return description.get("x_scale", "log"), description.get("y_scale", "log")


def _ticks(panels: list[dict[str, Any]]) -> list[float]:
    """Where the lines have points, or every second of them when there are many."""
    ticks = sorted({x for panel in panels for line in panel["lines"] for x in line["x"]})
    return ticks[::2] if len(ticks) > 9 else ticks


def _fraction(x: float) -> str:
    return "1" if x == 1 else f"1/{round(1 / x)}" if x < 1 else f"{x:g}"


def plotly_figure(description: dict[str, Any]) -> dict[str, Any]:
    """The same figure as Plotly's data and layout (plain values; the page carries the library)."""
    if description.get("kind") == "heat":
        return _plotly_heat(description)
    if description.get("kind") == "ranges":
        return _plotly_ranges(description)
    panels, data, floor = description["panels"], [], _floor(description)
    columns = min(description["columns"], len(panels))
    rows = -(-len(panels) // columns)
    gap, drop = (
        0.08 if description.get("own_y") else 0.04,
        0.28 / rows if rows > 1 else 0.0,
    )  # as many pixels for any number of rows
    wide, tall = (1 - gap * (columns - 1)) / columns, (1 - drop * (rows - 1)) / rows
    ticks, (x_scale, y_scale) = _ticks(panels), _scales(description)
    layout = _page(description["title"], 140 + 320 * rows)
    seen: set[str] = set()
    for i, panel in enumerate(panels):
        tail = "" if i == 0 else str(i + 1)
        left, low = (i % columns) * (wide + gap), 1 - tall - (i // columns) * (tall + drop)
        axis = {
            "gridcolor": "#eceef1",
            "zeroline": False,
            "linecolor": GREY,
            "ticks": "outside",
            "tickcolor": GREY,
        }
        last, first, own = (
            i + columns >= len(panels),
            i % columns == 0,
            bool(description.get("own_y")),
        )
        layout[f"xaxis{tail}"] = {
            **axis,
            "domain": [left, left + wide],
            "anchor": f"y{tail}",
            "showgrid": False,
            "type": x_scale,
            "title": {"text": description["x_label"] if last else ""},
        }
        if x_scale == "log":
            layout[f"xaxis{tail}"] |= {"tickvals": ticks, "ticktext": [_fraction(x) for x in ticks]}
        layout[f"yaxis{tail}"] = {
            **axis,
            "domain": [low, low + tall],
            "anchor": f"x{tail}",
            "showticklabels": first or own,
            "type": y_scale,
            "exponentformat": "power",
            **({"dtick": 1} if y_scale == "log" and floor > 1e-6 else {}),
            "title": {"text": description["y_label"] if first else "", "standoff": 8},
            "automargin": True,
        }
        if i:
            layout[f"xaxis{tail}"]["matches"] = "x"
        if i and not own:
            layout[f"yaxis{tail}"]["matches"] = "y"
        layout["annotations"].append(_above(panel["title"], left + wide / 2, low + tall))
        if y_scale == "log" and any(_open(some, floor) for some in ([panel] if own else panels)):
            layout[f"yaxis{tail}"]["autorangeoptions"] = {"minallowed": math.log10(floor)}
        if description.get("reference"):
            y = description["reference"]["y"]
            if i == 0:
                layout["annotations"].append(
                    {
                        "text": _html(description["reference"]["label"]),
                        "x": 0.01,
                        "xref": "x domain",
                        "xanchor": "left",
                        "yref": "y",
                        "y": math.log10(y) if y_scale == "log" else y,
                        "yanchor": "bottom",
                        "showarrow": False,
                        "font": {"size": 11, "color": GREY},
                    }
                )
            layout["shapes"].append(
                {
                    "type": "line",
                    "x0": 0,
                    "x1": 1,
                    "y0": y,
                    "y1": y,
                    "xref": f"x{tail} domain",
                    "yref": f"y{tail}",
                    "line": {"color": GREY, "width": 1, "dash": "dot"},
                }
            )
        for line in panel["lines"]:
            data.append(_trace(line, tail, line["label"] not in seen, floor, y_scale))
            seen.add(line["label"])
    return {"data": data, "layout": layout}


def _page(title: str, height: int) -> dict[str, Any]:
    """The layout that all of Plotly's figures share."""
    return {
        "title": {"text": title, "x": 0, "xref": "paper", "font": {"size": 15}},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "plot_bgcolor": "white",
        "height": height,
        "margin": {"l": 60, "r": 10, "t": 80, "b": 60},
        "hovermode": "closest",
        "annotations": [],
        "shapes": [],
        "legend": {"orientation": "v", "x": 1.02, "y": 1, "font": {"size": 11}},
    }


def _above(title: str, x: float, y: float) -> dict[str, Any]:
    """A panel's title."""
    place = {
        "x": x,
        "y": y,
        "xref": "paper",
        "yref": "paper",
        "xanchor": "center",
        "yanchor": "bottom",
    }
    return {"text": _html(title), **place, "showarrow": False, "font": {"size": 13}}


def _plotly_heat(description: dict[str, Any]) -> dict[str, Any]:
    panels, data = description["panels"], []
    columns = min(description["columns"], len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    gap, drop = 0.06, 0.14 if rows > 1 else 0.0
    wide, tall = (1 - gap * (columns - 1)) / columns, (1 - drop * (rows - 1)) / rows
    layout = _page(description["title"], 140 + 300 * rows)
    seen: set[str] = set()
    for i, panel in enumerate(panels):
        tail = "" if i == 0 else str(i + 1)
        left, low = (i % columns) * (wide + gap), 1 - tall - (i // columns) * (tall + drop)
        axis = {"showgrid": False, "zeroline": False, "ticks": ""}
        for letter, start, length in (("x", left, wide), ("y", low, tall)):
            names = description[letter]
            layout[f"{letter}axis{tail}"] = {
                **axis,
                "domain": [start, start + length],
                "anchor": (f"{'y' if letter == 'x' else 'x'}{tail}"),
                "tickvals": list(range(len(names))),
                "ticktext": names,
                "range": [-0.5, len(names) - 0.5],
                "title": {"text": description[f"{letter}_label"]},
            }
        layout["annotations"].append(_above(panel["title"], left + wide / 2, low + tall))
        hover = (
            f"{description['y_label']} %{{y}}, {description['x_label']} %{{x}}: "
            f"%{{z:.4f}}<extra></extra>"
        )
        data.append(
            {
                "type": "heatmap",
                "z": panel["z"],
                "x": list(range(len(description["x"]))),
                "y": list(range(len(description["y"]))),
                "zmin": panel["least"],
                "zmax": panel["most"],
                "colorscale": "Viridis",
                "showscale": False,
                "xaxis": f"x{tail}",
                "yaxis": f"y{tail}",
                "texttemplate": "%{z:.3f}",
                "hovertemplate": hover,
                "hoverongaps": False,
            }
        )
        best = [
            (x, y)
            for y, row in enumerate(panel["z"])
            for x, value in enumerate(row)
            if value is not None and value == panel["least"]
        ]
        layout["shapes"] += [
            {
                "type": "rect",
                "x0": x - 0.5,
                "x1": x + 0.5,
                "y0": y - 0.5,
                "y1": y + 0.5,
                "xref": f"x{tail}",
                "yref": f"y{tail}",
                "line": {"color": BEST, "width": 3},
            }
            for x, y in best
        ]
        for line in panel["paths"]:
            colour, shift = COLOURS[line["colour"] % len(COLOURS)], 0.13 * (line["colour"] - 1)
            data.append(
                {
                    "type": "scatter",
                    "mode": "lines+markers",
                    "x": [x + shift for x in line["x"]],
                    "y": [y - 0.3 + shift for y in line["y"]],
                    "name": line["label"],
                    "legendgroup": line["label"],
                    "showlegend": line["label"] not in seen,
                    "hoverinfo": "skip",
                    "line": {"color": colour, "width": 2},
                    "marker": {"size": 6},
                    "xaxis": f"x{tail}",
                    "yaxis": f"y{tail}",
                }
            )
            seen.add(line["label"])
        for mark in panel.get("marks", ()):
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [mark["x"] + 0.33],
                    "y": [mark["y"] + 0.28],
                    "name": mark["label"],
                    "legendgroup": mark["label"],
                    "showlegend": mark["label"] not in seen,
                    "hoverinfo": "name",
                    "xaxis": f"x{tail}",
                    "yaxis": f"y{tail}",
                    "marker": {
                        "symbol": mark["symbol"],
                        "size": 13,
                        "color": "white",
                        "line": {"color": "black", "width": 1},
                    },
                }
            )
            seen.add(mark["label"])
    return {"data": data, "layout": layout}


def _plotly_ranges(description: dict[str, Any]) -> dict[str, Any]:
    panels, data, seen = (
        description["panels"],
        [],
        set[str](),
    )  # panels that mean the same by their colours are told once
    columns = min(description["columns"], len(panels)) or 1
    rows = max(1, -(-len(panels) // columns))
    tall_enough = rows * 24 * max((len(panel["rows"]) for panel in panels), default=1) + 90 * (
        rows - 1
    )
    gap, drop = 0.12, 90 / (tall_enough + 60)
    wide, tall = (1 - gap * (columns - 1)) / columns, (1 - drop * (rows - 1)) / rows
    layout = _page(description["title"], 300 + tall_enough)
    layout["legend"] |= {
        "orientation": "h",
        "x": 0,
        "y": -90 / (tall_enough + 60),
        "yanchor": "top",
    }
    layout["margin"] |= {"b": 180}
    for i, panel in enumerate(panels):
        tail, meant = (
            "" if i == 0 else str(i + 1),
            "; ".join(sorted({row["label"] for row in panel["rows"]})),
        )
        left, low = (i % columns) * (wide + gap), 1 - tall - (i // columns) * (tall + drop)
        names = [_html(row["name"]) for row in panel["rows"]]
        layout[f"xaxis{tail}"] = {
            "domain": [left, left + wide],
            "anchor": f"y{tail}",
            "gridcolor": "#eceef1",
            "zeroline": True,
            "zerolinecolor": GREY,
            "title": {"text": panel["x_label"]},
        }
        layout[f"yaxis{tail}"] = {
            "domain": [low, low + tall],
            "anchor": f"x{tail}",
            "range": [len(names) - 0.5, -0.5],
            "showgrid": False,
            "zeroline": False,
            "tickvals": list(range(len(names))),
            "ticktext": _once(names),
            "automargin": True,
        }
        layout["annotations"].append(_above(panel["title"], left + wide / 2, low + tall))
        for y, row in enumerate(panel["rows"]):
            whole, colour = row["low"] is not None, COLOURS[row["colour"] % len(COLOURS)]
            error = (
                {"array": [row["high"] - row["mean"]], "arrayminus": [row["mean"] - row["low"]]}
                if whole
                else {"array": [0]}
            )
            group = f"{row['label']} of {meant}"
            data.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "x": [row["mean"]],
                    "y": [y],
                    "name": row["label"],
                    "showlegend": group not in seen,
                    "legendgroup": group,
                    "marker": {"size": 9, "color": colour},
                    "xaxis": f"x{tail}",
                    "yaxis": f"y{tail}",
                    "error_x": {
                        "type": "data",
                        "symmetric": False,
                        **error,
                        "thickness": 2,
                        "width": 0,
                        "color": colour,
                    },
                    "hovertemplate": f"{names[y]}, {row['label']}: %{{x:.3g}}<extra></extra>",
                }
            )
            seen.add(group)
    return {"data": data, "layout": layout}


def _trace(
    line: dict[str, Any], tail: str, first: bool, floor: float, scale: str
) -> dict[str, Any]:
    colour = COLOURS[line["colour"] % len(COLOURS)]
    trace: dict[str, Any] = {
        "type": "scatter",
        "x": line["x"],
        "y": line["y"],
        "name": _html(line["label"]),
        "legendgroup": line["label"],
        "showlegend": first,
        "xaxis": f"x{tail}",
        "yaxis": f"y{tail}",
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"size": 7},
        "text": line.get("text", [""] * len(line["x"])),
        "hovertemplate": f"%{{y:.4f}}<br>%{{text}}<extra>{_html(line['label'])}</extra>",
    }
    if line["style"] == "line":
        trace |= {"mode": "lines"}
    if line["style"] == "dots":
        trace |= {
            "mode": "markers",
            "marker": {"symbol": "x-thin", "size": 7, "line": {"width": 1.5, "color": colour}},
        }
    if line["style"] == "dashed":
        trace |= {
            "opacity": 0.5,
            "line": {"color": colour, "width": 1, "dash": "dash"},
            "marker": {"size": 5, "symbol": "square"},
        }
    if line["style"] == "solid" and any(v is not None for v in line["low"]):
        up = [None if hi is None else hi - y for y, hi in zip(line["y"], line["high"], strict=True)]
        down = [
            None if lo is None else y - _seen(lo, floor, scale)
            for y, lo in zip(line["y"], line["low"], strict=True)
        ]
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "thickness": 1.2,
            "width": 3,
        }
    return trace

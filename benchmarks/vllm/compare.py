"""What turns.py measured, as tables and a plot: the median of each point, its quartiles, and ours to vLLM's.

python benchmarks/vllm/compare.py table.json [--plot vllm.png]
"""

from __future__ import annotations

import argparse
import json
import statistics
from importlib import import_module
from pathlib import Path
from typing import Any

Rows = list[dict[str, Any]]
KEYS = ("server", "round", "context", "concurrency")


def split(rows: Rows) -> tuple[Rows, Rows]:
    """(together, cold)."""
    return [r for r in rows if "concurrency" in r], [r for r in rows if "cold_ttft_ms" in r]


def values(rows: Rows, server: str, point: tuple[int, ...], figure: str) -> list[float]:
    return [r[figure] for r in rows if r["server"] == server and point_of(r) == point]


def point_of(row: dict[str, Any]) -> tuple[int, ...]:
    return tuple(row[key] for key in ("context", "concurrency") if key in row)


def described(measured: list[float]) -> str:
    """Median, and the quartiles where there are three values or more, else all of them."""
    ordered = sorted(measured)
    low, high = ordered[0], ordered[-1]
    if len(ordered) > 2:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    return f"{statistics.median(ordered):,.1f} [{low:,.1f}–{high:,.1f}]"


def lines(rows: Rows, stock: str, ours: str) -> list[str]:
    """A row for each point that both have measured, a column for each figure."""
    figures = [name for name in rows[0] if name not in KEYS]
    names = ["context", "requests"][: len(point_of(rows[0]))]
    made = ["| " + " | ".join([*names, "runs", *figures]) + " |", "|---" * (len(names) + 1 + len(figures)) + "|"]
    for point in sorted({point_of(row) for row in rows}):
        counts = [len(values(rows, server, point, figures[0])) for server in (stock, ours)]
        if min(counts) == 0:
            continue
        cells = [*(f"{n:,}" for n in point), str(min(counts))]
        for figure in figures:
            pair = [values(rows, server, point, figure) for server in (stock, ours)]
            ratio = statistics.median(pair[1]) / statistics.median(pair[0])
            cells.append(f"{described(pair[0])} → {described(pair[1])} ({ratio:.2f})")
        made.append("| " + " | ".join(cells) + " |")
    return made


def plot(rows: Rows, stock: str, ours: str, path: Path) -> None:
    """Against the context: output tokens a second and time to first token at each concurrency, and the latter cold."""
    figure = import_module("matplotlib.figure").Figure(figsize=(12, 3.8), layout="constrained")
    ticker = import_module("matplotlib.ticker")
    together, cold = split(rows)
    panels = (
        (together, "output_tokens_per_s", "output tokens a second"),
        (together, "ttft_ms", "median time to first token, ms, prefix cached"),
        (cold, "cold_ttft_ms", "time to first token, ms, nothing cached"),
    )
    for axes, (table, figure_of, title) in zip(figure.subplots(1, 3), panels, strict=True):
        points = sorted({point_of(row) for row in table})
        for style, name, server in (("--", "vLLM", stock), ("-", "with the plugin", ours)):
            for number, concurrency in enumerate(sorted({point[1:] for point in points})):
                x = [p[0] for p in points if p[1:] == concurrency and values(table, server, p, figure_of)]
                y = [statistics.median(values(table, server, (c, *concurrency), figure_of)) for c in x]
                label = f"{name}, {concurrency[0] if concurrency else 1} at once"
                axes.plot(x, y, style, color=f"C{number}", marker="o", label=label)
        contexts = sorted({point[0] for point in points})
        axes.set(title=title, xlabel="context, tokens", xscale="log", yscale="log")
        axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("table", type=Path)
    parser.add_argument("--stock", default="stock", help="the name of the server without the plugin")
    parser.add_argument("--ours", default="ours")
    parser.add_argument("--plot", type=Path, help="an image of both tables; needs matplotlib")
    args = parser.parse_args()
    rows = json.loads(args.table.read_text())
    for table in split(rows):
        if table:
            print("\n".join(lines(table, args.stock, args.ours)) + "\n")
    if args.plot is not None:
        plot(rows, args.stock, args.ours, args.plot)


if __name__ == "__main__":
    main()

"""Two results of slice.py side by side.

python benchmarks/vllm/compare.py stock.json ours.json
"""

from __future__ import annotations

import argparse
import json
from importlib import import_module
from pathlib import Path
from typing import Any


def greedy_lines(stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """Where the greedy tokens part, and how near the two best were there: a tie within bfloat16 may go either way."""
    lines = ["| context | equal tokens | at the parting: gap of the two best (stock, ours) |", "|---|---|---|"]
    for a, b in zip(stock, ours, strict=True):
        pairs = list(zip(a["tokens"], b["tokens"], strict=True))
        equal = next((i for i, (x, y) in enumerate(pairs) if x != y), len(pairs))
        gap = "–"
        if equal < len(pairs):
            gap = ", ".join(f"{r['best'][equal][0] - r['best'][equal][1]:.4f}" for r in (a, b))
        lines.append(f"| {a['context']:,} | {equal} of {len(pairs)} | {gap} |")
    return lines


def ratio_lines(key: str, stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """A row per `key`, a column per figure: stock, ours and their ratio."""
    figures = [name for name in stock[0] if name != key]
    lines = [f"| {key} | " + " | ".join(figures) + " |", "|---" * (len(figures) + 1) + "|"]
    for a, b in zip(stock, ours, strict=True):
        cells = [f"{a[f]:,.2f} → {b[f]:,.2f} ({b[f] / a[f]:.2f})" for f in figures]
        lines.append(f"| {a[key]:,} | " + " | ".join(cells) + " |")
    return lines


def plot(stock: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """Time to first token and time per token against the context; output tokens a second against concurrency."""
    figure = import_module("matplotlib.figure").Figure(figsize=(10, 3.2), layout="constrained")
    panels = (
        ("alone", "context", "ttft_ms", "time to first token, ms"),
        ("alone", "context", "tpot_ms", "time per token, ms"),
        ("together", "concurrency", "output_tokens_per_s", "output tokens a second"),
    )
    for axes, (name, key, figure_of, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for label, result in (("vLLM", stock), ("with the plugin", ours)):
            rows = result[name]
            axes.plot([r[key] for r in rows], [r[figure_of] for r in rows], marker="o", label=label)
        axes.set(title=title, xlabel=key, xscale="log", yscale="log" if figure_of == "ttft_ms" else "linear")
        axes.set_xticks([r[key] for r in stock[name]], [f"{r[key]:,}" for r in stock[name]], rotation=20)
        axes.minorticks_off()
        if figure_of != "ttft_ms":
            axes.set_ylim(bottom=0)
    figure.axes[0].legend()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stock", type=Path)
    parser.add_argument("ours", type=Path)
    parser.add_argument("--plot", type=Path, help="an image of the latter two tables; needs matplotlib")
    args = parser.parse_args()
    stock, ours = json.loads(args.stock.read_text()), json.loads(args.ours.read_text())
    print("greedy\n" + "\n".join(greedy_lines(stock["greedy"], ours["greedy"])))
    for name, key in (("alone", "context"), ("together", "concurrency")):
        print(f"\n{name}\n" + "\n".join(ratio_lines(key, stock[name], ours[name])))
    if args.plot is not None:
        plot(stock, ours, args.plot)


if __name__ == "__main__":
    main()

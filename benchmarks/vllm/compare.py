"""Two results of slice.py side by side.

python benchmarks/vllm/compare.py stock.json ours.json [--plot vllm.svg]
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


def ratio_lines(keys: list[str], stock: list[dict[str, Any]], ours: list[dict[str, Any]]) -> list[str]:
    """A row per value of the `keys`, a column per figure: stock, ours and their ratio."""
    figures = [name for name in stock[0] if name not in keys]
    lines = ["| " + " | ".join([*keys, *figures]) + " |", "|---" * (len(keys) + len(figures)) + "|"]
    for a, b in zip(stock, ours, strict=True):
        if any(a[key] != b[key] for key in keys):
            raise ValueError(f"not the same runs: {[a[key] for key in keys]} and {[b[key] for key in keys]}")
        cells = [f"{a[key]:,}" for key in keys]
        cells += [f"{a[f]:,.2f} → {b[f]:,.2f} ({b[f] / a[f]:.2f})" for f in figures]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def plot(stock: dict[str, Any], ours: dict[str, Any], path: Path) -> None:
    """Against the context: output tokens a second and time to first token at each concurrency, and the latter cold."""
    figure = import_module("matplotlib.figure").Figure(figsize=(12, 3.8), layout="constrained")
    ticker = import_module("matplotlib.ticker")
    panels = (
        ("together", "output_tokens_per_s", "output tokens a second"),
        ("together", "ttft_ms", "median time to first token, ms, prefix cached"),
        ("cold", "cold_ttft_ms", "time to first token, ms, nothing cached"),
    )
    for axes, (table, figure_of, title) in zip(figure.subplots(1, 3), panels, strict=True):
        for style, name, result in (("--", "vLLM", stock), ("-", "with the plugin", ours)):
            for number, concurrency in enumerate(sorted({row.get("concurrency", 1) for row in result[table]})):
                rows = [row for row in result[table] if row.get("concurrency", 1) == concurrency]
                x, y = [row["context"] for row in rows], [row[figure_of] for row in rows]
                axes.plot(x, y, style, color=f"C{number}", marker="o", label=f"{name}, {concurrency} at once")
        contexts = sorted({row["context"] for row in stock[table]})
        axes.set(title=title, xlabel="context, tokens", xscale="log", yscale="log")
        axes.set_xticks(contexts, [f"{context // 1024}K" for context in contexts])
        axes.minorticks_off()
        axes.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:,.0f}"))
    figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=6, fontsize="small")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("stock", type=Path)
    parser.add_argument("ours", type=Path)
    parser.add_argument("--plot", type=Path, help="an image of the last two tables; needs matplotlib")
    args = parser.parse_args()
    stock, ours = json.loads(args.stock.read_text()), json.loads(args.ours.read_text())
    print("greedy\n" + "\n".join(greedy_lines(stock["greedy"], ours["greedy"])))
    for name, keys in (("cold", ["context"]), ("together", ["context", "concurrency"])):
        print(f"\n{name}\n" + "\n".join(ratio_lines(keys, stock[name], ours[name])))
    if args.plot is not None:
        plot(stock, ours, args.plot)


if __name__ == "__main__":
    main()

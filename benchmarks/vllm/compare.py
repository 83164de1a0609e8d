"""Two results of slice.py side by side.

python benchmarks/vllm/compare.py stock.json ours.json
"""

from __future__ import annotations

import json
import sys
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


def main() -> None:
    stock, ours = (json.loads(Path(path).read_text()) for path in sys.argv[1:3])
    tables = {"greedy": greedy_lines}
    for name in stock:
        if name not in ours:
            continue
        key = {"alone": "context", "together": "concurrency"}.get(name)
        lines = tables[name](stock[name], ours[name]) if key is None else ratio_lines(key, stock[name], ours[name])
        print(f"\n{name}\n" + "\n".join(lines))


if __name__ == "__main__":
    main()

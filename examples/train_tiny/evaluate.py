"""The whole table of a checkpoint: every skill at its bar, and the ablations. One JSON file and one picture.

`python -m examples.train_tiny.evaluate --checkpoint DIR --out DIR`; without --full at sizes for a CPU.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from msaserve.config import EngineConfig
from msaserve.errors import InvalidRequestError
from msaserve.eval.answer import InProcess
from msaserve.eval.run import Result, Skill, make_examples, plot, rows, run
from msaserve.eval.selection import Selection


@dataclass(frozen=True)
class Bar:
    skill: Skill
    n: int
    contexts: tuple[int, ...] = (1024,)
    at_least: float = 0.0
    at_most: float = 1.0
    selection: Selection = "index"


SMALL = (
    Bar("needle", 20, (2048, 4096, 8192), at_least=0.99),
    Bar("picture", 50, at_least=0.98),
    Bar("video", 20, at_least=0.95),
    Bar("tool", 50, at_least=0.98),
    Bar("mixed", 5, (4096,), at_least=0.95),
)
FULL = (
    Bar("needle", 100, (2048, 4096, 8192, 16384), at_least=0.99),
    Bar("needle", 50, (65536, 131072), at_least=0.95),
    Bar("picture", 300, at_least=0.98),
    Bar("video", 200, at_least=0.95),
    Bar("tool", 300, at_least=0.98),
    Bar("mixed", 100, (16384,), at_least=0.95),
    # The index branch does the work: random blocks fail where dense attention does as well as it.
    Bar("needle", 20, (16384, 65536, 131072), at_most=0.2, selection="random"),
    Bar("needle", 100, (2048, 4096, 8192, 16384), at_least=0.98, selection="dense"),
)


def evaluate(arguments: argparse.Namespace) -> bool:
    """Whether every bar is passed."""
    bars = FULL if arguments.full else SMALL
    longest = max(max(bar.contexts) for bar in bars)
    config = EngineConfig(
        device=arguments.device,
        max_model_len=longest + 256,
        max_num_seqs=16,
        max_num_batched_tokens=8192 if arguments.full else 2048,
    )
    report, needles, is_passed = [], [], True
    arguments.out.mkdir(parents=True, exist_ok=True)
    for selection in dict.fromkeys(bar.selection for bar in bars):
        answerer = InProcess(arguments.checkpoint, config, selection=selection)
        tokenizer = answerer.tokenizer
        for bar in bars:
            if bar.selection != selection:
                continue
            examples = make_examples(
                bar.skill,
                n=bar.n,
                contexts=bar.contexts,
                seed=arguments.seed,
                count=lambda text, tokenizer=tokenizer: len(tokenizer.encode_plain(text)),  # type: ignore[misc]
            )
            start = time.monotonic()
            results = run(examples, answerer, on_result=_ignore)
            seconds = time.monotonic() - start
            needles += results if bar.skill == "needle" and selection == "index" else []
            for row in rows(results):
                is_right = bar.at_least <= row.accuracy <= bar.at_most
                is_passed &= is_right
                bounds = f"≥ {bar.at_least:.0%}" if bar.at_most == 1.0 else f"≤ {bar.at_most:.0%}"
                print(
                    f"{row.label:<28} {selection:<7} {row.num_right:>4} of {row.num_asked:<4} {row.accuracy:7.1%}  "
                    f"{bounds:<6} {'passed' if is_right else 'MISSED'}",
                    flush=True,
                )
                report.append(
                    {
                        "what": row.label,
                        "selection": selection,
                        "right": row.num_right,
                        "asked": row.num_asked,
                        "is_passed": is_right,
                        "seconds_of_all_contexts": round(seconds, 1),
                    }
                )
            wrong = [r for r in results if not r.is_right][:2] if selection == "index" else []
            for result in wrong:
                turn = result.example.turns[0]
                print(f"    {turn.parts[-1]!s:.60} → {result.reply} instead of {turn.reply}", flush=True)
        (arguments.out / "evaluation.json").write_text(json.dumps(report, indent=1) + "\n")
    try:
        if needles:
            plot(needles, arguments.out / "needle.png", title="needle")
    except InvalidRequestError as error:
        print(f"no picture: {error}")
    return is_passed


def _ignore(result: Result) -> None:
    pass


def parse_arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.train_tiny.evaluate", description=__doc__)
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="evaluation.json and needle.png go here")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--full", action="store_true", help="up to 131,072 tokens and with ablations: for a GPU")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(0 if evaluate(parse_arguments()) else 1)

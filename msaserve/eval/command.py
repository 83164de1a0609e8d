"""`msaserve eval`: what its arguments mean."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import tyro

from msaserve import env
from msaserve.config import EngineConfig
from msaserve.errors import InvalidRequestError
from msaserve.eval.run import Answerer, Result, Skill, make_examples, plot, rows, run
from msaserve.serve import DEFAULT_CHECKPOINT

CHARS_PER_TOKEN = 3.5
"""Assumed of a server whose tokenizer is not at hand."""


@dataclass(frozen=True)
class Eval:
    """Ask a checkpoint, or a server, seeded questions of one skill and count the right answers."""

    needs: ClassVar[str] = "all"
    """The extra that brings what it imports."""

    skill: tyro.conf.Positional[Skill]
    checkpoint: Path | None = None
    """Directory to load. Default: the small trained model of a clone. With --url: only its tokenizer, for the length
    of texts."""
    url: str | None = None
    """Ask this server instead, such as http://127.0.0.1:8000. Its key: the environment variable MSASERVE_API_KEY."""
    model: str = "default"
    """With --url: the model's name there."""
    context: tuple[int, ...] = (8192,)
    """Tokens of prompt, of needle and mixed. Several are asked one after another."""
    n: int = 50
    """Questions; of needle and mixed for each context."""
    random_seed: int = 1
    """Of the questions."""
    selection: Literal["index", "random", "dense"] = "index"
    """Ablations: random blocks in place of the index branch's choice, or attention to all blocks."""
    max_tokens: int = 96
    """Of a reply: several times what the longest right one has."""
    plot: Path | None = None
    """Draw accuracy by context and depth into this file."""
    show: int = 3
    """Wrong answers to print."""
    json: bool = False
    """Print one JSON object in place of the table."""
    at_least: float = 0.0
    """Exit with 1 if any line's share of right answers is below this."""
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = field(default_factory=EngineConfig)

    def run(self) -> int:
        if self.n < 1:
            raise InvalidRequestError(f"--n must be positive, not {self.n}")
        if self.url is not None and self.selection != "index":
            raise InvalidRequestError("--selection changes an engine in this process: it does not go with --url")
        from msaserve.eval.answer import Http, InProcess
        from msaserve.tokenizer import Tokenizer

        answerer: Answerer
        tokenizer: Tokenizer | None = None
        if self.url is not None:
            answerer = Http(self.url, model=self.model, api_key=env.api_key(), max_tokens=self.max_tokens)
            if self.checkpoint is not None:
                tokenizer = Tokenizer.load(self.checkpoint)
        elif self.checkpoint is None and not DEFAULT_CHECKPOINT.is_dir():
            raise InvalidRequestError("give --checkpoint DIRECTORY or --url ADDRESS")
        else:
            answerer = InProcess(
                self.checkpoint or DEFAULT_CHECKPOINT,
                self.engine,
                selection=self.selection,
                seed=self.random_seed,
                max_tokens=self.max_tokens,
            )
            tokenizer = answerer.tokenizer

        def count(text: str) -> int:
            return round(len(text) / CHARS_PER_TOKEN) if tokenizer is None else len(tokenizer.encode_plain(text))

        examples = make_examples(self.skill, n=self.n, contexts=self.context, seed=self.random_seed, count=count)
        wrong: list[Result] = []

        def on_result(result: Result) -> None:
            if not result.is_right and len(wrong) < self.show:
                wrong.append(result)

        start = time.monotonic()
        results = run(examples, answerer, on_result=on_result)
        seconds = time.monotonic() - start
        table = rows(results)
        if self.json:
            lines = [{"what": r.label, "right": r.num_right, "asked": r.num_asked} for r in table]
            print(json.dumps({"selection": self.selection, "seconds": round(seconds, 1), "rows": lines}))
        else:
            for row in table:
                print(f"{row.label:<28} {row.num_right:>5} of {row.num_asked:<5} {row.accuracy:7.1%}")
            print(f"{len(results)} questions in {seconds:.1f} s, selection: {self.selection}")
            for result in wrong:
                turn = result.example.turns[0]
                print(f"  wrong: {turn.parts[-1]!s:.80} → {result.reply} instead of {turn.reply}", file=sys.stderr)
        if self.plot is not None:
            plot(results, self.plot, title=f"{self.skill}, selection: {self.selection}")
        return 0 if all(row.accuracy >= self.at_least for row in table) else 1

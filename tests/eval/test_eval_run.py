"""The run over examples: who is asked, how it is counted, and what ablations change."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from msaserve.config import EngineConfig
from msaserve.errors import EngineError, InvalidRequestError
from msaserve.eval import command as eval_command
from msaserve.eval import tool
from msaserve.eval.answer import Http, InProcess
from msaserve.eval.command import Eval
from msaserve.eval.conversation import prompt
from msaserve.eval.example import Example, Reply
from msaserve.eval.run import DEPTHS, Result, depth_grid, make_examples, plot, rows, run
from msaserve.gateway.chat import ChatTemplate
from msaserve.tokenizer import Tokenizer

SMALL = EngineConfig(device="cpu", kv_cache_gib=0.1, max_model_len=4096, max_num_seqs=8)


class Knowing:
    """Answers rightly, but for every third example; last first."""

    def answer(self, examples: Sequence[Example]) -> Iterator[tuple[int, Reply]]:
        for number in reversed(range(len(examples))):
            yield number, Reply("I do not know.") if number % 3 == 0 else examples[number].turns[0].reply


def examples_of(skill: Any, tokenizer: Tokenizer, **options: Any) -> list[Example]:
    options = {"n": 6, "contexts": (400,), "seed": 1} | options
    return make_examples(skill, count=lambda text: len(tokenizer.encode_plain(text)), **options)


def ignore(result: Result) -> None:
    pass


@pytest.mark.parametrize("context", [512, 3000])
def test_prompts_have_the_context_asked_for(context: int, tokenizer: Tokenizer, template: ChatTemplate) -> None:
    for example in examples_of("needle", tokenizer, contexts=(context,)):
        expanded, _ = prompt(example, tokenizer, template, None)
        assert context - 128 < len(expanded.token_ids) <= context


def test_counts_by_context_and_depth(tokenizer: Tokenizer) -> None:
    examples = examples_of("needle", tokenizer, n=10, contexts=(400, 800))
    seen: list[Result] = []
    results = run(examples, Knowing(), on_result=seen.append)
    assert [r.example for r in results] == examples
    assert len(seen) == 20
    table = rows(results)
    assert [(row.label, row.num_right, row.num_asked) for row in table] == [
        ("needle at 400 tokens", 6, 10),
        ("needle at 800 tokens", 7, 10),
    ]
    assert table[0].accuracy == 0.6
    grid = depth_grid(results)
    assert len(grid) == 2 * len(DEPTHS)
    # Depth 0 at 400 tokens: examples 0 (wrong) and 5.
    assert grid[400, 0.0] == 0.5
    assert sum(grid.values()) / len(grid) == pytest.approx(13 / 20)


def test_same_seed_same_examples(tokenizer: Tokenizer) -> None:
    def first(seed: int) -> tuple[Any, ...]:
        return examples_of("needle", tokenizer, seed=seed)[0].turns[0].parts

    assert first(1) == first(1)
    assert first(1) != first(2)


def test_plot_says_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(InvalidRequestError, match=r"msaserve\[plot\]"):
        plot([], tmp_path / "out.png", title="")


@pytest.mark.parametrize("skill", ["needle", "tool"])
def test_plot_draws(skill: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = run(examples_of(skill, tokenizer), Knowing(), on_result=ignore)
    plot(results, tmp_path / "out.png", title="test")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(InvalidRequestError, match="cannot be written"):
        plot(results, tmp_path / "out.nothing", title="test")


def greedy(checkpoint: Path, selection: Any, examples: Sequence[Example]) -> list[Reply]:
    asked = InProcess(checkpoint, SMALL, selection=selection, max_tokens=8)
    return [r.reply for r in run(examples, asked, on_result=ignore)]


def test_ablations_change_long_contexts_alone(narrow: Path, tokenizer: Tokenizer) -> None:
    # The checkpoint selects two blocks: up to 256 tokens there is nothing to select.
    short = [tool.generate(random.Random(0), thinking="disabled")]
    known = greedy(narrow, "index", short)
    assert greedy(narrow, "dense", short) == known
    assert greedy(narrow, "random", short) == known
    long = examples_of("needle", tokenizer, n=1, contexts=(900,))
    said = [greedy(narrow, selection, long) for selection in ("index", "dense", "random")]
    assert said[0] != said[1]
    assert said[0] != said[2]
    assert said[1] != said[2]


@pytest.mark.parametrize("skill", ["picture", "video", "tool", "mixed"])
def test_every_skill_is_asked(untrained: Path, tokenizer: Tokenizer, skill: str) -> None:
    examples = examples_of(skill, tokenizer, n=2)
    results = run(examples, InProcess(untrained, SMALL, max_tokens=4), on_result=ignore)
    assert [r.is_right for r in results] == [False, False]
    assert all(r.reply != Reply() for r in results)


class Scripted(BaseHTTPRequestHandler):
    bodies: ClassVar[list[dict[str, Any]]] = []

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append({**body, "path": self.path, "key": self.headers["Authorization"]})
        question = body["messages"][-1]["content"]
        if question == "refuse":
            self.send_error(400)
            return
        tools = body.get("tools") or []
        call = {"function": {"name": tools[0]["function"]["name"], "arguments": '{"x": 1}'}} if tools else None
        message = {"content": "" if call else "yes", "reasoning_content": "so", "tool_calls": [call] if call else []}
        data = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Scripted.bodies.clear()
    http = HTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{http.server_port}"
    http.shutdown()
    thread.join()
    http.server_close()


def test_http_asks_as_a_client_does(server: str, tokenizer: Tokenizer) -> None:
    asked = Http(server, model="tiny", api_key="secret", concurrency=1)
    example = tool.generate(random.Random(0), thinking="enabled")
    pictures = examples_of("picture", tokenizer, n=1)
    (_, called), (_, seen) = asked.answer([example, *pictures])
    assert called.reasoning == "so"
    assert called.calls[0].arguments == {"x": 1}
    assert called.calls[0].name == example.tools[0]["function"]["name"]
    assert seen.content == "yes"
    first, second = Scripted.bodies
    assert first["path"] == "/v1/chat/completions"
    assert first["key"] == "Bearer secret"
    assert first["thinking"] == {"type": "enabled"}
    assert first["temperature"] == 0
    assert first["tools"] == list(example.tools)
    image, text = second["messages"][0]["content"]
    assert image["image_url"]["url"].startswith("data:image/png;base64,")
    assert text["text"] == pictures[0].turns[0].parts[-1]


def test_http_failures_are_named(server: str) -> None:
    example = tool.generate(random.Random(0))
    turn = example.turns[0]
    refused = Example("tool", (type(turn)(("refuse",), turn.reply, turn.scorer),))
    with pytest.raises(InvalidRequestError, match="answered 400"):
        list(Http(server, model="tiny").answer([refused]))
    with pytest.raises(EngineError, match="gave no answer"):
        list(Http("http://127.0.0.1:1", model="tiny").answer([example]))


def test_command_in_process(untrained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = Eval("tool", checkpoint=untrained, n=2, json=True, engine=SMALL, at_least=0.5, max_tokens=4)
    assert command.run() == 1
    report = json.loads(capsys.readouterr().out)
    assert report["rows"] == [{"what": "tool", "right": 0, "asked": 2}]
    assert Eval("tool", checkpoint=untrained, n=1, engine=SMALL, max_tokens=4).run() == 0
    printed = capsys.readouterr()
    assert "0 of 1" in printed.out
    assert "instead of" in printed.err


def test_command_takes_the_small_trained_checkpoint_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert Eval("tool", n=1, random_seed=1, engine=SMALL).run() == 0
    assert "1 of 1" in capsys.readouterr().out
    monkeypatch.setattr(eval_command, "DEFAULT_CHECKPOINT", tmp_path / "none")
    with pytest.raises(InvalidRequestError, match="give --checkpoint"):
        Eval("tool", n=1).run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://127.0.0.1:1", "selection": "dense"}, "does not go with --url"),
        ({"url": "http://127.0.0.1:1", "n": 0}, "must be positive"),
        ({"url": "http://127.0.0.1:1", "context": (100,)}, "too short"),
    ],
)
def test_command_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Eval("needle", **options).run()

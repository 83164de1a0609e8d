"""A real vLLM behind this package's gateway, asked as clients ask: `msaserve serve CHECKPOINT --engine vllm`.

    pip install --no-deps .    # into vLLM's environment, beside smg-grpc-servicer and what the gateway needs
    python benchmarks/vllm/through_gateway.py DIR --out results [--stock]

DIR gets a random slice of MiniMax-M3 (checkpoint.py) with the tokenizer of checkpoints/tiny, unless it is a checkpoint
with a tokenizer of as many tokens already. One server runs with the plugin, with --stock one without beside it, and
their greedy tokens are compared. Each check is a line of a table; the exit code is 1 if one failed. Whatever happens,
the servers end before this does.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gateway_server import Server, WrongError, need
from slice import make_prompt

TINY = Path(__file__).resolve().parents[2] / "checkpoints/tiny"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")
VOCAB = 4096
LENGTHS = (200, 3000, 6500, 12_000)
"""Of prompts: 2,048 tokens fit into the blocks that are selected, beyond 8,192 they are computed in chunks."""
NUM_GREEDY = 24
PLUGIN = {
    "ours": "MiniMax-M3 selects blocks and attends to them with msaserve's kernels",
    "stock": "vLLM runs its own kernels: MSASERVE_VLLM=0",
}
MEDIAN, MOST = 0.02, 1.5
"""By how much log probabilities with and without the plugin may differ: a random model's experts change at a rounding
(two builds of vLLM with the plugin: 0.0006, and 0.7 at most), and a wrong block changes them all."""
NUMBER = {"type": "integer", "minimum": 3, "maximum": 99}
VALUES = {"ok": {"type": "boolean"}, "colour": {"enum": ["red", "green"]}, "number": NUMBER}
SCHEMA = {"type": "object", "additionalProperties": False, "required": list(VALUES), "properties": VALUES}


class Stopped(BaseException):
    """The time is up, or this process was told to end."""


class Table:
    def __init__(self) -> None:
        self.num_failed = 0
        print("| | check | s | seen |\n|---|---|--:|---|", flush=True)

    def run(self, name: str, check: Callable[..., dict[str, Any]], *args: Any) -> bool:
        """Whether it passed."""
        begin, state, seen = time.monotonic(), "FAIL", "stopped"
        try:
            seen, state = json.dumps(check(*args), ensure_ascii=False), "PASS"
        except Exception as error:
            seen = str(error) if isinstance(error, WrongError) else f"{type(error).__name__}: {error}"
        finally:
            self.num_failed += state == "FAIL"
            seen = " ".join(seen.split()).replace("|", "\\|")[: 1500 if state == "FAIL" else 300]
            print(f"| {state} | {name} | {time.monotonic() - begin:.1f} | {seen} |", flush=True)
        return state == "PASS"


def make_checkpoint(directory: Path, device: str) -> dict[str, Any]:
    is_made = not (directory / "tokenizer.json").exists()
    if is_made:
        line = [sys.executable, str(Path(__file__).with_name("checkpoint.py")), str(directory), "--device", device]
        done = subprocess.run([*line, "--vocab", str(VOCAB)], capture_output=True, text=True)
        need(done.returncode == 0, done.stderr[-1500:])
        add_tokenizer(directory)
    return {"made": is_made, "bytes": sum(path.stat().st_size for path in directory.glob("*.safetensors"))}


def add_tokenizer(directory: Path) -> None:
    """That of checkpoints/tiny, which has VOCAB tokens, with its special ones."""
    special = json.loads((TINY / "config.json").read_text())["text_config"]
    config = json.loads((directory / "config.json").read_text())
    for part in (config, config["text_config"]):
        part.update({name: special[name] for name in ("bos_token_id", "eos_token_id")})
    (directory / "config.json").write_text(json.dumps(config))
    for name in reversed(TOKENIZER):  # the one that says it is a whole checkpoint comes last
        shutil.copy(TINY / name, directory)


def models(server: Server) -> dict[str, Any]:
    found = server.http.get("/v1/models").raise_for_status().json()["data"]
    need([model["id"] for model in found] == ["m3"], found)
    server.context = found[0]["max_model_len"]
    return {"max_model_len": server.context}


def plugin(server: Server) -> dict[str, Any]:
    found = [line for line in server.lines() if PLUGIN[server.name] in line]
    about = [line for line in server.lines() if "msaserve" in line][:5]
    need(found, f"no such line (is this package installed?): {about}")
    return {"line": found[0][found[0].index("msaserve") :], "times": len(found)}


def greedy(server: Server, lengths: Sequence[int]) -> dict[str, Any]:
    """With log probabilities, which are kept for the comparison."""
    options = {"max_tokens": NUM_GREEDY, "temperature": 0, "ignore_eos": True, "logprobs": 2}
    for seed, length in enumerate(lengths):
        answer = server.post("/v1/completions", prompt=make_prompt(seed, length, VOCAB), **options)
        choice, usage = answer["choices"][0], answer["usage"]
        need((usage["prompt_tokens"], usage["completion_tokens"]) == (length, NUM_GREEDY), usage)
        need(choice["finish_reason"] == "length", choice["finish_reason"])
        tokens, found = choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"]
        # By their texts: where two tokens have one, the better may be missing.
        best = [sorted(top.values(), reverse=True)[:2] for top in choice["logprobs"]["top_logprobs"]]
        need(len(tokens) == len(found) == len(best) == NUM_GREEDY, choice["logprobs"])
        need(all(math.isfinite(p) and p < 1e-3 for p in found), found)
        need(all(p > top[0] - 1e-3 for p, top in zip(found, best, strict=True)), "greedy is not the best")
        server.greedy.append({"tokens": tokens, "logprobs": found, "best": best})
    distinct = [len(set(row["tokens"])) for row in server.greedy]
    need(max(distinct) > 3, f"distinct tokens: {distinct}")
    return {"lengths": list(lengths), "distinct tokens": distinct}


def compared(one: Server, other: Server) -> dict[str, Any]:
    """Up to where two answers part, there included, the same was computed."""
    need(len(one.greedy) == len(other.greedy), "one of them has not answered all")
    parts, gaps, off = [], [0.0], []
    for a, b in zip(one.greedy, other.greedy, strict=True):
        differ = [i for i in range(NUM_GREEDY) if a["tokens"][i] != b["tokens"][i]]
        parts.append(differ[0] if differ else NUM_GREEDY)
        gaps += [row["best"][i][0] - row["best"][i][-1] for i in differ[:1] for row in (a, b)]
        off += [abs(a["logprobs"][i] - b["logprobs"][i]) for i in range(min(parts[-1] + 1, NUM_GREEDY))]
    median, most, gap = (round(value, 5) for value in (statistics.median(off), max(off), max(gaps)))
    seen = {"equal tokens": parts, "off in the median": median, "at most": most, "gap where they part": gap}
    need(median <= MEDIAN and max(most, gap) <= MOST, seen)
    return seen


def chat(server: Server) -> dict[str, Any]:
    body = {"model": "m3", "messages": [{"role": "user", "content": "What is the code of Winston?"}], "temperature": 0}
    body |= {"max_tokens": 20, "ignore_eos": True, "logprobs": True, "top_logprobs": 2, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with server.http.stream("POST", "/v1/chat/completions", json=body) as answer:
        need(answer.status_code == 200, answer.status_code)
        said = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
    need(said.pop() == "[DONE]", "the stream does not end with [DONE]")
    chunks = [json.loads(line) for line in said]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    logprobs = [token for choice in choices for token in (choice.get("logprobs") or {}).get("content") or ()]
    usage = chunks[-1]["usage"]["completion_tokens"]
    seen = {"chunks": len(choices), "finish": reasons, "logprobs": len(logprobs), "completion_tokens": usage}
    need(len(choices) > 3 and (reasons, len(logprobs), usage) == (["length"], 20, 20), seen)
    return seen


def several(server: Server) -> dict[str, Any]:
    options = {"n": 2, "temperature": 1.0, "seed": 5, "max_tokens": 12, "ignore_eos": True}
    answer = server.post("/v1/completions", prompt=make_prompt(9, 64, VOCAB), **options)
    texts, total = [choice["text"] for choice in answer["choices"]], answer["usage"]["completion_tokens"]
    need(len(set(texts)) == 2 and total == 24, answer)
    return {"texts": texts}


def constrained(server: Server) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    body = {"messages": [{"role": "user", "content": "Give me JSON."}], "response_format": form, "max_tokens": 400}
    values = []
    for temperature in (0, 1.0):
        choice = server.post("/v1/chat/completions", **body, temperature=temperature, seed=3)["choices"][0]
        need(choice["finish_reason"] == "stop", choice)
        values.append(value := json.loads(choice["message"]["content"]))
        need(set(value) == set(VALUES) and isinstance(value["ok"], bool), value)
        need(value["colour"] in ("red", "green") and 3 <= value["number"] <= 99, value)
    for kind, given in (("choice", ["yes", "no", "perhaps"]), ("regex", "[a-f]{4}-[0-9]{3}")):
        body = {"prompt": make_prompt(11, 40, VOCAB), "max_tokens": 40, "structured_outputs": {kind: given}}
        values.append(text := server.post("/v1/completions", **body, temperature=0)["choices"][0]["text"])
        need(re.fullmatch(given if kind == "regex" else "|".join(given), text), values)
    return {"values": values}


def refused(server: Server) -> dict[str, Any]:
    bodies = [{"prompt": make_prompt(1, server.context + 1, VOCAB)}, {"prompt": [5, 6], "temperature": -1}]
    bodies.append({"prompt": [5, 6], "structured_outputs": {"regex": "(["}})
    answers = [server.http.post("/v1/completions", json={"model": "m3", "max_tokens": 4, **body}) for body in bodies]
    seen = {"answers": [f"{answer.status_code} {answer.text[:80]}" for answer in answers]}
    need(all(answer.status_code == 400 for answer in answers), seen)
    return seen


def abort(server: Server) -> dict[str, Any]:
    """A client that leaves in the middle of a long answer."""
    prompt = make_prompt(12, 500, VOCAB)
    body = {"model": "m3", "prompt": prompt, "max_tokens": server.context - 501, "ignore_eos": True, "stream": True}
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        need(answer.status_code == 200, answer.status_code)
        for _ in zip(range(12), answer.iter_lines(), strict=False):
            running = server.num_running()
        need(running >= 1, "/metrics does not count it")
    begin = time.monotonic()
    while server.num_running() > 0:
        need(time.monotonic() < begin + 25, "it still runs after 25 s")
        server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=2)  # vLLM's counts are those of its last step
    return {"gone after s": round(time.monotonic() - begin, 2)}


def together(server: Server, longest: int) -> dict[str, Any]:
    options = {"max_tokens": 32, "temperature": 0.7, "ignore_eos": True}

    def ask(number: int) -> int:
        prompt = make_prompt(100 + number, 1 + longest * number // 12, VOCAB)
        return int(server.post("/v1/completions", prompt=prompt, seed=number, **options)["usage"]["completion_tokens"])

    pool = ThreadPoolExecutor(12)
    try:
        found = list(pool.map(ask, range(12)))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # when stopped: it waits for servers that end after this
    need(found == [32] * 12, found)
    return {"tokens": sum(found)}


def healthy(server: Server) -> dict[str, Any]:
    seen = {path: server.http.get(path).raise_for_status().json()["status"] for path in ("/health", "/ready")}
    return {**seen, "running": server.num_running()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder for the servers' logs")
    parser.add_argument("--stock", action="store_true", help="a second server without the plugin, to compare with")
    parser.add_argument("--seconds", type=int, default=420, help="then it ends, with all it started (%(default)s)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of greedy prompts (%(default)s)")
    parser.add_argument("--vllm-args", default="", help="options of vllm serve, which come after those set here")
    parser.add_argument("--device", default="cuda", help="that makes the checkpoint")
    args = parser.parse_args()

    def stop(number: int, frame: object) -> None:
        raise Stopped

    for number in (signal.SIGALRM, signal.SIGTERM):
        signal.signal(number, stop)
    signal.alarm(args.seconds)
    args.out.mkdir(parents=True, exist_ok=True)
    table, servers = Table(), []
    with tempfile.TemporaryDirectory() as cache, ExitStack() as stack:
        try:
            if not table.run("checkpoint", make_checkpoint, args.checkpoint, args.device):
                return 1
            for name in ("ours", "stock") if args.stock else ("ours",):
                servers.append(Server(name, args.checkpoint, args.out, args.vllm_args, cache))
                stack.callback(servers[-1].kill)
            for server in servers:
                checks = [models, plugin, greedy]
                checks += (
                    [chat, several, constrained, refused, abort, together, healthy] if server is servers[0] else []
                )
                more = {greedy: (args.lengths,), together: (max(args.lengths),)}
                if table.run(f"{server.name}: start", server.wait):
                    for check in checks:
                        table.run(f"{server.name}: {check.__name__}", check, server, *more.get(check, ()))
            if args.stock:
                table.run("ours and stock: greedy", compared, *servers)
            signal.alarm(0)
            for server in servers:
                table.run(f"{server.name}: end", server.end)
        except Stopped:
            print("stopped: told to end, or the time was up", flush=True)
    print(f"{table.num_failed} FAIL", flush=True)
    return int(table.num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())

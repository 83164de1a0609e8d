"""What of benchmarks/vllm runs without vLLM: the slice's configuration, taking turns, and the judge."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from golden_data import golden
from safetensors import safe_open
from waits import until

from msaserve.config import ModelConfig
from msaserve.models.loader import load_model

FOLDER = Path(__file__).parents[2] / "benchmarks/vllm"


def load(name: str) -> Any:
    """The script as a module; those it imports lie beside it."""
    if str(FOLDER) not in sys.path:
        sys.path.insert(0, str(FOLDER))
    return importlib.import_module(name)


def test_slice_is_minimax_m3_with_fewer_layers(tmp_path: Path) -> None:
    load("slice").write_config(tmp_path, num_layers=5, num_dense=1)
    text = ModelConfig.from_checkpoint(tmp_path).text
    assert (text.num_heads, text.num_kv_heads, text.head_dim, text.num_index_heads, text.index_dim) == (
        64,
        4,
        128,
        4,
        128,
    )
    assert (text.block_size, text.topk_blocks, text.num_experts, text.num_experts_per_tok) == (128, 16, 128, 4)
    assert (text.sparse_layer_ids, text.has_moe) == ((1, 2, 3, 4), (False, True, True, True, True))


@pytest.mark.parametrize("name", sorted(path.stem for path in FOLDER.glob("*.py") if "__main__" in path.read_text()))
def test_each_says_what_it_takes(name: str) -> None:
    done = subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), "--help"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"usage: {name}.py")


def test_selection_without_a_release(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "selection.py"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "scripts/vllm_facts.py VERSION --keep DIR" in done.stderr


def together(server: str, context: int, concurrency: int, speed: float) -> dict[str, Any]:
    figures = {"output_tokens_per_s": speed, "ttft_ms": 70.0, "last_ttft_ms": 90.0, "step_ms": 2.0}
    return {"server": server, "round": 0, "context": context, "concurrency": concurrency, **figures}


def cold(server: str, context: int, milliseconds: float) -> dict[str, Any]:
    return {"server": server, "round": 0, "context": context, "cold_ttft_ms": milliseconds}


def test_compare(tmp_path: Path) -> None:
    rows = [together("stock", 8192, 32, speed) for speed in (400.0, 390.0, 1000.0)]
    rows += [together("ours", 8192, 32, speed) for speed in (600.0, 10.0, 610.0)]
    rows += [cold("stock", 8192, 100.0), cold("ours", 8192, 40.0), cold("ours", 8192, 60.0)]
    rows += [together("ours", 65_536, 1, 1.0)]  # a point that only one of them reached
    (tmp_path / "table.json").write_text(json.dumps(rows))
    command = [sys.executable, str(FOLDER / "compare.py"), str(tmp_path / "table.json")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "| 8,192 | 32 | 3 | 400.0 [395.0–700.0] → 600.0 [305.0–605.0] (1.50) | 70.0 [70.0–70.0] →" in said
    assert "| 8,192 | 1 | 100.0 [100.0–100.0] → 50.0 [40.0–60.0] (0.50) |" in said
    assert "65,536" not in said


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    servers = ("stock", "ours")
    rows = [together(s, context, n, 400.0 * n) for s in servers for context in (8192, 65_536) for n in (1, 8)]
    rows += [cold(s, context, context / 100) for s in servers for context in (8192, 65_536)]
    load("compare").plot(rows, *servers, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert drawn.count('id="axes_') == 3
    assert "with the plugin, 8 at once" in drawn


class Engine:
    """vLLM's engine as `Slice.timed` drives it: one token of each request a step, the first only after two steps."""

    def __init__(self) -> None:
        self.model_config = SimpleNamespace(get_vocab_size=lambda: 20_000)
        self.requests: dict[str, tuple[list[int], int]] = {}
        self.made: dict[str, int] = {}
        self.sent: list[list[int]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        assert name not in self.made
        self.sent.append(prompt["prompt_token_ids"])
        self.requests[name] = (prompt["prompt_token_ids"], sampling["max_tokens"])
        self.made[name] = -1

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        time.sleep(0.001)
        outputs = []
        for name, (_, most) in list(self.requests.items()):
            self.made[name] += 1
            tokens = list(range(self.made[name]))
            outputs.append(SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=tokens)]))
            if self.made[name] == most:
                del self.requests[name]
        return outputs


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Engine]:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(SamplingParams=dict))
    engine = Engine()
    made = load("slice").Slice(SimpleNamespace(llm_engine=engine))
    monkeypatch.setattr(made, "generate", lambda prompts, num_tokens: (0.0, []))
    return made, engine


def test_requests_sent_together(runs: tuple[Any, Engine]) -> None:
    module, (made, engine) = load("slice"), runs
    row = made.together(4096, 3)
    assert (row["context"], row["concurrency"]) == (4096, 3)
    assert [len(prompt) for prompt in engine.sent] == [4096] * 3
    assert len({tuple(prompt[: 4096 - module.NEW]) for prompt in engine.sent}) == 1
    assert len({tuple(prompt) for prompt in engine.sent}) == 3
    # Two steps to the first tokens, then one step a token.
    assert 2 <= row["ttft_ms"] <= row["last_ttft_ms"]
    assert 1 <= row["step_ms"] < row["ttft_ms"]
    assert 0 < row["output_tokens_per_s"] <= 3 * module.OUTPUT / (0.001 * (module.OUTPUT + 1))
    assert set(engine.made.values()) == {module.OUTPUT}


def test_turns_over_two_servers(runs: tuple[Any, Engine], tmp_path: Path) -> None:
    """The real server loop and the real controller, over an engine that is none."""

    class Failing:
        def together(self, context: int, concurrency: int) -> None:
            raise ValueError("out of memory")

    module, directories = load("slice"), [tmp_path / name for name in ("stock", "ours")]
    threads = [
        threading.Thread(target=module.serve, args=(made, directory), daemon=True)
        for made, directory in zip((runs[0], Failing()), directories, strict=True)
    ]
    for thread in threads:
        thread.start()
    while not all((directory / "ready").exists() for directory in directories):
        time.sleep(0.01)
    command = [sys.executable, str(FOLDER / "turns.py"), *map(str, directories), "--out", str(tmp_path / "table.json")]
    command += ["--contexts", "8192", "--concurrency", "1", "--rounds", "1"]
    failed = subprocess.run(command, capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "ValueError: out of memory" in failed.stderr
    command[3] = command[2]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == 2 * 3 + 2 * 5
    assert all(
        re.match(r" +\d+\.\d s  warm: stock, (together 8,192 × 1|touch 8,192|cold 8,192): ", s) for s in lines[:6]
    )
    assert re.search(r"round 1 of 1: stock, cold 8,192: cold_ttft_ms \d+\.\d$", lines[-1])
    rows = json.loads((tmp_path / "table.json").read_text())
    assert [set(row) & {"ttft_ms", "cold_ttft_ms"} for row in rows] == 6 * [{"ttft_ms"}] + 2 * [{"cold_ttft_ms"}]
    for directory in directories:
        load("turns").Server(directory).send("end")
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


def test_turns_that_are_stopped(tmp_path: Path) -> None:
    """What was measured is in the file and was said, while the next one takes long; the time may be up at once."""
    answers = threading.Semaphore(1)  # to both, whose directory is one

    class Slow:
        def together(self, context: int, concurrency: int) -> dict[str, float]:
            answers.acquire()
            return {"context": context, "concurrency": concurrency, "ttft_ms": 1.5}

    module, directory = load("slice"), tmp_path / "stock"
    thread = threading.Thread(target=module.serve, args=(Slow(), directory), daemon=True)
    thread.start()
    until((directory / "ready").exists)
    table = tmp_path / "table.json"
    command = [sys.executable, str(FOLDER / "turns.py"), str(directory), str(directory), "--out", str(table)]
    over = subprocess.run([*command, "--seconds", "0"], capture_output=True, text=True)
    assert (over.returncode, over.stderr) == (0, "")
    assert over.stdout == "the 0 s were over before all was measured\n"
    assert json.loads(table.read_text()) == []
    command += ["--no-warm", "--contexts", "4096", "--concurrency", "8"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as told:
        assert told.stdout is not None
        lines = [told.stdout.readline() for _ in range(2)]
        told.kill()
    assert all(line.endswith(" of 5: stock, together 4,096 × 8: ttft_ms 1.5\n") for line in lines)
    assert len(json.loads(table.read_text())) == 2
    for _ in range(10):
        answers.release()
    load("turns").Server(directory).send("end")
    thread.join(10)
    assert not thread.is_alive()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The slice's, narrow."""
    directory, patch = tmp_path_factory.mktemp("slice"), pytest.MonkeyPatch()
    module = load("slice")
    write_config = module.write_config

    def narrow(directory: Path, **sizes: int) -> None:
        write_config(directory, **sizes)
        config = json.loads((directory / "config.json").read_text())
        sizes = {"hidden_size": 64, "intermediate_size": 32, "dense_intermediate_size": 32, "num_attention_heads": 8}
        config["text_config"] |= {**sizes, "shared_intermediate_size": 32}
        (directory / "config.json").write_text(json.dumps(config))

    with patch.context() as context:
        context.setattr(module, "write_config", narrow)
        load("checkpoint").write(directory, device="cpu", num_layers=3, num_dense=1, num_experts=8, vocab_size=1200)
    return directory


def test_checkpoint_has_vllms_names(checkpoint: Path) -> None:
    with safe_open(checkpoint / "model.safetensors", framework="pt") as file:
        names = set(file.keys())
        assert file.get_tensor("lm_head.weight").dtype == torch.bfloat16
        embeddings, head = file.get_tensor("model.embed_tokens.weight"), file.get_tensor("lm_head.weight")
    assert {"model.layers.1.self_attn.index_q_proj.weight", "model.layers.2.block_sparse_moe.gate.weight"} < names
    assert all(name.startswith(("model.", "lm_head.")) for name in names)
    assert 0.9 < float(embeddings.float().std()) < 1.1
    assert not torch.equal(embeddings, head)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module; what it changes for good in its own process is set back."""
    module = load("judge")
    for name in module.OPERATORS:
        operator = importlib.import_module(f"msaserve.ops.{name}")
        monkeypatch.setattr(operator, "IMPLS", operator.IMPLS)
    for name, constant, _ in module.TILES:
        reference = importlib.import_module(f"msaserve.ops.{name}.reference")
        monkeypatch.setattr(reference, constant, getattr(reference, constant))
    module.only_references()
    return module


def test_reference_is_transformers(judge: Any) -> None:
    directory, expected = golden("tiny")
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    reference = judge.Reference(load_model(directory, show_progress=False), len(tokens))
    wanted = expected["text.logits"].log_softmax(-1)
    first = int(rows[0])
    reference.fill(tokens.tolist()[:first])
    got = reference.logprobs(tokens.tolist(), first)
    assert torch.allclose(got[rows - first], wanted, atol=2e-3)
    following = reference.following(tokens.tolist())
    for row, logprobs in zip(rows.tolist(), wanted, strict=True):
        if row + 1 < len(tokens):
            assert following[row] == pytest.approx(float(logprobs[tokens[row + 1]]), abs=2e-3)


@pytest.fixture
def results(judge: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Of three engines the first is right, the second parts from it once, the third gives no numbers."""
    module = load("slice")
    monkeypatch.setattr(module, "SCORED", (300,))
    monkeypatch.setattr(judge, "CHUNK", 128)
    reference = judge.Reference(judge.load(checkpoint, "cpu"), 600)
    lengths, right = (200, 450), []
    for number, length in enumerate(lengths):
        tokens, best = module.greedy_prompt(number, length, 1200), []
        for _ in range(3):
            logprobs = reference.logprobs(tokens, 0)[-1]
            best.append(logprobs.topk(2).values.tolist())
            tokens.append(int(logprobs.argmax()))
        right.append({"context": length, "tokens": tokens[length:], "best": best})
    scored = [{"context": 300, "logprobs": reference.following(module.make_prompt(300, 300, 1200))}]
    other = json.loads(json.dumps(right))
    other[1]["tokens"][2] = (right[1]["tokens"][2] + 1) % 1200
    lost = json.loads(json.dumps(right[:1]))
    lost[0]["best"] = [[float("nan")] * 2] * 3
    return {
        "right": {"greedy": right, "scored": scored},
        "other": {"greedy": other, "scored": []},
        "lost": {"greedy": lost, "scored": [{"context": 300, "logprobs": [0.0] * 299}]},
    }


def test_filled_is_computed(judge: Any, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that only fills the cache, in steps of another size, leaves what a whole pass leaves."""
    tokens = load("slice").make_prompt(1, 700, 1200)
    model = judge.load(checkpoint, "cpu")
    whole = judge.Reference(model, 800).logprobs(tokens, 0)[690:]
    monkeypatch.setattr(judge, "CHUNK", 96)
    reference = judge.Reference(model, 800)
    reference.fill(tokens[:690])
    assert torch.allclose(reference.logprobs(tokens, 690), whole, atol=1e-5)
    layer = model.layers[-1]
    assert not {"_attend_sparse", "_attend_dense"} & set(vars(layer.self_attn))
    assert "forward" not in vars(layer.mlp)


def test_judge(judge: Any, checkpoint: Path, results: dict[str, Any]) -> None:
    todo, records = judge.tasks(results), {}
    assert [(task["kind"], task["context"], task["parts"]) for task in todo] == [
        ("greedy", 450, True),
        ("greedy", 200, False),
        ("scored", 300, False),
    ]
    reference = judge.Reference(judge.load(checkpoint, "cpu"), 600)
    judging = judge.judge(reference, todo, 1200, records)
    assert next(judging) == todo[0]["key"]
    lines = judge.report(list(results), todo, records)
    assert "| right, other | 1 | 1 | 0 |" in "\n".join(lines)
    assert lines[-1] == "not judged, out of time: 2 of 3, 0 of which part"
    assert list(judging) == [task["key"] for task in todo[1:]]
    lines = judge.report(list(results), todo, records)
    assert "| right | 6 of 6 | 0.0000 in the mean, 99 %: 0.000, most 0.000 | 0.0000 in the mean" in lines[2]
    assert lines[3].startswith("| other | 5 of 6 |")
    assert "| lost | 3 of 3 | inf in the mean" in lines[4]
    assert "99 %: 0.000" not in lines[4]
    assert "out of time" not in "".join(lines)
    partings = records[todo[0]["key"]]["partings"]
    assert [(p["pair"], p["context"], p["step"]) for p in partings] == [(["right", "other"], 450, 2)]


def test_judge_in_pieces(judge: Any, checkpoint: Path, results: dict[str, Any], tmp_path: Path) -> None:
    """Each prompt is written once judged; a run without time adds nothing; one that has all of it loads no model."""
    reference = judge.Reference(judge.load(checkpoint, "cpu"), 600, time.monotonic() - 1)
    todo = judge.tasks(results)
    assert list(judge.judge(reference, todo, 1200, {})) == []
    for name, result in results.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(result))
    paths = [str(tmp_path / f"{name}.json") for name in results]
    out = tmp_path / "judge.jsonl"

    def run(directory: Path, *options: str) -> list[str]:
        command = [
            sys.executable,
            str(FOLDER / "judge.py"),
            str(directory),
            *paths,
            "--device",
            "cpu",
            "--out",
            str(out),
        ]
        return subprocess.run([*command, *options], capture_output=True, text=True, check=True).stdout.splitlines()

    assert run(checkpoint, "--seconds", "0")[-1] == "not judged, out of time: 3 of 3, 1 of which part"
    out.write_text('{"key": "cut o')
    said = run(checkpoint)
    assert [line.split("  ")[-1].split(", ")[0] for line in said[:4]] == [
        "loaded",
        "1 of 3: greedy",
        "2 of 3: greedy",
        "3 of 3: scored",
    ]
    again = run(tmp_path / "no checkpoint")
    assert again == said[4:]
    assert again[0].startswith("| result |")
    # Another result is another question.
    results["other"]["greedy"][0]["tokens"][0] += 1
    (tmp_path / "other.json").write_text(json.dumps(results["other"]))
    said = run(checkpoint)
    assert "3 of 3: greedy, 200 tokens, " in said[1]
    assert said[2].startswith("| result |")

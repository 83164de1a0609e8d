"""benchmarks/vllm/through_gateway.py with this package's own worker in vLLM's place, whole and at fault."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import vllm_stand_in
from test_vllm_benchmarks import FOLDER, load
from test_vllm_benchmarks import checkpoint as checkpoint

TINY = Path(__file__).parents[2] / "checkpoints/tiny"
PLUGIN = Path(__file__).parents[2] / "msaserve/integrations/vllm"
SAYS = """
import os
print({ours!r} if os.environ["MSASERVE_VLLM"] == "1" else {stock!r}, flush=True)
"""
LEAVES = "import subprocess; subprocess.Popen(['sleep', '613'], start_new_session=True)"


def asked(tmp_path: Path, before: str, *options: str) -> tuple[int, dict[str, tuple[str, str]]]:
    """Exit code, and (PASS or FAIL, what was seen) of each check."""
    command = [sys.executable, str(FOLDER / "through_gateway.py"), str(TINY), "--out", str(tmp_path / "out"), *options]
    command += ["--vllm-args", "--max-model-len 2048", "--lengths", "20", "150"]
    environment = vllm_stand_in.environment(tmp_path, TINY, before)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    rows = re.findall(r"^\| (PASS|FAIL) \| (.*?) \| [\d.]+ \| (.*) \|$", done.stdout, re.MULTILINE)
    assert rows, done.stdout + done.stderr
    return done.returncode, {name: (state, seen) for state, name, seen in rows}


def sleeping(seconds: str) -> list[psutil.Process]:
    return [process for process in psutil.process_iter(["cmdline"]) if process.info["cmdline"] == ["sleep", seconds]]


@pytest.mark.slow
def test_whole(tmp_path: Path) -> None:
    """Each check passes with and without the plugin, whose lines are those that it writes."""
    lines = load("through_gateway").PLUGIN
    code, rows = asked(tmp_path, SAYS.format(**{name: f"msaserve: {line}" for name, line in lines.items()}), "--stock")
    assert {name: seen for name, (state, seen) in rows.items() if state != "PASS"} == {}
    assert code == 0
    assert len(rows) == 1 + 11 + 4 + 1 + 2
    assert json.loads(rows["ours and stock: greedy"][1])["equal tokens"] == [24, 24]
    for line, source in zip(lines.values(), ("msa_models.py", "__init__.py"), strict=True):
        assert line in (PLUGIN / source).read_text()


@pytest.mark.slow
def test_faults_are_found(tmp_path: Path) -> None:
    """No line of the plugin, and a process that outlives vLLM, which is ended all the same."""
    code, rows = asked(tmp_path, LEAVES)
    assert {name for name, (state, _) in rows.items() if state == "FAIL"} == {"ours: plugin", "ours: end"}
    assert "left running" in rows["ours: end"][1]
    assert code == 1
    assert sleeping("613") == []


def test_the_time_is_up(tmp_path: Path) -> None:
    """While the server starts: it ends with all it started."""
    code, rows = asked(tmp_path, "import subprocess; subprocess.run(['sleep', '614'])", "--stock", "--seconds", "8")
    assert {name: state for name, (state, _) in rows.items()} == {"checkpoint": "PASS", "ours: start": "FAIL"}
    assert code == 1
    assert sleeping("614") == []


def test_tokenizer_of_a_checkpoint_that_is_made(checkpoint: Path, tmp_path: Path) -> None:
    """Its special tokens are the checkpoint's, and a whole checkpoint is left as it is."""
    module = load("through_gateway")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    module.add_tokenizer(tmp_path)
    text = json.loads((tmp_path / "config.json").read_text())["text_config"]
    assert (text["bos_token_id"], text["eos_token_id"]) == (4065, 4067)
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", *module.TOKENIZER}
    assert module.make_checkpoint(tmp_path, "cpu")["made"] is False


def test_log_probabilities_are_compared_where_the_same_was_computed() -> None:
    module = load("through_gateway")

    def server(*tokens: int, logprob: float = -1.0, second: float = -1.1) -> object:
        answer = {"tokens": [*tokens, *[0] * (module.NUM_GREEDY - len(tokens))]}
        answer |= {"logprobs": [logprob] * module.NUM_GREEDY, "best": [[logprob, second]] * module.NUM_GREEDY}
        return SimpleNamespace(greedy=[answer])

    assert module.compared(server(1, 2), server(1, 2))["equal tokens"] == [module.NUM_GREEDY]
    assert module.compared(server(1, 2), server(1, 3))["equal tokens"] == [1]
    for other in (server(3, logprob=-1.1), server(1, 3, second=-3.0), SimpleNamespace(greedy=[])):
        with pytest.raises(module.WrongError):
            module.compared(server(1, 2), other)

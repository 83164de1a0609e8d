from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden_data import GOLDEN
from safetensors.torch import load_file, save_file

import msaserve
from msaserve import serve
from msaserve.cli import main
from msaserve.config import ModelConfig
from msaserve.serve import Serve

TINY = GOLDEN / "tiny"


def one_line(text: str) -> str:
    """An error is one line, and no traceback."""
    lines = text.splitlines()
    assert len(lines) == 1, text
    assert lines[0].startswith("msaserve: error: ")
    return lines[0]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"msaserve {msaserve.__version__}\n"


def test_help_and_import_load_no_torch() -> None:
    code = "import sys, msaserve.cli; assert 'torch' not in sys.modules; msaserve.cli.main(['serve', '--help'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False)
    assert result.returncode == 0, result.stderr
    for option in ("--host", "--port", "--api-key", "--kv-cache-gib", "--max-num-seqs", "--drain-seconds"):
        assert option in result.stdout


def test_serve_takes_the_small_trained_checkpoint_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ModelConfig.from_checkpoint(Serve().checkpoint).text.num_layers == 4
    missing = tmp_path / "none"
    monkeypatch.setattr(serve, "DEFAULT_CHECKPOINT", missing)
    assert main(["serve", str(missing)]) == 2
    assert "only a clone of the repository has" in one_line(capsys.readouterr().err)


def test_an_unknown_option() -> None:
    with pytest.raises(SystemExit) as raised:
        main(["serve", str(TINY), "--nonsense"])
    assert raised.value.code == 2


def test_check(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY), "--memory", "0.5", "--dtype", "float32"]) == 0
    rows = {line[:18].strip(): line[18:].strip() for line in capsys.readouterr().out.splitlines()}
    # 4 layers · K and V · 2 heads of 32 · 4 bytes; 3 sparse layers · 32 · 4 bytes.
    assert rows["KV per token"] == "2,048 B"
    assert rows["index-K per token"] == "384 B"
    weights = sum(t.numel() * 4 for t in load_file(TINY / "model.safetensors").values())
    assert rows["weights"] == f"{weights / 2**20:.2f} MiB in float32"
    pages = (2**29 - weights) // (16 * (2048 + 384)) - 1
    assert f"{pages:,} pages, {pages * 16:,} tokens" in rows["cache"]
    assert rows["longest request"] == f"{pages * 16:,} tokens"


def test_check_without_room(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY), "--memory", "0.001"]) == 1
    assert "leave no cache" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize("memory", ["nan", "inf", "0", "-1"])
def test_check_of_no_memory(memory: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(TINY), "--memory", memory]) == 2
    assert "memory must be a positive number of GiB" in one_line(capsys.readouterr().err)


def test_generate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("one\n\ntwo\n", encoding="utf-8")
    options = ["--kv-cache-gib", "0.01", "--max-tokens", "5", "--temperature", "0"]
    assert main(["generate", str(TINY), "--prompt", "one", "--file", str(prompts), "--json", *options]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["prompt"] for line in lines] == ["one", "one", "two"]
    assert lines[0] == lines[1]
    assert len(lines[2]["token_ids"]) == 5
    assert main(["generate", str(TINY), "--prompt", "one", *options]) == 0
    assert capsys.readouterr().out == lines[0]["text"] + "\n"
    assert main(["generate", str(TINY), "--prompt", "one", "--chat", "--json", *options]) == 0
    assert json.loads(capsys.readouterr().out)["token_ids"] != lines[0]["token_ids"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no prompt"),
        (["--file", "/nowhere/prompts"], "cannot be read"),
        (["--prompt", "x", "--max-num-seqs", "0"], "max_num_seqs must be positive"),
        (["--prompt", "x", "--attend-impl", "fast"], "attend_impl must be one of"),
        (["--prompt", "x", "y\udcff", "--kv-cache-gib", "0.01"], "a lone surrogate"),
    ],
)
def test_generate_refuses(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(TINY), *arguments]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_generate_reports_a_prompt_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--kv-cache-gib", "0.01", "--max-model-len", "32", "--max-tokens", "2"]
    assert main(["generate", str(TINY), "--prompt", "x" * 40, "y", *options]) == 1
    captured = capsys.readouterr()
    assert "40" in one_line(captured.err)
    assert len(captured.out.splitlines()) >= 1


def copy(tmp_path: Path) -> Path:
    directory = tmp_path / "checkpoint"
    shutil.copytree(TINY, directory, ignore=shutil.ignore_patterns("expected.safetensors"))
    return directory


def missing(directory: Path) -> str:
    shutil.rmtree(directory)
    return "does not exist"


def without_config(directory: Path) -> str:
    (directory / "config.json").unlink()
    return "config.json is missing"


def truncated(directory: Path) -> str:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100_000])
    return "model.safetensors"


def truncated_config(directory: Path) -> str:
    path = directory / "config.json"
    path.write_text(path.read_text()[:100])
    return "config.json cannot be read"


def other_model(directory: Path) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "llama"}))
    return "'llama'"


def wrong_shape(directory: Path) -> str:
    tensors = load_file(directory / "model.safetensors")
    tensors["language_model.model.norm.weight"] = torch.zeros(7)
    save_file(tensors, directory / "model.safetensors")
    return "language_model.model.norm.weight is [7], expected [96]"


def quantised(directory: Path) -> str:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp8"}}))
    return "mxfp8"


def without_tokenizer(directory: Path) -> str:
    (directory / "tokenizer.json").unlink()
    return "tokenizer.json cannot be read"


def bad_template(directory: Path) -> str:
    (directory / "chat_template.jinja").write_text("{% for %}")
    return "chat_template.jinja line 1"


@pytest.mark.parametrize(
    "spoil",
    [
        missing,
        without_config,
        truncated,
        truncated_config,
        other_model,
        wrong_shape,
        quantised,
        without_tokenizer,
        bad_template,
    ],
)
def test_bad_checkpoints(spoil: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    directory = copy(tmp_path)
    assert callable(spoil)
    message = spoil(directory)
    assert main(["serve", str(directory), "--port", "0", "--kv-cache-gib", "0.01"]) == 2
    assert message in one_line(capsys.readouterr().err)


def test_port_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", str(TINY), "--port", str(port)]) == 1
    assert f"cannot listen on 127.0.0.1 port {port}: Address already in use" in one_line(capsys.readouterr().err)


@pytest.mark.parametrize(
    ("host", "port"), [("127.0.0.1", "70000"), ("no.such.host.invalid", "0"), ("203.0.113.7", "0")]
)
def test_address_that_cannot_be(host: str, port: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", str(TINY), "--host", host, "--port", port, "--api-key", "k"]) == 1
    assert f"cannot listen on {host} port {port}" in one_line(capsys.readouterr().err)


def test_a_warning_without_a_key(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["serve", str(tmp_path / "none"), "--host", "0.0.0.0", "--port", "0"]
    assert main(arguments) == 2
    assert "warning: 0.0.0.0 is reachable from elsewhere" in capsys.readouterr().err
    assert main([*arguments, "--api-key", "k"]) == 2
    assert "msaserve: warning" not in capsys.readouterr().err
    monkeypatch.setenv("MSASERVE_API_KEY", "k")
    assert main(arguments) == 2
    assert "msaserve: warning" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--help"], ["check", str(TINY)]])
def test_a_reader_that_has_read_enough(arguments: list[str]) -> None:
    """As `msaserve serve --help | head -1`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "msaserve", *arguments]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=200, check=False)
    os.close(writer)
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")

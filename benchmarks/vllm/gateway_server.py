"""The servers that through_gateway.py asks: `msaserve serve --engine vllm`, and all they start."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil

from msaserve.integrations.vllm.launch import free_port

VLLM_ARGS = (
    "--load-format safetensors --max-model-len 16384 --max-num-seqs 32 --max-num-batched-tokens 8192 --enforce-eager"
    " --gpu-memory-utilization 0.3 --kv-cache-memory-bytes 4294967296"
    """ --structured-outputs-config '{"backend": "guidance", "disable_any_whitespace": true}' """
)
DEFAULTS = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",  # would be compiled at the first request
    "SMG_VLLM_SERVICER_WARMUP": "off",  # up to 300 s; every kernel meets its first request here
    "PYTHONUNBUFFERED": "1",
}


class WrongError(Exception):
    """What was seen in the place of what must be."""


def need(holds: object, seen: object) -> None:
    if not holds:
        raise WrongError(seen if isinstance(seen, str) else json.dumps(seen, ensure_ascii=False))


class Server:
    """`msaserve serve` and what it starts; it is "ours" or "stock"."""

    def __init__(self, name: str, checkpoint: Path, out: Path, vllm_args: str, cache: str) -> None:
        self.name, self._log, port = name, out / f"{name}.log", free_port()
        line = [sys.executable, "-m", "msaserve", "serve", str(checkpoint), "--engine", "vllm", "--port", str(port)]
        line += ["--served-model-name", "m3", f"--vllm-args={VLLM_ARGS}{vllm_args}"]
        switch = {"MSASERVE_VLLM": "1" if name == "ours" else "0", "VLLM_CACHE_ROOT": f"{cache}/{name}"}
        environment = {**DEFAULTS, **os.environ, **switch}
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # slice.py's, for an engine in its own process
        with self._log.open("w") as log:
            self._process = subprocess.Popen(line, env=environment, stdout=log, stderr=subprocess.STDOUT)
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=150)
        self.greedy: list[dict[str, Any]] = []
        self.context = 0

    def lines(self) -> list[str]:
        return [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]

    def wait(self) -> dict[str, Any]:
        """/ready is refused, then perhaps 503, then 200; once in 20 s the last line of its log is shown."""
        seen: list[int | str] = []
        shown = time.monotonic()
        while seen[-1:] != [200]:
            time.sleep(0.2)
            need(self._process.poll() is None, "\n".join(["it ended", *self.lines()[-12:]]))
            try:
                now: int | str = self.http.get("/ready", timeout=5).status_code
            except httpx.TransportError:
                now = "refused"
            seen += [now] if seen[-1:] != [now] else []
            if time.monotonic() > shown + 20:
                shown = time.monotonic()
                print(f"{self.name}: {(self.lines() or ['-'])[-1][:160]}", file=sys.stderr, flush=True)
        need(seen == [state for state in ("refused", 503, 200) if state in seen], seen)
        return {"/ready": seen}

    def post(self, path: str, **body: Any) -> dict[str, Any]:
        answer = self.http.post(path, json={"model": "m3", **body})
        need(answer.status_code == 200, f"{answer.status_code} {answer.text[:500]}")
        found: dict[str, Any] = answer.json()
        return found

    def metrics(self) -> dict[str, float]:
        lines = self.http.get("/metrics").raise_for_status().text.splitlines()
        pairs = [line.rsplit(" ", 1) for line in lines if line and not line.startswith("#")]
        return {name: float(value) for name, value in pairs}

    def num_running(self) -> float:
        """Requests, as the gateway and the engine count them: the larger."""
        found = [n for name, n in self.metrics().items() if re.search("num_requests_running|running_requests", name)]
        need(found, "/metrics does not say how many requests run")
        return max(found)

    def end(self) -> dict[str, Any]:
        """As Ctrl-C ends it. Whatever of it has not ended is killed."""
        below = self._below()
        try:
            need(self._process.poll() is None, f"it had ended with {self._process.returncode}")
            self._process.send_signal(signal.SIGINT)
            code = self._process.wait(50)
            left = [process for process in psutil.wait_procs(below, timeout=2)[1] if is_alive(process)]
            need(code in (0, 130) and not left, f"exit code {code}, left running: {left}")
        finally:
            self.kill(below)
        return {"exit code": code, "processes": 1 + len(below)}

    def kill(self, below: Sequence[psutil.Process] = ()) -> None:
        for process in (*below, *self._below()):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.kill()
        self._process.wait()

    def _below(self) -> list[psutil.Process]:
        is_there = self._process.poll() is None  # and not waited for, so the number is no other process's
        return psutil.Process(self._process.pid).children(recursive=True) if is_there else []


def is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    return False

"""Runs named jobs on a machine with a card until its time is up and keeps what each gave; `__main__` is the command."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SOURCES = ("msaserve", "benchmarks", "examples", "tests")
FOLDERS = ("peers", "vllm", "releases", "sglang")
"""What a user may give, each by an option of its own."""


@dataclass(frozen=True)
class Job:
    """A command for bash and what it needs.

    In the command these are filled in: {python}, {root}, {out} (a folder of its own), {all} (where the folders of all
    jobs are), {cores}, {seconds} (that are left, for a command that ends by itself), {releases} and {sglang} (given
    folders) and {with_peers} (an option, or nothing).
    """

    name: str
    command: str
    seconds: float
    """What it takes, about."""
    least: float = 60.0
    """Seconds that a command that can be told when to end must have."""
    alone: bool = False
    """It measures time: nothing else may run."""
    cores: int = 1
    gpu_gib: float = 2.0
    needs: tuple[str, ...] = ()
    """Of FOLDERS, those that must be given."""
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    """Jobs that must be done before."""
    files: tuple[str, ...] = ("**/*",)
    """What of its folder is packed."""
    partly: str = "out of time"
    """A pattern: where its log has it, the command has ended by itself with something left to do."""
    detached: bool = False
    """It goes on when the time is up; a later run collects it."""

    @property
    def least_seconds(self) -> float:
        """That must be left to start it."""
        return min(self.seconds, self.least) if self.detached or "{seconds}" in self.command else self.seconds


def commit(root: Path = ROOT) -> str:
    """Of the working tree; where it has other changes, or there is no git, a digest of the sources too."""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=12"]
    named = "no git"
    with suppress(OSError, subprocess.CalledProcessError):
        named = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not named.endswith("-dirty"):
            return named
    digest = hashlib.sha256()
    for path in sorted(path for folder in SOURCES for path in (root / folder).rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return f"{named} {digest.hexdigest()[:12]}"


def birth(pid: int) -> int | None:
    """When a process that lives began, in the kernel's ticks: a number alone may be another's by now."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in "ZX" else int(fields[19])
    return None


def lives(state: dict[str, Any]) -> bool:
    return state["birth"] is not None and birth(state["pid"]) == state["birth"]


@dataclass
class Run:
    """`states` holds of each job: state, seconds, last (line of its log), and the commit and command these are of."""

    jobs: Sequence[Job]
    out: Path
    end: float
    """Of time.monotonic(): what runs then is ended, but for detached jobs."""
    commit: str
    given: dict[str, str] = field(default_factory=dict)
    """FOLDERS, and "site" of further packages, as far as there are any."""
    cores: int = os.cpu_count() or 1
    gpu_gib: float = 130.0
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    _children: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __call__(self) -> None:
        (self.out / "logs").mkdir(parents=True, exist_ok=True)
        if (self.out / "state.json").exists():
            self.states = json.loads((self.out / "state.json").read_text())
        for job in self.jobs:
            self._look_up(job)
        try:
            while time.monotonic() < self.end:
                for job in self.running():
                    self._collect(job)
                self._start_what_fits()
                if not self.running():
                    break
                time.sleep(0.2)
        finally:
            for job in self.running():
                self._collect(job)
            self._stop([job for job in self.running() if not job.detached])
            self._keep()

    def running(self) -> list[Job]:
        return [job for job in self.jobs if self.states[job.name]["state"] == "running"]

    def _look_up(self, job: Job) -> None:
        """What a former run has left of it, and whether it can run here."""
        state = self.states.setdefault(job.name, {"state": "to do", "seconds": 0.0, "last": ""})
        if state["state"] == "running":
            if lives(state):
                if job.detached:
                    return
                self._signal(job, signal.SIGKILL)  # who should have ended it was killed
            self._collect(job)
        is_same = (state.get("commit"), state.get("command")) == (self.commit, self._kind(job))
        if state["state"] == "done" and (is_same or job.detached):
            return
        if not (is_same or job.detached):
            # Nothing of other code may be gone on with.
            shutil.rmtree(self.out / job.name, ignore_errors=True)
            state["seconds"] = 0.0
        reason = self._why_never(job)
        state.update({"state": "to do"} if reason is None else {"state": "left out", "last": reason})

    def _kind(self, job: Job) -> str:
        """The command, whatever folders and machine it is for."""
        return job.command.replace("{with_peers}", "--peers" if "peers" in self.given else "")

    def _why_never(self, job: Job) -> str | None:
        missing = [f"--{name}" for name in job.needs if name not in self.given]
        env = self._env(job)
        missing += [f"the program {name}" for name in job.programs if shutil.which(name, path=env["PATH"]) is None]
        code = f"from importlib.util import find_spec as f; print(*[m for m in {job.modules!r} if f(m) is None])"
        if job.modules:
            asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env)
            missing += [f"the module {name}" for name in asked.stdout.split()]
        return f"needs {', '.join(missing)}" if missing else None

    def _env(self, job: Job) -> dict[str, str]:
        env, given = {**os.environ, "PYTHONUNBUFFERED": "1"}, self.given
        paths = [
            str(ROOT),
            given.get("vllm") if "vllm" in job.needs else None,
            given.get("site"),
            env.get("PYTHONPATH"),
        ]
        env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        programs = [f"{given['site']}/bin"] if "site" in given else []
        env["PATH"] = os.pathsep.join([*programs, str(Path(sys.executable).parent), env.get("PATH", "")])
        return env

    def _start_what_fits(self) -> None:
        """In their order; what must be alone is not overtaken, or it would wait for ever."""
        for job in [job for job in self.jobs if self.states[job.name]["state"] == "to do"]:
            state, running, left = self.states[job.name], self.running(), self.end - time.monotonic()
            before = {name: self.states.get(name, {}).get("state", "to do") for name in job.after}
            if waits := [name for name, outcome in before.items() if outcome != "done"]:
                state["last"] = f"{waits[0]} is not done"
                continue
            if left < job.least_seconds:
                state["last"] = f"takes {job.seconds:.0f} s, {max(0.0, left):.0f} are left"
                continue
            if job.alone and running:
                if any(other.detached for other in running):
                    continue
                return
            cores = self.cores if job.alone else min(job.cores, self.cores)
            is_room = sum(min(other.cores, self.cores) for other in running) + cores <= self.cores
            is_room = is_room and sum(other.gpu_gib for other in running) + job.gpu_gib <= self.gpu_gib
            if not running or (is_room and not any(other.alone for other in running)):
                self._start(job, left, cores)

    def _start(self, job: Job, left: float, cores: int) -> None:
        state, out = self.states[job.name], self.out / job.name
        code, peers = self.out / f"{job.name}.rc", self.given.get("peers")
        out.mkdir(exist_ok=True)
        code.unlink(missing_ok=True)
        fields: dict[str, Any] = {"python": sys.executable, "root": ROOT, "all": self.out, "out": out, "cores": cores}
        fields |= {"with_peers": f"--peers {peers}" if peers else "", "seconds": int(left - min(10.0, left / 4))}
        command = job.command.format(**fields, **self.given)
        with (self.out / "logs" / f"{job.name}.log").open("ab") as log:
            log.write(f"\n$ {command}\n".encode())
            log.flush()
            state["offset"] = log.tell()  # before the command writes: it shares this place
            child = subprocess.Popen(
                ["bash", "-c", f"({command}\n)\necho $? >'{code}'"],
                cwd=ROOT,
                env=self._env(job),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            state.update(pid=child.pid, birth=birth(child.pid), started=time.time())
        self._children[job.name] = child
        state.update(state="running", last="", commit=self.commit, command=self._kind(job))
        print(f"{job.name} begins", flush=True)
        self._keep()

    def _collect(self, job: Job) -> None:
        """Its last line, and how it ended if it has."""
        state, code, log = self.states[job.name], self.out / f"{job.name}.rc", self.out / "logs" / f"{job.name}.log"
        has_ended = not lives(state)
        said = log.read_bytes()[state["offset"] :].decode(errors="replace").strip() if log.exists() else ""
        state["last"] = said.rpartition("\n")[2][-150:]
        if not has_ended:
            return
        if job.name in self._children:
            self._signal(job, signal.SIGKILL)  # what it has left running
            self._children.pop(job.name).wait()
        status = code.read_text().strip() if code.exists() else ""
        outcome = "partly" if re.search(job.partly, said, re.MULTILINE) else "done"
        outcome = "cut" if not status else outcome if status == "0" else f"failed: {status}"
        state.update(state=outcome, seconds=round(state["seconds"] + time.time() - state["started"], 1))
        print(f"{job.name}: {outcome}, {state['seconds']:.0f} s; {state['last']}", flush=True)
        self._keep()

    def _stop(self, jobs: list[Job]) -> None:
        """First asked to end, then made to."""
        until = time.monotonic() + 5
        for job in jobs:
            self._signal(job, signal.SIGTERM)
        for job in jobs:
            child = self._children[job.name]
            with suppress(ProcessLookupError):
                while time.monotonic() < until:
                    child.poll()
                    os.killpg(child.pid, 0)  # none of it is left
                    time.sleep(0.1)
            self._signal(job, signal.SIGKILL)
            child.wait()
            del self._children[job.name]
            self._collect(job)

    def _signal(self, job: Job, number: int) -> None:
        """To the job's whole process group."""
        with suppress(ProcessLookupError):
            os.killpg(self.states[job.name]["pid"], number)

    def _keep(self) -> None:
        new = self.out / "state.new"
        new.write_text(json.dumps(self.states, indent=1))
        new.replace(self.out / "state.json")

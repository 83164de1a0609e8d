"""The command that runs all that needs a card, with jobs that need none."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from waits import SECONDS, until

from benchmarks.card import __main__ as card
from benchmarks.card.run import ROOT, Job, Run, birth, commit


def run(out: Path, *jobs: Job, seconds: float = 200.0, at: str = "c0", **options: Any) -> Run:
    options = {"cores": 4, "gpu_gib": 100.0, **options}
    made = Run(jobs, out, time.monotonic() + seconds, at, **options)
    made()
    return made


def run_until(over: Callable[[Run], bool], out: Path, *jobs: Job, at: str = "c0") -> Run:
    """One whose time is up as soon as that is so, however busy the machine is."""

    class Ending(Run):
        def _start_what_fits(self) -> None:
            super()._start_what_fits()
            if over(self):
                self.end = 0.0

    made = Ending(jobs, out, time.monotonic() + SECONDS, at, cores=4, gpu_gib=100.0)
    made()
    return made


def states(made: Run) -> dict[str, str]:
    return {job.name: made.states[job.name]["state"] for job in made.jobs}


def spans(out: Path, *names: str) -> list[tuple[float, float]]:
    """When jobs of `span` ran."""
    read = [(out / name / "span").read_text().split() for name in names]
    return [(float(first), float(last)) for first, last in read]


def span(name: str, meets: str = "", **needs: Any) -> Job:
    """meets: it ends once that one has begun, too."""
    wait = f"until [ -s {{all}}/{meets}/span ]; do sleep 0.05; done" if meets else "sleep 0.3"
    return Job(name, f"date +%s.%N > {{out}}/span; {wait}; date +%s.%N >> {{out}}/span", 1, **needs)


def overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def test_one_that_fails_stops_no_other(tmp_path: Path) -> None:
    jobs = [Job("bad", "echo before; exit 3", 1), Job("gone", "no_such_program", 1), Job("good", "echo '5 | 6 µs'", 1)]
    made = run(tmp_path, *jobs)
    assert states(made) == {"bad": "failed: 3", "gone": "failed: 127", "good": "done"}
    text = card.summary(made, jobs, [])
    assert re.match(r"\d{4}-\d\d-\d\d, .*torch [\d.]+.*, commit c0\n", text)
    assert re.search(r"^\| good \| done \| \d+ \| 5 \\\| 6 µs \|$", text, re.MULTILINE)
    assert re.search(r"^\| bad \| failed: 3 \| \d+ \| before \|$", text, re.MULTILINE)
    assert (tmp_path / "logs" / "bad.log").read_text() == "\n$ echo before; exit 3\nbefore\n"


def test_one_that_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anybody has looked at it."""

    def begun(*args: Any, **options: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(*args, **options)
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        return child

    monkeypatch.setattr("benchmarks.card.run.subprocess", SimpleNamespace(**{**vars(subprocess), "Popen": begun}))
    begin = time.monotonic()
    assert states(run(tmp_path, Job("short", "true", 1), seconds=300.0)) == {"short": "done"}
    assert time.monotonic() - begin < 200


def test_time_is_up(tmp_path: Path) -> None:
    """What runs then ends with all it has started; what it has written stays; what is too long does not begin."""
    long = Job("long", "echo part > {out}/part; sleep 300 & echo $! > {out}/child; sleep 300", 1)
    deaf = Job("deaf", "trap '' TERM; echo here; touch {out}/here; while true; do sleep 0.1; done", 1)
    have_begun = lambda run: all((tmp_path / name).exists() for name in ("long/child", "deaf/here"))  # noqa: E731
    made = run_until(have_begun, tmp_path, long, deaf, Job("too_long", "true", 1000))
    assert states(made) == {"long": "cut", "deaf": "cut", "too_long": "to do"}
    assert made.states["too_long"]["last"].startswith("takes 1000 s, ")
    assert made.states["deaf"]["last"] == "here"
    assert (tmp_path / "long" / "part").read_text() == "part\n"
    assert birth(int((tmp_path / "long" / "child").read_text())) is None
    assert json.loads((tmp_path / "state.json").read_text()) == made.states


def test_commands_are_told_when_to_end(tmp_path: Path) -> None:
    made = run(tmp_path, Job("told", "echo {seconds} {cores}", 500, cores=9), seconds=70.0)
    seconds, cores = made.states["told"]["last"].split()
    assert 20 <= int(seconds) <= 60
    assert cores == "4"


def test_resume(tmp_path: Path) -> None:
    """Done once is done; what failed, was cut off or says that it has not done everything is gone on with."""
    count = "echo x >> {all}/{n}.count; echo x >> {out}/own; "
    good = Job("good", count.replace("{n}", "good"), 1)
    bad = Job("bad", count.replace("{n}", "bad") + "[ $(wc -l < {out}/own) = 2 ]", 1)
    slow = Job("slow", count.replace("{n}", "slow") + "[ $(wc -l < {out}/own) = 2 ] || sleep 300", 1)
    part = Job("part", count.replace("{n}", "part") + "[ $(wc -l < {out}/own) = 2 ] || echo not run, out of time", 1)
    jobs = (good, bad, slow, part)

    def only_slow(made: Run) -> bool:
        return made.running() == [slow] and (tmp_path / "slow" / "own").exists()

    first = states(run_until(only_slow, tmp_path, *jobs))
    assert first == {"good": "done", "bad": "failed: 1", "slow": "cut", "part": "partly"}
    assert set(states(run(tmp_path, *jobs)).values()) == {"done"}
    assert set(states(run(tmp_path, *jobs)).values()) == {"done"}
    counts = [len((tmp_path / f"{job.name}.count").read_text()) // 2 for job in jobs]
    assert counts == [1, 2, 2, 2]
    # Other code, or another command: again, and nothing of the former run is gone on with.
    run(tmp_path, good, at="c1")
    assert (tmp_path / "good" / "own").read_text() == "x\n"
    run(tmp_path, Job("good", good.command + "true", 1), at="c1")
    assert (tmp_path / "good" / "own").read_text() == "x\n"
    assert len((tmp_path / "good.count").read_text()) // 2 == 3


def test_which_code(tmp_path: Path) -> None:
    """Changes that are not committed are another commit's, each time they change."""
    source = tmp_path / "msaserve" / "code.py"
    source.parent.mkdir()
    source.write_text("1")
    without = commit(tmp_path)
    source.write_text("2")
    assert commit(tmp_path) != without
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *arguments], check=True)
    clean = commit(tmp_path)
    assert re.fullmatch(r"[0-9a-f]{12}", clean)
    source.write_text("3")
    dirty = commit(tmp_path)
    source.write_text("4")
    assert len({clean, dirty, commit(tmp_path)}) == 3
    source.write_text("2")
    assert commit(tmp_path) == clean


def test_peers_make_another_command(tmp_path: Path) -> None:
    job = Job("timed", "echo with {with_peers}", 1)
    assert run(tmp_path, job).states["timed"]["last"] == "with"
    assert run(tmp_path, job, given={"peers": "/somewhere"}).states["timed"]["last"] == "with --peers /somewhere"
    made = run(tmp_path, job, given={"peers": "/elsewhere"})
    assert made.states["timed"]["last"] == "with --peers /somewhere"


def test_who_runs_beside_whom(tmp_path: Path) -> None:
    jobs = [span("one", "two", cores=2), span("two", "one", cores=2), span("timed", alone=True), span("other")]
    assert set(states(run(tmp_path, *jobs)).values()) == {"done"}
    one, two, timed, other = spans(tmp_path, "one", "two", "timed", "other")
    assert overlap(one, two)
    assert not any(overlap(timed, at) for at in (one, two, other))
    assert timed[0] < other[0], "overtaken"


@pytest.mark.parametrize("needs", [{"cores": 3}, {"gpu_gib": 60.0}])
def test_cores_and_memory_are_counted(tmp_path: Path, needs: dict[str, Any]) -> None:
    """Two that are too large together; a small one beside the first; one that is larger than the machine, by itself."""
    huge = span("huge", **{name: 10 * value for name, value in needs.items()})
    jobs = (span("one", "small", **needs), span("two", **needs), span("small", "one"), huge)
    assert set(states(run(tmp_path, *jobs)).values()) == {"done"}
    one, two, small, huge_at = spans(tmp_path, "one", "two", "small", "huge")
    assert not overlap(one, two)
    assert overlap(one, small)
    assert not any(overlap(huge_at, at) for at in (one, two, small))


def trainer(tmp_path: Path, last: str = "done") -> Job:
    """Until there is a file "go" it only begins."""
    command = "echo step 1; echo w1 > {out}/weights; until [ -e {all}/go ]; do sleep 0.1; done; echo w2 > {out}/weights"
    return Job("train", f"{command}; echo {last}", 1, detached=True, partly="^to be resumed")


def test_detached(tmp_path: Path) -> None:
    """It outlives the run that began it; later ones collect what there is, and then what waits for it runs."""
    jobs = (trainer(tmp_path), Job("evaluate", "cat {all}/train/weights", 1, after=("train",)))
    made = run_until(lambda _: (tmp_path / "train" / "weights").exists(), tmp_path, *jobs)
    assert states(made) == {"train": "running", "evaluate": "to do"}
    pid = made.states["train"]["pid"]
    try:
        timed = Job("timed", "true", 1, alone=True)
        beside = Job("beside", "true", 1)
        is_done = lambda run: run.states["beside"]["state"] == "done"  # noqa: E731
        made = run_until(is_done, tmp_path, timed, *jobs, beside, at="c1")
        assert states(made) == {"timed": "to do", "train": "running", "evaluate": "to do", "beside": "done"}
        assert (made.states["train"]["last"], made.states["train"]["commit"]) == ("step 1", "c0")
        (tmp_path / "go").touch()
        made = run(tmp_path, *jobs, at="c1")
        assert states(made) == {"train": "done", "evaluate": "done"}
        assert made.states["evaluate"]["last"] == "w2"
        assert made.states["train"]["seconds"] > 0
    finally:
        if birth(pid) is not None:
            os.killpg(pid, signal.SIGKILL)


def test_detached_on_a_machine_that_is_gone(tmp_path: Path) -> None:
    """Its number may be another process's here, which is let alone; it begins again where its files end."""
    (tmp_path / "go").touch()
    run(tmp_path, trainer(tmp_path))
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        kept = json.loads((tmp_path / "state.json").read_text())
        kept["train"] |= {"state": "running", "pid": other.pid, "birth": 1}
        (tmp_path / "state.json").write_text(json.dumps(kept))
        (tmp_path / "train.rc").unlink()
        again = Job("train", "cat {out}/weights", 1, detached=True)
        made = run(tmp_path, again, at="c1")
        assert (made.states["train"]["state"], made.states["train"]["last"]) == ("done", "w2")
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_detached_that_ended_by_itself(tmp_path: Path) -> None:
    (tmp_path / "go").touch()
    assert states(run(tmp_path, trainer(tmp_path, "to be resumed: step 9"))) == {"train": "partly"}
    assert states(run(tmp_path, trainer(tmp_path, "done: step 20"))) == {"train": "done"}


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    jobs = (
        Job("module", "true", 1, modules=("json", "no_such_module")),
        Job("program", "true", 1, programs=("bash", "no_such_program")),
        Job("folder", "ls {releases}", 1, needs=("releases",)),
        Job("after", "true", 1, after=("module",)),
    )
    made = run(tmp_path, *jobs)
    assert {job.name: (made.states[job.name]["state"], made.states[job.name]["last"]) for job in jobs} == {
        "module": ("left out", "needs the module no_such_module"),
        "program": ("left out", "needs the program no_such_program"),
        "folder": ("left out", "needs --releases"),
        "after": ("to do", "module is not done"),
    }
    # What came with wheels counts, to look for and to run.
    (tmp_path / "site" / "bin").mkdir(parents=True)
    (tmp_path / "site" / "no_such_module.py").write_text("print('found')")
    (tmp_path / "site" / "bin" / "no_such_program").write_text("#!/bin/sh\n")
    (tmp_path / "site" / "bin" / "no_such_program").chmod(0o755)
    jobs = (
        Job("module", "{python} -c 'import no_such_module'", 1, modules=("no_such_module",)),
        Job("program", "no_such_program", 1, programs=("no_such_program",)),
    )
    made = run(tmp_path, *jobs, given={"site": str(tmp_path / "site")})
    assert states(made) == {"module": "done", "program": "done"}
    assert made.states["module"]["last"] == "found"


def test_a_run_that_was_killed(tmp_path: Path) -> None:
    """What it left running is ended by the next one, which begins it again."""
    code = f"""
import sys, time; sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from benchmarks.card.run import Job, Run
job = Job("job", "echo $$ > {{out}}/pid; [ -e {{all}}/again ] || sleep 300", 1)
Run([job], Path({str(tmp_path)!r}), time.monotonic() + 60, "c0", cores=4)()
"""
    killed = subprocess.Popen([sys.executable, "-c", code])
    until(lambda: (tmp_path / "job" / "pid").exists() and (tmp_path / "job" / "pid").read_text() != "")
    killed.kill()
    killed.wait()
    pid = int((tmp_path / "job" / "pid").read_text())
    assert birth(pid) is not None
    (tmp_path / "again").touch()
    made = run(tmp_path, Job("job", "echo $$ > {out}/pid; [ -e {all}/again ] || sleep 300", 1))
    assert states(made) == {"job": "done"}
    until(lambda: birth(pid) is None)


def test_packed_and_unpacked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "PART", 1 << 16)
    monkeypatch.setattr(card, "MOST", 1 << 18)
    job = Job(
        "job", "mkdir {out}/a; head -c 150000 /dev/urandom > {out}/a/kept; head -c 200000 /dev/zero > {out}/big", 1
    )
    other = Job("other", "touch {out}/x {out}/y", 1, files=("x",))
    made = run(tmp_path / "one", job, other)
    said = card.pack(made, [job, other])
    packed = tmp_path / "one" / "pack"
    assert "not packed, too large: job/big" in said
    assert (packed / "summary.md").read_text() == said
    parts = sorted(packed.glob("card.tar.gz.*"))
    assert len(parts) == 3
    assert all(path.stat().st_size <= 1 << 16 for path in parts)
    card.unpack(packed, tmp_path / "two")
    found = {str(path.relative_to(tmp_path / "two")) for path in (tmp_path / "two").rglob("*") if path.is_file()}
    assert found == {"job/a/kept", "other/x", "logs/job.log", "logs/other.log", "state.json"}
    kept = (tmp_path / "one" / "job" / "a" / "kept").read_bytes()
    assert (tmp_path / "two" / "job" / "a" / "kept").read_bytes() == kept
    # Elsewhere, what is done stays done.
    begins = (tmp_path / "two" / "logs" / "job.log").read_text()
    assert set(states(run(tmp_path / "two", job, other)).values()) == {"done"}
    assert (tmp_path / "two" / "logs" / "job.log").read_text() == begins
    # A smaller pack leaves no part of the larger one.
    monkeypatch.setattr(card, "PART", 1 << 20)
    card.pack(made, [job, other])
    assert len(list(packed.glob("card.tar.gz.*"))) == 1


def command_line(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.card", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_command(tmp_path: Path) -> None:
    """Without a peer or time for anything: a summary all the same. Then it must be told to go on."""
    done = command_line("--out", str(tmp_path), "--seconds", "16", "--jobs", "decode,vllm_turns")
    assert done.returncode == 0, done.stderr
    assert "| decode | to do | 0 | takes" in done.stdout
    assert "| vllm_turns | left out | 0 | needs --vllm" in done.stdout
    assert commit() in (tmp_path / "pack" / "summary.md").read_text()
    again = command_line("--out", str(tmp_path), "--seconds", "16", "--jobs", "decode")
    assert again.returncode == 2
    assert "--resume goes on with it" in again.stderr
    new = command_line(
        "--out", str(tmp_path / "new"), "--seconds", "16", "--jobs", "decode", "--resume", str(tmp_path / "pack")
    )
    assert new.returncode == 0, new.stderr
    assert (tmp_path / "new" / "state.json").exists()
    again = command_line("--out", str(tmp_path / "new"), "--seconds", "16", "--jobs", "decode", "--resume")
    assert again.returncode == 0, again.stderr
    wrong = command_line("--out", str(tmp_path / "x"), "--jobs", "decode,decoed")
    assert wrong.returncode == 2
    assert "no job decoed; there are decode, prefill" in wrong.stderr


def test_told_to_end(tmp_path: Path) -> None:
    """What there is by then is packed, and nothing is left running."""
    code = f"""
import sys
sys.argv = ["card", "--out", {str(tmp_path)!r}, "--jobs", "job"]
from benchmarks.card import __main__ as card
card.JOBS = (card.Job("job", "echo $$ > {{out}}/pid; sleep 300", 1),)
card.main()
"""
    told = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until(lambda: (tmp_path / "job" / "pid").exists() and (tmp_path / "job" / "pid").read_text() != "")
    told.terminate()
    assert told.wait(200) == 1
    assert birth(int((tmp_path / "job" / "pid").read_text())) is None
    assert "| job | cut |" in (tmp_path / "pack" / "summary.md").read_text()

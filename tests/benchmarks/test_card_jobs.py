"""The jobs that need a card: their commands fit the scripts, and what the two that are scripts themselves do."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.card.jobs import JOBS, SGLANG, TRAIN, TURNS
from benchmarks.card.run import FOLDERS, ROOT, Job


def test_default_list() -> None:
    """What times the operators comes first, in quiet; every job it waits for comes before it."""
    names = [job.name for job in JOBS]
    assert len(set(names)) == len(names)
    assert names[:5] == ["decode", "prefill", "dense", "context", "decode_shared"]
    quiet = [job.alone for job in JOBS]
    assert quiet == sorted(quiet, reverse=True)
    for job in JOBS:
        assert all(names.index(name) < names.index(job.name) for name in job.after)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_commands_fit_their_scripts(job: Job) -> None:
    """Each script is there, and it or one beside it knows each option."""
    fields = dict.fromkeys(("python", "root", "out", "all", "cores", "seconds", "with_peers", *FOLDERS), "X")
    command = job.command.format(**fields | {"root": str(ROOT)}).replace(f"{ROOT}/", "")
    modules = re.findall(r"-m (examples\S+)", command)
    scripts = re.findall(r"benchmarks/\S+\.(?:py|sh)", command) + [f"{name.replace('.', '/')}.py" for name in modules]
    if job.name.startswith("tests_"):
        scripts = ["benchmarks/card/once.py"]
    assert scripts
    known = "".join(path.read_text() for name in scripts for path in (ROOT / name).parent.glob("*.py"))
    assert all((ROOT / name).is_file() for name in scripts)
    for option in re.findall(r" --(\S+)", command):
        assert f'"--{option}"' in known or re.search(rf"^    {option.replace('-', '_')}: ", known, re.MULTILINE), option


STUB = """#!/bin/bash
echo "$@" >> {folder}/calls
case "$*" in
    *vllm.general_plugins*) [ ! -e {folder}/no_plugin ] || exit 1;;
    *--serve*) mkdir "${{@: -1}}"; [ -e {folder}/broken ] && exit 1; sleep 0.3; touch "${{@: -1}}/ready"; sleep 60;;
    *turns.py*) echo "turns ${{@: -1}}"; echo [] > table.json;;
    *compare.py*) echo compared;;
esac
"""


def script(command: str, folder: Path, **fields: str) -> subprocess.CompletedProcess[str]:
    """A job's command with a program in python's place that writes down what it is asked."""
    (folder / "python").write_text(STUB.format(folder=folder))
    (folder / "python").chmod(0o755)
    (folder / "calls").write_text("")
    command = command.format(python=folder / "python", root="ROOT", out=folder / "out", **fields)
    (folder / "out").mkdir(exist_ok=True)
    done = subprocess.Popen(["bash", "-c", f"({command}\n)"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert done.stdout is not None
    try:
        code = done.wait(200)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(done.pid, signal.SIGKILL)
    return subprocess.CompletedProcess([], code, done.stdout.read())


def test_two_servers_by_turns(tmp_path: Path) -> None:
    """Asked when both are ready, with the seconds that are left; one that cannot start ends it."""
    done = script(TURNS, tmp_path, seconds="500")
    assert done.returncode == 0
    said = done.stdout.splitlines()
    assert said[1:] == ["compared"]
    assert 300 <= int(said[0].removeprefix("turns ")) <= 500
    (tmp_path / "broken").touch()
    assert script(TURNS, tmp_path, seconds="500").returncode == 1
    assert "turns.py" not in (tmp_path / "calls").read_text()
    (tmp_path / "no_plugin").touch()
    assert script(TURNS, tmp_path, seconds="500").returncode == 1
    assert "slice.py" not in (tmp_path / "calls").read_text()


def test_training_goes_on(tmp_path: Path) -> None:
    """From its state; where that is lost, from a copy of the checkpoint."""
    assert script(TRAIN, tmp_path).returncode == 0
    assert (tmp_path / "calls").read_text().strip().endswith("--minutes 20.5 --save-minutes 2")
    (tmp_path / "out" / "checkpoint").mkdir()
    (tmp_path / "out" / "checkpoint" / "progress.json").write_text("{}")
    script(TRAIN, tmp_path)
    assert (tmp_path / "calls").read_text().strip().endswith(f"--resume-from {tmp_path}/out/former")
    assert (tmp_path / "out" / "former" / "progress.json").exists()
    (tmp_path / "out" / "state").mkdir()
    (tmp_path / "out" / "state" / "state.pt").touch()
    script(TRAIN, tmp_path)
    assert "--resume-from" not in (tmp_path / "calls").read_text()


def test_every_unpacked_release_is_run(tmp_path: Path) -> None:
    for release in ("0.5.16", "0.5.23"):
        (tmp_path / "releases" / release).mkdir(parents=True)
    assert script(SGLANG, tmp_path, sglang=str(tmp_path / "releases")).returncode == 0
    releases = f"{tmp_path}/releases/0.5.16 {tmp_path}/releases/0.5.23"
    assert (tmp_path / "calls").read_text() == f"benchmarks/sglang/step.py {releases} --timeout 150\n"

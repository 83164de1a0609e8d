"""What was measured and checked on a card, once more, by one command on a machine that has one.

    python -m benchmarks.card --out DIR [--seconds 570] [--jobs decode,conformance,…] [--peers DIR] [--wheels DIR] …
    python -m benchmarks.card --out DIR --resume [PACK]

Jobs that measure time run alone, others beside each other as far as cores and the card's memory reach. Each has a log
and a folder in DIR; DIR/pack gets summary.md and all of it as card.tar.gz.N, files of at most 15 MiB. The command ends
in its time. With --resume the next one leaves out what is done (same commit, same command) and goes on with the rest;
PACK is such a folder from a machine that is gone. A training goes on between the two.
"""

from __future__ import annotations

import argparse
import io
import signal
import subprocess
import sys
import tarfile
import time
from contextlib import suppress
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from benchmarks.card.jobs import JOBS
from benchmarks.card.run import FOLDERS, Job, Run, commit

PART, MOST = 15 << 20, 60 << 20
"""Bytes of a packed file, and of what is packed before it is compressed: the smallest files first."""
PACKING = 15.0
"""Seconds kept for it."""


def machine() -> list[str]:
    """Date, card and versions, as a table of measurements names them."""
    found = [date.today().isoformat()]
    with suppress(OSError):
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        found += subprocess.run(command, capture_output=True, text=True).stdout.strip().splitlines()
    for name in ("torch", "triton"):
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return found


def summary(run: Run, jobs: list[Job], left_out: list[str]) -> str:
    lines = [
        ", ".join([*machine(), f"commit {run.commit}"]),
        "",
        "| job | state | seconds | last line |",
        "|---|---|--:|---|",
    ]
    for job in jobs:
        state = run.states[job.name]
        last = state["last"].replace("|", "\\|")
        lines.append(f"| {job.name} | {state['state']} | {state['seconds']:.0f} | {last} |")
    return "\n".join(lines + [f"\nnot packed, too large: {', '.join(left_out)}"] * bool(left_out)) + "\n"


def pack(run: Run, jobs: list[Job]) -> str:
    """Returns the summary, which lies beside the packed files."""
    out, to = run.out, run.out / "pack"
    to.mkdir(exist_ok=True)
    found = {path for job in jobs for pattern in job.files for path in (out / job.name).glob(pattern)}
    found |= {out / "state.json", *(out / "logs").glob("*.log")}
    files, size, left_out = [], 0, []
    for path in sorted((path for path in found if path.is_file()), key=lambda path: path.stat().st_size):
        size += path.stat().st_size
        (files.append(path) if size < MOST else left_out.append(str(path.relative_to(out))))
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
        for path in files:
            archive.add(path, path.relative_to(out))
    for old in to.glob("card.tar.gz.*"):
        old.unlink()
    for number, start in enumerate(range(0, len(buffer.getbuffer()), PART)):
        (to / f"card.tar.gz.{number}").write_bytes(buffer.getbuffer()[start : start + PART])
    text = summary(run, jobs, left_out)
    (to / "summary.md").write_text(text)
    return text


def unpack(packed: Path, out: Path) -> None:
    parts = sorted(packed.glob("card.tar.gz.*"), key=lambda path: int(path.suffix[1:]))
    with tarfile.open(fileobj=io.BytesIO(b"".join(path.read_bytes() for path in parts))) as archive:
        archive.extractall(out, filter="data")


def install(wheels: Path, site: Path) -> None:
    """Into a folder of their own: what the machine has stays as it is."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-index",
        "--no-deps",
        "--upgrade",
        "--target",
        str(site),
    ]
    subprocess.run([*command, *map(str, sorted(wheels.glob("*.whl")))], check=True)


def main() -> None:
    started = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.card", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=570.0, help="of this command, packing included")
    parser.add_argument("--jobs", default=",".join(job.name for job in JOBS), help="in this order; by default all")
    parser.add_argument("--resume", nargs="?", const=True, metavar="PACK")
    parser.add_argument("--peers", type=Path, help="folder with vLLM's kernels, timed beside ours")
    parser.add_argument("--vllm", type=Path, help="folder with vLLM and what it imports")
    parser.add_argument("--releases", type=Path, help="what scripts/vllm_facts.py --keep left")
    parser.add_argument("--sglang", type=Path, help="folder of unpacked releases of SGLang, each named as its version")
    parser.add_argument("--wheels", type=Path, help="folder of wheels that jobs need and the machine lacks")
    parser.add_argument("--gpu-gib", type=float, default=130.0, help="of the card's memory, for jobs beside each other")
    options = parser.parse_args()
    known = {job.name: job for job in JOBS}
    if unknown := [name for name in options.jobs.split(",") if name not in known]:
        parser.error(f"no job {', '.join(unknown)}; there are {', '.join(known)}")
    jobs, out = [known[name] for name in options.jobs.split(",")], options.out.resolve()
    if (out / "state.json").exists() and not options.resume:
        parser.error(f"{out} holds a former run: --resume goes on with it")
    if isinstance(options.resume, str) and not (out / "state.json").exists():
        unpack(Path(options.resume), out)
    given = {name: getattr(options, name) for name in FOLDERS if getattr(options, name)}
    if options.wheels:
        given["site"] = out / "site"
        if not given["site"].exists():
            install(options.wheels, given["site"])
    given = {name: str(path.resolve()) for name, path in given.items()}
    run = Run(jobs, out, started + options.seconds - PACKING, commit(), given, gpu_gib=options.gpu_gib)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("told to end"))
    try:
        run()
    finally:
        print(pack(run, jobs))


if __name__ == "__main__":
    main()

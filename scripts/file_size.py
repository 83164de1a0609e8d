"""Fail if a Python file outgrows its limit: 500 lines, 700 for kernel files. Small files are found and read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LIMIT = 500
KERNEL_LIMIT = 700


def is_kernel(path: Path) -> bool:
    return path.parts[:2] == ("msaserve", "ops") and ("triton" in path.name or "gluon" in path.name)


def main() -> int:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    too_long = []
    for path in (Path(name) for name in listed):
        if not path.exists():
            continue
        lines = len(path.read_text(encoding="utf-8").splitlines())
        limit = KERNEL_LIMIT if is_kernel(path) else LIMIT
        if lines > limit:
            too_long.append(f"{path}: {lines} lines, the limit is {limit}")
    print("\n".join(too_long) if too_long else "file sizes: all within the limit")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())

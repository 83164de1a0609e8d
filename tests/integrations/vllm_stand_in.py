"""This package's own worker in the place of `vllm serve --grpc`: an environment in which `vllm` can be imported."""

from __future__ import annotations

import os
from pathlib import Path

STAND_IN = """
import json, os, sys
given = sys.argv[1:]
with open(os.environ["SEEN"], "w") as file:
    json.dump({"argv": given, "plugins": os.environ.get("VLLM_PLUGINS")}, file)
exec(os.environ["BEFORE"])
option = dict(zip(given, given[1:]))
address = option["--host"] + ":" + option["--port"]
from msaserve.cli import main
options = ["--served-model-name", option["--served-model-name"], "--max-model-len", option["--max-model-len"]]
sys.exit(main(["worker", os.environ["CHECKPOINT"], "--grpc", address, *options]))
"""


def environment(folder: Path, checkpoint: Path, before: str = "") -> dict[str, str]:
    """Modules `vllm` and `smg_grpc_servicer` in `folder`.

    `checkpoint` is what the worker serves, whatever it is asked for. It writes its arguments and VLLM_PLUGINS to the
    file SEEN, and runs the code `before` first.
    """
    package = folder / "vllm/entrypoints/cli"
    package.mkdir(parents=True)
    for inner in (package, package.parent, package.parent.parent):
        (inner / "__init__.py").touch()
    (package / "main.py").write_text(STAND_IN)
    (folder / "smg_grpc_servicer").mkdir()
    (folder / "smg_grpc_servicer/__init__.py").touch()
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    given = {"PYTHONPATH": path, "SEEN": str(folder / "seen.json"), "CHECKPOINT": str(checkpoint), "BEFORE": before}
    return {**os.environ, **given}

"""An unpacked SGLang release imported without its installation, and our plugin loaded by SGLang's own loader."""

from __future__ import annotations

import ast
import importlib
import os
import sys
import tempfile
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SPARSE = "sglang.srt.layers.attention.minimax_sparse"
KERNELS = "sglang.kernels.ops.attention.minimax_sparse"
ENTRIES = ("minimax_sparse_prefill", "minimax_sparse_decode")
PAGE = 128


def module(name: str, path: Path | None = None, **names: Any) -> ModuleType:
    """A module of these names, or a package whose own __init__ is not run."""
    made = ModuleType(name)
    made.__dict__.update(names)
    made.__path__ = [] if path is None else [str(path)]
    sys.modules[name] = made
    parent, _, child = name.rpartition(".")
    if parent in sys.modules:
        setattr(sys.modules[parent], child, made)
    return made


def import_release(root: Path) -> ModuleType:
    """The module of SGLang's two entry functions, imported over stand-ins for what needs a whole installation."""
    is_cuda = DEVICE == "cuda"
    for name in ("sglang", "sglang.kernels", "sglang.kernels.ops", "sglang.kernels.ops.attention"):
        module(name, root / name.replace(".", "/"))
    platform = SimpleNamespace(is_sm90=is_cuda and torch.cuda.get_device_capability()[0] == 9)
    module("sglang.utils", is_in_ci=lambda: False)
    importlib.import_module("sglang.srt")
    other_hardware = dict.fromkeys(("is_hip", "is_npu", "is_xpu", "is_gfx95_supported"), lambda: False)
    module("sglang.srt.utils", is_cuda=lambda: is_cuda, **other_hardware)
    cuda_version = tuple(int(part) for part in (torch.version.cuda or "0.0").split("."))
    module("sglang.srt.utils.common", is_cuda=lambda: is_cuda, get_cuda_version=lambda: cuda_version)
    # Its server runs with --page-size 128.
    server = SimpleNamespace(page_size=PAGE)
    module("sglang.srt.runtime_context", get_platform=lambda: platform, get_server_args=lambda: server)
    return importlib.import_module(f"{SPARSE}_ops.minimax_sparse")


def build_topk(root: Path) -> str:
    """What selects a decode's blocks: the release's CUDA kernel, built here, or else its Triton kernels."""
    paths = ("sglang/kernels/ops/attention/minimax_decode_topk", "sglang/jit_kernel/minimax_decode_topk")
    try:
        if DEVICE == "cpu":
            raise RuntimeError("there is no card")
        path = next(path for path in paths if (root / f"{path}.py").is_file())
        importlib.import_module(path.replace("/", "."))._jit_module(torch.int64)
    except Exception as error:
        os.environ["SGLANG_OPT_USE_MINIMAX_DECODE_TOPK_RADIX"] = "0"
        return f"its Triton kernels ({failure(error)})"
    return "its CUDA kernel"


def import_backend(root: Path, entries: ModuleType) -> type:
    """The backend's class with the release's own methods; no base class, and None where a server set nothing."""
    tree = ast.parse((root / f"{SPARSE.replace('.', '/')}_backend.py").read_text())
    tree.body = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "MiniMaxSparseAttnBackend"]
    for found in tree.body:
        assert isinstance(found, ast.ClassDef)
        found.bases = []
    tree.body = [*ast.parse("from __future__ import annotations").body, *tree.body]
    # Early releases import the entry functions at the top of this module.
    names = {name: getattr(entries, name) for name in ENTRIES}
    made = module(f"{SPARSE}_backend", torch=torch, **names)
    exec(compile(tree, made.__name__, "exec"), made.__dict__)
    backend: type = made.MiniMaxSparseAttnBackend
    backend.__getattr__ = lambda self, name: None  # type: ignore[attr-defined]
    return backend


def load_plugin() -> None:
    """SGLang's own loader finds our entry point, runs it and applies the hooks."""
    os.environ["SGLANG_PLUGINS"] = "msaserve"
    if DEVICE == "cpu":
        os.environ["MSASERVE_SGLANG"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        if "msaserve" not in entry_points(group="sglang.srt.plugins").names:
            # As pip would leave it.
            text = (REPOSITORY / "pyproject.toml").read_text()
            entry = text.partition('[project.entry-points."sglang.srt.plugins"]\n')[2].partition("\n")[0]
            installed = Path(folder) / "msaserve-0.dist-info"
            installed.mkdir()
            (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: msaserve\nVersion: 0\n")
            (installed / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{entry.replace(chr(34), '')}\n")
            sys.path.append(folder)
        importlib.import_module("sglang.srt.plugins").load_plugins()


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:160]

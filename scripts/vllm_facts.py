"""What the vLLM plugin relies on, as facts about a vLLM release: names, signatures and attributes, never source.

    python scripts/vllm_facts.py 0.34.0              # writes tests/integrations/facts/vllm-0.34.0.json
    python scripts/vllm_facts.py 0.34.0 --keep DIR   # and leaves the files that were read in DIR/0.34.0

Downloads the release's wheel (hundreds of MB) through pip, reads it without installing or importing anything, and
forgets it. tests/integrations/test_vllm_contract.py says what the facts must be.
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FACTS = Path(__file__).parents[1] / "tests/integrations/facts"
M3 = "vllm/models/minimax_m3"

WANTED: dict[str, tuple[str, ...]] = {
    f"{M3}/__init__.py": (),
    f"{M3}/common/indexer.py": (
        "MiniMaxM3Indexer",
        "MiniMaxM3IndexerCache",
        "MiniMaxM3IndexerDecodeMetadata",
        "MiniMaxM3IndexerImpl",
        "MiniMaxM3IndexerMetadata",
        "MiniMaxM3IndexerPrefillMetadata",
        "MiniMaxM3IndexerTritonImpl",
        "select_indexer_impl_cls",
    ),
    f"{M3}/common/sparse_attention.py": (
        "MiniMaxM3SparseBackend",
        "MiniMaxM3SparseDecodeMetadata",
        "MiniMaxM3SparseImpl",
        "MiniMaxM3SparseMetadata",
        "MiniMaxM3SparsePrefillMetadata",
        "MiniMaxM3SparseTritonImpl",
        "select_main_backend_and_impl_cls",
        "select_main_impl_cls",
    ),
    f"{M3}/nvidia/model.py": ("MiniMaxM3SparseAttention",),
    "vllm/config/__init__.py": (),
    "vllm/config/attention.py": ("AttentionConfig",),
    "vllm/config/cache.py": ("CacheConfig",),
    "vllm/config/model.py": ("ModelConfig",),
    "vllm/config/vllm.py": ("VllmConfig", "get_current_vllm_config"),
    "vllm/forward_context.py": ("ForwardContext", "get_forward_context"),
    "vllm/logger.py": ("_VllmLogger", "init_logger"),
    "vllm/model_executor/models/registry.py": ("_ModelRegistry",),
    "vllm/platforms/interface.py": ("DeviceCapability", "Platform"),
    "vllm/plugins/__init__.py": ("load_general_plugins",),
}
"""The files that are read, and the functions and classes in them whose signatures are kept."""

KEPT_METHODS = {
    "__init__",
    "forward",
    "get_device_capability",
    "info_once",
    "is_cuda",
    "register_model",
    "resolve_indexer_kv_dtype",
    "warning_once",
}
KEPT_SETTINGS = {
    "attention_config",
    "cache_config",
    "cache_dtype",
    "hf_text_config",
    "indexer_kv_dtype",
    "model_config",
}
"""Of the classes in vllm/config: their many other fields say nothing here."""
ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3MTP")


def signature(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, Any]:
    """{"positional": names, "keyword": names, "required": names without a default}."""
    args = function.args
    positional = [a.arg for a in (*args.posonlyargs, *args.args) if a.arg not in ("self", "cls")]
    required = positional[: len(positional) - len(args.defaults)] if args.defaults else list(positional)
    keyword = [a.arg for a in args.kwonlyargs]
    required += [name for name, default in zip(keyword, args.kw_defaults, strict=True) if default is None]
    return {"positional": positional, "keyword": keyword, "required": required}


def class_facts(node: ast.ClassDef) -> dict[str, Any]:
    """Bases, kept methods' signatures, annotated fields and the attributes that its methods set on self."""
    methods, fields, attributes = {}, [], set()
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
            if item.name in KEPT_METHODS:
                methods[item.name] = signature(item)
            for part in ast.walk(item):
                is_own = (
                    isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self"
                )
                if is_own and isinstance(part.ctx, ast.Store):
                    attributes.add(part.attr)
        elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            fields.append(item.target.id)
    bases = [ast.unparse(base).partition("[")[0] for base in node.bases]
    return {"bases": bases, "methods": methods, "fields": sorted(fields), "attributes": sorted(attributes)}


def imported(tree: ast.Module) -> list[str]:
    """Names that imports bind in the module, also below its conditions."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return sorted(names)


def ignores_selection(tree: ast.Module) -> bool:
    """Whether the sparse layer calls its indexer once, as a statement: nothing is done with what it returns."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "self.indexer"]
    statements = [n for n in ast.walk(tree) if isinstance(n, ast.Expr) and n.value in calls]
    return len(calls) == len(statements) == 1


def insert_scales(tree: ast.Module) -> dict[str, str]:
    """Scales given to the fused operator that fills the caches: {keyword: the attribute it is given under, or ""}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("fused_minimax_m3_qknorm_rope_kv_insert"):
            for keyword in node.keywords:
                if keyword.arg and keyword.arg.startswith("kv_") and "scale" in keyword.arg:
                    is_conditional = isinstance(keyword.value, ast.IfExp)
                    found[keyword.arg] = ast.unparse(keyword.value.test) if is_conditional else ""
    return found


def cache_shape(tree: ast.Module) -> list[str]:
    """The sizes that the main backend says its cache has, where it says so (until 0.28): the last return's."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and node.name == "MiniMaxM3SparseBackend":
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == "get_kv_cache_shape":
                    last = item.body[-1]
                    if isinstance(last, ast.Return) and isinstance(last.value, ast.Tuple):
                        return [ast.unparse(size) for size in last.value.elts]
    return []


def registered(tree: ast.Module) -> dict[str, list[str]]:
    """Where the registry finds MiniMax-M3: {architecture: [module, class]}."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and key.value in ARCHITECTURES and isinstance(value, ast.Tuple):
                    found[str(key.value)] = [str(ast.literal_eval(part)) for part in value.elts]
    return found


def facts(version: str, sources: Mapping[str, str]) -> dict[str, Any]:
    """The facts of a release whose files have these texts."""
    files: dict[str, Any] = {}
    trees = {path: ast.parse(sources[path]) for path in WANTED if path in sources}
    for path, tree in trees.items():
        known: dict[str, Any] = {"functions": {}, "classes": {}}
        if path.startswith(M3) or path.endswith("__init__.py"):
            known["imports"] = [n for n in imported(tree) if "MiniMaxM3" in n or n.startswith(("select_", "get_"))]
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name in WANTED[path]:
                known["functions"][node.name] = signature(node)
            elif isinstance(node, ast.ClassDef) and node.name in WANTED[path]:
                known["classes"][node.name] = found = class_facts(node)
                if path.startswith("vllm/config/"):
                    for names in ("fields", "attributes"):
                        found[names] = [name for name in found[names] if name in KEPT_SETTINGS]
        files[path] = known
    missing = [path for path in WANTED if path not in trees]
    if missing:
        raise SystemExit(f"vLLM {version} has no {', '.join(missing)}: what the plugin relies on has moved")
    model = trees[f"{M3}/nvidia/model.py"]
    plugins = ast.unparse(trees["vllm/plugins/__init__.py"])
    return {
        "version": version,
        "files": files,
        "ignores_selection": ignores_selection(model),
        "insert_scales": insert_scales(model),
        "cache_shape": cache_shape(trees[f"{M3}/common/sparse_attention.py"]),
        "registry": registered(trees["vllm/model_executor/models/registry.py"]),
        "has_general_plugins": "vllm.general_plugins" in plugins,
    }


def read_wheel(version: str, keep: Path | None = None) -> dict[str, str]:
    """Texts of the files that facts come from, out of the wheel on the package index.

    keep: a folder for MiniMax-M3's files as they are.
    """
    with tempfile.TemporaryDirectory() as folder:
        platforms = [f"--platform=manylinux_2_{n}_x86_64" for n in range(39, 16, -1)]
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", "--implementation=cp", *platforms, "-d", folder, f"vllm=={version}"]
        if subprocess.run(command).returncode != 0:
            raise SystemExit(f"pip could not download vLLM {version}")
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = set(archive.namelist())
            if keep is not None:
                archive.extractall(keep / version, [n for n in names if n.startswith(M3) and n.endswith(".py")])
            return {path: archive.read(path).decode() for path in WANTED if path in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("versions", nargs="+", metavar="VERSION")
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    FACTS.mkdir(exist_ok=True)
    for version in args.versions:
        target = FACTS / f"vllm-{version}.json"
        text = json.dumps(facts(version, read_wheel(version, args.keep)), indent=1, sort_keys=True)
        target.write_text(text + "\n")
        print(f"wrote {target}")


if __name__ == "__main__":
    main()

"""Every name, signature and attribute that the plugin relies on is in each vLLM release that it says it knows.

The facts were read from the wheels by scripts/vllm_facts.py. MSASERVE_TEST_WHEELS=1 reads them again (3.6 GB).
"""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from fake_vllm import install, minor

from msaserve.integrations import vllm as plugin
from msaserve.integrations.vllm.releases import RELEASES

FACTS = Path(__file__).parent / "facts"
SCRIPT = Path(__file__).parents[2] / "scripts/vllm_facts.py"
M3 = "vllm/models/minimax_m3"
EACH = pytest.mark.parametrize("version", list(RELEASES))


@cache
def facts(version: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FACTS / f"vllm-{version}.json").read_text())
    assert loaded["version"] == version
    return loaded


def of_class(version: str, path: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = facts(version)["files"][path]["classes"][name]
    return found


def of_function(version: str, path: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = facts(version)["files"][path]["functions"][name]
    return found


def test_facts_are_of_the_releases_in_the_table() -> None:
    assert {path.stem.removeprefix("vllm-") for path in FACTS.glob("vllm-*.json")} == set(RELEASES)


@EACH
def test_plugins_are_found_and_models_are_registered_as_we_replace_them(version: str) -> None:
    known = facts(version)
    assert known["has_general_plugins"]
    assert known["registry"] == {name: ["vllm.models.minimax_m3", name] for name in plugin.ARCHITECTURES}
    assert set(plugin.ARCHITECTURES) <= set(known["files"][f"{M3}/__init__.py"]["imports"])
    register = of_class(version, "vllm/model_executor/models/registry.py", "_ModelRegistry")["methods"][
        "register_model"
    ]
    assert register["positional"] == ["model_arch", "model_cls"]


@EACH
def test_selectors_are_where_we_put_ours(version: str) -> None:
    """The indexer's is asked for in its own module, the attention's under the name that the model has bound."""
    selector = RELEASES[version].selector
    indexer = of_function(version, f"{M3}/common/indexer.py", "select_indexer_impl_cls")
    assert indexer == {"positional": [], "keyword": ["topk_blocks", "indexer_kv_dtype"], "required": ["topk_blocks"]}
    assert selector in facts(version)["files"][f"{M3}/nvidia/model.py"]["imports"]
    attend = of_function(version, f"{M3}/common/sparse_attention.py", selector)
    expected = {"topk_blocks", "kv_cache_dtype"} | ({"num_kv_heads"} if minor(version) >= 26 else set())
    assert set(attend["required"]) == expected
    assert attend["positional"] == []
    newer = "select_main_backend_and_impl_cls"
    has_newer = newer in facts(version)["files"][f"{M3}/common/sparse_attention.py"]["functions"]
    assert has_newer == (selector == newer)


@EACH
def test_indexer_is_built_and_called_as_ours_is(version: str) -> None:
    path = f"{M3}/common/indexer.py"
    base = of_class(version, path, "MiniMaxM3IndexerImpl")
    assert of_class(version, path, "MiniMaxM3IndexerTritonImpl")["bases"] == ["MiniMaxM3IndexerImpl"]
    assert base["bases"] == ["nn.Module"]
    built = base["methods"]["__init__"]
    assert built["positional"] == []
    read = {"topk_blocks", "local_blocks", "num_index_heads", "index_head_dim", "index_cache"}
    assert read <= set(base["attributes"])
    assert {"kv_cache", "dtype", "prefix"} <= set(of_class(version, path, "MiniMaxM3IndexerCache")["attributes"])
    called = of_class(version, path, "MiniMaxM3IndexerTritonImpl")["methods"]["forward"]
    assert called["positional"] == ["index_query"]
    assert called["required"] == ["index_query"]
    assert "impl" in of_class(version, path, "MiniMaxM3Indexer")["attributes"]


@EACH
def test_attention_is_built_and_called_as_ours_is(version: str) -> None:
    path = f"{M3}/common/sparse_attention.py"
    base = of_class(version, path, "MiniMaxM3SparseImpl")
    assert of_class(version, path, "MiniMaxM3SparseTritonImpl")["bases"] == ["MiniMaxM3SparseImpl"]
    assert {"num_heads", "head_size", "scale", "block_size", "kv_cache_fp8_dtype"} <= set(base["attributes"])
    called = of_class(version, path, "MiniMaxM3SparseTritonImpl")["methods"]["forward"]
    assert called["positional"] == ["layer", "query", "kv_cache", "output"]
    assert called["keyword"] == (["query_fp8"] if minor(version) >= 27 else [])
    layer = of_class(version, f"{M3}/nvidia/model.py", "MiniMaxM3SparseAttention")
    assert facts(version)["ignores_selection"], "the layer must not use what our indexer does not return"
    assert {"layer_name", "indexer", "impl", "kv_cache"} <= set(layer["attributes"])


@EACH
def test_metadata_has_what_we_read(version: str) -> None:
    indexer, attention = f"{M3}/common/indexer.py", f"{M3}/common/sparse_attention.py"
    shared = {"num_actual_tokens", "num_decodes", "num_decode_tokens", "num_prefills", "max_seq_len"}
    for path, stem in ((indexer, "MiniMaxM3Indexer"), (attention, "MiniMaxM3Sparse")):
        assert shared | {"decode", "prefill"} <= set(of_class(version, path, f"{stem}Metadata")["fields"])
        decode = set(of_class(version, path, f"{stem}DecodeMetadata")["fields"])
        assert {"seq_lens", "block_table", "decode_query_len"} <= decode
        prefill = set(of_class(version, path, f"{stem}PrefillMetadata")["fields"])
        assert {"cu_seqlens_q", "seq_lens", "block_table", "max_query_len"} <= prefill


@EACH
def test_layout_of_the_cache(version: str) -> None:
    packed = ["num_blocks", "num_kv_heads", "block_size", "2 * head_size"]
    apart = ["num_blocks", "2", "block_size", "num_kv_heads", "head_size"]
    # From 0.29 on the layout is the cache's own business; the tensor keeps its meaning.
    assert facts(version)["cache_shape"] == (apart if minor(version) <= 25 else packed if minor(version) <= 28 else [])


@EACH
def test_8_bit_caches_are_filled_without_scales(version: str) -> None:
    """So that reading them without is right: of all cache types only nvfp4, which is not ours, is given scales."""
    assert set(facts(version)["insert_scales"].values()) <= {"self.use_nvfp4_kv"}


@EACH
def test_settings_are_where_we_read_them(version: str) -> None:
    config = "vllm/config"
    assert "get_current_vllm_config" in facts(version)["files"][f"{config}/__init__.py"]["imports"]
    assert of_function(version, f"{config}/vllm.py", "get_current_vllm_config")["required"] == []
    for name, class_name, needed in (
        ("vllm", "VllmConfig", {"attention_config", "cache_config", "model_config"}),
        ("cache", "CacheConfig", {"cache_dtype"}),
        ("attention", "AttentionConfig", {"indexer_kv_dtype"}),
        ("model", "ModelConfig", {"hf_text_config"}),
    ):
        found = of_class(version, f"{config}/{name}.py", class_name)
        assert needed <= {*found["fields"], *found["attributes"]}
    attention = of_class(version, f"{config}/attention.py", "AttentionConfig")["methods"]
    if minor(version) >= 28:
        assert attention["resolve_indexer_kv_dtype"]["positional"] == ["default"]
    else:
        assert "resolve_indexer_kv_dtype" not in attention


@EACH
def test_surroundings(version: str) -> None:
    assert "attn_metadata" in of_class(version, "vllm/forward_context.py", "ForwardContext")["fields"]
    assert of_function(version, "vllm/forward_context.py", "get_forward_context")["required"] == []
    assert of_function(version, "vllm/logger.py", "init_logger")["positional"] == ["name"]
    assert {"info_once", "warning_once"} <= set(of_class(version, "vllm/logger.py", "_VllmLogger")["methods"])
    platform = of_class(version, "vllm/platforms/interface.py", "Platform")["methods"]
    assert platform["is_cuda"]["required"] == []
    assert platform["get_device_capability"]["required"] == []
    assert {"major", "minor"} <= set(of_class(version, "vllm/platforms/interface.py", "DeviceCapability")["fields"])


@EACH
def test_the_fake_that_other_tests_run_before_has_the_real_signatures(
    monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    fake = install(monkeypatch, version)
    indexer = fake.module("models.minimax_m3.common.indexer")
    attention = fake.module("models.minimax_m3.common.sparse_attention")
    for real, ours in (
        (of_class(version, f"{M3}/common/indexer.py", "MiniMaxM3IndexerImpl"), indexer.MiniMaxM3IndexerTritonImpl),
        (
            of_class(version, f"{M3}/common/sparse_attention.py", "MiniMaxM3SparseImpl"),
            attention.MiniMaxM3SparseTritonImpl,
        ),
    ):
        given = inspect.signature(ours).parameters.values()
        keyword = [p.name for p in given if p.kind is p.KEYWORD_ONLY]
        positional = [p.name for p in given if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert real["methods"]["__init__"]["positional"] == positional
        # msa_decode_backend, which newer releases hand to the attention, is taken by **_.
        assert set(real["methods"]["__init__"]["keyword"]) - {"msa_decode_backend"} == set(keyword)


@pytest.mark.skipif(os.environ.get("MSASERVE_TEST_WHEELS") != "1", reason="MSASERVE_TEST_WHEELS=1 downloads wheels")
@pytest.mark.timeout(1800)
@EACH
def test_facts_are_what_the_wheel_says(version: str) -> None:
    spec = importlib.util.spec_from_file_location("vllm_facts", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules["vllm_facts"] = script
    spec.loader.exec_module(script)
    assert script.facts(version, script.read_wheel(version)) == facts(version)

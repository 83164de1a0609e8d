"""The vLLM plugin's entry point: what it registers, and when it leaves vLLM alone."""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path

import pytest
from fake_vllm import install

from msaserve.integrations import vllm as plugin
from msaserve.integrations.vllm.releases import RELEASES, find


@pytest.fixture(autouse=True)
def no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MSASERVE_VLLM", raising=False)


def test_entry_point_names_the_function() -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    section = text.partition('[project.entry-points."vllm.general_plugins"]\n')[2]
    module, _, name = section.split('"')[1].partition(":")
    assert getattr(importlib.import_module(module), name) is plugin.register


def test_register_is_lazy_and_may_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "0.24.0")
    monkeypatch.delitem(sys.modules, "vllm.models.minimax_m3")
    plugin.register()
    first = list(fake.registry.registered)
    plugin.register()
    assert first == [(a, f"msaserve.integrations.vllm.msa_models:{a}") for a in plugin.ARCHITECTURES]
    assert fake.registry.registered == first * 2
    assert "vllm.models.minimax_m3" not in sys.modules
    assert "msaserve.integrations.vllm.msa_models" not in sys.modules


def test_register_loads_no_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process of vLLM that builds no model, such as its API server, pays for nothing."""
    fake = install(monkeypatch, "0.33.0")
    before = set(sys.modules)
    plugin.register()
    assert len(fake.registry.registered) == 3
    assert not {name for name in set(sys.modules) - before if name.startswith("msaserve")}


@pytest.mark.parametrize("value", ["0", "off", "False"])
def test_off(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, value: str) -> None:
    fake = install(monkeypatch, "0.24.0")
    monkeypatch.setenv("MSASERVE_VLLM", value)
    with caplog.at_level(logging.INFO):
        plugin.register()
    assert fake.registry.registered == []
    assert "MSASERVE_VLLM=0" in caplog.text


@pytest.mark.parametrize("version", ["0.23.0", "0.34.0", "0.33.1", "0.33.0rc1", "1.0", "dev", ""])
def test_unknown_version_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    fake = install(monkeypatch, "0.33.0")
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    plugin.register()
    assert fake.registry.registered == []
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"its version {version} is not among" in record.getMessage()


def test_a_failing_registry_does_not_end_vllm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, "0.24.0")
    monkeypatch.delattr(sys.modules["vllm"], "ModelRegistry")
    plugin.register()
    assert "could not be set up" in caplog.text


def test_local_part_of_a_version_says_nothing() -> None:
    assert find("0.24.0+cu129") is RELEASES["0.24.0"]

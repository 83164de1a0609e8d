"""A checkpoint of the small model, untrained."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from examples.train_tiny import checkpoint, model
from msaserve.config import ModelConfig
from msaserve.gateway.chat import ChatTemplate
from msaserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("untrained")
    checkpoint.write_small_files(directory)
    made = model.build(ModelConfig.from_checkpoint(directory), seed=1)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("score_bias"):
                parameter.normal_(0.0, 0.1, generator=torch.Generator().manual_seed(2))
    checkpoint.export(made, directory)
    return directory


@pytest.fixture(scope="session")
def narrow(untrained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The untrained model with two selected blocks: sparse in a short prompt."""
    directory = tmp_path_factory.mktemp("narrow") / "checkpoint"
    shutil.copytree(untrained, directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["sparse_attention_config"]["sparse_topk_blocks"] = 2
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.fixture(scope="session")
def tokenizer(untrained: Path) -> Tokenizer:
    return Tokenizer.load(untrained)


@pytest.fixture(scope="session")
def template(untrained: Path) -> ChatTemplate:
    template = ChatTemplate.load(untrained)
    assert template is not None
    return template

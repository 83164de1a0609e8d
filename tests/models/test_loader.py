"""Loading: what comes out, and what is refused with one clear error."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from golden_data import GOLDEN, golden, relative_error
from paged_driver import Driver

from checkpoints import changed_tiny, released_spelling, shard, tiny_config, write_config
from msaserve.errors import CheckpointError, InvalidRequestError, UnsupportedError
from msaserve.layers.moe import SparseMoE
from msaserve.models.loader import destinations, load_model, resolve_device, resolve_dtype
from msaserve.models.minimax_m3 import MiniMaxM3

TOKENS = torch.arange(60) * 7 % 500


def run(model: MiniMaxM3) -> torch.Tensor:
    return model.logits(Driver(model, [len(TOKENS)]).run(TOKENS))


def test_every_parameter_is_filled_once(tiny: MiniMaxM3) -> None:
    filled = {name: tensor.numel() for name, tensor in destinations(tiny)}
    assert sum(filled.values()) == sum(parameter.numel() for parameter in tiny.parameters())
    assert not any(parameter.requires_grad for parameter in tiny.parameters())


def test_sharded_is_single(tiny: MiniMaxM3, tmp_path: Path) -> None:
    shard(changed_tiny(tmp_path), 3)
    assert torch.equal(run(load_model(tmp_path)), run(tiny))


def test_released_config_gives_the_same_model(tiny: MiniMaxM3, tmp_path: Path) -> None:
    write_config(changed_tiny(tmp_path), released_spelling(tiny_config()))
    assert torch.equal(run(load_model(tmp_path)), run(tiny))


def test_mtp_tensors_are_ignored(tmp_path: Path) -> None:
    changed_tiny(tmp_path, lambda tensors: tensors.update({"mtp.layers.0.weight": torch.zeros(3)}))
    load_model(tmp_path)


def test_text_only(tiny: MiniMaxM3, tmp_path: Path) -> None:
    def drop_vision(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if not name.startswith("language_model.")]:
            del tensors[name]

    model = load_model(changed_tiny(tmp_path, drop_vision, lambda config: config.pop("vision_config")))
    assert model.vision is None
    assert torch.equal(run(model), run(tiny))
    with pytest.raises(UnsupportedError, match="no vision tower"):
        model.embed_media(torch.zeros(4, 1176), [(1, 2, 2)])


def test_bfloat16(tmp_path: Path) -> None:
    directory, expected = golden("tiny")
    model = load_model(directory, dtype=torch.bfloat16)
    moe = model.layers[1].mlp
    assert isinstance(moe, SparseMoE)
    assert {moe.router.weight.dtype, moe.router.score_bias.dtype} == {torch.float32}
    assert {p.dtype for name, p in model.named_parameters() if ".router." not in name} == {torch.bfloat16}
    tokens, rows = expected["text.input_ids"], expected["text.rows"].long()
    error = relative_error(model.logits(Driver(model, [len(tokens)]).run(tokens)[rows]), expected["text.logits"])
    # Rounded weights choose other experts and blocks here and there; garbage would be near 1.4.
    assert error < 0.3
    assert model.embed_media(torch.zeros(4, 1176), [(1, 2, 2)]).dtype == torch.bfloat16


def test_all_wrong_tensors_are_named_in_one_error(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["language_model.model.layers.1.self_attn.index_q_norm.weight"]
        del tensors["patch_merge_mlp.linear_2.bias"]
        tensors["language_model.model.layers.2.extra"] = torch.zeros(1)
        tensors["language_model.model.norm.weight"] = torch.zeros(95)
        tensors["language_model.lm_head.weight"] = torch.zeros(96, 512)

    with pytest.raises(CheckpointError) as caught:
        load_model(changed_tiny(tmp_path, spoil))
    message = str(caught.value)
    assert "2 missing: language_model.model.layers.1.self_attn.index_q_norm.weight, patch_merge_mlp.linear" in message
    assert "1 unexpected: language_model.model.layers.2.extra" in message
    assert "2 of the wrong shape" in message
    assert "language_model.model.norm.weight is [95], expected [96]" in message
    assert "language_model.lm_head.weight is [96, 512], expected [512, 96]" in message


def test_of_many_wrong_tensors_the_first_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_model(changed_tiny(tmp_path, lambda tensors: tensors.clear()))
    message = str(caught.value)
    assert "multi_modal_projector" not in message
    assert "language_model.lm_head.weight, language_model.model.embed_tokens.weight" in message
    assert re.search(r"layers\.0\.[a-z_.]+ and \d+ more$", message)
    assert len(message) < 1000


@pytest.mark.parametrize("num_bytes", [0, 5, 1000, 2_000_000, 4_278_319])
def test_truncated_file(tmp_path: Path, num_bytes: int) -> None:
    shutil.copytree(GOLDEN / "tiny", tmp_path, dirs_exist_ok=True)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(num_bytes)
    with pytest.raises(CheckpointError, match=r"model\.safetensors is (truncated|not a safetensors file)"):
        load_model(tmp_path)


def test_file_that_is_no_safetensors(tmp_path: Path) -> None:
    changed_tiny(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\x20" + bytes(7) + b"x" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        load_model(tmp_path)


def test_missing_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        load_model(tmp_path / "none")
    shard(changed_tiny(tmp_path), 3)
    (tmp_path / "model-00001-of-00003.safetensors").unlink()
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00001-of-00003\.safetensors, model-00003-of-00003\.safetensors"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(CheckpointError, match=r"missing: model\.safetensors"):
        load_model(tmp_path)


def test_index_that_lies(tmp_path: Path) -> None:
    shard(changed_tiny(tmp_path), 2)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        index.read_text().replace('"language_model.model.norm.weight"', '"language_model.model.nrm.weight"')
    )
    with pytest.raises(CheckpointError, match=r"not where .* says: language_model\.model\.nrm\.weight"):
        load_model(tmp_path)
    index.write_text('{"weight_map": {"a": "../elsewhere.safetensors"}}')
    with pytest.raises(CheckpointError, match="files beside it"):
        load_model(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="not an index"):
        load_model(tmp_path)


def test_another_model_type(tmp_path: Path) -> None:
    changed_tiny(tmp_path, change_config=lambda config: config.update(model_type="qwen3"))
    with pytest.raises(CheckpointError, match="'qwen3'"):
        load_model(tmp_path)


@pytest.mark.parametrize("fault", ["dtype", "scales"])
def test_quantised_weights_are_refused_even_without_a_config(tmp_path: Path, fault: str) -> None:
    name = "language_model.model.layers.0.self_attn.q_proj.weight"

    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        if fault == "dtype":
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        else:
            tensors[f"{name}_scale_inv"] = torch.ones(1)

    with pytest.raises(UnsupportedError, match="F8_E4M3" if fault == "dtype" else "weight_scale_inv"):
        load_model(changed_tiny(tmp_path, quantise))


@pytest.mark.parametrize(
    ("shape", "grid"),
    [
        ((4, 1175), [(1, 2, 2)]),
        ((5, 1176), [(1, 2, 2)]),
        ((6, 1176), [(1, 2, 3)]),
        ((0, 1176), []),
        ((0, 1176), [(0, 2, 2)]),
    ],
)
def test_patches_that_do_not_fit_their_grid(
    tiny: MiniMaxM3, shape: tuple[int, int], grid: list[tuple[int, int, int]]
) -> None:
    with pytest.raises(InvalidRequestError, match="grid"):
        tiny.embed_media(torch.zeros(shape), grid)


def test_device_and_dtype_names() -> None:
    cpu = torch.device("cpu")
    assert resolve_dtype("auto", cpu) == torch.float32
    assert resolve_dtype("auto", torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("bfloat16", cpu) == torch.bfloat16
    assert resolve_device("cpu") == cpu
    if torch.cuda.is_available():
        assert resolve_device("auto").type == "cuda"
    else:
        assert resolve_device("auto") == cpu
        with pytest.raises(UnsupportedError, match="no CUDA device"):
            resolve_device("cuda")

"""How the small model starts and how its weights are moved: heads that look back and match names, and Muon."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from examples.train_tiny import model, muon, recipe, train
from msaserve.layers.rope import rotate, text_rotation
from msaserve.models.loader import load_model


def test_first_heads_look_a_few_tokens_back(untrained: Path) -> None:
    made = load_model(untrained)
    token_ids = torch.randint(0, 4000, (600,), generator=torch.Generator().manual_seed(1))
    layer, config = made.layers[0], made.config.text
    # Text left out at 200 and at 400, as in training.
    positions = torch.arange(600) + 70_000 * (torch.arange(600) >= 200) + 50_000 * (torch.arange(600) >= 400)
    rotation = text_rotation(positions, rotary_dim=config.rotary_dim, theta=config.rope_theta)
    with torch.no_grad():
        normed = layer.input_layernorm(torch.nn.functional.embedding(token_ids, made.embed_tokens))
        q, k = layer.self_attn.in_proj(normed)[:, : 18 * 64].unflatten(1, (-1, 64)).split((16, 2), dim=1)
        q, k = rotate(layer.self_attn.q_norm(q), rotation), rotate(layer.self_attn.k_norm(k), rotation)
        logits = torch.einsum("qhd,kd->hqk", q[:, :8], k[:, 0]) / 8
        shares = logits.masked_fill(~torch.ones(600, 600).tril().bool(), -torch.inf).softmax(-1)
    is_whole = (torch.arange(600)[:, None] % 200 >= 8).flatten()
    for head, distance in enumerate(model.LOOK_BACK):
        share = shares[head].diagonal(-distance)[is_whole[distance:]]
        assert float(share.mean()) > 0.95, head
        assert float(share.min()) > 0.7, head


def test_looking_back_is_not_lost_among_131072_tokens() -> None:
    config = recipe.model_config()["text_config"]
    pairs = config["rotary_dim"] // 2
    assert len(model.LOOK_BACK_SHARES) == pairs
    assert sum(model.LOOK_BACK_SHARES) == pytest.approx(1.0, abs=1e-3)
    frequency = config["rope_theta"] ** (-torch.arange(pairs, dtype=torch.float64) / pairs)
    highest = model.LOOK_BACK_NORM**2 * config["head_dim"] ** 0.5
    for distance in (1, 8):
        angles = (torch.arange(131_072) - distance)[:, None] * frequency
        logits = highest * angles.cos() @ torch.tensor(model.LOOK_BACK_SHARES, dtype=torch.float64)
        assert float(logits.softmax(0)[distance]) > 0.95


def test_second_layer_finds_what_follows_the_same_name(untrained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, token_ids = (
        load_model(untrained),
        torch.randint(0, 4000, (1, 640), generator=torch.Generator().manual_seed(0)),
    )
    token_ids[0, 600] = token_ids[0, 100]  # The name; what stands between differs.
    seen: list[torch.Tensor] = []

    def spy(attention: Any, x: torch.Tensor, *others: Any, **options: Any) -> Any:
        seen.append(x[0])
        return attend(attention, x, *others, **options)

    attend = model._attention
    monkeypatch.setattr(model, "_attention", spy)
    with torch.no_grad():
        model.forward(made, token_ids, torch.arange(640)[None], topk=None, index_rows=None)
        attention = made.layers[1].self_attn
        heads = attention.in_proj(seen[1]).unflatten(-1, (-1, 64))
        q, k = attention.q_norm(heads[:, :16]), attention.k_norm(heads[:, 16:18])
        index_q, index_k = attention.index_q_norm(heads[:, 20:22]), attention.index_k_norm(heads[:, 22])
    for head, distance in ((0, 3), (3, 3), (8, 4), (11, 4)):
        query, asked = 600 + distance - 1, 100 + distance
        shares = (q[query, head] @ k[: query + 1, head // 8].T / 8).softmax(-1)
        assert int(shares.argmax()) == asked
        assert float(shares[asked]) > 0.5
    for head in range(2):
        # Head 1 asks one token later, when the name is as far behind that query itself: it is left out.
        best = (index_q[602 + head, head] @ index_k[: 602 + head].T).topk(4).indices
        assert 103 in best.tolist()


@pytest.mark.parametrize("shape", [(3, 16, 40), (2, 40, 16)])
def test_orthogonalized_keeps_singular_vectors(shape: tuple[int, ...]) -> None:
    matrices = (
        torch.randn(shape, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1e-6, 1.0, 1e3])[: shape[0], None, None]
    )
    found = muon.orthogonalized(matrices)
    for one, known in zip(found, matrices, strict=True):
        u, _, v = torch.linalg.svd(known, full_matrices=False)
        inside = u.T @ one @ v.T
        assert 0.6 < float(inside.diagonal().min()) <= float(inside.diagonal().max()) < 1.3
        assert float((inside - inside.diagonal().diag()).abs().max()) < 0.02


def test_muon_moves_every_matrix_as_far_however_small_its_gradient(untrained: Path) -> None:
    made = load_model(untrained)
    for name, parameter in made.named_parameters():
        parameter.requires_grad_(not name.endswith("score_bias"))
    optimizers = train.make_optimizers(made, recipe.FULL)
    parts = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in parts} == {id(p) for p in made.parameters() if p.requires_grad}
    assert len(parts) == len({id(p) for p in parts})
    generator = torch.Generator().manual_seed(0)
    weight = made.layers[1].self_attn.in_proj.weight
    rates = {p: group["full"] for group in optimizers[0].param_groups for p in group["params"]}
    for parameter in rates:
        parameter.grad = torch.randn(parameter.shape, generator=generator)
    assert weight.grad is not None
    weight.grad[-64:] *= 1e-5  # As the index branch's may be.
    for group in optimizers[0].param_groups:
        group["lr"] = group["full"]
    before = {p: p.detach().clone() for p in rates}
    optimizers[0].step()
    for parameter, old in before.items():
        moved = (parameter.detach() - old * (1 - rates[parameter] * recipe.FULL.weight_decay)).square().mean().sqrt()
        assert float(moved) == pytest.approx(0.2 * rates[parameter], rel=0.25)
    moved = (weight.detach() - before[weight])[-64:].square().mean().sqrt()
    assert float(moved) == pytest.approx(0.2 * rates[weight], rel=0.25)

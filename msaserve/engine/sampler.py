"""Choosing tokens, all rows at once. A row's token depends on its logits, its parameters, its seed and its output
position alone: not on the batch, on how its prompt was cut into chunks, nor on preemption."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch

from msaserve.engine.plan import PlanRow, RowResult
from msaserve.engine.seen import SeenTokens
from msaserve.types import Logprobs, SamplingParams

_MASK64 = (1 << 64) - 1


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a pure function of the seed (taken modulo 2⁶⁴) and the output position."""
    key = (seed & _MASK64).to_bytes(8, "little") + position.to_bytes(8, "little")
    return (int.from_bytes(blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53


def sample(logits: torch.Tensor, rows: Sequence[PlanRow], eos_token_ids: Sequence[int]) -> list[RowResult]:
    """One token per row, and its log-probabilities where asked for.

    In this order: repetition, frequency and presence penalty, logit_bias, min_tokens (no end-of-sequence or stop
    token before it is reached), the constraint, then argmax at temperature 0, else temperature, min_p, top_k, top_p
    and the inverse of the cumulative distribution in vocabulary order at `uniform(seed, output position)`. A filter
    keeps every token as likely as the last one it keeps. Log-probabilities are those of the logits as they came.

    Args:
        logits: [R, V], any float dtype; not modified.
        rows: R rows, parallel to the logits.
        eos_token_ids: what ends a sequence, unless the row ignores it.

    Returns:
        R results. A row with logits that are not finite, or with no token left, has an error and harms no other.
    """
    if not rows:
        return []
    raw = logits.float()
    low, high = torch.aminmax(raw, dim=-1)
    finite = low.isfinite() & high.isfinite()
    edited = _constrain(_edit(raw, rows, eos_token_ids), raw, rows)
    possible = finite if edited is raw else edited.amax(dim=-1).isfinite()
    tokens = edited.argmax(dim=-1)
    drawn = [i for i, row in enumerate(rows) if row.sampling.temperature > 0]
    if len(drawn) == len(rows):
        tokens = _draw(edited, rows)
    elif drawn:
        index = torch.tensor(drawn, device=raw.device)
        tokens[index] = _draw(edited[index], [rows[i] for i in drawn])
    token_list, is_finite, is_possible = torch.stack((tokens, finite.long(), possible.long())).tolist()
    results = [
        RowResult(token_id=token)
        if finite_row and possible_row
        else RowResult(error="no token is left to choose from" if finite_row else "the model's logits are not finite")
        for token, finite_row, possible_row in zip(token_list, is_finite, is_possible, strict=True)
    ]
    for i, row in enumerate(rows):
        if row.matcher is not None and row.matcher.error is not None:
            results[i] = RowResult(error=row.matcher.error)
    _add_logprobs(results, raw, rows)
    return results


def _edit(logits: torch.Tensor, rows: Sequence[PlanRow], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Penalties, bias and min_tokens: a changed copy, or `logits` itself when no row asks for any of it."""
    vocab_size = logits.shape[1]
    penalised = [(i, row, row.seen) for i, row in enumerate(rows) if row.seen is not None]
    biased = [(i, row.sampling.logit_bias) for i, row in enumerate(rows) if row.sampling.logit_bias]
    banned: list[int] = []
    for i, row in enumerate(rows):
        params = row.sampling
        if len(row.output_token_ids) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            banned.extend(i * vocab_size + token for token in ends if 0 <= token < vocab_size)
    if not (penalised or biased or banned):
        return logits
    logits = logits.clone()
    flat, device = logits.view(-1), logits.device
    if penalised:
        _penalise(logits, penalised)
    if biased:
        at = np.concatenate([np.fromiter(bias, np.int64, len(bias)) + i * vocab_size for i, bias in biased])
        values = np.concatenate([np.fromiter(bias.values(), np.float32, len(bias)) for _, bias in biased])
        flat[torch.from_numpy(at).to(device)] += torch.from_numpy(values).to(device)
    if banned:
        flat[torch.tensor(banned, device=device)] = -torch.inf
    return logits


def _constrain(logits: torch.Tensor, raw: torch.Tensor, rows: Sequence[PlanRow]) -> torch.Tensor:
    """−inf for what a row's constraint does not allow: in place if `logits` is a copy, not `raw` itself."""
    constrained = [i for i, row in enumerate(rows) if row.matcher is not None]
    if not constrained:
        return logits
    masks = np.zeros((len(constrained), -(-logits.shape[1] // 32)), dtype=np.int32)
    masked: list[int] = []
    for i in constrained:
        matcher = rows[i].matcher
        if matcher is not None and matcher.fill(rows[i].output_token_ids, masks[len(masked)]):
            masked.append(i)
    if not masked:
        return logits
    is_banned = _unpack(~masks[: len(masked)], logits.device)[:, : logits.shape[1]]
    if len(masked) == len(rows):
        return (
            logits.masked_fill(is_banned, -torch.inf) if logits is raw else logits.masked_fill_(is_banned, -torch.inf)
        )
    if logits is raw:
        logits = logits.clone()
    index = torch.tensor(masked, device=logits.device)
    logits[index] = logits[index].masked_fill_(is_banned, -torch.inf)
    return logits


def _unpack(words: np.ndarray, device: torch.device) -> torch.Tensor:
    """Bits of int32 words [R, W], the lowest first, as bool [R, 32 · W]."""
    packed = words.view(np.uint8)
    if device.type != "cuda":  # twenty times as fast as torch's shifts on one core
        return torch.from_numpy(np.unpackbits(packed, axis=1, bitorder="little")).view(torch.bool)
    bits = torch.from_numpy(packed).pin_memory().to(device, non_blocking=True)
    shifts = torch.arange(8, dtype=torch.uint8, device=device)
    return ((bits[:, :, None] >> shifts) & 1).flatten(1).bool()


def _penalise(logits: torch.Tensor, rows: Sequence[tuple[int, PlanRow, SeenTokens]]) -> None:
    """In place, for rows (their place among the logits, the row, its tokens)."""
    prompt = _penalised(logits, [(i, row.sampling, seen.prompt_ids, None) for i, row, seen in rows if seen.prompt_ids])
    output = _penalised(logits, [(i, row.sampling, seen.output_ids, seen.output_counts) for i, row, seen in rows])
    for places, values in (prompt, output):  # the output's are right also where the prompt has the token, too
        logits.view(-1)[places] = values


def _penalised(
    logits: torch.Tensor, parts: Sequence[tuple[int, SamplingParams, array[int], array[int] | None]]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Places [N] in the flat logits and the values [N] that belong there.

    parts: place of a row, its parameters, distinct tokens and how often its output has each; None: not at all.
    """
    places, repetition, minus = [np.empty(0, np.int64)], [np.empty(0, np.float32)], [np.empty(0, np.float32)]
    for i, params, ids, counts in parts:
        places.append(i * logits.shape[1] + np.frombuffer(ids, np.int32).astype(np.int64))
        repetition.append(np.full(len(ids), params.repetition_penalty, np.float32))
        if counts is None:
            minus.append(np.zeros(len(ids), np.float32))
        else:
            minus.append(np.float32(params.frequency_penalty) * np.frombuffer(counts, np.int32).astype(np.float32))
            minus[-1] += np.float32(params.presence_penalty)
    at, by, less = (torch.from_numpy(np.concatenate(parts)).to(logits.device) for parts in (places, repetition, minus))
    values = logits.view(-1)[at]
    return at, torch.where(values > 0, values / by, values * by) - less


def _column(values: Iterable[float], like: torch.Tensor) -> torch.Tensor:
    """[R, 1] of `like`'s dtype."""
    return torch.tensor(list(values), dtype=like.dtype, device=like.device)[:, None]


def _draw(logits: torch.Tensor, rows: Sequence[PlanRow]) -> torch.Tensor:
    """[R] token ids of rows with a temperature. float64, for a vocabulary's tail must not be lost in the sum."""
    scaled = logits.double()
    scaled = scaled - scaled.amax(dim=-1, keepdim=True)
    scaled = scaled / _column([row.sampling.temperature for row in rows], scaled)
    filtered = [
        i for i, row in enumerate(rows) if row.sampling.top_k or row.sampling.top_p < 1 or row.sampling.min_p > 0
    ]
    if filtered:
        index = torch.tensor(filtered, device=logits.device)
        threshold = torch.full((len(rows), 1), -torch.inf, dtype=scaled.dtype, device=scaled.device)
        threshold[index] = _threshold(scaled[index], [rows[i].sampling for i in filtered])
        scaled = scaled.masked_fill(scaled < threshold, -torch.inf)
    cumulative = scaled.exp().cumsum(dim=-1)
    points = _column([uniform(row.seed, len(row.output_token_ids)) for row in rows], cumulative) * cumulative[:, -1:]
    # The first token whose sum exceeds the point: one of probability zero is never it.
    return torch.searchsorted(cumulative, points, right=True).squeeze(-1).clamp_(max=logits.shape[1] - 1)


def _threshold(scaled: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[R, 1]: the least scaled logit that min_p, then top_k, then top_p keep. `scaled` [R, V] has maximum 0."""
    vocab_size = scaled.shape[1]
    top_k = [min(p.top_k, vocab_size) or vocab_size for p in params]
    needs_all = any(p.top_p < 1 and k == vocab_size for p, k in zip(params, top_k, strict=True))
    width = vocab_size if needs_all else max((k for k in top_k if k < vocab_size), default=1)
    # Only the values count, so that rows do not feel how far their neighbours are sorted.
    best = scaled.topk(width, dim=-1).values
    threshold = _column([p.min_p for p in params], scaled).log()
    ranks = torch.tensor([min(k, width) for k in top_k], device=scaled.device)[:, None]
    is_cut = torch.tensor([k < vocab_size for k in top_k], device=scaled.device)[:, None]
    threshold = torch.where(is_cut, torch.maximum(threshold, best.gather(1, ranks - 1)), threshold)
    if any(p.top_p < 1 for p in params):
        is_kept = (torch.arange(width, device=scaled.device) < ranks) & (best >= threshold)
        weights = torch.where(is_kept, best.exp(), 0.0)
        cumulative = weights.cumsum(dim=-1)
        top_p = _column([p.top_p for p in params], scaled)
        is_kept &= cumulative - weights < top_p * cumulative[:, -1:]
        num_kept = is_kept.sum(dim=-1, keepdim=True)
        nucleus = best.gather(1, (num_kept - 1).clamp_(min=0))
        threshold = torch.where(top_p < 1, torch.maximum(threshold, nucleus), threshold)
    return threshold


def _add_logprobs(results: Sequence[RowResult], logits: torch.Tensor, rows: Sequence[PlanRow]) -> None:
    chosen: list[tuple[int, int, int]] = []
    for i, (row, result) in enumerate(zip(rows, results, strict=True)):
        if row.sampling.logprobs is not None and result.token_id is not None:
            chosen.append((i, result.token_id, min(row.sampling.logprobs, logits.shape[1])))
    if not chosen:
        return
    picked = torch.tensor([i for i, _, _ in chosen], device=logits.device)
    token_ids = torch.tensor([token for _, token, _ in chosen], device=logits.device)[:, None]
    logprobs = logits[picked].log_softmax(dim=-1)
    best = logprobs.topk(max(k for _, _, k in chosen), dim=-1)
    values = torch.cat((logprobs.gather(1, token_ids), best.values), dim=1).tolist()
    for (i, token, k), (own, *top), ids in zip(chosen, values, best.indices.tolist(), strict=True):
        results[i].logprobs = Logprobs(token, own, tuple(zip(ids[:k], top[:k], strict=True)))

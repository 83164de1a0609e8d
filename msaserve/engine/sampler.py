"""Choosing tokens, all rows at once. A row's token depends on its logits, its parameters, its seed and its output
position alone: not on the batch, on how its prompt was cut into chunks, nor on preemption."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b

import numpy as np
import torch

from msaserve.engine.plan import PlanRow, RowResult
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


def _changes_counts(params: SamplingParams) -> bool:
    return params.frequency_penalty != 0 or params.presence_penalty != 0 or params.repetition_penalty != 1


def _edit(logits: torch.Tensor, rows: Sequence[PlanRow], eos_token_ids: Sequence[int]) -> torch.Tensor:
    """Penalties, bias and min_tokens: a changed copy, or `logits` itself when no row asks for any of it."""
    penalised = [i for i, row in enumerate(rows) if _changes_counts(row.sampling)]
    bias: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int]] = []
    vocab_size = logits.shape[1]
    for i, row in enumerate(rows):
        params = row.sampling
        bias.extend((i, token, value) for token, value in params.logit_bias.items() if 0 <= token < vocab_size)
        if len(row.output_token_ids) < params.min_tokens:
            ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
            banned.extend((i, token) for token in ends if 0 <= token < vocab_size)
    if not (penalised or bias or banned):
        return logits
    logits = logits.clone()
    device = logits.device
    if penalised:
        index = torch.tensor(penalised, device=device)
        logits[index] = _penalise(logits[index], [rows[i] for i in penalised])
    if bias:
        at = torch.tensor([(i, token) for i, token, _ in bias], device=device).T
        logits[at[0], at[1]] += torch.tensor([value for _, _, value in bias], device=device)
    if banned:
        at = torch.tensor(banned, device=device).T
        logits[at[0], at[1]] = -torch.inf
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


def _penalise(logits: torch.Tensor, rows: Sequence[PlanRow]) -> torch.Tensor:
    params = [row.sampling for row in rows]
    counts = _count([row.output_token_ids for row in rows], logits)
    if any(p.repetition_penalty != 1 for p in params):
        seen = counts > 0
        for i, row in enumerate(rows):
            if row.distinct_prompt_ids:
                ids = np.frombuffer(row.distinct_prompt_ids, np.int32).astype(np.int64)
                seen[i, torch.from_numpy(ids).to(logits.device)] = True
        penalty = _column([p.repetition_penalty for p in params], logits)
        logits = torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)
    logits = logits - counts * _column([p.frequency_penalty for p in params], logits)
    return logits - (counts > 0) * _column([p.presence_penalty for p in params], logits)


def _count(sequences: Sequence[Sequence[int]], like: torch.Tensor) -> torch.Tensor:
    """How often each token stands in each sequence, in the shape of `like` [R, V]."""
    lens = [len(sequence) for sequence in sequences]
    ids = np.fromiter((token for sequence in sequences for token in sequence), dtype=np.int64, count=sum(lens))
    flat = np.repeat(np.arange(len(lens), dtype=np.int64) * like.shape[1], lens) + ids
    where, count = np.unique(flat, return_counts=True)
    counts = torch.zeros_like(like)
    counts.view(-1)[torch.from_numpy(where).to(like.device)] = torch.from_numpy(count).to(like.device, like.dtype)
    return counts


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

"""What the operators must compute, one token at a time and in float64."""

from __future__ import annotations

import math

import torch

from msaserve.ops.testing import Case


def rows(case: Case) -> list[tuple[int, int, int]]:
    """(row, request, position) of every row that is no padding."""
    found = []
    row = 0
    for request, (query_len, seq_len) in enumerate(case.spec.requests):
        for token in range(query_len):
            if seq_len:
                found.append((row + token, request, seq_len - query_len + token))
        row += query_len
    return found


def _read(case: Case, cache: torch.Tensor, request: int, token: int) -> torch.Tensor:
    page = int(case.block_table[request, token // case.spec.block_size])
    return cache[page, token % case.spec.block_size].double()


def block_scores(case: Case) -> torch.Tensor:
    """[Hkv, T, N] float64."""
    block_size = case.spec.block_size
    num_blocks = -(-case.spec.max_seq_len // block_size)
    scores = torch.full((case.spec.num_kv_heads, case.q.shape[0], num_blocks), -torch.inf, dtype=torch.float64)
    for row, request, position in rows(case):
        for token in range(position + 1):
            products = case.index_q[row].double() @ _read(case, case.index_k_cache, request, token)
            for head, product in enumerate(products.tolist()):
                best = float(scores[head, row, token // block_size])
                scores[head, row, token // block_size] = max(best, -math.inf if math.isnan(product) else product)
    return scores


def block_ids(case: Case, scores: torch.Tensor) -> list[list[set[int]]]:
    """[Hkv][T] sets of blocks."""
    spec = case.spec
    chosen: list[list[set[int]]] = [[set() for _ in range(case.q.shape[0])] for _ in range(spec.num_kv_heads)]
    for row, _, position in rows(case):
        own = position // spec.block_size
        for head in range(spec.num_kv_heads):
            forced = {block for block in range(own + 1) if block > own - spec.local_blocks}
            by_score = sorted(set(range(own + 1)) - forced, key=lambda block: (-float(scores[head, row, block]), block))
            chosen[head][row] = forced | set(by_score[: spec.topk - len(forced)])
    return chosen


def attend(case: Case, ids: torch.Tensor | None = None) -> torch.Tensor:
    """[T, Hq, D] float64: over the blocks in ids [Hkv, T, S], or for None over all tokens up to the query's."""
    spec = case.spec
    out = torch.zeros(case.q.shape, dtype=torch.float64)
    for row, request, position in rows(case):
        for head in range(spec.num_kv_heads):
            tokens = range(position + 1)
            if ids is not None:
                chosen = set(ids[head, row].tolist())
                tokens = [token for token in tokens if token // spec.block_size in chosen]
            if not tokens:
                continue
            keys = torch.stack([_read(case, case.k_cache, request, token)[head] for token in tokens])
            values = torch.stack([_read(case, case.v_cache, request, token)[head] for token in tokens])
            heads = slice(head * spec.group, (head + 1) * spec.group)
            weights = (case.q[row, heads].double() @ keys.T * spec.head_dim**-0.5).softmax(-1)
            out[row, heads] = weights @ values
    return out


def sets(ids: torch.Tensor) -> list[list[set[int]]]:
    """[Hkv][T] sets of blocks of block_ids; asserts that valid ids come first, then −1, none twice."""
    found = []
    for head in ids.tolist():
        found.append([])
        for row in head:
            valid = [block for block in row if block >= 0]
            assert row == valid + [-1] * (len(row) - len(valid))
            assert len(set(valid)) == len(valid)
            found[-1].append(set(valid))
    return found

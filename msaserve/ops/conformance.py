"""Whether an implementation keeps its operator's contract on a named case: what CI's interpreter and a card both run.

`Conformance(trial).check(operator, impl)` computes with scratch full of NaN and outputs full of garbage, and compares
with the reference in float32. It also replays the call from a CUDA graph, after sequences have shrunk, and computes
each of a few requests with the others turned into padding: both must give the same bits.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch

from msaserve import ops
from msaserve.ops.dispatch import Impl
from msaserve.ops.ragged import query_rows, raw
from msaserve.ops.testing import Case, CaseSpec, Selection, build, projection, relative_error, select, token_slots

Scales = Literal["tensor", "head"]

OPERATORS = (
    "select_blocks",
    "sparse_attend",
    "select_attend",
    "dense_attend",
    "remap",
    "page_table",
    "batch_from_slots",
    "combine",
    "store_kv",
    "norm_rope_store",
)
"""Operators that have kernels."""

TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-3}
"""The relative error of attention that a dtype of queries allows."""
TOLERANCE_8_BITS = 2e-2
"""The same with 8-bit caches, against the dequantised reference."""
SWAP, SWAP_8_BITS = 1e-5, 2e-3
"""By how much of the scores a block left out may be better than one chosen; with 8-bit queries, summed to 13 bits."""
ROW_FACTOR = 4.0
"""How much larger the error of one query's one head may be: an error of all rows together hides a wrong one."""


@dataclass(frozen=True)
class Trial:
    """A case in some dtypes: 8-bit caches if `scales` is given, index queries of 8 bits too if these are per head."""

    spec: CaseSpec
    dtype: torch.dtype
    device: str
    scales: Scales | None = None

    @property
    def name(self) -> str:
        return self.spec.name if self.scales is None else f"{self.spec.name}, fp8 per {self.scales}"

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype] if self.scales is None else TOLERANCE_8_BITS


class RefusedError(Exception):
    """The implementation does not serve these arguments, and says why."""


class MismatchError(AssertionError):
    """The implementation broke the contract."""


@contextmanager
def poisoned() -> Iterator[None]:
    """Everything torch allocates without a value holds NaN, or the largest integer."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills  # type: ignore[attr-defined]


def implementations(operator: str) -> list[str]:
    """The kernels of an operator: every implementation that is no reference."""
    return [impl.name for impl in import_module(f"msaserve.ops.{operator}").IMPLS if "reference" not in impl.name]


class Conformance:
    """One trial's tensors and expected results, shared by all implementations.

    is_short: fewer selections and requests alone, for Triton's interpreter and for compute-sanitizer.
    """

    def __init__(self, trial: Trial, *, seed: int = 0, is_short: bool = False) -> None:
        self.trial = trial
        self._seed = seed
        self._kinds: tuple[Selection, ...] = ("neighbours", "out_of_range") if is_short else get_args(Selection)
        self._max_alone = 1 if is_short else 3
        self.case = self._build()
        device = self.case.q.device
        per_head = torch.tensor([0.5, 1.25, 2.0, 0.75], device=device).repeat(8)[: trial.spec.num_kv_heads]
        self.scales: dict[str, torch.Tensor] = {}
        if trial.scales is not None:
            k_scale = per_head if trial.scales == "head" else per_head[0]
            self.scales = {"k_scale": k_scale, "v_scale": k_scale.flip(0) if k_scale.dim() else k_scale * 3}
        self._padding = query_rows(self.case.seq_lens, self.case.cu_query_lens, self.case.q.shape[0]).positions < 0

    def check(self, operator: str, impl: str) -> float:
        """The worst relative error; 0 where results are exact.

        Raises:
            RefusedError: the implementation does not serve this case.
            MismatchError: a wrong result, and which.
        """
        error: float = getattr(self, f"_check_{operator}")(impl)
        return error

    def default(self, operator: str) -> str:
        """The implementation that impl=None takes: it is called once."""
        taken: list[str] = []
        load = Impl.load

        def load_and_tell(impl: Impl) -> Callable[..., Any]:
            taken.append(impl.name)
            return load(impl)

        args, options = self._first_call(operator)
        with patch.object(Impl, "load", load_and_tell):
            getattr(ops, operator)(*args, **options)
        return taken[0]

    def _build(self, **changes: Any) -> Case:
        trial = self.trial
        cache_dtype = None if trial.scales is None else torch.float8_e4m3fn
        options = {"dtype": trial.dtype, "device": trial.device, "cache_dtype": cache_dtype, "seed": self._seed}
        case = build(trial.spec, **options, **changes)  # type: ignore[arg-type]
        if trial.scales == "head":
            case = replace(case, index_q=case.index_q.to(torch.float8_e4m3fn))
        return case

    def _first_call(self, operator: str) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
        case, spec = self.case, self.trial.spec
        if operator == "select_blocks":
            return (case.index_q, case.index_k_cache, *case.batch), dict(case.selection_options)
        if operator == "sparse_attend":
            tensors = (case.q, case.k_cache, case.v_cache, select(case), *case.batch)
            return tensors, {"max_query_len": spec.max_query_len, **self.scales}
        if operator == "select_attend":
            queries = (case.q, case.k_cache, case.v_cache, case.index_q, case.index_k_cache, *case.batch)
            return queries, {**case.selection_options, **self.scales}
        if operator == "dense_attend":
            return (case.q, case.k_cache, case.v_cache, *case.batch), {**case.bounds, **self.scales}
        if operator == "remap":
            return (select(case), case.cu_query_lens), {"max_blocks": case.block_table.shape[1]}
        if operator == "page_table":
            return (select(case), *case.batch), {"block_size": spec.block_size, "num_kv_heads": spec.num_kv_heads}
        if operator == "batch_from_slots":
            return (*token_slots(case), case.seq_lens), self._columns
        if operator == "combine":
            return self._parts(), {}
        case = self._build_empty()
        if operator == "store_kv":
            index = {"index_k": case.index_k, "index_k_cache": case.index_k_cache}
            return (case.k, case.v, case.k_cache, case.v_cache, case.slots), {**index, **self.scales}
        args, options = projection(case, is_narrow=self.trial.scales == "head")
        return args, {**options, **self.scales}

    def _call(self, operator: str, impl: str, *args: Any, **options: Any) -> Any:
        try:
            with poisoned():
                return getattr(ops, operator)(*args, **options, impl=impl)
        except ValueError as error:
            if "cannot serve these arguments" not in str(error):
                raise
            raise RefusedError(str(error).split("arguments: ")[-1]) from None

    def _expect(self, holds: bool | torch.Tensor, what: str) -> None:
        if not holds:
            raise MismatchError(what)

    # Selection

    def _select(self, impl: str, case: Case) -> torch.Tensor:
        shape = (case.spec.num_kv_heads, case.q.shape[0], case.spec.topk)
        out = torch.full(shape, -7, dtype=torch.int32, device=case.q.device)
        args = (case.index_q, case.index_k_cache, *case.batch)
        result = self._call("select_blocks", impl, *args, **case.selection_options, out=out)
        self._expect(result is out, "out is not what was given")
        return out

    @cached_property
    def _selected(self) -> torch.Tensor:
        args = (self.case.index_q.float(), self.case.index_k_cache, *self.case.batch)
        options: dict[str, Any] = self.case.selection_options
        return ops.select_blocks(*args, **options, impl="reference").sort(-1).values

    def _check_select_blocks(self, impl: str) -> float:
        chosen, error = self._selection_error(self._select(impl, self.case))
        again = self._select(impl, self.case).sort(-1).values
        self._expect(torch.equal(again, chosen), "a second call chose other blocks")
        for alone, rows in self._alone():
            ids = self._select(impl, alone).sort(-1).values
            self._expect(torch.equal(ids[:, rows], chosen[:, rows]), "a request alone chose other blocks")
        self._check_replay(lambda batch: self._select(impl, replace(self.case, **batch)))
        return error

    def _selection_error(self, chosen: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The ids sorted, and by how much of the scores a block left out is better than one chosen."""
        is_valid = chosen >= 0
        self._expect((is_valid == is_valid.sort(-1, descending=True).values).all(), "−1 among valid ids")
        chosen = chosen.sort(-1).values
        self._expect((chosen[..., 1:] > chosen[..., :-1]).logical_or(chosen[..., 1:] < 0).all(), "an id twice")
        self._expect((chosen[:, self._padding] == -1).all(), "blocks of a padding row")
        differing = (chosen != self._selected).any(-1)
        if not differing.any():
            return chosen, 0.0
        self._expect(self.case.spec.index_values == "normal", f"{int(differing.sum())} rows chose other blocks")
        error = self._worst_swap(chosen, differing)
        is_within = error <= (SWAP_8_BITS if self.case.index_q.itemsize == 1 else SWAP)
        self._expect(is_within, f"a block left out is better by {error:.1e} of the scores")
        return chosen, error

    def _worst_swap(self, chosen: torch.Tensor, differing: torch.Tensor) -> float:
        """By how much of the largest score involved a wrongly chosen block is worse than one left out."""
        case, spec = self.case, self.trial.spec
        heads, rows = differing.nonzero(as_tuple=True)
        share = 0.1 if case.index_q.itemsize == 1 else 0.02
        self._expect(len(rows) <= share * differing.numel() + 8, f"{len(rows)} of {differing.numel()} rows differ")
        where = query_rows(case.seq_lens, case.cu_query_lens, case.q.shape[0])
        worst = 0.0
        for i in range(0, len(rows), 64):
            head, row = heads[i : i + 64], rows[i : i + 64]
            ids = torch.stack([chosen[head, row], self._selected[head, row]], 1).long()
            pages = case.block_table[where.requests[row, None, None], ids.clamp(min=0)].long()
            keys = raw(case.index_k_cache)[pages].view(case.index_k_cache.dtype).float()
            scores = torch.einsum("rcsbd,rd->rcsb", keys, case.index_q[row, head].float())
            tokens = ids[..., None] * spec.block_size + torch.arange(spec.block_size, device=ids.device)
            hidden = (tokens > where.positions[row, None, None, None]) | scores.isnan()
            scores = scores.masked_fill(hidden, -torch.inf).amax(-1)
            in_both = (ids[:, 0, :, None] == ids[:, 1, None, :]) | (ids[:, 0, :, None] < 0)
            kept = scores[:, 0].masked_fill(in_both.any(2), torch.inf).amin(-1)
            left_out = scores[:, 1].masked_fill(in_both.any(1), -torch.inf).amax(-1)
            scale = scores.masked_fill(ids < 0, 0.0).abs().amax((1, 2)).clamp(min=1e-30)
            worst = max(worst, float(((left_out - kept) / scale).max()))
        return worst

    # Attention

    def _check_sparse_attend(self, impl: str) -> float:
        case, spec = self.case, self.trial.spec
        args = (case.q, case.k_cache, case.v_cache)

        def attend(case: Case, ids: torch.Tensor) -> torch.Tensor:
            out = torch.full_like(case.q, torch.nan)
            options = {"max_query_len": spec.max_query_len, "out": out, **self.scales}
            result = self._call("sparse_attend", impl, *args, ids, *case.batch, **options)
            self._expect(result is out, "out is not what was given")
            return out

        worst = 0.0
        for kind in self._kinds:
            ids = select(case, kind)
            out = attend(case, ids)
            worst = max(worst, self._attention_error(out, self._attended(kind), kind))
            if kind in ("random", "neighbours"):
                self._expect(torch.equal(attend(case, ids), out), f"{kind}: a second call gave other bits")
            if kind == self._kinds[0]:
                for alone, rows in self._alone():
                    self._expect(torch.equal(attend(alone, ids)[rows], out[rows]), f"{kind}: alone gave other bits")
        ids = select(case, "holes")
        self._check_replay(lambda batch: attend(replace(case, **batch), ids))
        return worst

    def _attended(self, kind: Selection) -> torch.Tensor:
        if kind not in self._attended_by_kind:
            case, spec = self.case, self.trial.spec
            args = (case.q.float(), case.k_cache, case.v_cache, select(case, kind), *case.batch)
            options: dict[str, Any] = {"max_query_len": spec.max_query_len, **self.scales}
            self._attended_by_kind[kind] = ops.sparse_attend(*args, **options, impl="reference")
        return self._attended_by_kind[kind]

    @cached_property
    def _attended_by_kind(self) -> dict[str, torch.Tensor]:
        return {}

    def _check_select_attend(self, impl: str) -> float:
        case, spec = self.case, self.trial.spec

        def attend(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
            out = torch.full_like(case.q, torch.nan)
            args = (case.q, case.k_cache, case.v_cache, case.index_q, case.index_k_cache, *case.batch)
            result, ids = self._call("select_attend", impl, *args, **case.selection_options, out=out, **self.scales)
            self._expect(result is out, "out is not what was given")
            return out, ids

        out, ids = attend(case)
        chosen, _ = self._selection_error(ids)
        args = (case.q.float(), case.k_cache, case.v_cache, ids, *case.batch)
        options: dict[str, Any] = {"max_query_len": spec.max_query_len, **self.scales}
        error = self._attention_error(out, ops.sparse_attend(*args, **options, impl="reference"), "its own choice")
        self._expect(torch.equal(attend(case)[0], out), "a second call gave other bits")
        for alone, rows in self._alone():
            own_out, own_ids = attend(alone)
            self._expect(torch.equal(own_ids.sort(-1).values[:, rows], chosen[:, rows]), "alone chose other blocks")
            self._expect(torch.equal(own_out[rows], out[rows]), "alone gave other bits")
        self._check_replay(lambda batch: attend(replace(case, **batch))[0])
        return error

    def _check_dense_attend(self, impl: str) -> float:
        case = self.case
        args = (case.q, case.k_cache, case.v_cache)

        def attend(case: Case) -> torch.Tensor:
            out = torch.full_like(case.q, torch.nan)
            self._call("dense_attend", impl, *args, *case.batch, **case.bounds, out=out, **self.scales)
            return out

        out = attend(case)
        error = self._attention_error(out, self._dense, "dense")
        for alone, rows in self._alone():
            self._expect(torch.equal(attend(alone)[rows], out[rows]), "alone gave other bits")
        self._check_replay(lambda batch: attend(replace(case, **batch)))
        return error

    @cached_property
    def _dense(self) -> torch.Tensor:
        args = (self.case.q.float(), self.case.k_cache, self.case.v_cache, *self.case.batch)
        options: dict[str, Any] = {**self.case.bounds, **self.scales}
        return ops.dense_attend(*args, **options, impl="reference")

    def _attention_error(self, out: torch.Tensor, expected: torch.Tensor, kind: str) -> float:
        self._expect((out[self._padding] == 0).all(), f"{kind}: padding rows are not 0")
        self._expect(out.isfinite().all(), f"{kind}: NaN or infinite")
        error = relative_error(out, expected)
        self._expect(error <= self.trial.tolerance, f"{kind}: off by {error:.1e}")
        difference, norm = (out.float() - expected).norm(dim=-1), expected.norm(dim=-1)
        self._expect((difference[norm == 0] == 0).all(), f"{kind}: not 0 where nothing is visible")
        if norm.any():
            row_error = float((difference / norm.clamp(min=1e-30))[norm > 0].max())
            self._expect(row_error <= ROW_FACTOR * self.trial.tolerance, f"{kind}: one row is off by {row_error:.1e}")
        return error

    # Exact operators

    def _check_remap(self, impl: str) -> float:
        case = self.case
        for kind in self._kinds:
            args = (select(case, kind), case.cu_query_lens)
            options: dict[str, Any] = {"max_blocks": case.block_table.shape[1]}
            found = self._call("remap", impl, *args, **options)
            for got, want in zip(found, ops.remap(*args, **options, impl="reference"), strict=True):
                self._expect(torch.equal(got, want), f"{kind}: other rows")
        return 0.0

    def _check_page_table(self, impl: str) -> float:
        case, spec = self.case, self.trial.spec
        options: dict[str, Any] = {"block_size": spec.block_size, "num_kv_heads": spec.num_kv_heads}
        for kind in self._kinds:
            args = (select(case, kind), *case.batch)
            found = self._call("page_table", impl, *args, **options)
            for got, want in zip(found, ops.page_table(*args, **options, impl="reference"), strict=True):
                self._expect(torch.equal(got, want), f"{kind}: other pages")
        ids = select(case, "holes")
        self._check_replay(lambda new: self._call("page_table", impl, ids, *replace(case, **new).batch, **options)[0])
        return 0.0

    @property
    def _columns(self) -> dict[str, int]:
        return {"block_size": self.trial.spec.block_size, "max_blocks": self.case.block_table.shape[1]}

    def _check_batch_from_slots(self, impl: str) -> float:
        slots, row_ids = token_slots(self.case)
        for dtype in (torch.int32, torch.int64):
            args = (slots.to(dtype), row_ids.to(dtype), self.case.seq_lens.to(dtype))
            found = self._call("batch_from_slots", impl, *args, **self._columns)
            starts = torch.arange(len(row_ids) + 1, device=row_ids.device)
            for got, want in zip(found, (self.case.block_table, self.case.seq_lens, starts), strict=True):
                self._expect(got.dtype == torch.int32 and torch.equal(got, want.int()), f"{dtype}: another batch")
        self._check_replay(
            lambda new: self._call("batch_from_slots", impl, slots, row_ids, new["seq_lens"], **self._columns)[0]
        )
        return 0.0

    def _parts(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Partial outputs and their log-sum-exps; a third of the parts are empty and hold NaN."""
        spec, case = self.trial.spec, self.case
        generator = torch.Generator(case.q.device).manual_seed(2)
        shape = (min(case.q.shape[0], 300), spec.num_kv_heads, spec.topk, spec.group)
        options: dict[str, Any] = {"generator": generator, "device": case.q.device}
        lse = torch.randn(shape, **options) * 5
        is_empty = (torch.rand((*shape[:3], 1), **options) < 0.33).expand(shape)
        parts = torch.randn((*shape, spec.head_dim), **options).masked_fill(is_empty[..., None], torch.nan)
        return parts.to(self.trial.dtype), lse.masked_fill(is_empty, -torch.inf)

    def _check_combine(self, impl: str) -> float:
        parts, lse = self._parts()
        out, out_lse = self._call("combine", impl, parts, lse)
        expected, expected_lse = ops.combine(parts.float(), lse, impl="reference")
        error = relative_error(out, expected)
        self._expect(error <= TOLERANCES[self.trial.dtype], f"off by {error:.1e}")
        self._expect(torch.allclose(out_lse, expected_lse, rtol=1e-5, atol=1e-5), "other log-sum-exps")
        return error

    # Writes

    def _check_store_kv(self, impl: str) -> float:
        results = []
        for name in (impl, "reference"):
            case = self._build_empty()
            index = {"index_k": case.index_k, "index_k_cache": case.index_k_cache}
            caches = (case.k_cache, case.v_cache)
            self._call("store_kv", name, case.k, case.v, *caches, case.slots, **index, **self.scales)
            results.append([*caches, case.index_k_cache])
        return self._stored_error(results, 0.0)

    def _check_norm_rope_store(self, impl: str) -> float:
        results = []
        for name in (impl, "reference"):
            case = self._build_empty()
            args, options = projection(case, is_narrow=self.trial.scales == "head")
            queries = self._call("norm_rope_store", name, *args, **options, **self.scales)
            results.append([case.k_cache, case.v_cache, case.index_k_cache, *queries])
        # Sums are taken in another order, which may round a value to its neighbour.
        return self._stored_error(results, 1e-6 if self.trial.dtype == torch.float32 else 1e-3)

    def _stored_error(self, results: list[list[torch.Tensor]], allowed: float) -> float:
        """Of [result's, reference's] k, v, index_k, q, index_q. 8-bit values may be rounded to a neighbour, rarely."""
        worst = 0.0
        for got, want, name in zip(*results, ("k", "v", "index_k", "q", "index_q"), strict=False):
            wide, expected = got.float(), want.float()
            self._expect(torch.equal(wide.isnan(), expected.isnan()), f"{name}: other slots")
            wide, expected = wide.nan_to_num(0), expected.nan_to_num(0)
            error = relative_error(wide, expected)
            worst = max(worst, error)
            if got.itemsize > 1:
                self._expect(error <= allowed, f"{name}: off by {error:.1e}")
                continue
            largest = torch.maximum(wide.abs(), expected.abs())
            self._expect(((wide - expected).abs() <= largest / 7 + 2**-9).all(), f"{name}: no neighbour")
            share = float((wide != expected).sum()) / max(1, int((expected != 0).sum()))
            self._expect(share <= 0.02, f"{name}: {share:.1%} of the 8-bit values differ")
        return worst

    def _build_empty(self) -> Case:
        if self.trial.spec.pool_pages:
            raise RefusedError("nothing is stored in pages that blocks share")
        return self._build(is_stored=False)

    # Invariances

    def _alone(self) -> Iterator[tuple[Case, slice]]:
        """The case with all requests but one as padding, and that one's rows: the longest few, if there are others."""
        starts, seq_lens = self.case.cu_query_lens.tolist(), self.case.seq_lens.tolist()
        real = [i for i, seq_len in enumerate(seq_lens) if seq_len and starts[i + 1] > starts[i]]
        if len(real) < 2:
            return
        for request in sorted(real, key=lambda i: -seq_lens[i])[: self._max_alone]:
            lens = torch.zeros_like(self.case.seq_lens)
            lens[request] = seq_lens[request]
            yield replace(self.case, seq_lens=lens), slice(starts[request], starts[request + 1])

    def _check_replay(self, call: Callable[[dict[str, Any]], torch.Tensor]) -> None:
        """On a card: a graph captured of `call` gives the bits of an eager call, before and after sequences shrink."""
        # Without torch's memory cache, as compute-sanitizer needs it, nothing can be allocated during a capture.
        if self.trial.device != "cuda" or os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING") == "1":
            return
        case = self.case
        seq_lens = case.seq_lens.clone()
        query_lens = case.cu_query_lens.diff()
        shorter = torch.where(seq_lens > 0, torch.maximum(query_lens, seq_lens // 2), 0).int()
        call({"seq_lens": seq_lens})
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = call({"seq_lens": seq_lens})
        for lens, when in ((case.seq_lens, "replay"), (shorter, "replay after sequences shrank")):
            seq_lens.copy_(lens)
            graph.replay()
            replayed = result.clone()
            eager = call({"seq_lens": lens})
            if result.dtype == torch.int32 and result.dim() == 3:
                replayed, eager = replayed.sort(-1).values, eager.sort(-1).values
            self._expect(torch.equal(replayed, eager), f"{when}: other bits than an eager call")

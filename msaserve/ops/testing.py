"""Named cases for tests and benchmarks: a batch, its caches and its selection, on any device and in any dtype.

Slots that hold no token are NaN in every cache, pages are shuffled, and page 0 belongs to no request.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch

from msaserve.ops.ragged import query_rows

Layout = Literal["token_major", "vllm", "far", "sliced", "odd"]
IndexValues = Literal["normal", "integers", "equal", "special"]
Selection = Literal["random", "equal", "holes", "out_of_range", "neighbours"]

TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""The relative error allowed between an implementation and a float64 oracle over the same inputs."""

FAR_PAGE_STRIDE = (1 << 30) + 4096
"""Elements between pages of the "far" layout: page 2 begins past 2^31."""


@dataclass(frozen=True, kw_only=True)
class CaseSpec:
    """What a batch looks like.

    requests: (query_len, seq_len) of each; seq_len 0 is a padding request, whatever its query_len.
    tail_rows: rows of queries after the last request's.
    layout: of the K and V caches. "token_major" is contiguous [P, block, Hkv, D]; "vllm" is two views of one
        [P, Hkv, block, 2D]; "far" has FAR_PAGE_STRIDE between pages, of the index cache too. In "sliced" every cache
        and the queries are parts of wider allocations, rows on 16 bytes; in "odd" no row is aligned.
    index_values: "integers" are small, so that scores are exact in any dtype and order and often equal; "equal"
        makes all scores equal; "special" plants infinite and NaN keys among integers.
    pool_pages: if not 0, a request's blocks but the last share that many pages, so that a long context needs little
        memory; nothing can be stored then. spare_pages: of no request, shuffled among the others.
    """

    name: str
    requests: tuple[tuple[int, int], ...]
    num_kv_heads: int = 2
    group: int = 4
    head_dim: int = 32
    index_dim: int = 16
    block_size: int = 16
    topk: int = 4
    local_blocks: int = 1
    tail_rows: int = 0
    layout: Layout = "token_major"
    index_values: IndexValues = "integers"
    pool_pages: int = 0
    spare_pages: int = 3

    @property
    def max_query_len(self) -> int:
        return max((query_len for query_len, _ in self.requests), default=0)

    @property
    def max_seq_len(self) -> int:
        return max((seq_len for _, seq_len in self.requests), default=0)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A CaseSpec's tensors, named and shaped as the operators take them.

    k, v and index_k are the new tokens', as the caches already hold them unless the case was built empty.
    """

    spec: CaseSpec
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    index_q: torch.Tensor
    index_k: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    index_k_cache: torch.Tensor
    slots: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_query_lens: torch.Tensor
    generator: torch.Generator

    @property
    def batch(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(block_table, seq_lens, cu_query_lens), the arguments most operators end with."""
        return self.block_table, self.seq_lens, self.cu_query_lens

    @property
    def bounds(self) -> dict[str, int]:
        """max_query_len and max_seq_len."""
        return {"max_query_len": self.spec.max_query_len, "max_seq_len": self.spec.max_seq_len}

    @property
    def selection_options(self) -> dict[str, int]:
        """What select_blocks takes besides tensors."""
        return {"topk": self.spec.topk, "local_blocks": self.spec.local_blocks, **self.bounds}


SMALL_CASES = (
    CaseSpec(name="ragged", requests=((5, 37), (1, 90), (7, 7), (1, 1), (3, 66))),
    CaseSpec(name="decode", requests=((1, 95), (1, 16), (1, 17), (1, 15), (1, 1))),
    CaseSpec(name="contexts_around_a_block", requests=((1, 1), (15, 15), (16, 16), (17, 17), (1, 33))),
    CaseSpec(name="chunk_inside_a_block", requests=((6, 57), (9, 41), (20, 52))),
    CaseSpec(name="fewer_blocks_than_topk", requests=((4, 20), (1, 40), (3, 3)), topk=8),
    CaseSpec(name="padding", requests=((2, 50), (0, 0), (1, 0), (1, 33), (3, 0), (0, 0)), tail_rows=4),
    CaseSpec(name="nothing_but_padding", requests=((0, 0), (2, 0)), tail_rows=2),
    CaseSpec(name="all_ties", requests=((3, 95), (18, 130)), index_values="equal"),
    CaseSpec(name="special_keys", requests=((6, 95), (1, 150)), index_values="special"),
    CaseSpec(name="normal_scores", requests=((6, 95), (1, 150)), index_values="normal"),
    CaseSpec(name="local_blocks_2", requests=((5, 95), (1, 150), (2, 20), (3, 3)), local_blocks=2),
    CaseSpec(name="vllm_layout", requests=((5, 95), (1, 40)), layout="vllm"),
    CaseSpec(name="group_1", requests=((5, 95), (1, 40)), num_kv_heads=3, group=1),
    CaseSpec(name="group_16", requests=((3, 95), (1, 40)), num_kv_heads=1, group=16, head_dim=16),
    CaseSpec(name="index_dim_differs", requests=((5, 95),), head_dim=16, index_dim=64),
    CaseSpec(name="block_64", requests=((3, 200), (1, 65)), block_size=64, topk=2),
    CaseSpec(name="block_128", requests=((3, 400), (1, 128), (1, 129)), block_size=128, topk=2),
    CaseSpec(name="topk_64", requests=((2, 1100), (1, 300)), topk=64, num_kv_heads=1, group=2, head_dim=16),
    CaseSpec(name="topk_1", requests=((3, 95), (1, 16)), topk=1),
)
"""Cases a token-by-token oracle can follow; between them every corner the contracts name."""

FAR_CASE = CaseSpec(name="far_pages", requests=((2, 30),), layout="far", topk=2)
"""Needs gigabytes of address space, of which it touches kilobytes on a CPU; a GPU must have the memory."""


def m3_spec(name: str, requests: tuple[tuple[int, int], ...], **changes: Any) -> CaseSpec:
    """A CaseSpec of MiniMax-M3's shapes: 4 KV heads of 128 with 16 query heads each, 16 of the blocks of 128."""
    shapes = {
        "num_kv_heads": 4,
        "group": 16,
        "head_dim": 128,
        "index_dim": 128,
        "block_size": 128,
        "topk": 16,
        "index_values": "normal",
    }
    return CaseSpec(name=name, requests=requests, **{**shapes, **changes})


def _kernel_spec(name: str, requests: tuple[tuple[int, int], ...], **changes: Any) -> CaseSpec:
    return CaseSpec(name=name, requests=requests, **{"head_dim": 64, "index_dim": 64, "block_size": 64, **changes})


KERNEL_CASES = (
    _kernel_spec("decode", ((1, 700), (1, 1), (0, 0), (1, 64), (1, 65), (1, 0)), group=2, tail_rows=2),
    _kernel_spec("decode_8_tokens", ((8, 300), (2, 130)), group=2, layout="vllm", index_values="special"),
    _kernel_spec("decode_ties", ((1, 900), (2, 400)), index_values="equal", layout="sliced", local_blocks=2),
    _kernel_spec("decode_odd", ((1, 200), (4, 70)), layout="odd", num_kv_heads=3, group=2),
    _kernel_spec("prefill", ((20, 300), (1, 1), (17, 17), (0, 0), (9, 130), (2, 0)), group=2, tail_rows=3),
    _kernel_spec("prefill_special", ((18, 500),), index_values="special", layout="vllm", num_kv_heads=1, group=8),
    _kernel_spec("prefill_ties", ((33, 400), (12, 64)), index_values="equal", layout="sliced", local_blocks=2),
    _kernel_spec("prefill_odd", ((12, 200), (33, 70)), layout="odd", num_kv_heads=1, group=2),
    _kernel_spec("group_1_topk_64", ((9, 400), (1, 65)), num_kv_heads=1, group=1, topk=64),
    m3_spec("m3", ((21, 400), (1, 129)), num_kv_heads=1, topk=3, index_values="integers"),
)
"""Cases of shapes that every kernel takes, small enough for Triton's interpreter and for compute-sanitizer."""

_PAGES: dict[str, Any] = {"pool_pages": 300, "index_values": "integers"}
_RAGGED_17 = tuple((0 if i % 5 == 4 else 1 + 37 * i % 300, 300 + 431 * i % 5000) for i in range(17))
_RAGGED_64 = tuple((i % 7, 97 * i % 3000 and 6 + 97 * i % 3000) for i in range(64))
_SMALL_SHAPES: dict[str, Any] = {"num_kv_heads": 2, "head_dim": 64, "index_dim": 64, "block_size": 64, "topk": 4}

DECODE_CASES = (
    m3_spec("contexts", tuple((1, n) for n in (1, 127, 128, 129, 2047, 2048, 2049, 0))),
    m3_spec("context_131073", ((1, 131073), (1, 1000)), index_values="integers"),
    m3_spec("pages_4096", ((1, 4096 * 128),), **_PAGES),
    m3_spec("pages_4097", ((2, 4096 * 128 + 1), (1, 4097 * 128)), layout="vllm", **_PAGES),
    m3_spec("pages_8192", ((1, 8192 * 128), (1, 300)), **_PAGES),
    m3_spec("requests_17", tuple((1, 1 + 431 * i % 5000) for i in range(17)), layout="vllm"),
    m3_spec("requests_64", tuple((1, 97 * i % 3000) for i in range(64)), layout="vllm"),
    m3_spec("ragged_64", tuple((min(n, 8), length) for n, length in _RAGGED_64), tail_rows=5),
    m3_spec("decode_ties_m3", ((1, 140000), (1, 9999)), index_values="equal"),
    m3_spec("decode_special", ((4, 9000), (2, 300), (1, 5)), index_values="special"),
    m3_spec("tokens_8", ((8, 5000), (8, 8), (3, 200)), layout="vllm", index_values="integers"),
    m3_spec("decode_local_2", ((5, 4000), (1, 3000)), local_blocks=2, index_values="integers"),
    m3_spec("decode_far", ((2, 200),), layout="far"),
    m3_spec("decode_2_31", ((3, 9000), (1, 70)), layout="vllm", spare_pages=16500),
    m3_spec("decode_sliced", ((2, 3000), (1, 129)), layout="sliced"),
    m3_spec("decode_odd_m3", ((2, 3000), (1, 129)), layout="odd"),
    CaseSpec(name="decode_group_1_topk_64", requests=((2, 9000), (1, 70)), **{**_SMALL_SHAPES, "group": 1, "topk": 64}),
    CaseSpec(name="decode_group_2", requests=((1, 5000), (1, 65)), **{**_SMALL_SHAPES, "num_kv_heads": 1, "group": 2}),
    CaseSpec(name="decode_group_4_dim_128", requests=((1, 700), (6, 65)), **{**_SMALL_SHAPES, "head_dim": 128}),
    CaseSpec(name="decode_group_8", requests=((1, 5000), (2, 64)), **{**_SMALL_SHAPES, "group": 8, "index_dim": 128}),
    CaseSpec(name="decode_group_16_topk_1", requests=((3, 900), (1, 70)), **{**_SMALL_SHAPES, "group": 16, "topk": 1}),
    m3_spec("decode_block_128_dim_64", ((3, 900), (1, 70)), head_dim=64, index_dim=64, topk=32),
)
"""1 to 8 query tokens a request, on a card."""

PREFILL_CASES = (
    *(m3_spec(f"tokens_{n}", ((n, n),)) for n in (9, 63, 65, 1023)),
    m3_spec("tokens_777", ((777, 8969),), layout="vllm"),
    m3_spec("tokens_1000", ((1000, 3001),), index_values="integers"),
    m3_spec("tokens_4097", ((4097, 70000),), layout="vllm"),
    m3_spec("tokens_8193", ((8193, 131073),), layout="vllm"),
    m3_spec("tokens_8193_from_0", ((8193, 8193),)),
    m3_spec("contexts_of_20", tuple((min(n, 20), n) for n in (1, 127, 128, 129, 2047, 2048, 2049, 0))),
    m3_spec("ragged", ((300, 5000), (1, 1), (77, 77), (200, 2048), (0, 0), (5, 0)), tail_rows=7),
    m3_spec("prefill_17", _RAGGED_17, layout="vllm"),
    m3_spec("prefill_64", (*_RAGGED_64[:-1], (130, 1000)), tail_rows=3),
    m3_spec("prefill_4096_pages", ((40, 4096 * 128),), **_PAGES),
    m3_spec("prefill_4097_pages", ((257, 4096 * 128 + 1), (9, 4097 * 128)), layout="vllm", **_PAGES),
    m3_spec("prefill_8192_pages", ((100, 8192 * 128),), **_PAGES),
    m3_spec("prefill_ties_m3", ((200, 20000), (100, 400)), index_values="equal"),
    m3_spec("prefill_special_m3", ((200, 9000), (50, 300), (1, 5)), index_values="special"),
    m3_spec("prefill_local_2", ((50, 4000), (10, 3000)), local_blocks=2, index_values="integers"),
    m3_spec("prefill_far", ((20, 200),), layout="far"),
    m3_spec("prefill_2_31", ((300, 9000), (10, 70)), layout="vllm", spare_pages=16500),
    m3_spec("prefill_sliced", ((200, 3000), (10, 129)), layout="sliced"),
    m3_spec("prefill_odd_m3", ((200, 3000), (10, 129)), layout="odd"),
    CaseSpec(name="group_1_topk_64_9000", requests=((200, 9000), (1, 70)), **{**_SMALL_SHAPES, "group": 1, "topk": 64}),
    CaseSpec(name="group_2", requests=((100, 5000), (11, 65)), **{**_SMALL_SHAPES, "num_kv_heads": 1, "group": 2}),
    CaseSpec(name="group_4_dim_128", requests=((100, 700), (60, 65)), **{**_SMALL_SHAPES, "head_dim": 128}),
    CaseSpec(name="group_8", requests=((129, 5000), (20, 64)), **{**_SMALL_SHAPES, "group": 8, "index_dim": 128}),
    CaseSpec(name="group_16_topk_1", requests=((300, 900), (10, 70)), **{**_SMALL_SHAPES, "group": 16, "topk": 1}),
    m3_spec("block_128_dim_64", ((300, 900), (10, 70)), head_dim=64, index_dim=64, topk=32),
)
"""Longer chunks, on a card."""

CASES_8_BITS = (
    *("contexts", "pages_8192", "requests_17", "tokens_8", "decode_special", "decode_sliced", "decode_group_8"),
    *("decode_block_128_dim_64", "tokens_777", "tokens_8193", "contexts_of_20", "ragged", "prefill_17"),
    *("prefill_4097_pages", "prefill_special_m3", "group_4_dim_128", "group_8", "block_128_dim_64"),
)
"""Names of those that are run with 8-bit caches too."""


def build(
    spec: CaseSpec,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    cache_dtype: torch.dtype | None = None,
    seed: int = 0,
    is_stored: bool = True,
) -> Case:
    """The tensors of a case: the same for the same spec, seed, dtypes and device.

    Args:
        dtype: of the queries and the new tokens' keys and values.
        cache_dtype: of the caches; None is dtype.
        is_stored: whether the caches hold the new tokens; else their slots are NaN too, for store_kv to fill.
    """
    cache_dtype = cache_dtype or dtype
    generator = torch.Generator(device).manual_seed(seed)
    query_lens = torch.tensor([query_len for query_len, _ in spec.requests], dtype=torch.int64)
    seq_lens = torch.tensor([seq_len for _, seq_len in spec.requests], dtype=torch.int64)
    num_rows = int(query_lens.sum()) + spec.tail_rows
    block_table, num_pages = _pages(spec, seq_lens, spec.block_size, seed)
    slots, is_used, is_new = _slots(spec, block_table, num_pages, num_rows)
    is_held = (is_used if is_stored else is_used & ~is_new).to(device)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def laid_out(queries: torch.Tensor) -> torch.Tensor:
        return _pad(queries, spec.layout) if spec.layout in PADDING else queries

    page_shape = (num_pages, spec.block_size)
    kv_shape = (*page_shape, spec.num_kv_heads, spec.head_dim)
    k_pages, v_pages = randn(*kv_shape).to(cache_dtype), randn(*kv_shape).to(cache_dtype)
    index_q, index_pages = _index(spec, num_rows, page_shape, generator, torch.device(device))
    index_pages = index_pages.to(dtype).to(cache_dtype)
    slots = slots.to(device)
    new = slots.clamp(min=0)
    k, v = k_pages.flatten(0, 1)[new].to(dtype), v_pages.flatten(0, 1)[new].to(dtype)
    index_k = index_pages.flatten(0, 1)[new].to(dtype)
    k_cache, v_cache, index_k_cache = _lay_out(spec.layout, k_pages, v_pages, index_pages, is_held)
    return Case(
        spec=spec,
        q=laid_out(randn(num_rows, spec.num_kv_heads * spec.group, spec.head_dim)),
        k=k,
        v=v,
        index_q=laid_out(index_q.to(dtype)),
        index_k=index_k,
        k_cache=k_cache,
        v_cache=v_cache,
        index_k_cache=index_k_cache,
        slots=slots,
        block_table=block_table.int().to(device),
        seq_lens=seq_lens.int().to(device),
        cu_query_lens=torch.cat([query_lens.new_zeros(1), query_lens.cumsum(0)]).int().to(device),
        generator=generator,
    )


def _pages(spec: CaseSpec, seq_lens: torch.Tensor, block_size: int, seed: int) -> tuple[torch.Tensor, int]:
    """(block_table [B, max_blocks], number of pages): shuffled, some of no request, 0 beyond a request's last."""
    num_blocks = (seq_lens + block_size - 1) // block_size
    width = int(num_blocks.max()) + 2 if len(seq_lens) else 0
    block_table = torch.zeros((len(seq_lens), width), dtype=torch.int64)
    num_used = 0
    for request, count in enumerate(num_blocks.tolist()):
        pages = torch.arange(count)
        if spec.pool_pages and count:
            pages %= spec.pool_pages
            # Of its own: the slots that it leaves are NaN.
            pages[-1] = min(count - 1, spec.pool_pages)
        block_table[request, :count] = 1 + num_used + pages
        num_used += int(pages.max()) + 1 if count else 0
    # The far layout pays address space for each page.
    num_pages = 1 + num_used + (0 if spec.layout == "far" else spec.spare_pages)
    shuffled = torch.randperm(num_pages - 1, generator=torch.Generator().manual_seed(seed)) + 1
    return torch.cat([torch.zeros(1, dtype=torch.int64), shuffled])[block_table], num_pages


def _slots(
    spec: CaseSpec, block_table: torch.Tensor, num_pages: int, num_rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(slots [T], which slots hold a token, which hold a new one), the latter two [P, block]."""
    slots = torch.full((num_rows,), -1, dtype=torch.int64)
    is_used = torch.zeros(num_pages * spec.block_size, dtype=torch.bool)
    is_new = is_used.clone()
    row = 0
    for request, (query_len, seq_len) in enumerate(spec.requests):
        tokens = torch.arange(seq_len)
        held = block_table[request, tokens // spec.block_size] * spec.block_size + tokens % spec.block_size
        is_used[held] = True
        if seq_len:
            assert query_len <= seq_len
            new = held[seq_len - query_len :]
            slots[row : row + query_len] = new
            is_new[new] = True
        row += query_len
    return slots, is_used.view(-1, spec.block_size), is_new.view(-1, spec.block_size)


def _index(
    spec: CaseSpec, num_rows: int, page_shape: tuple[int, int], generator: torch.Generator, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """(index_q [T, Hkv, Di], index keys [P, block, Di]) in float32."""
    shapes = (num_rows, spec.num_kv_heads, spec.index_dim), (*page_shape, spec.index_dim)
    index_q, index_k = (torch.randn(shape, generator=generator, device=device) for shape in shapes)
    if spec.index_values == "normal":
        return index_q, index_k
    index_q, index_k = index_q.mul(2).round().clamp(-3, 3), index_k.mul(2).round().clamp(-3, 3)
    if spec.index_values == "equal":
        index_k = torch.ones_like(index_k)
    if spec.index_values == "special":
        kinds = torch.randint(0, 12, page_shape, generator=generator, device=device)
        for kind, value in enumerate((torch.inf, -torch.inf, torch.nan)):
            # One channel: a product with 0 is NaN, with others infinite.
            index_k[..., 0] = torch.where(kinds == kind, value, index_k[..., 0])
        # Whole blocks whose every score is −inf are visible all the same.
        index_k[::4] = torch.nan
    return index_q, index_k


def _lay_out(
    layout: Layout, k_pages: torch.Tensor, v_pages: torch.Tensor, index_pages: torch.Tensor, is_held: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The caches, NaN where nothing is held."""
    pages = [_poison(plane, is_held) for plane in (k_pages, v_pages, index_pages)]
    if layout == "token_major":
        return pages[0], pages[1], pages[2]
    if layout == "vllm":
        both = torch.cat(pages[:2], dim=-1).transpose(1, 2).contiguous().transpose(1, 2)
        dim = k_pages.shape[-1]
        return both[..., :dim], both[..., dim:], pages[2]
    if layout in PADDING:
        return _pad(pages[0], layout), _pad(pages[1], layout), _pad(pages[2], layout)
    far = []
    for plane in pages:
        size = (plane.shape[0] - 1) * FAR_PAGE_STRIDE + plane[0].numel()
        storage = torch.empty(size, dtype=plane.dtype, device=plane.device)
        far.append(storage.as_strided(plane.shape, (FAR_PAGE_STRIDE, *plane.stride()[1:])).copy_(plane))
    return far[0], far[1], far[2]


PADDING = {"sliced": 8, "odd": 3}
"""Elements between the rows of these layouts."""


def _pad(rows: torch.Tensor, layout: Layout) -> torch.Tensor:
    """A copy whose dimensions are all parts of larger ones, the last one contiguous; what lies between is NaN."""
    outer = rows.shape[0] + 1, *(size + 1 for size in rows.shape[1:-1]), rows.shape[-1] + PADDING[layout]
    wide = torch.full(outer, torch.nan, dtype=torch.float32, device=rows.device).to(rows.dtype)
    inner = wide[tuple(slice(size) for size in rows.shape)]
    return inner.copy_(rows)


def _poison(pages: torch.Tensor, is_held: torch.Tensor) -> torch.Tensor:
    mask = is_held.view(*is_held.shape, *[1] * (pages.dim() - 2))
    # torch selects no 8-bit floats.
    wide = pages.float() if pages.itemsize == 1 else pages
    return torch.where(mask, wide, torch.nan).to(pages.dtype)


def select(case: Case, kind: Selection = "random") -> torch.Tensor:
    """block_ids [Hkv, T, S] of a case, made without scores; the own block is always among them.

    "random": each query's own choice, in any order; "equal": all queries prefer the same low blocks; "holes": random
    with −1 among valid ids; "out_of_range": random with ids beyond the request's blocks and beyond block_table;
    "neighbours": most of it common to runs of 32 queries.
    """
    spec, max_blocks = case.spec, case.block_table.shape[1]
    num_heads, num_rows, topk = spec.num_kv_heads, case.q.shape[0], spec.topk
    if max_blocks == 0:
        return torch.full((num_heads, num_rows, topk), -1, dtype=torch.int32, device=case.q.device)
    generator = torch.Generator().manual_seed(1)
    own = query_rows(case.seq_lens.cpu(), case.cu_query_lens.cpu(), num_rows).positions // spec.block_size
    own = own[None, :, None]
    others = torch.arange(topk - 1).expand(num_heads, num_rows, -1)
    if kind != "equal":
        # One of each stretch of the blocks before the own one: distinct, and all of them if they are few.
        edges = own.clamp(min=topk - 1) * torch.arange(topk) // max(1, topk - 1)
        part = torch.rand((num_heads, num_rows, topk - 1), generator=generator)
        if kind == "neighbours":
            part[torch.rand(part.shape, generator=generator) < 0.9] = 0.5
        others = edges[..., :-1] + (part * edges.diff(dim=-1)).long()
    others = others.masked_fill(others >= own, -1)
    block_ids = torch.cat([own.expand(num_heads, -1, 1), others], dim=-1)
    if kind == "holes" and topk > 1:
        block_ids[..., 2::2] = -1
    if kind == "out_of_range":
        beyond = torch.tensor([max_blocks, max_blocks + 7, 1 << 20])[: topk - 1]
        block_ids[..., topk - len(beyond) :] = beyond
        if topk > 4:
            block_ids[..., -4] = own[..., 0] + 1
    if kind not in ("equal", "neighbours"):
        block_ids = block_ids.gather(-1, torch.rand(block_ids.shape, generator=generator).argsort(-1))
    return block_ids.masked_fill(own < 0, -1).int().to(case.q.device)


def projection(case: Case, *, is_narrow: bool = False) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """norm_rope_store's arguments for a case's rows; index queries of 8 bits if is_narrow."""
    spec, num_rows, device = case.spec, case.q.shape[0], case.q.device
    generator = torch.Generator(device).manual_seed(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(case.q.dtype)

    columns = (spec.group + 2) * spec.num_kv_heads * spec.head_dim + (spec.num_kv_heads + 1) * spec.index_dim
    pairs = min(spec.head_dim, spec.index_dim) // 4
    angles = torch.rand((num_rows, pairs), generator=generator, device=device) * 6
    weights = {name: normal(spec.head_dim) for name in ("q_weight", "k_weight")}
    weights |= {name: normal(spec.index_dim) for name in ("index_q_weight", "index_k_weight")}
    options: dict[str, Any] = {
        "eps": 1e-6,
        "num_index_heads": spec.num_kv_heads,
        "index_k_cache": case.index_k_cache,
        **weights,
    }
    if is_narrow:
        options["index_q_dtype"] = torch.float8_e4m3fn
    args = (normal(num_rows, columns), case.k_cache, case.v_cache, case.slots, angles.cos(), angles.sin())
    return args, options


def token_slots(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(slots [R, max_tokens], row_ids [B]), both int64: a table of more requests than the case's, in another order.

    The slots of what is no token of the case are −7, and so are the rows of requests without one.
    """
    seq_lens, block_size = case.seq_lens.long().cpu(), case.spec.block_size
    num_requests, max_blocks = case.block_table.shape
    tokens = torch.arange(max_blocks * block_size)
    held = case.block_table.cpu().long()[:, tokens // block_size] * block_size + tokens % block_size
    row_ids = torch.randperm(num_requests + 3, generator=torch.Generator().manual_seed(3))[:num_requests]
    slots = torch.full((num_requests + 3, len(tokens)), -7, dtype=torch.int64)
    slots[row_ids] = torch.where(tokens < seq_lens[:, None], held, -7)
    row_ids = torch.where(seq_lens > 0, row_ids, -7)
    return slots.to(case.q.device), row_ids.to(case.q.device)


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """‖out − reference‖ / ‖reference‖ in float64; ‖out‖ where the reference is all zeros, NaN if either has one."""
    expected = reference.double()
    norm = float(expected.norm())
    return float((out.double() - expected).norm()) / (norm or 1.0)

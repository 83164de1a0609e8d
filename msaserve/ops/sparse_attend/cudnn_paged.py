"""sparse_attend through cuDNN's paged attention, unmodified: KV heads become batch rows, selected pages their tables.

`page_table` numbers the selected pages in the one-head views of K and V; cuDNN then sees T · Hkv sequences of one query
token with G query heads and one KV head each. Needs the package nvidia-cudnn-frontend.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from msaserve.ops.page_table import one_head_view, page_table


class _Plan(NamedTuple):
    """A built graph and its tensors, in the order of `sparse_attend`'s arguments to it."""

    graph: Any
    tensors: tuple[Any, ...]
    workspace_bytes: int


@lru_cache(maxsize=16)
def _new_handle(index: int) -> Any:
    with torch.cuda.device(index):
        return import_module("cudnn").create_handle()


def _handle(device: torch.device) -> Any:
    """cuDNN's handle of a device, bound to the current stream."""
    handle = _new_handle(torch.cuda.current_device() if device.index is None else device.index)
    import_module("cudnn").set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    return handle


@lru_cache(maxsize=64)
def _plan(
    device: torch.device,
    dtype: torch.dtype,
    num_rows: int,
    group: int,
    dim: int,
    num_pages: int,
    block_size: int,
    token_step: int,
    topk: int,
    scale: float,
) -> _Plan:
    cudnn: Any = import_module("cudnn")
    element = cudnn.data_type.BFLOAT16 if dtype == torch.bfloat16 else cudnn.data_type.HALF
    graph = cudnn.pygraph(
        io_data_type=element,
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(device),
    )

    def integers(name: str, *shape: int) -> Any:
        stride = [shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1]
        return graph.tensor(name=name, dim=list(shape), stride=stride, data_type=cudnn.data_type.INT32)

    rows, row_stride = [num_rows, group, 1, dim], [group * dim, dim, dim, 1]
    pages = {"dim": [num_pages, 1, block_size, dim], "stride": [dim, dim, token_step, 1]}
    q = graph.tensor(name="q", dim=rows, stride=row_stride, data_type=element)
    k = graph.tensor(name="k", data_type=element, **pages)
    v = graph.tensor(name="v", data_type=element, **pages)
    k_pages, v_pages = (integers(name, num_rows, 1, topk, 1) for name in ("k_pages", "v_pages"))
    query_lens, kv_lens = (integers(name, num_rows, 1, 1, 1) for name in ("query_lens", "kv_lens"))
    out, _ = graph.sdpa(
        name="sdpa",
        q=q,
        k=k,
        v=v,
        generate_stats=False,
        attn_scale=scale,
        use_padding_mask=True,
        seq_len_q=query_lens,
        seq_len_kv=kv_lens,
        paged_attention_k_table=k_pages,
        paged_attention_v_table=v_pages,
        paged_attention_max_seq_len_kv=topk * block_size,
    )
    out.set_output(True).set_dim(rows).set_stride(row_stride)
    try:
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
    except cudnn.cudnnGraphNotSupportedError as error:
        raise ValueError(f"sparse_attend: impl='cudnn_paged' cannot serve these arguments: {error}") from error
    return _Plan(graph, (q, k, v, k_pages, v_pages, query_lens, kv_lens, out), graph.get_workspace_size())


def why_not(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    *_: torch.Tensor,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    **__: object,
) -> str | None:
    """None if `sparse_attend` serves these arguments, else the reason."""
    if not q.is_cuda:
        return f"{q.device} is no CUDA device"
    if find_spec("cudnn") is None:
        return "the package nvidia-cudnn-frontend is not installed"
    if q.dtype not in (torch.bfloat16, torch.float16) or k_cache.dtype != q.dtype:
        return f"queries are {q.dtype} and caches {k_cache.dtype}, not both bfloat16 or float16"
    if not all(x is None or x.is_contiguous() for x in (q, k_cache, v_cache, out)):
        return "q, out and the caches must be contiguous, the caches token-major [P, block, Hkv, D]"
    if k_scale is not None or v_scale is not None:
        return "scales are not served"
    if min(q.shape[0], block_ids.shape[2], block_table.numel()) == 0:
        return "nothing to attend to"
    return None


def sparse_attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_ids: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_query_lens: torch.Tensor,
    *,
    scale: float,
    max_query_len: int,
    out: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    num_rows, num_heads, dim = q.shape
    block_size, num_kv_heads = k_cache.shape[1:3]
    group, topk = num_heads // num_kv_heads, block_ids.shape[2]
    out = torch.empty_like(q) if out is None else out
    pages, kv_lens = page_table(
        block_ids, block_table, seq_lens, cu_query_lens, block_size=block_size, num_kv_heads=num_kv_heads
    )
    k_view, v_view = one_head_view(k_cache), one_head_view(v_cache)
    plan = _plan(
        q.device,
        q.dtype,
        num_rows * num_kv_heads,
        group,
        dim,
        k_view.shape[0],
        block_size,
        num_kv_heads * dim,
        topk,
        scale,
    )
    # A row that sees nothing has no query either, and keeps its zeros.
    out.zero_()
    query_lens = (kv_lens > 0).int()
    values = (q, k_view, v_view, pages, pages, query_lens, kv_lens, out)
    workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=q.device)
    plan.graph.execute(dict(zip(plan.tensors, values, strict=True)), workspace, handle=_handle(q.device))
    return out

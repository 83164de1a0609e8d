"""The MSA operators, alone: `from msaserve import ops`.

Shapes: T query tokens of B requests, Hq query heads, Hkv KV heads (= index heads), G = Hq / Hkv, D head dim,
Di index dim, P pages, N blocks, S = top-k. Requests are ragged: request b's tokens are
cu_query_lens[b] … cu_query_lens[b+1] − 1, token j of it stands at position seq_lens[b] − query_lens[b] + j.
`block_table [B, max_blocks]` maps a request's block to its page. Caches may have any strides with a contiguous
last dimension. Every operator takes `impl`: None is the best that works here, a name means that one or raises.

`msaserve.ops.msa` shows the pipeline on one page.
"""

from msaserve.ops.batch_from_slots import batch_from_slots
from msaserve.ops.combine import combine
from msaserve.ops.dense_attend import dense_attend
from msaserve.ops.index_score import index_score
from msaserve.ops.msa import msa_attend
from msaserve.ops.norm_rope_store import Queries, norm_rope_store
from msaserve.ops.page_table import one_head_view, page_table
from msaserve.ops.remap import BlockQueries, remap
from msaserve.ops.select_attend import select_attend
from msaserve.ops.select_blocks import select_blocks
from msaserve.ops.sparse_attend import sparse_attend
from msaserve.ops.store_kv import store_kv
from msaserve.ops.topk_blocks import topk_blocks

__all__ = [
    "BlockQueries",
    "Queries",
    "batch_from_slots",
    "combine",
    "dense_attend",
    "index_score",
    "msa_attend",
    "norm_rope_store",
    "one_head_view",
    "page_table",
    "remap",
    "select_attend",
    "select_blocks",
    "sparse_attend",
    "store_kv",
    "topk_blocks",
]

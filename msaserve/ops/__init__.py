"""The MSA operators, alone: `from msaserve import ops`.

Shapes: T query tokens of B requests, Hq query heads, Hkv KV heads (= index heads), G = Hq / Hkv, D head dim,
Di index dim, P pages, N blocks, S = top-k. Requests are ragged: request b's tokens are
cu_query_lens[b] … cu_query_lens[b+1] − 1, token j of it stands at position seq_lens[b] − query_lens[b] + j.
`block_table [B, max_blocks]` maps a request's block to its page. Caches may have any strides with a contiguous
last dimension. Every operator takes `impl`: None is the best that works here, a name means that one or raises.

`msaserve.ops.msa` shows the pipeline on one page.
"""

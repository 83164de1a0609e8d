"""select_attend as the references of select_blocks and sparse_attend."""

from __future__ import annotations

from functools import partial

from msaserve.ops.select_attend.two_steps import select_attend as two_steps

select_attend = partial(two_steps, impl="reference")

"""The TMA load under the name it has in the Triton at hand: `async_load` since 3.9."""

from __future__ import annotations

from triton.experimental.gluon.language.nvidia.hopper import tma

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
"""(descriptor, coordinates, barrier, shared memory): fetch a box and count its bytes on the barrier."""

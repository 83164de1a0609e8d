"""What differs between the vLLM releases that the plugin knows. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """What the plugin must know of one vLLM release."""

    names_backend: bool
    """Whether a layer asks for its attention's cache backend and implementation in one, or for the latter alone."""
    is_stock_right: bool = True
    """Whether vLLM's own kernels for Hopper read the selected blocks right: 0.25 and 0.26 take their buffer of block
    ids by the wrong axis (vllm#48603, #49147)."""

    @property
    def selector(self) -> str:
        """The function that a layer asks, as `nvidia.model` binds it."""
        return "select_main_backend_and_impl_cls" if self.names_backend else "select_main_impl_cls"


_FAULTY = Release(names_backend=False, is_stock_right=False)
_CURRENT = Release(names_backend=True)

RELEASES: dict[str, Release] = {
    "0.24.0": Release(names_backend=False),
    "0.25.0": _FAULTY,
    "0.25.1": _FAULTY,
    "0.26.0": _FAULTY,
    "0.27.0": _CURRENT,
    "0.27.1": _CURRENT,
    "0.28.0": _CURRENT,
    "0.29.0": _CURRENT,
    "0.30.0": _CURRENT,
    "0.31.0": _CURRENT,
    "0.32.0": _CURRENT,
    "0.33.0": _CURRENT,
}


def find(version: str) -> Release | None:
    """The release of that version, whose local part ("+cu129") says nothing here; None if it is unknown."""
    return RELEASES.get(version.partition("+")[0])

"""Whether a card, its Triton and a model's shapes are what our kernels serve: what both plugins ask. Loads no torch."""

from __future__ import annotations

OLDEST_TRITON = (3, 6)
MAX_TOPK = 64
MAX_GROUP = 64


def triton_version() -> str | None:
    """Of the Triton that is there; None without one."""
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)


def why_not(
    capability: tuple[int, int], *, triton: str | None, has_8_bits: bool, is_forced: bool, switch: str
) -> str | None:
    """Why the engine's own kernels run on this card; None if ours may.

    Args:
        has_8_bits: whether a cache is float8_e4m3fn.
        is_forced: whether the environment variable `switch` is 1, which takes other cards than Hopper's too.
    """
    major, minor = capability
    if not is_forced and major != 9:
        return f"compute capability {major}.{minor} is not Hopper's; {switch}=1 takes ours all the same"
    if capability < (8, 0):
        return f"compute capability {major}.{minor} is under 8.0"
    if has_8_bits and capability < (8, 9):
        return f"compute capability {major}.{minor} has no 8-bit floats"
    if triton is None:
        return "Triton is not installed"
    if tuple(int(part) for part in triton.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {triton} is older than {'.'.join(map(str, OLDEST_TRITON))}"
    return None


def why_not_shape(*, topk: int, local_blocks: int, group: int) -> str | None:
    """None if `impl=None` of the operators takes kernels on a card; the references would not run in a captured graph.

    Args:
        group: query heads to a KV head.
    """
    if not 1 <= local_blocks <= topk <= MAX_TOPK:
        return f"local_blocks is {local_blocks} and topk {topk}, not 1 ≤ local_blocks ≤ topk ≤ {MAX_TOPK}"
    if not 1 <= group <= MAX_GROUP:
        return f"{group} query heads to a KV head are not 1 to {MAX_GROUP}"
    return None

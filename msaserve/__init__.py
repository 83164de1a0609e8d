"""msaserve: serve MiniMax-M3 and models of its kind.

Importing this package loads no torch; the names below load what they need when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from msaserve.llm import LLM
    from msaserve.types import SamplingParams

__all__ = ["LLM", "SamplingParams", "__version__"]
__version__ = "0.1.0.dev0"


def __getattr__(name: str) -> Any:
    if name == "LLM":
        try:
            from msaserve.llm import LLM
        except ModuleNotFoundError as error:
            if str(error.name).startswith("msaserve"):
                raise
            raise ImportError(f"msaserve.LLM needs {error.name}: pip install 'msaserve[engine]'") from error
        return LLM
    if name == "SamplingParams":
        from msaserve.types import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'msaserve' has no attribute {name!r}")

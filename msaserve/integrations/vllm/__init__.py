"""The vLLM plugin: MiniMax-M3's block selection and sparse attention on our operators (docs/vllm.md).

vLLM runs `register` in every process it starts. It only names a module that vLLM imports when it builds such a model:
a process that builds none pays for nothing.
"""

from __future__ import annotations

import logging

from msaserve import env
from msaserve.integrations.vllm import releases

# Below vLLM's own logger, so that its handlers print what we say.
logger = logging.getLogger("vllm.msaserve")

ARCHITECTURES = ("MiniMaxM3SparseForCausalLM", "MiniMaxM3SparseForConditionalGeneration", "MiniMaxM3MTP")
MODELS = "msaserve.integrations.vllm.msa_models"


def register() -> None:
    """The entry point. May run several times in a process; whatever goes wrong, vLLM goes on as it is."""
    try:
        _register()
    except Exception:
        logger.warning("msaserve: the plugin could not be set up; vLLM runs its own kernels", exc_info=True)


def _register() -> None:
    import vllm

    if env.vllm_plugin() == "off":
        logger.info("msaserve: vLLM runs its own kernels: MSASERVE_VLLM=0")
        return
    if releases.find(vllm.__version__) is None:
        logger.warning(
            "msaserve: vLLM runs its own kernels: its version %s is not among those the plugin knows: %s",
            vllm.__version__,
            ", ".join(releases.RELEASES),
        )
        return
    from vllm import ModelRegistry

    for architecture in ARCHITECTURES:
        ModelRegistry.register_model(architecture, f"{MODELS}:{architecture}")

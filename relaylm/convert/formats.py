"""Which public models load, by which network and under which law, and which are refused: the one list of both.

Refusals go by it, and the tables of docs/models.md are made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROW, BLOCKS = "the row", "blocks of "


@dataclass(frozen=True)
class Loaded:
    """A format that loads: masked diffusion over `law`, the whole row or one block after another."""

    name: str  # as `recognise` gives it
    title: str
    models: str  # the published ones
    network: str  # that computes it: relaylm's own, or a class of transformers
    law: str
    note: str = ""


@dataclass(frozen=True)
class Refused:
    """Models that are refused, by the `model_type` of their configuration where they have one of their own."""

    models: str
    why: str
    types: tuple[str, ...] = ()


LOADED = (
    Loaded("mdlm", "MDLM", "kuleshov-group/mdlm-owt, mdlm-no_flashattn-fp32-owt", "own", ROW),
    Loaded("lightning", "MDLM", "`.ckpt` of MDLM, ReMDM and Duo's repositories", "own", ROW, "averaged weights"),
    Loaded(
        "bd3lm", "BD3-LM", "kuleshov-group/bd3lm-owt-block_size4, 8, 16", "own", BLOCKS + "4, 8, 16",
        "block_size1024-pretrain: the row",
    ),
    Loaded("sedd", "SEDD", "louaaron/sedd-small, -medium", "own, given the time", ROW, "the normalised score"),
    Loaded("smdm", "SMDM", "nieshen/SMDM, 30 sizes", "own", ROW),
    Loaded(
        "llada", "LLaDA", "GSAI-ML/LLaDA-8B-Base, -Instruct, LLaDA-1.5, iLLaDA-8B-Base, -Instruct", "LLaMA", ROW,
        "iLLaDA: mask 5 (`--mask-id`)",
    ),
    Loaded(
        "dream", "Dream",
        "Dream-org/Dream-v0-Base-7B, -Instruct-7B, Dream-Coder-v0-Base-7B, -Instruct-7B; "
        "apple/DiffuCoder-7B-Base, -Instruct, -cpGRPO",
        "Qwen2", ROW, "answers one position early",
    ),
    Loaded(
        "sdar", "SDAR", "JetLM/SDAR-1.7B-Chat, 4B, 8B, and -b8 to -b64; Gen-Verse/TraDo-4B-Instruct, 8B", "Qwen3",
        BLOCKS + "4 to 64", "4 if neither configuration nor name says",
    ),
    Loaded(
        "fast-dllm", "Fast-dLLM v2", "Efficient-Large-Model/Fast_dLLM_v2_1.5B, 7B", "Qwen2", BLOCKS + "32",
        "answers one position early",
    ),
    Loaded(
        "a2d", "Tiny-A2D",
        "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1, -bd3lm-v0.1; Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1, -bd3lm",
        "Qwen2, Qwen3", f"{ROW}; -bd3lm: blocks", "-bd3lm: `--block-length 32`",
    ),
    Loaded(
        "masked-lm", "masked LMs", "BERT, RoBERTa, ModernBERT, DistilBERT, most `...ForMaskedLM`", "their own", ROW,
        "learned from 15 to 40% masks",
    ),
)  # fmt: skip
EXPERTS = "a mixture of experts, of which relaylm has no reader"
REFUSED = (
    Refused(
        "inclusionAI/LLaDA2.0-mini, -flash, LLaDA2.1-mini, -flash, LLaDA-MoE-7B-A1B; JetLM/SDAR-30B-A3B", EXPERTS,
        ("llada2_moe", "llada21_moe", "lladamoe", "sdar_moe"),
    ),
    Refused(
        "google/diffusiongemma-26B-A4B-it", "uniform-state diffusion, which starts from random tokens and has no mask",
        ("diffusion_gemma",),
    ),
    Refused(
        "Edit Flows of dllm", "a model that inserts and deletes, so that positions do not keep their place",
        tuple(f"editflow-{name}" for name in ("llada", "dream", "modernbert", "qwen2", "qwen3")),
    ),
    Refused("Duo, UDLM, SEDD over the uniform graph", "uniform-state diffusion, which has no mask"),
    Refused("AR checkpoints of MDLM and BD3-LM's repositories", "a left-to-right model, not a denoiser"),
    Refused(
        "nvidia/Efficient-DLM, Nemotron-Labs-Diffusion; RND1, WeDLM, Stable-DiffCoder, LLaDA-V",
        "not recognised: their tensors could not be looked up",
    ),
)  # fmt: skip


def refusal(config: Mapping[str, Any]) -> str | None:
    """What the model of this config.json is that makes it refused; None if nothing."""
    model_type = str(config.get("model_type", "")).lower()
    if model_type in ("llada", "sdar") and config.get("num_experts"):
        return EXPERTS
    return next((one.why for one in REFUSED if model_type in one.types), None)

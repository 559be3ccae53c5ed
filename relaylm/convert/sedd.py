r"""SEDD (louaaron/sedd-small, sedd-medium): a score, turned into the denoising distribution.

SEDD's network is MDLM's with time conditioning, and its tensors have no prefix. What differs is the meaning of its
output. For a row x with a mask at position l, the concrete score is a ratio of two marginals at noise level sigma. Each
token survives with probability e^-sigma, else it is masked, so with the other positions held fixed

    s(x)_v = p_sigma(x with v at l) / p_sigma(x) = p(x0_l = v | x) e^-sigma / (1 - e^-sigma)
           = p(x0_l = v | x) / (e^sigma - 1).

The denoising distribution is therefore proportional to the score over all v but the mask, whatever sigma is. The
network gives out_v with log s_v = out_v - log(e^sigma - 1) - log(V - 1) (`scale_by_sigma`, as published; V counts the
mask), so p(x0_l = v | x) = exp(out_v) / (V - 1): the raw outputs serve as logits, and the sampler never writes the
mask. A trained score need not add up to one: what is divided away is the normaliser Z = sum_v exp(out_v) / (V - 1),
which `probe` reports (log Z = 0 for an exact score).

The network is conditioned on sigma(t) = -log(1 - 0.999 t), SEDD's log-linear noise, which is `Transformer`'s own.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.convert import mdlm
from relaylm.convert.tensors import Found, Options, number, open_weights
from relaylm.errors import UserError, brief
from relaylm.files import read_object
from relaylm.models.denoiser import Architecture, Transformer


def is_config(config: dict[str, Any]) -> bool:
    """SEDD's config.json is its training configuration; it has no model_type."""
    return isinstance(config.get("graph"), dict) and isinstance(config.get("model"), dict) and "tokens" in config


def open_folder(folder: Path, name: str, options: Options) -> Found:
    """SEDD as it lies on the hub: config.json and safetensors or pytorch_model.bin."""
    path = folder / "config.json"
    config = read_object(path)
    graph, noise, model = config["graph"], config.get("noise"), config["model"]
    if graph.get("type") != "absorb":
        raise UserError(f"{folder} is a SEDD over the graph {graph.get('type')!r}: only 'absorb' has a mask")
    if (kind := noise.get("type", "loglinear") if isinstance(noise, dict) else noise) not in (None, "loglinear"):
        raise UserError(f"{folder} is a SEDD with noise {brief(kind)}: relaylm knows its log-linear noise only")
    architecture = Architecture(
        vocab_size=number(config, "tokens", path) + 1,
        length=options.length or number(model, "length", path, 1024),
        width=number(model, "hidden_size", path),
        depth=number(model, "n_blocks", path),
        heads=options.heads or number(model, "n_heads", path),
        adaln=True,
        time_conditioning=True,
        cond_dim=number(model, "cond_dim", path, 128),
    )
    tensors, files = open_weights(folder)
    meta = {"scale_by_sigma": bool(model.get("scale_by_sigma", True))}
    return mdlm.found("sedd", name, architecture, tensors, "", folder, files, meta)


def normaliser(
    network: Transformer, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor, scale_by_sigma: bool = True
) -> Tensor:
    """log Z (B, K) at masked positions: how far the score is from a distribution that needs no normalising."""
    out_BKV = network.logits_at(tokens_BL, t_B, positions_BK).double()
    out_BKV[..., network.mask_id] = -torch.inf
    log_z_BK = out_BKV.logsumexp(dim=-1)
    if scale_by_sigma:
        return log_z_BK - math.log(network.vocab_size - 1)
    sigma_B = -torch.log1p(-(1 - 1e-3) * t_B.double())
    return log_z_BK + torch.log(torch.expm1(sigma_B))[:, None]


@torch.no_grad()
def probe(network: Transformer, scale_by_sigma: bool = True) -> dict[str, float]:
    """The normaliser on a fully masked row at t = 1: its mean and the largest distance from 0, over 8 positions."""
    length = min(network.architecture.length, 128)
    tokens_BL = torch.full((1, length), network.mask_id, device=network.device)
    positions_BK = torch.linspace(0, length - 1, min(8, length), device=network.device).long()[None]
    t_B = torch.ones(1, dtype=torch.float64, device=network.device)
    log_z = normaliser(network, tokens_BL, t_B, positions_BK, scale_by_sigma)
    return {"mean_log_z": float(log_z.mean()), "max_abs_log_z": float(log_z.abs().max())}

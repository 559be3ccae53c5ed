"""Triton kernels for CUDA. Each has a plain PyTorch twin that defines its result, and nothing needs them to work."""

from __future__ import annotations

import importlib.util
import os

import torch

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # CPU builds of PyTorch come without Triton
    triton = tl = None


def available() -> bool:
    """Whether Triton is installed and not switched off: RELAYLM_EAGER=1 does so, for the kernels and CUDA graphs."""
    return triton is not None and os.environ.get("RELAYLM_EAGER", "0") in ("", "0")


def early(x: torch.Tensor) -> dict[str, bool]:
    """Options of a kernel that begins before the one ahead of it has ended, loads what no kernel writes, and then waits
    for it (EARLY): on Hopper that hides what it takes to start, which counts where a call has few rows."""
    able = x.is_cuda and torch.cuda.get_device_capability(x.device)[0] >= 9
    return {"EARLY": True, "launch_pdl": True} if able else {"EARLY": False}


def may_stop(done: torch.Tensor) -> bool:
    """Whether all is done, so that a loop of a fixed number of rounds may end early. To know that takes a wait for the
    device, so while a CUDA graph is captured the answer is no."""
    return not (done.is_cuda and torch.cuda.is_current_stream_capturing()) and bool(done.all())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding, half-split: the first half of each head is paired with the second. Computed in the angles'
    precision, returned in x's. Here, because a network needs it where no kernel applies."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

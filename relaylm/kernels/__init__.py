"""Triton kernels for CUDA. Each has a plain PyTorch twin that defines its result, and nothing needs them to work."""

from __future__ import annotations

import importlib.util
import os

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # CPU builds of PyTorch come without Triton
    triton = tl = None


def available() -> bool:
    """Whether Triton is installed and not switched off: RELAYLM_EAGER=1 does so, for the kernels and CUDA graphs."""
    return triton is not None and os.environ.get("RELAYLM_EAGER", "0") in ("", "0")

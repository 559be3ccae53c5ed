"""A causal network of the same size that writes from left to right: what a diffusion model is measured against, too.

It keeps keys and values in a static cache, on CUDA in graphs, in bfloat16, for one row also compiled: there the kernels
between the products decide. At large T and batch it wins.

Shapes: B rows, L positions, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.errors import UserError
from relaylm.kernels import rotate
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.studies.bench.published import captured, dtype_of, free_memory, random_network, seconds_of


class Decoder:
    """A causal network that writes one token of each of B rows at a time, with keys and values in buffers of fixed
    size."""

    def __init__(self, network: Transformer, batch: int, length: int, compiled: bool = False) -> None:
        a = network.architecture
        if not a.causal or a.adaln:
            raise UserError("only a plain causal network decodes from left to right")
        self.network, self.batch, self.length = network, batch, length
        dtype, device = dtype_of(network), network.device
        shape = (a.depth, 2, batch, a.heads, length, a.width // a.heads)
        self.cache = torch.zeros(shape, dtype=dtype, device=device)
        self.token_B = torch.zeros(batch, dtype=torch.int64, device=device)
        self.at = torch.zeros(1, dtype=torch.int64, device=device)
        self.index_L = torch.arange(length, device=device)
        out = network.output_layer.linear
        half = device.type == "cuda"  # the head in bfloat16, as anyone would run it
        self.head = [tensor.to(torch.bfloat16) if half else tensor for tensor in (out.weight, out.bias)]
        self.parts = 1 if compiled else 4  # attention reaches over quarters of the length, each of them captured
        self.step = torch.compile(self._step, dynamic=False) if compiled else self._step

    def logits(self, upto: int) -> Tensor:
        """Logits (B, V) after `token_B` at position `at` (below `upto`), which enters the cache."""
        a, network = self.network.architecture, self.network
        cos, sin = (table[self.at] for table in network.angles(self.length))
        seen = (self.index_L[:upto] <= self.at)[None, None, None]
        x = network.vocab_embed(self.token_B)
        for cache, block in zip(self.cache, cast(list[Any], network.blocks), strict=True):
            h = block.norm1(x).to(self.cache.dtype)
            qkv = F.linear(h, block.attn_qkv.weight, block.attn_qkv.bias).view(self.batch, 3, a.heads, 1, -1)
            cache[0].index_copy_(2, self.at, rotate(qkv[:, 1], cos, sin))
            cache[1].index_copy_(2, self.at, qkv[:, 2])
            q = rotate(qkv[:, 0], cos, sin)
            out = F.scaled_dot_product_attention(q, cache[0, :, :, :upto], cache[1, :, :, :upto], attn_mask=seen)
            x = x + F.linear(out.flatten(1), block.attn_out.weight)
            h = F.linear(block.norm2(x).to(self.cache.dtype), block.mlp[0].weight, block.mlp[0].bias)
            x = x + F.linear(F.gelu(h, approximate="tanh"), block.mlp[2].weight, block.mlp[2].bias)
        h = network.output_layer.norm_final(x)
        return F.linear(h.to(self.head[0].dtype), *self.head)

    def _step(self, upto: int) -> None:
        p_BV = self.logits(upto).float().softmax(dim=-1)
        self.token_B.copy_((p_BV / torch.empty_like(p_BV).exponential_()).argmax(dim=-1))
        self.at += 1

    def generate(self, repeats: int = 2) -> float:
        """Tokens per second over whole rows, the fastest of a few."""
        device, reach = self.network.device, max(1, -(-self.length // self.parts))
        quarters = [min(self.length, reach * (i + 1)) for i in range(-(-self.length // reach))]
        with torch.inference_mode():
            steps = []
            for upto in quarters:
                self.at.zero_()
                step = partial(self.step, upto)
                steps.append(captured(step) if device.type == "cuda" else step)

            def whole() -> None:
                self.at.zero_()
                for position in range(self.length):
                    steps[position // reach]()

            return self.batch * self.length / min(seconds_of(whole, device) for _ in range(repeats))


def rival(architecture: Architecture, batches: Sequence[int], length: int, device: torch.device, seed: int) -> Any:
    """Tokens per second of the causal network by batch size, until a larger one brings less than 2%."""
    plain = {**architecture.to_json(), "causal": True, "adaln": False, "time_conditioning": False, "qkv_bias": False}
    network = random_network(Architecture(**plain), seed).to(device)
    network = network.cast(torch.bfloat16) if device.type == "cuda" else network
    rate: dict[int, float] = {}
    for batch in batches:
        try:
            rate[batch] = Decoder(network, batch, length).generate(2 if device.type == "cuda" else 1)
        except torch.OutOfMemoryError:
            break
        finally:
            free_memory(device)
        if len(rate) > 1 and rate[batch] < 1.02 * max(list(rate.values())[:-1]):
            break
    if device.type == "cuda":
        rate[1] = max(rate[1], Decoder(network, 1, length, compiled=True).generate())
    best = max(rate, key=lambda batch: rate[batch])
    by_batch = {str(batch): value for batch, value in rate.items()}
    return {"batch_1": rate[1], "best": rate[best], "best_batch": best, "by_batch": by_batch}

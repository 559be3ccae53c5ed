r"""Network calls on a device: tokens in, the due positions' tokens written in place.

On CUDA a call of the shipped network is one CUDA graph of fixed shape: the host sends a few kilobytes of indices,
replays it, and goes on to the next call without waiting. Everywhere else the same code runs eagerly.

Shapes: B rows in a call, L positions, K places for due positions in each row, N due positions kept for the head, V
vocabulary.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relaylm import kernels
from relaylm.denoiser import Transformer
from relaylm.errors import UserError
from relaylm.plan import Plan, race


def _exact(device: torch.device) -> torch.dtype:
    """float64, or the best there is: MPS has none."""
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True)
class Law:
    """How logits become a distribution. The default is the model's own law; each option changes it."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise UserError(f"temperature must be above 0, not {self.temperature}")
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top_k must be at least 1, not {self.top_k}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise UserError(f"top_p must lie in (0, 1], not {self.top_p}")

    @property
    def changes(self) -> tuple[str, ...]:
        """The options in force, as text; empty if samples follow the models' own law."""
        top_p = None if self.top_p == 1 else self.top_p
        pairs = (("temperature", self.temperature, 1.0), ("top_k", self.top_k, None), ("top_p", top_p, None))
        return tuple(f"{name}={value}" for name, value, off in pairs if value != off)

    def apply(self, logits_NV: Tensor, mask_id: int) -> Tensor:
        """The mask itself is never written; then temperature, top-k, top-p in that order, as is customary."""
        if mask_id < logits_NV.shape[-1]:
            logits_NV[:, mask_id] = -torch.inf
        if self.temperature != 1.0:
            logits_NV = logits_NV / self.temperature
        if self.top_k is not None and self.top_k < logits_NV.shape[-1]:
            kth = logits_NV.topk(self.top_k, dim=-1).values[:, -1:]
            logits_NV = logits_NV.masked_fill(logits_NV < kth, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, index = logits_NV.sort(dim=-1, descending=True)
            p = ordered.to(_exact(logits_NV.device)).softmax(dim=-1)
            beyond = p.cumsum(dim=-1) - p >= self.top_p  # the smallest set whose mass reaches top_p; never empty
            logits_NV = logits_NV.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
        return logits_NV


def _sees_t(model: Any) -> bool:
    """Might the head want the time? A plain network's does not."""
    return not (isinstance(model, Transformer) and not model.architecture.adaln)


@dataclass(frozen=True)
class Shape:
    """Room in one call: B rows, K due positions in a row, N due positions in all."""

    rows: int
    per_row: int
    kept: int


@dataclass(frozen=True)
class Call:
    """One batch for one network. Empty places point at row n, a scratch row nobody reads."""

    model: int
    shape: Shape
    rows_R: np.ndarray  # the rows that are really there, R <= B
    events_R: np.ndarray
    counts_R: np.ndarray  # due positions of each
    rows_B: np.ndarray
    t_B: np.ndarray
    positions_BK: np.ndarray
    kept_N: np.ndarray  # index into the B*K places
    kept_row_N: np.ndarray  # which row that place belongs to (n if empty)
    kept_position_N: np.ndarray

    def index(self) -> Tensor:
        """All of the call's integers side by side, so that one transfer carries them."""
        parts = [self.rows_B, self.positions_BK.ravel(), self.kept_N, self.kept_row_N, self.kept_position_N]
        return torch.from_numpy(np.concatenate(parts))


class Engine:
    """Token state on the device, and the network calls that change it."""

    def __init__(
        self, models: list[Any], plan: Plan, mask_id: int, law: Law, device: torch.device | str, scored: bool = False
    ) -> None:
        self.models, self.mask_id, self.law, self.seed = models, mask_id, law, plan.seed
        self.device, self.scored = torch.device(device), scored
        self.sum_of_largest = torch.zeros((), dtype=_exact(self.device), device=self.device)
        rows = np.where(plan.given_nL < 0, mask_id, plan.given_nL)
        scratch = np.full((1, plan.length), mask_id)
        self.state_nL = torch.from_numpy(np.concatenate([rows, scratch])).to(self.device)  # (n + 1, L)
        self.row_ids = torch.from_numpy(np.concatenate([plan.rows_n, [0]])).to(self.device)
        self._graphs: dict[tuple[int, Shape], _Graph] = {}
        self._seen: set[tuple[int, Shape]] = set()
        self._pool: Any = None
        self._under_way: deque[Any] = deque()

    def load(self, rows_m: np.ndarray, tokens_mL: np.ndarray) -> None:
        """Put other rows, masks included, in the first places. In place: what was captured goes on working."""
        self.row_ids[: len(rows_m)] = torch.from_numpy(rows_m.astype(np.int64)).to(self.device)
        self.state_nL[: len(rows_m)] = torch.from_numpy(tokens_mL.astype(np.int64)).to(self.device)

    def run(self, call: Call, everywhere: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make a call: draw a token for each kept place and write it. Returns those tokens, their log-probabilities
        (if `scored`) and, if asked, the logits at every position of the batch's rows (a full head, for policies that
        want it). What is returned may be overwritten by the next call."""
        key = (call.model, call.shape)
        # Without Triton the race asks the device how many blocks to open, which a graph cannot hold.
        capture = self.device.type == "cuda" and kernels.available() and not everywhere
        if capture and isinstance(self.models[call.model], Transformer):
            # The first call of a shape runs eagerly (it also warms everything up); the second is captured.
            if key in self._seen and key not in self._graphs:
                self._graphs[key] = _Graph(self, call.model, call.shape)
            self._seen.add(key)
            if key in self._graphs:
                result = self._graphs[key].replay(call)
                self._keep_pace()
                return *result, None
        index = call.index().to(self.device)
        t_B = torch.from_numpy(call.t_B).to(self.device, _exact(self.device))
        return self.step(call.model, call.shape, index, t_B, everywhere)

    def step(
        self, model_index: int, shape: Shape, index: Tensor, t_B: Tensor, everywhere: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The device's part of a call, on tensors that are there already."""
        model = self.models[model_index]
        b, k, n = shape.rows, shape.per_row, shape.kept
        rows_B, positions, kept_N, row_N, position_N = index.split([b, b * k, n, n, n])
        tokens_BL, positions_BK = self.state_nL[rows_B], positions.view(b, k)
        logits_BLV = model.logits(tokens_BL, t_B) if everywhere else None
        if logits_BLV is not None:
            features = logits_BLV.flatten(0, 1)[kept_N // k * tokens_BL.shape[1] + position_N]
        elif hasattr(model, "hidden_at"):
            features = model.hidden_at(tokens_BL, t_B, positions_BK).flatten(0, 1)[kept_N]
        else:
            features = model.logits_at(tokens_BL, t_B, positions_BK).flatten(0, 1)[kept_N]
        head = model if logits_BLV is None and hasattr(model, "hidden_at") else None
        t_N = t_B[kept_N // k] if head is not None and _sees_t(model) else None
        token_N, logprob_N = self._write(features, head, t_N, row_N, position_N, b)
        return token_N, logprob_N, logits_BLV

    def _write(
        self, features: Tensor, head: Any, t_N: Tensor | None, row_N: Tensor, position_N: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each place and write it. `features` are what the model `head` makes logits of; without one
        they are logits. With few steps most positions of a call's rows are due at once: then it goes in slices."""
        parts, most = [], max(1, rows * self.state_nL.shape[1] // 4)
        for start in range(0, len(features), most):
            part_N = slice(start, start + most)
            t = None if t_N is None else t_N[part_N]
            logits_NV = features[part_N] if head is None else head.head(features[part_N], t)
            parts.append(self._draw(logits_NV, row_N[part_N], position_N[part_N]))
        token_N, logprob_N = (torch.cat(pair) if len(parts) > 1 else pair[0] for pair in zip(*parts, strict=True))
        self.state_nL[row_N, position_N] = token_N
        return token_N, logprob_N

    def beginnings(self, model_index: int, shape: Shape, positions_U: np.ndarray) -> Tensor:
        """What the head takes (U, D) at these positions of row 0 as it is now: by calls of this shape, all of whose
        rows are that row, so that it has the bits of any other call of the shape."""
        model, room = self.models[model_index], shape.rows * shape.per_row
        tokens_BL = self.state_nL[:1].expand(shape.rows, -1).contiguous()
        t_B = torch.ones(shape.rows, dtype=_exact(self.device), device=self.device)
        parts = []
        for start in range(0, len(positions_U), room):
            some = positions_U[start : start + room]
            padded = np.concatenate([some, np.zeros(room - len(some), dtype=np.int64)])
            positions_BK = torch.from_numpy(padded).to(self.device).view(shape.rows, shape.per_row)
            parts.append(model.hidden_at(tokens_BL, t_B, positions_BK).flatten(0, 1)[: len(some)])
        return torch.cat(parts)

    def begin(self, call: Call, table_UD: Tensor, slot_L: np.ndarray) -> Tensor:
        """A call for rows that are still as row 0 was: everything but the network's blocks, which `beginnings` has.
        `slot_L` says where in the table a position is. Returns the tokens."""
        model = self.models[call.model]
        index = torch.from_numpy(np.stack([slot_L[call.kept_position_N], call.kept_row_N, call.kept_position_N]))
        slot_N, row_N, position_N = index.to(self.device)
        t_N = torch.ones(len(slot_N), dtype=_exact(self.device), device=self.device) if _sees_t(model) else None
        return self._write(table_UD[slot_N], model, t_N, row_N, position_N, call.shape.rows)[0]

    def _draw(self, logits_NV: Tensor, row_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        logits_NV = self.law.apply(logits_NV, self.mask_id)
        # The largest is NaN if any is, and tells of +inf and of nothing left to choose; -inf for some is legitimate.
        # And a sum is finite only if all of it is.
        self.sum_of_largest += logits_NV.amax(dim=-1).sum(dtype=self.sum_of_largest.dtype)
        token_N = race(logits_NV, self.seed, self.row_ids[row_N], position_N, torch.zeros_like(row_N))
        token_N = token_N.clamp_max(logits_NV.shape[-1] - 1)  # a race among NaNs has no winner
        if not self.scored:
            return token_N, token_N
        log_p_NV = logits_NV.to(_exact(self.device)).log_softmax(dim=-1)
        return token_N, log_p_NV.gather(1, token_N[:, None])[:, 0]

    def check(self) -> None:
        """Refuse samples from networks that gave nonsense. Looked at once, at the end: asking costs a wait."""
        total = float(self.sum_of_largest)
        self.sum_of_largest.zero_()
        if not math.isfinite(total):
            raise UserError(
                "a model gave logits that are not finite: its weights are damaged or overflow this precision"
            )

    def _keep_pace(self) -> None:
        """Let the host run a few calls ahead of the device and no further: enough that the device never waits, and
        progress and interruption still mean something."""
        event = torch.cuda.Event()
        event.record()
        self._under_way.append(event)
        if len(self._under_way) > 8:
            self._under_way.popleft().synchronize()

    def graph_pool(self) -> Any:
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        return self._pool

    def release(self) -> None:
        """Give back what the graphs hold."""
        self._graphs.clear()
        self._seen.clear()
        self._pool = None  # a pool whose graphs are gone cannot be used again
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


class _Graph:
    """A captured call: fixed shape, fixed buffers. An engine's graphs share their memory: only one runs at a time."""

    def __init__(self, engine: Engine, model: int, shape: Shape) -> None:
        b, k, n = shape.rows, shape.per_row, shape.kept
        # While capturing, every place is the scratch row's, so that nothing real is written.
        scratch = engine.state_nL.shape[0] - 1
        parts = [(b, scratch), (b * k, 0), (n, 0), (n, scratch), (n, 0)]
        index = torch.cat([torch.full((size,), value) for size, value in parts])
        # Indices and, as the same number of bytes, times: one transfer carries both.
        self.sent = torch.cat([index, torch.ones(b, dtype=torch.float64).view(torch.int64)]).to(engine.device)
        self.index, self.t_B = self.sent[:-b], self.sent[-b:].view(torch.float64)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            engine.step(model, shape, self.index, self.t_B)
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        # What other threads do on the device meanwhile is not to spoil the capture.
        with torch.cuda.graph(self.graph, pool=engine.graph_pool(), capture_error_mode="thread_local"):
            self.tokens, self.logprobs, _ = engine.step(model, shape, self.index, self.t_B)

    def replay(self, call: Call) -> tuple[Tensor, Tensor]:
        # From pageable memory these few kilobytes are staged by the driver, so the host does not wait for the device.
        times = torch.from_numpy(call.t_B).view(torch.int64)
        self.sent.copy_(torch.cat([call.index(), times]), non_blocking=True)
        self.graph.replay()
        return self.tokens, self.logprobs


@contextlib.contextmanager
def settings(device: torch.device | str) -> Iterator[None]:
    """Inference mode, and on CUDA the fastest attention there is and no TF32 where float32 was asked for."""
    with torch.inference_mode():
        if torch.device(device).type != "cuda":
            yield
            return
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        order = [
            SDPBackend.CUDNN_ATTENTION,
            SDPBackend.FLASH_ATTENTION,
            SDPBackend.EFFICIENT_ATTENTION,
            SDPBackend.MATH,
        ]
        try:
            with sdpa_kernel(order, set_priority=True):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

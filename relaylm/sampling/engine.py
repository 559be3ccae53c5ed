r"""Network calls on a device: tokens in, the due positions' tokens written in place.

On CUDA a call of the shipped network is one CUDA graph of fixed shape (`graphs`). Everywhere else the same code runs
eagerly.

**Logits only where they are needed.** The trunk's last block and the vocabulary head run at due positions alone; no
tensor of B x L x V elements is made, unless a policy asks for the logits of all masked positions.

Shapes: n rows, B rows in a call, R of them real, L positions, K places for due positions in each row, N due positions
kept for the head, D features, V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from relaylm.core.noise import split_seed
from relaylm.core.plan import Plan
from relaylm.models.denoiser import features_at, sees_t
from relaylm.sampling.law import Drawer, Law, widest_float

if TYPE_CHECKING:
    from relaylm.sampling.graphs import Graphs

ResultT = TypeVar("ResultT")
SCRATCH = -1  # the last row of an engine's state, for the empty places of a call; nobody reads it


class Shape(NamedTuple):
    """Places in one call: B rows, K due positions in a row, N due positions in all."""

    rows: int
    per_row: int
    kept: int

    @property
    def parts(self) -> list[int]:
        """Lengths of the parts of a call's index."""
        return [self.rows, self.rows * self.per_row, self.kept, self.kept, self.kept]


@dataclass(frozen=True)
class Call:
    """One batch for one network. Empty places belong to the scratch row."""

    model: int
    shape: Shape
    rows_R: np.ndarray
    events_R: np.ndarray
    counts_R: np.ndarray  # due positions of each row
    due_F: np.ndarray  # those positions, row after row
    t_B: np.ndarray
    index: np.ndarray
    """Side by side, so that one transfer carries all: the rows (B) and their due positions (B K); of each place kept
    for the head its number among the B K, its row and its position (N each)."""


class Eager:
    """Calls made as they come. `graphs.Graphs` has the same functions, and captures calls."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def run(
        self, key: Any, model: Any, make: Callable[..., ResultT], index: np.ndarray, t_B: np.ndarray, blank: Any
    ) -> ResultT:
        """`make(index, t_B)` on the device; the rest is for graphs."""
        times_B = torch.from_numpy(t_B).to(self.device, widest_float(self.device))
        return make(torch.from_numpy(index).to(self.device), times_B)

    def release(self) -> None:
        """Nothing is held."""

    close = release


def calls_on(device: torch.device) -> Eager | Graphs:
    """How calls are made on a device: what captures them is imported on CUDA alone."""
    if device.type != "cuda":
        return Eager(device)
    from relaylm.sampling.graphs import Graphs

    return Graphs(device, Eager(device).run)


class Engine:
    """Token state on the device, and the network calls that change it.

    Models are anything with `logits_at(tokens, t, positions)`, or `hidden_at` and `head` in its place. With `scored` a
    call also returns the log-probabilities of the tokens it wrote, which dynamic policies see. With `shared`, rows of
    several plans come and go (`seat`), and the noise of each is keyed by its own plan's seed; unless `scored`, a call
    then returns the largest logits in place of log-probabilities, which are finite if all is well."""

    def __init__(
        self,
        models: Sequence[Any],
        plan: Plan,
        mask_id: int,
        law: Law,
        device: torch.device | str,
        scored: bool = False,
        shared: bool = False,
    ) -> None:
        self.models, self.device, self.scored = list(models), torch.device(device), scored
        self.exact = widest_float(self.device)
        self.drawer = Drawer(law, plan.seed, mask_id, self.device)
        # Of each row its tokens and, where rows come and go, its number and seed beside them: one transfer seats it.
        size = plan.length + (3 if shared else 0)
        self._rows_nX = torch.full((plan.n + 1, size), mask_id, dtype=torch.int64, device=self.device)
        self.state_nL = self._rows_nX[:, : plan.length]
        self.row_ids = torch.zeros(plan.n + 1, dtype=torch.int64, device=self.device)
        self.seeds_2n: Tensor | None = None
        if shared:
            self.row_ids, self.seeds_2n = self._rows_nX[:, plan.length], self._rows_nX[:, plan.length + 1 :].T
        self.load(plan.rows_n, np.where(plan.given_nL < 0, mask_id, plan.given_nL))
        self.runner = calls_on(self.device)

    def load(self, rows_m: np.ndarray, tokens_mL: np.ndarray) -> None:
        """Put other rows, masks included, in the first places. In place, so captured calls stay valid."""
        self.row_ids[: len(rows_m)] = torch.from_numpy(rows_m.astype(np.int64)).to(self.device)
        self.state_nL[: len(rows_m)] = torch.from_numpy(tokens_mL.astype(np.int64)).to(self.device)

    def seat(self, place: int, plan: Plan, row: int) -> None:
        """Put one row of another plan in a place. In place, so captured calls stay valid."""
        assert self.seeds_2n is not None
        given_L = plan.given_nL[row]
        tokens_L = np.where(given_L < 0, self.drawer.mask_id, given_L)
        row_X = torch.from_numpy(np.concatenate([tokens_L, [plan.rows_n[row], *split_seed(plan.seed)]]))
        self._rows_nX[place].copy_(row_X, non_blocking=True)  # the host does not wait for the calls under way

    def serves(self, models: Sequence[Any], plan: Plan, mask_id: int, law: Law, scored: bool) -> bool:
        """Was this engine made for such a run? All of this is fixed in what it has captured."""
        drawer, shape = self.drawer, (plan.n + 1, plan.length)
        own = (drawer.seed, drawer.law, drawer.mask_id, self.scored, tuple(self.state_nL.shape))
        return own == (plan.seed, law, mask_id, scored, shape) and [*map(id, self.models)] == [*map(id, models)]

    def run(self, call: Call, everywhere: bool = False) -> tuple[Tensor, Tensor, Tensor | None]:
        """Make a call: draw a token for each kept place and write it. Returns those tokens, their log-probabilities
        (if `scored`) and, with `everywhere`, the logits at every position of the batch's rows (B, L, V). What is
        returned may be overwritten by the next call."""
        make = partial(self.step, call.model, call.shape, everywhere=everywhere)
        return self._run(call, "run", None if everywhere else self.models[call.model], make)

    def send(self, call: Call) -> Tensor:
        """Make a call as `run` does. Returns the tokens and their log-probabilities side by side (2, N), so that one
        transfer brings both: a float64 holds a token's number."""

        def make(index: Tensor, t_B: Tensor) -> Tensor:
            token_N, logprob_N, _ = self.step(call.model, call.shape, index, t_B)
            return torch.stack((token_N.to(logprob_N.dtype), logprob_N))

        return self._run(call, "send", self.models[call.model], make)

    def _run(self, call: Call, what: str, model: Any, make: Callable[[Tensor, Tensor], ResultT]) -> ResultT:
        # Its number in place of SCRATCH: the fastest way to select rows knows no negative ones. While capturing, every
        # place is the scratch row's, so that nothing real is written.
        last = len(self.state_nL) - 1
        index = np.where(call.index < 0, last, call.index)
        blank = zip(call.shape.parts, (last, 0, 0, last, 0), strict=True)
        return self.runner.run((what, call.model, call.shape), model, make, index, call.t_B, blank)

    def step(
        self, model_index: int, shape: Shape, index: Tensor, t_B: Tensor, everywhere: bool = False
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """The device's part of a call, on tensors that are there already."""
        rows_B, positions, kept_N, row_N, position_N = torch.split(index, shape.parts)
        model = at_rows(self.models[model_index], rows_B, len(self.state_nL) - 1)
        tokens_BL, logits_BLV = self.state_nL.index_select(0, rows_B), None
        if everywhere:
            logits_BLV, head = model.logits(tokens_BL, t_B), None
            features = logits_BLV[kept_N // shape.per_row, position_N]
        else:
            features, head = features_at(model, tokens_BL, t_B, positions.view(shape.rows, shape.per_row))
            features = features.index_select(0, kept_N)
        t_N = t_B[kept_N // shape.per_row] if head is not None and sees_t(model) else None
        return *self.write(features, head, t_N, row_N, position_N, shape.rows), logits_BLV

    def write(
        self, features: Tensor, head: Any, t_N: Tensor | None, row_N: Tensor, position_N: Tensor, rows: int
    ) -> tuple[Tensor, Tensor]:
        """Draw a token for each place and write it. `head` makes logits of the features; without one they are logits.
        With few steps most positions of a call's rows are due at once, so large heads are run in slices."""
        parts, most = [], max(1, rows * self.state_nL.shape[1] // 4)
        for start in range(0, len(features), most):
            part_N = slice(start, start + most)
            t = None if t_N is None else t_N[part_N]
            logits_NV = features[part_N] if head is None else head(features[part_N], t)
            parts.append(self._draw(logits_NV, row_N[part_N], position_N[part_N]))
        token_N, logprob_N = (torch.cat(pair) if len(parts) > 1 else pair[0] for pair in zip(*parts, strict=True))
        self.state_nL[row_N, position_N] = token_N
        return token_N, logprob_N

    def _draw(self, logits_NV: Tensor, row_N: Tensor, position_N: Tensor) -> tuple[Tensor, Tensor]:
        seed = None if self.seeds_2n is None else (self.seeds_2n[0, row_N], self.seeds_2n[1, row_N])
        drawn = logits_NV, self.row_ids[row_N], position_N, torch.zeros_like(row_N), seed
        token_N, lawful_NV, largest_N = self.drawer(*drawn)
        if not self.scored:
            return token_N, token_N if seed is None else largest_N.to(self.exact)
        log_p_NV = lawful_NV.to(self.exact).log_softmax(dim=-1)
        return token_N, log_p_NV.gather(1, token_N[:, None])[:, 0]

    def release(self) -> None:
        """Give back what captured calls hold."""
        self.runner.release()


def at_rows(model: Any, rows_B: Tensor, n: int | None = None) -> Any:
    """A model for a call of these rows: another one only where it holds something of each row (`blocks`). Numbers of n
    and above, the scratch row's, stand for any of them."""
    return model.of_rows(rows_B if n is None else rows_B.clamp_max(n - 1)) if hasattr(model, "of_rows") else model


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, a device's or the machine's own (of which PyTorch says so in words alone)."""
    words = ("can't allocate memory", "not enough memory")
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in str(error) for word in words)


@contextlib.contextmanager
def settings(device: torch.device | str) -> Iterator[None]:
    """Inference mode, and on CUDA the fastest attention there is and no TF32 where float32 was asked for."""
    with torch.inference_mode():
        if torch.device(device).type != "cuda":
            yield
            return
        allowed = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = False
        kinds = ("CUDNN_ATTENTION", "FLASH_ATTENTION", "EFFICIENT_ATTENTION", "MATH")
        try:
            with sdpa_kernel([getattr(SDPBackend, kind) for kind in kinds], set_priority=True):
                yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = allowed

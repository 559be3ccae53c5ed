r"""What writing positions together loses, predicted from how much they know of each other.

A call that writes a set S of positions draws each from its own conditional distribution, so it loses the total
correlation of S given what stands. To first order that is the sum over pairs of S of their mutual information given the
rest. `PairTable` keeps its mean I(distance, masked share); `measure.pairs` measures it. The **predicted loss** of a way
to write rows is the sum of the table over all pairs that are written together, in nats for one position:

    loss  =  1/L  E_plan  sum over calls c  sum over pairs {p, q} of S_c  of  I(|p - q|, t_c),

where t_c is the masked share before the call. It is relative to one position at a time, whose loss is 0.

Shapes: n rows, L positions, C calls of a row, S shares, D bins of distance.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from relaylm.core.noise import uniforms
from relaylm.core.schedule import Spacing
from relaylm.core.spacing import spaced_calls
from relaylm.errors import UserError

PLANS = 48  # over which predicted losses are averaged


@dataclass(frozen=True, eq=False)
class PairTable:
    """Mutual information of two masked positions in nats, by masked share (rows) and distance (columns)."""

    shares_S: np.ndarray
    edges_D: np.ndarray
    """The smallest distance of each bin, from 1 up; the last bin has no end."""
    nats_SD: np.ndarray
    error_SD: np.ndarray
    """Standard errors of the means over rows."""
    rows: int
    model: str
    source: str
    """`text` or `samples`."""

    def to_json(self) -> dict[str, Any]:
        """Plain values; `from_json` reads them back."""
        return {
            "kind": "pairs",
            "model": self.model,
            "source": self.source,
            "rows": self.rows,
            "shares": self.shares_S.tolist(),
            "distances": self.edges_D.tolist(),
            "nats": self.nats_SD.tolist(),
            "error": self.error_SD.tolist(),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> PairTable:
        """The table that `to_json` gave; a UserError if it is not one."""
        try:
            table = PairTable(
                np.asarray(value["shares"], dtype=np.float64),
                np.asarray(value["distances"], dtype=np.int64),
                np.asarray(value["nats"], dtype=np.float64),
                np.asarray(value["error"], dtype=np.float64),
                int(value["rows"]),
                str(value["model"]),
                str(value["source"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"this is no table of pairs: {type(error).__name__} {str(error)[:60]}") from None
        shape = (len(table.shares_S), len(table.edges_D))
        rising = all(len(x) and (np.diff(x) > 0).all() for x in (table.shares_S, table.edges_D))
        if table.nats_SD.shape != shape or table.error_SD.shape != shape or not rising or table.edges_D[0] != 1:
            raise UserError("this is no table of pairs: shares and distances must rise and match the values")
        if not np.isfinite(table.nats_SD).all():
            raise UserError("this is no table of pairs: values must be finite")
        return table

    def loss(self, call_nL: np.ndarray) -> float:
        """Predicted loss in nats a position of rows whose position l is written by call `call_nL[:, l]` (0: given)."""
        return float((self.counts(call_nL) * self.nats_SD).sum() / max(1, int((call_nL > 0).sum())))

    def counts(self, call_nL: np.ndarray) -> np.ndarray:
        """Pairs that are written together, (S, D): by distance, and by masked share between the two nearest of the
        table's shares."""
        bins_L = np.searchsorted(self.edges_D, np.arange(call_nL.shape[1]), side="right") - 1
        out = np.zeros(self.nats_SD.shape)
        for call_L in call_nL:
            order = np.argsort(call_L, kind="stable")
            order = order[call_L[order] > 0]  # by call, positions rising
            call = call_L[order]
            sizes = np.bincount(call)[1:]
            left = sizes.sum() - np.concatenate([[0], np.cumsum(sizes)[:-1]])
            at_C = np.interp(left / call_nL.shape[1], self.shares_S, np.arange(len(self.shares_S)))
            for lag in range(1, int(sizes.max(initial=1))):  # the lag-th next position of the same call
                same = np.flatnonzero(call[lag:] == call[:-lag])
                bins = bins_L[order[same + lag] - order[same]]
                at = at_C[call[same] - 1]
                low = np.minimum(at.astype(np.int64), max(0, len(self.shares_S) - 2))
                np.add.at(out, (low, bins), 1 - (at - low))
                np.add.at(out, (np.minimum(low + 1, len(self.shares_S) - 1), bins), at - low)
        return out


def _plans(length: int) -> np.ndarray:
    return uniforms(0, np.arange(PLANS), length)


def spacing_loss(table: PairTable, spacing: Spacing, length: int) -> float:
    """Predicted loss of a spacing, nats a position."""
    u_nL = _plans(length)
    return table.loss(spaced_calls(u_nL, np.ones_like(u_nL, dtype=bool), spacing))


def uniform_loss(table: PairTable, steps: int, length: int) -> float:
    """Predicted loss of T uniform steps, nats a position."""
    step_nL = np.ceil(_plans(length) * steps)
    # Calls are numbered from the masked end, steps without a position left out.
    return table.loss(np.stack([np.unique(-step_L, return_inverse=True)[1] + 1 for step_L in step_nL]))


def smallest_spacing(table: PairTable, length: int, most: float, form: str = "sets") -> Spacing:
    """The smallest distance whose predicted loss is at most `most` nats a position; the length if there is none."""

    def fits(distance: int) -> bool:
        return spacing_loss(table, Spacing(distance, form), length) <= most

    return Spacing(1 + bisect_left(range(1, length), True, key=fits), form)


@lru_cache(maxsize=1024)
def default_spacing(table: PairTable, length: int, form: str = "sets") -> Spacing:
    """The smallest spacing that is predicted to lose no more than T = L uniform steps."""
    return smallest_spacing(table, length, uniform_loss(table, length, length), form)

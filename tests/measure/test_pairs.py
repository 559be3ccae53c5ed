"""Information between positions against a model whose answer is known."""

import math

import numpy as np
import pytest
import torch

from relaylm import FromLogits, UserError
from relaylm.core.pairs import PairTable, default_spacing, smallest_spacing, spacing_loss, uniform_loss
from relaylm.core.schedule import Spacing
from relaylm.core.spacing import spaced_calls
from relaylm.measure.pairs import distance_bins, measure_pairs

MASK, L = 2, 12


def copies(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """Position l equals its left or right neighbour where one is written, and is a fair coin otherwise."""
    logits = torch.zeros(*tokens.shape, 3, dtype=torch.float64)
    for shift in (1, -1):
        near = torch.roll(tokens, shift, dims=1).clone()
        near[:, 0 if shift == 1 else -1] = MASK
        for value in (0, 1):
            logits[..., value] += torch.where(near == value, 40.0, 0.0)
    return logits


def test_neighbours_share_one_bit_and_others_nothing() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (60, 1)).repeat(L, axis=1)
    table = measure_pairs(FromLogits(copies), rows, MASK, shares=(1.0,), batch_size=16)
    assert table.nats_SD[0, 0] == pytest.approx(math.log(2), abs=1e-9)
    assert np.abs(table.nats_SD[0, 1:]).max() < 1e-9 and table.rows == 60
    again = PairTable.from_json(table.to_json())
    np.testing.assert_array_equal(again.nats_SD, table.nats_SD)
    assert spacing_loss(table, Spacing(2), L) == 0 < uniform_loss(table, L, L) < uniform_loss(table, 3, L)
    assert smallest_spacing(table, L, 0.0) == Spacing(2) and default_spacing(table, L) == Spacing(2)


def test_what_is_asked_of_the_network() -> None:
    """At each share a row is seen with as many masks as that is, at least 2, and again with one of them written, as it
    is in the text; the time is the share that is masked in the first."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def uniform(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        seen.append((tokens, t))
        return torch.zeros(*tokens.shape, 3, dtype=torch.float64)

    text = np.random.default_rng(0).integers(0, 2, (5, L))
    measure_pairs(FromLogits(uniform), text, MASK, shares=(0.01, 0.5, 1.0), batch_size=5)
    assert len(seen) == 6
    for (before, t), (after, t_after), masked in zip(seen[::2], seen[1::2], (2, L // 2, L), strict=True):
        assert (before == MASK).sum(dim=1).tolist() == [masked] * 5
        assert (after == MASK).sum(dim=1).tolist() == [masked - 1] * 5
        for tokens in (before, after):
            assert ((tokens == MASK) | (tokens == torch.from_numpy(text))).all()
        assert ((after == MASK) <= (before == MASK)).all()
        assert t.tolist() == t_after.tolist() == pytest.approx([masked / L] * 5)


def test_bins_of_distance() -> None:
    assert distance_bins(32).tolist() == [*range(1, 9), 9, 10, 12, 14, 16, 19, 22, 26, 30]
    assert distance_bins(2).tolist() == [1]


def test_the_loss_counts_every_pair_of_a_call_once() -> None:
    edges = distance_bins(L)
    rng = np.random.default_rng(1)
    table = PairTable(
        np.array([0.2, 0.7]), edges, rng.random((2, len(edges))), np.zeros((2, len(edges))), 2, "", "text"
    )
    u = rng.random((3, L))
    call = spaced_calls(u, np.ones_like(u, dtype=bool), Spacing(3))
    total = 0.0
    for row in call:
        for p in range(L):
            for q in range(p + 1, L):
                if row[p] == row[q]:
                    share = (row >= row[p]).mean()
                    values = table.nats_SD[:, np.searchsorted(edges, q - p, side="right") - 1]
                    total += float(np.interp(share, table.shares_S, values))
    assert table.loss(call) == pytest.approx(total / call.size)
    given = np.array([[1, 0, 1, 0]])  # what is given is in no call, and no position that anything is lost for
    assert table.loss(given) == pytest.approx(np.interp(0.5, table.shares_S, table.nats_SD[:, 1]) / 2)


def test_the_default_spacing_loses_no_more_than_as_many_steps_as_positions() -> None:
    """The smallest distance of which that is so, by trying all; a longer row takes a larger one."""
    found = []
    for length in (12, 24):
        edges = distance_bins(length)
        nats = np.exp(-0.3 * edges)[None] * np.array([[1.0], [0.4]])
        table = PairTable(np.array([0.2, 0.9]), edges, nats, 0 * nats, 2, "", "text")
        most = uniform_loss(table, length, length)
        found.append(next(d for d in range(1, length + 1) if spacing_loss(table, Spacing(d), length) <= most))
        assert default_spacing(table, length) == Spacing(found[-1]) and 1 < found[-1] < length
        fewer = uniform_loss(table, length // 2, length)
        assert smallest_spacing(table, length, fewer).distance < found[-1]


def test_standard_errors_are_over_rows() -> None:
    """A model that learns something from ones and nothing from zeros: of a row of each the mean is half of it, and so
    is the standard error of two rows."""

    def logits(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        one = 3.0 * (tokens == 1).any(dim=1).double()
        return torch.stack([0 * one, one, 0 * one], dim=-1)[:, None].expand(-1, tokens.shape[1], -1)

    table = measure_pairs(FromLogits(logits), np.repeat([[0], [1]], L, axis=1), MASK, shares=(1.0,))
    p = 1 / (1 + math.exp(-3))
    nats = math.log(2) + p * math.log(p) + (1 - p) * math.log(1 - p)
    seen = table.error_SD[0] > 0  # by both rows
    assert seen[0]
    np.testing.assert_allclose(table.nats_SD[0, seen], nats / 2)
    np.testing.assert_allclose(table.error_SD[0, seen], nats / 2)


def test_what_is_no_table_is_refused() -> None:
    good = measure_pairs(FromLogits(copies), np.zeros((2, L), dtype=np.int64), MASK, shares=(0.5,)).to_json()
    for change in ({"nats": [[1.0]]}, {"distances": [2, 1]}, {"shares": []}, {"rows": None}):
        with pytest.raises(UserError, match="no table of pairs"):
            PairTable.from_json({**good, **change})
    with pytest.raises(UserError, match="at least 2 rows"):
        measure_pairs(FromLogits(copies), np.zeros((1, L), dtype=np.int64), MASK)

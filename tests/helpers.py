"""Denoisers small enough to know everything about, and the exact law of what they produce.

The enumeration here shares no code with the sampler: it follows the reverse process of `diffusion`'s first page over
all (V + 1)^L partly masked rows, from alpha's formula, with no plan, no events and no noise.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np
import scipy.special
import scipy.stats
import torch
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor

State = tuple[int, ...]
Table = Callable[[State, float], np.ndarray]  # (row, t) -> probabilities (L, V) of the clean token, mask excluded


class TableDenoiser:
    """Logits looked up by the whole row and, if there are several tables, by time: table k serves t in
    (edges[k + 1], edges[k]]. The mask's own column holds a large logit, which no sampler may heed."""

    def __init__(self, seed: int, length: int = 3, symbols: int = 3, edges: Sequence[float] = (1.0, 0.0)) -> None:
        rng = np.random.default_rng(seed)
        self.length, self.symbols, self.mask_id = length, symbols, symbols
        self.edges = torch.tensor(list(edges)[1:-1], dtype=torch.float64)
        states = (symbols + 1) ** length
        table = rng.normal(size=(len(edges) - 1, states, length, symbols + 1)) * 1.5
        table[..., symbols] = 5.0
        self.table = torch.from_numpy(table)
        self.radix = torch.tensor([(symbols + 1) ** j for j in range(length)])
        self.time_conditioning = len(edges) > 2

    def to(self, device: str) -> TableDenoiser:
        """The same table on another device."""
        moved = copy.copy(self)
        moved.edges, moved.table, moved.radix = (x.to(device) for x in (self.edges, self.table, self.radix))
        return moved

    def _index(self, tokens_BL: Tensor, t_B: Tensor) -> tuple[Tensor, Tensor]:
        when_B = (t_B.double()[:, None] <= self.edges + 1e-9).sum(dim=1)
        return when_B, (tokens_BL * self.radix).sum(dim=1)

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        return self.table[self._index(tokens_BL, t_B)]

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        when_B, state_B = self._index(tokens_BL, t_B)
        return self.table[when_B[:, None], state_B[:, None], positions_BK]

    def __call__(self, state: State, t: float) -> np.ndarray:
        """Probabilities (L, V) for the enumeration, by numpy alone."""
        when = sum(t <= edge + 1e-9 for edge in self.edges.tolist())
        index = sum(token * (self.symbols + 1) ** j for j, token in enumerate(state))
        weight = np.exp(self.table[when, index].numpy()[:, : self.symbols])
        return weight / weight.sum(axis=1, keepdims=True)


class LinearDenoiser:
    """Logits that depend on every token, every position and the time, for any length: for invariants, not for laws.
    Float64 and summed over positions in a fixed order, so that a row's logits do not depend on its mates at all."""

    def __init__(self, seed: int, length: int, vocab_size: int) -> None:
        rng = np.random.default_rng(seed)
        self.bias_LV = torch.from_numpy(rng.normal(size=(length, vocab_size)))
        self.weight_LVV = torch.from_numpy(rng.normal(size=(length, vocab_size, vocab_size)))
        self.rate_LV = torch.from_numpy(rng.normal(size=(length, vocab_size)))
        self.batches: list[int] = []  # rows of each pass through the network

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        self.batches.append(len(tokens_BL))
        total_BV = torch.zeros(len(tokens_BL), self.bias_LV.shape[1], dtype=torch.float64)
        for j in range(tokens_BL.shape[1]):
            total_BV = total_BV + self.weight_LVV[j][tokens_BL[:, j]]
        length = tokens_BL.shape[1]
        return total_BV[:, None] * self.rate_LV[:length] + self.bias_LV[:length] * t_B.double()[:, None, None]

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        logits_BLV = self.logits(tokens_BL, t_B)
        return logits_BLV.gather(1, positions_BK[..., None].expand(-1, -1, logits_BLV.shape[-1]))

    def flops(self, length: int, positions: int | None = None) -> float:
        return 1000.0 + (length if positions is None else positions)


def masked_share(kind: str, t: float) -> float:
    """1 - alpha(t), written out again."""
    return {"linear": t, "cosine": math.cos(math.pi / 2 * (1 - t)) if t > 0 else 0.0}[kind]


def _write(state: State, mask_id: int, due: Sequence[int], p_LV: np.ndarray) -> dict[State, float]:
    """All ways to fill the due positions at once."""
    ways: dict[State, float] = {}
    for tokens in itertools.product(range(mask_id), repeat=len(due)):
        new = list(state)
        for position, token in zip(due, tokens, strict=True):
            new[position] = token
        ways[tuple(new)] = math.prod(p_LV[position, token] for position, token in zip(due, tokens, strict=True))
    return ways


def _subsets(masked: Sequence[int], hazard: float) -> list[tuple[tuple[int, ...], float]]:
    return [
        (due, hazard ** len(due) * (1 - hazard) ** (len(masked) - len(due)))
        for size in range(len(masked) + 1)
        for due in itertools.combinations(masked, size)
    ]


def law_of_steps(
    start: State, times: Sequence[float], model_of: Callable[[int, State], Table], mask_id: int, kind: str = "linear"
) -> dict[State, float]:
    """The exact law of the last row on a grid of times from 1 to 0; `model_of(k, state)` runs at the k-th step."""
    law = {start: 1.0}
    for k, (t, s) in enumerate(itertools.pairwise(times)):
        hazard = 1 - masked_share(kind, s) / masked_share(kind, t)
        after: dict[State, float] = {}
        for state, weight in law.items():
            masked = [j for j, token in enumerate(state) if token == mask_id]
            p_LV = model_of(k, state)(state, t)
            for due, chance in _subsets(masked, hazard):
                for new, p in _write(state, mask_id, due, p_LV).items():
                    after[new] = after.get(new, 0.0) + weight * chance * p
        law = after
    return law


def law_of_events(
    start: State, edges: Sequence[float], models: Sequence[Table], mask_id: int, kind: str = "linear"
) -> dict[State, float]:
    """The exact law at T = infinity, for networks that are constant in time on each stretch (edges[k + 1], edges[k]]:
    the positions that fall into a stretch are written one by one, in any order with equal chance."""
    law = {start: 1.0}
    for (t, s), model in zip(itertools.pairwise(edges), models, strict=True):
        hazard = 1 - masked_share(kind, s) / masked_share(kind, t)
        after: dict[State, float] = {}
        for state, weight in law.items():
            masked = [j for j, token in enumerate(state) if token == mask_id]
            for due, chance in _subsets(masked, hazard):
                orders = list(itertools.permutations(due))
                for order in orders:
                    path = {state: weight * chance / len(orders)}
                    for position in order:
                        longer: dict[State, float] = {}
                        for here, mass in path.items():
                            for new, p in _write(here, mask_id, [position], model(here, (t + s) / 2)).items():
                                longer[new] = longer.get(new, 0.0) + mass * p
                        path = longer
                    for new, mass in path.items():
                        after[new] = after.get(new, 0.0) + mass
        law = after
    return law


def p_value(tokens_nL: np.ndarray, law: dict[State, float], symbols: int) -> float:
    """G-test of samples against a law over whole rows. A row that cannot happen gives 0; cells with fewer than 10
    expected are pooled into one."""
    assert abs(sum(law.values()) - 1) < 1e-9
    length = tokens_nL.shape[1]
    if tokens_nL.min() < 0 or tokens_nL.max() >= symbols:
        return 0.0
    radix = symbols ** np.arange(length)
    observed = np.bincount(tokens_nL @ radix, minlength=symbols**length)
    expected = np.zeros(symbols**length)
    for state, chance in law.items():
        if chance > 0:  # rows still masked at the end have none
            expected[np.dot(state, radix)] = chance
    return g_test(observed, expected)


def g_test(observed: np.ndarray, chance: np.ndarray) -> float:
    """p-value of counts against probabilities, by the likelihood ratio."""
    if observed[chance == 0].any():
        return 0.0
    observed, expected = observed[chance > 0].astype(float), chance[chance > 0] * observed.sum()
    small = expected < 10
    if small.any():
        observed = np.append(observed[~small], observed[small].sum())
        expected = np.append(expected[~small], expected[small].sum())
    if len(expected) < 2:
        return 1.0
    statistic = 2 * (scipy.special.xlogy(observed, observed / expected)).sum()
    return float(scipy.stats.chi2.sf(statistic, len(expected) - 1))


def tiny_json(letters: int = 256) -> str:
    """Byte-level BPE over the first so many bytes' symbols, plus [MASK] in front."""
    tokens = {"[MASK]": 0} | {s: i for i, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet())[:letters], 1)}
    backend = Backend(models.BPE(vocab=tokens, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()

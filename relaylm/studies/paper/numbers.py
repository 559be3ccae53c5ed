r"""The paper's own numbers, under its own labels (`paper.toml`), and where they contradict each other (`slips`).

Schedules are named as everywhere: light, quarter:1 (light steps at the masked end) to quarter:4, sandwich, heavy.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

SCHEDULES = ("light", "quarter:1", "quarter:2", "quarter:3", "quarter:4", "sandwich", "heavy")
MIXED = SCHEDULES[1:6]  # a quarter of the steps light
KL_PEAK = (0.4, 0.6)  # "disagreement peaks near the middle (t ≈ 0.4-0.6)"
SEARCH = "the best schedules put light segments near both ends, the worst in the middle (no numbers are printed)"


@dataclass(frozen=True)
class Row:
    """Generative perplexity, half of its 95% interval, token entropy in nats."""

    ppl: float
    half: float
    entropy: float


@dataclass(frozen=True)
class Slip:
    """A statement of the paper, where it is, and what its own numbers give."""

    where: str
    says: str
    found: str


Table = Mapping[str, Row]
PAPER = tomllib.loads(Path(__file__).with_name("paper.toml").read_text(encoding="utf-8"))
TABLES: dict[str, Table] = {
    label: {name: Row(*row) for name, *row in zip(SCHEDULES, t["ppl"], t["half"], t["entropy"], strict=True)}
    for label, t in PAPER["tables"].items()
}
STEPS: dict[str, int] = {label: table["steps"] for label, table in PAPER["tables"].items()}
OWT, LM1B, PREFIX_128, PREFIX_256 = TABLES
DEPTHS, SHARES = ({int(key): tuple(row) for key, row in PAPER[name].items()} for name in ("depths", "shares"))
OUTPUT_LAYER, BLOCKS = ({int(key): share for key, share in PAPER[name].items()} for name in ("output_layer", "blocks"))
_labels_re = re.compile("|".join(map(re.escape, sorted(PAPER["printed"], key=len, reverse=True))))


def named(text: str) -> str:
    """The text with the paper's labels (`tab:scaling_steps`) replaced by what the paper prints (`Table 2`)."""
    return _labels_re.sub(lambda found: PAPER["printed"][found.group()], text)


def degradation(table: Table, name: str = "sandwich") -> float:
    """How much worse than all-heavy, as a share."""
    return table[name].ppl / table["heavy"].ppl - 1


def gap_paid(table: Table, name: str) -> float:
    """The share of the gap between all-heavy and all-light that a schedule pays."""
    return (table[name].ppl - table["heavy"].ppl) / (table["light"].ppl - table["heavy"].ppl)


def share_paid(share: int) -> float:
    """The share of the same gap that the sandwich pays with so many per cent of light steps."""
    return (SHARES[share][0] - SHARES[0][0]) / (SHARES[100][0] - SHARES[0][0])


def extra(name: str) -> float:
    """Log-perplexity above all-heavy in the main table."""
    return math.log1p(degradation(TABLES[OWT], name))


def order(table: Table) -> list[str]:
    """The mixed schedules, best first."""
    return sorted(MIXED, key=lambda name: table[name].ppl)


def order_text(table: Table) -> str:
    """The same in words, with a sign between those that are level."""
    names = order(table)
    links = [" = " if table[a].ppl == table[b].ppl else ", " for a, b in pairwise(names)]
    return "".join(name + link for name, link in zip(names, [*links, ""], strict=True))


def slips(width: int = 768, vocabulary: int = 50258, length: int = 1024) -> list[Slip]:
    """What the paper says against what its own tables and equations give. The sizes are its OpenWebText models'."""
    owt, lm1b, prefix = TABLES[OWT], TABLES[LM1B], TABLES[PREFIX_256]
    place = order(lm1b).index("sandwich") + 1
    block, head = 24 * length * width**2 + 4 * length**2 * width, 2 * length * width * vocabulary
    entropy = {name: [row.entropy for row in table.values()] for name, table in (("owt", owt), ("lm1b", lm1b))}
    heavy, light = SHARES[0][2], SHARES[100][2]  # seconds
    values = {
        **{"OWT": OWT, "LM1B": LM1B, "PREFIX_256": PREFIX_256, "owt": owt, "lm1b": lm1b, "prefix": prefix},
        **{f"depth_{depth}": row for depth, row in DEPTHS.items()},
        **{f"range_{name}": round(max(values) - min(values), 2) for name, values in entropy.items()},
        **{"low": min(entropy["lm1b"]), "high": max(entropy["lm1b"]), "degradation": degradation(lm1b)},
        **{"place": place, "better": " and ".join(f"{n} ({lm1b[n].ppl})" for n in order(lm1b)[: place - 1])},
        "tied": " and ".join(name for name in MIXED if prefix[name].ppl == prefix["sandwich"].ppl),
        **{"bound": 1 / OUTPUT_LAYER[12], "wrong_bound": 1 / (1 - OUTPUT_LAYER[12])},
        **{"length": length, "width": width, "vocabulary": vocabulary},
        **{"saved": 0.25 * 8 * block / (12 * block + head), "drop_6": DEPTHS[6][0] / DEPTHS[12][0] - 1},
        **{"speedup": SHARES[100][3], "time_saved": 1 - light / heavy, "true_speedup": heavy / light - 1},
        "sums": [sum(gap_paid(table, f"quarter:{k}") for k in (1, 2, 3, 4)) for table in (owt, lm1b)],
    }
    return [Slip(**{key: text.format(**values) for key, text in slip.items()}) for slip in PAPER["slips"]]

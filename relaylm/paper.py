r"""The paper's own numbers, under its own labels, and where they contradict each other.

"Not All Denoising Steps Are Equal: Model Scheduling for Faster Masked Diffusion Language Models". Tables are copied
digit by digit (perplexity, half of the 95% interval, entropy in nats); figures whose values are not printed are kept in
words. `slips` recomputes from these tables what the text says about them. Standard library only.

Schedules are named as everywhere here: light, quarter:1 (light steps at the masked end) to quarter:4, sandwich, heavy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

SCHEDULES = ("light", "quarter:1", "quarter:2", "quarter:3", "quarter:4", "sandwich", "heavy")
MIXED = SCHEDULES[1:6]  # a quarter of the steps light
LABELS = {
    "light": "L1000",
    "quarter:1": "L250 → H750",
    "quarter:2": "H250 → L250 → H500",
    "quarter:3": "H500 → L250 → H250",
    "quarter:4": "H750 → L250",
    "sandwich": "L125 → H750 → L125",
    "heavy": "H1000",
}
LM1B_LABELS = {
    "light": "L128",
    "quarter:1": "L32 → H96",
    "quarter:2": "H32 → L32 → H64",
    "quarter:3": "H64 → L32 → H32",
    "quarter:4": "H96 → L32",
    "sandwich": "L16 → H96 → L16",
    "heavy": "H128",
}


@dataclass(frozen=True)
class Row:
    """Generative perplexity, half of its 95% interval, token entropy in nats."""

    ppl: float
    half: float
    entropy: float


def _table(*rows: tuple[float, float, float]) -> dict[str, Row]:
    return {name: Row(*row) for name, row in zip(SCHEDULES, rows, strict=True)}


OWT = "tab:schedule_ppl_entopy_owt_12b-4b"  # sic
LM1B = "tab:schedule_ppl_entropy_lm1b_12b-4b"
PREFIX_128 = "tab:owt_schedule_ppl_prefix128"
PREFIX_256 = "tab:owt_schedule_ppl_prefix256"
TABLES: dict[str, dict[str, Row]] = {
    OWT: _table(
        (53.4, 0.62, 5.27),
        (44.6, 0.50, 5.28),
        (48.0, 0.54, 5.30),
        (47.1, 0.52, 5.29),
        (45.4, 0.50, 5.29),
        (44.3, 0.50, 5.27),
        (42.9, 0.47, 5.29),
    ),
    LM1B: _table(
        (242.0, 4.69, 4.30),
        (207.9, 3.96, 4.25),
        (215.5, 4.66, 4.24),
        (211.9, 4.83, 4.24),
        (209.1, 4.48, 4.24),
        (210.5, 4.16, 4.26),
        (188.8, 4.35, 4.21),
    ),
    PREFIX_128: _table(
        (55.3, 0.54, 5.39),
        (46.7, 0.45, 5.39),
        (49.7, 0.53, 5.39),
        (49.1, 0.51, 5.38),
        (47.5, 0.49, 5.38),
        (46.3, 0.43, 5.39),
        (44.9, 0.46, 5.38),
    ),
    PREFIX_256: _table(
        (47.5, 0.44, 5.42),
        (40.9, 0.38, 5.42),
        (43.2, 0.41, 5.41),
        (42.6, 0.41, 5.41),
        (41.4, 0.40, 5.40),
        (40.9, 0.36, 5.42),
        (39.3, 0.37, 5.40),
    ),
}

# tab:scaling_models: blocks of the light model -> perplexity, half of its interval, saved FLOPs and "PPL drop" in %.
DEPTHS = {
    4: (44.31, 0.76, 16.67, 3.41),
    6: (43.67, 0.67, 12.50, 1.94),
    8: (43.45, 0.73, 8.33, 1.40),
    10: (42.90, 0.70, 4.17, 0.12),
    12: (42.85, 0.71, 0.0, 0.0),
}

# tab:scaling_steps: per cent of light steps -> perplexity, saved FLOPs in per cent, seconds, "speedup" in per cent.
SHARES = {
    0: (42.9, 0.0, 109.7, 0.0),
    10: (43.1, 6.7, 106.4, 3.0),
    20: (43.8, 13.3, 103.3, 5.8),
    30: (44.7, 20.0, 100.4, 8.5),
    40: (45.9, 26.7, 97.3, 11.3),
    50: (47.2, 33.3, 94.3, 14.0),
    60: (48.6, 40.0, 91.1, 17.0),
    70: (50.1, 46.7, 90.7, 17.3),
    80: (51.4, 53.3, 85.4, 22.2),
    90: (52.5, 60.0, 84.8, 22.7),
    100: (53.4, 66.7, 78.7, 28.3),
}

# Section "Wall-clock vs. FLOPs": share of the run time, by blocks of the model.
OUTPUT_LAYER = {4: 0.816, 12: 0.599}
BLOCKS = {4: 0.182, 12: 0.400}

KL_PEAK = (0.4, 0.6)  # "disagreement peaks near the middle (t ≈ 0.4-0.6)"
SEARCH = "the best schedules put light segments near both ends, the worst in the middle (no numbers are printed)"


def degradation(table: Mapping[str, Row], name: str = "sandwich") -> float:
    """How much worse than all-heavy, as a share."""
    return table[name].ppl / table["heavy"].ppl - 1


def gap_paid(table: Mapping[str, Row], name: str) -> float:
    """The share of the gap between all-heavy and all-light that a schedule pays."""
    return (table[name].ppl - table["heavy"].ppl) / (table["light"].ppl - table["heavy"].ppl)


def order(table: Mapping[str, Row]) -> list[str]:
    """The mixed schedules, best first."""
    return sorted(MIXED, key=lambda name: table[name].ppl)


def order_text(table: Mapping[str, Row]) -> str:
    """The same in words, with a sign between those that are level."""
    names = order(table)
    links = [" = " if table[a].ppl == table[b].ppl else ", " for a, b in pairwise(names)]
    return "".join(name + link for name, link in zip(names, [*links, ""], strict=True))


@dataclass(frozen=True)
class Slip:
    where: str
    says: str
    found: str


def entropy_range(table: Mapping[str, Row]) -> float:
    values = [row.entropy for row in table.values()]
    return round(max(values) - min(values), 2)


def slips(width: int = 768, vocabulary: int = 50258, length: int = 1024) -> list[Slip]:
    """What the paper says against what its own tables and equations give. The sizes are its OpenWebText models'."""
    owt, lm1b, prefix = TABLES[OWT], TABLES[LM1B], TABLES[PREFIX_256]
    place = order(lm1b).index("sandwich") + 1
    tied = [name for name in MIXED if prefix[name].ppl == prefix["sandwich"].ppl]
    block = 24 * length * width**2 + 4 * length**2 * width
    head = 2 * length * width * vocabulary
    saved = 0.25 * 8 * block / (12 * block + head)
    alpha = OUTPUT_LAYER[12]
    sums = {key: sum(gap_paid(table, f"quarter:{k}") for k in (1, 2, 3, 4)) for key, table in TABLES.items()}
    time_saved = 1 - SHARES[100][2] / SHARES[0][2]
    return [
        Slip(
            f"caption of {LM1B}",
            "the same schedule ranking as on OpenWebText, where the sandwich is best, is reproduced",
            f"the sandwich ({lm1b['sandwich'].ppl}) is number {place} of {len(MIXED)}, behind "
            + " and ".join(f"{name} ({lm1b[name].ppl})" for name in order(lm1b)[: place - 1]),
        ),
        Slip(
            "abstract and conclusion",
            "modest degradation on both corpora (3.4% on OpenWebText)",
            f"{degradation(lm1b):.1%} on LM1B",
        ),
        Slip(
            f"caption of {LM1B}",
            "entropy varies by less than 0.06 nats",
            f"by {entropy_range(lm1b):.2f} ({min(r.entropy for r in lm1b.values()):.2f} to "
            f"{max(r.entropy for r in lm1b.values()):.2f})",
        ),
        Slip(
            f"caption of {OWT}",
            "entropy varies by less than 0.03 nats",
            f"by {entropy_range(owt):.2f}, not less",
        ),
        Slip(
            PREFIX_256,
            "the sandwich performs best among the mixed schedules; the ranking is unchanged",
            f"{' and '.join(tied)} are level at {prefix['sandwich'].ppl}",
        ),
        Slip(
            "eq:mdlm_loss",
            "the loss has the weight α'/(1-α)",
            "α' is negative: the weight must be -α'/(1-α), as the sentence under the equation has it",
        ),
        Slip(
            "Section 'Wall-clock vs. FLOPs', a simple model",
            f"with α = T_out/T the speedup is at most 1/(1-α), which is {1 / (1 - alpha):.2f} for the 12-block model",
            f"blocks that take no time leave T_out = αT, so the bound is 1/α = {1 / alpha:.2f}",
        ),
        Slip(
            "eq:saved_flops",
            f"the 25% sandwich of 4 and 12 blocks saves {DEPTHS[4][2]}% of the FLOPs",
            f"the output layer is left out: with it (L = {length}, {width} wide, {vocabulary} tokens) the saving is "
            f"{saved:.1%}",
        ),
        Slip(
            f"{OWT} against tab:scaling_models",
            f"42.9 ± {owt['heavy'].half:.2f} and 44.3 ± {owt['sandwich'].half:.2f}",
            f"the same two numbers, 42.85 ± {DEPTHS[12][1]:.2f} and 44.31 ± {DEPTHS[4][1]:.2f}: two intervals for one",
        ),
        Slip(
            "tab:scaling_models",
            f"with 6 blocks perplexity drops by {DEPTHS[6][3]}%",
            f"{DEPTHS[6][0]} against {DEPTHS[12][0]} is {DEPTHS[6][0] / DEPTHS[12][0] - 1:.2%}",
        ),
        Slip(
            "fig:lm1b-12b-4b-barplot-perplexity",
            "250/1000 light steps",
            "the table of the same data has 32/128",
        ),
        Slip(
            "tab:scaling_steps",
            f"a speedup of {SHARES[100][3]}% at 100% light steps",
            f"that is time saved ({time_saved:.1%}); the speedup is {SHARES[0][2] / SHARES[100][2] - 1:.0%}",
        ),
        Slip(
            "Section on the fixed light-step ratio",
            "losses of single quarters are read as the importance of these steps",
            "they do not add up: the four quarters together pay "
            + " and ".join(
                f"{sums[key]:.0%} of the gap on {name}" for key, name in ((OWT, "OpenWebText"), (LM1B, "LM1B"))
            ),
        ),
        Slip(
            "Experimental setup",
            "perplexity by 'a pretrained GPT-2', as a mean",
            "which GPT-2, and whether the mean is over samples or over tokens, is not said; nor in which precision "
            "tokens were drawn (MDLM's float32 draws cut off rare tokens, most of all early and at many steps)",
        ),
    ]

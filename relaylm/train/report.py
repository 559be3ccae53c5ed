"""What a finished family is worth: its bits, a sample, how many of its words are words, and what would help.

The table of pairs (`measure.pairs`) is measured on held-out text when a family is written; it says how far apart
positions must be to be written together, which is then the family's own spacing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from relaylm.console import table, terminal_width, wrapped
from relaylm.core.pairs import default_spacing
from relaylm.files import read_json, write_json
from relaylm.measure.likelihood import spread_rows
from relaylm.measure.pairs import measure_pairs
from relaylm.models.denoiser import Transformer
from relaylm.models.family import Family
from relaylm.models.folder import PAIRS
from relaylm.sampling.sample import sample
from relaylm.train.corpus import TokenFile

ROWS = 64  # of held-out text for the table of pairs
GAP = 0.08  # a model whose held-out bits are this share above its training bits has learned its text by heart
WORDS = 0.9  # share of words that are words, from which a model is said to write words


def measured_pairs(
    out: Path, model: Transformer, corpus: TokenFile, summary: Mapping[str, Any], device: torch.device, progress: bool
) -> dict[str, Any] | None:
    """The table of pairs of a model that was trained in OUT, and the spacing that follows, kept in OUT/pairs.json; None
    where there is no held-out text in plain rows."""
    length = model.architecture.length
    if corpus.manifest["packing"] == "pad" or corpus.heldout.size < 2 * length:
        return None
    found = read_json(out / PAIRS)
    if found is None or found["summary"] != summary:
        rows_NL = spread_rows(corpus.heldout.reshape(-1), length, ROWS)
        name, model = str(summary["label"]), model.to(device)
        pairs = measure_pairs(model, rows_NL, model.mask_id, device=device, name=name, progress=progress)
        model.to("cpu")
        found = {"summary": summary, "table": pairs.to_json(), "spacing": str(default_spacing(pairs, length))}
        write_json(out / PAIRS, found)
    return found


def report(folder: Path, corpus: TokenFile, device: str = "auto", n: int = 4) -> dict[str, Any]:
    """What `relaylm train` ends with: held-out bits, samples of the heavy model, the share of their words that occur in
    the training text, and a verdict in a sentence."""
    family = Family.load(folder, device=device)
    training = family.meta["training"]
    summary = training[family.heavy]
    texts = sample(family, "heavy", n, seed=0).texts
    known = set(_words(corpus.tokenizer.decode(corpus.train.reshape(-1)[:2_000_000])))
    words = [word for text in texts for word in _words(text)[1:-1]]  # the first and the last may be cut
    share = sum(word in known for word in words) / max(1, len(words))
    found: dict[str, Any] = {"samples": texts, "words": share, "passes": summary["tokens"] / corpus.train.size}
    if (held := summary["heldout"]) is not None:
        trained = summary["train_loss"]  # None while the warm-up lasts
        found |= {"heldout_bits": held["bits"], "train_bits": None if trained is None else trained / math.log(2)}
    return found | {"verdict": _verdict(found)}


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def _verdict(found: Mapping[str, Any]) -> str:
    """A sentence on what the numbers mean."""
    if (held := found.get("heldout_bits")) is None:
        return "nothing was held out, so there is no telling: prepare the text with --holdout 0.02"
    trained, passes = found["train_bits"], found["passes"]
    if trained is not None and held > (1 + GAP) * trained:
        return (
            f"needs more text: it was read {passes:.0f} times and is being learned by heart "
            f"({trained:.2f} bits on it, {held:.2f} on text that was held out)"
        )
    if found["words"] < WORDS:
        return (
            f"needs more training: {found['words']:.0%} of its words are words of the text; more steps "
            "(--set steps=...) or a larger preset (relaylm ls)"
        )
    return f"writes words: {found['words']:.0%} of them are words of the text"


def render(family: Family, found: Mapping[str, Any]) -> str:
    """The report as text: a table of bits, a sample, the verdict and the next command."""
    rows = []
    for name, s in family.meta["training"].items():
        bits = ["-", "-"] if s["heldout"] is None else [f"{s['heldout']['bits']:.3f}", f"{s['bits_per_character']:.3f}"]
        rows.append([name, f"{s['parameters']:,}", *bits, f"{s['wall_seconds']:.0f} s"])
    head = ["model", "parameters", "held-out bits a token", "a character", "trained in"]
    spacing = family.meta.get("spacing")
    lines = [table(head, rows), "", f"A sample of {family.heavy}:", "", found["samples"][0], ""]
    lines += wrapped([f"Verdict: {found['verdict']}."], terminal_width())
    lines += [f"Positions {spacing.partition(':')[2]} apart are written together ({PAIRS})."] if spacing else []
    return "\n".join([*lines, f"Next: relaylm sample --family {family.folder}"])

"""The one palette, and which model wrote which piece of a text.

Readers with a colour vision deficiency can distinguish the colours (Okabe and Ito's, with violet and brown in place of
those too bright to read on white), and each has a contrast of 3 to 1 on white.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from relaylm.models.family import Family
    from relaylm.models.tokenizer import Tokenizer
    from relaylm.sampling.result import Samples

BLUE, RED, GREEN, PINK, VIOLET, BROWN, BLACK = COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#8A2BE2", "#843C24", "#000000"),
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # beside the colours, for print in grey
# From the lightest model of a family to its heaviest; the first ones are the easiest to distinguish.
MODELS = (RED, BLUE, VIOLET, BROWN, PINK, GREEN)
BROKEN = "\ufffd"  # what bytes decode to that are not whole characters
GIVEN, MASKED = -1, -2  # in place of a model's rank: a position that the user gave, one that is still masked
END = " [end] "  # where a text ends, in place of a tokenizer's own mark (<|endoftext|>)
GREYS = {GIVEN: "#808080", MASKED: "#4D4D4D"}


def colour_of(rank: int) -> str:
    """The colour of a family's model by its rank (0: the lightest), or a grey for `GIVEN` and `MASKED`."""
    return GREYS[rank] if rank < 0 else MODELS[rank % len(MODELS)]


def writers_of(family: Family, samples: Samples, row: int) -> list[int]:
    """For each position the rank in the family of the model that wrote it, or `GIVEN`. A model has one rank and so one
    colour, whatever other models took part."""
    ranks = [family.names.index(name) for name in samples.trace.models]
    return [GIVEN if model < 0 else ranks[model] for model in samples.trace.model_nL[row].tolist()]


def readable(family: Family, text: str) -> str:
    """The text with a plain mark where the model ended one text and began another."""
    return text if family.tokenizer is None else _readable(family.tokenizer, text)


def _readable(tokenizer: Tokenizer, text: str) -> str:
    return text if tokenizer.eos_id is None else text.replace(tokenizer.decode([tokenizer.eos_id]), END)


def pieces_of(family: Family, tokens_L: np.ndarray) -> list[str]:
    """The text of each token by itself, made `readable`; a masked one is a blank."""
    tokenizer: Any = family.tokenizer
    if tokenizer is None:
        return [f"{token} " for token in tokens_L]
    return [*map(_pieces(tokenizer, family.mask_id).__getitem__, tokens_L.tolist())]


class _Pieces(dict[int, str]):
    """Tokens by themselves, kept: a server asks for the same ones over and over."""

    def __init__(self, tokenizer: Tokenizer, mask_id: int) -> None:
        self.tokenizer, self.mask_id = tokenizer, mask_id

    def __missing__(self, token: int) -> str:
        piece = self[token] = _readable(self.tokenizer, self.tokenizer.decode_partial([token], self.mask_id))
        return piece


_pieces = lru_cache(maxsize=16)(_Pieces)


def row_pieces(family: Family, tokens_L: np.ndarray) -> list[str]:
    """As `pieces_of`, for tokens that stand side by side. Where several tokens make one character, the first has it
    and the others are empty."""
    pieces = pieces_of(family, tokens_L)
    if family.tokenizer is None or BROKEN not in "".join(pieces):
        return pieces
    for start in [at for at, piece in enumerate(pieces) if BROKEN in piece]:
        for end in range(start + 2, min(start + 8, len(pieces)) + 1) if pieces[start] else ():
            if BROKEN not in pieces[end - 1]:
                break
            text = family.tokenizer.decode_partial(tokens_L[start:end], family.mask_id)
            if BROKEN not in text:
                pieces[start:end] = [text, *[""] * (end - start - 1)]
                break
    return pieces


def on_a_line(piece: str) -> str:
    """The piece with a space for every character that moves the cursor (tabs, line ends)."""
    return "".join(character if character.isprintable() else " " for character in piece)


def runs_of(pieces: Sequence[str], ranks: Sequence[int]) -> list[tuple[str, int]]:
    """Neighbouring pieces of one model, joined."""
    pairs = groupby(zip(pieces, ranks, strict=True), key=lambda pair: pair[1])
    return [("".join(piece for piece, _ in run), rank) for rank, run in pairs]

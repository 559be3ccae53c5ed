"""OpenAI's text completions, made of the events of a request.

A row is written in any order. A stream can only add text at the end, so it sends the left-most finished text: what
stands before the first position that is still masked. (Under a rule that masks positions again all of it comes last.)
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from relaylm.serve.request import Ask


def cut_at(text: str, stops: Sequence[str], start: int = 0) -> tuple[str, bool]:
    """The text up to the first stop from a place on, and whether there was one."""
    ends = [end for stop in stops if (end := text.find(stop, start)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


class Completion:
    """The choices of one answer, as they come about."""

    def __init__(self, ask: Ask, start: dict[str, Any]) -> None:
        self.ask, self.created = ask, int(time.time())
        self.frame = {"id": start["id"], "object": "text_completion", "created": self.created, "model": start["family"]}
        self.leads: list[int] = start["leads"]
        rows = len(self.leads)
        self.logprobs: list[dict[int, float | None]] = [{} for _ in range(rows)]  # by position
        self.texts, self.shown = [""] * rows, [""] * rows
        self.fresh: Sequence[int] = ()  # rows that the last event changed
        self.done: dict[str, Any] = {}

    def take(self, name: str, event: dict[str, Any]) -> None:
        """Take note of an event."""
        if name == "written":
            self.logprobs[event["row"]].update(zip(event["positions"], event["logprobs"], strict=True))
            self.texts[event["row"]], self.fresh = event["finished"], [event["row"]]
        elif name == "done":
            self.done, self.texts, self.fresh = event, event["completions"], range(len(self.texts))

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(row, *self._cut(row), last=True) for row in range(len(self.texts))]
        return {**self.frame, "choices": choices, "usage": self.done["usage"], "relaylm": self.done["relaylm"]}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What the last event lets be sent. Text that may become a stop is held back, and half a character. Many
        clients look into the first choice of every chunk, so what concerns the whole comes with the last row's end, and
        in a chunk without choices only what was asked for so."""
        last, longest = bool(self.done), max(map(len, self.ask.stop), default=1) - 1
        for row in self.fresh:
            shown, (cut, stopped) = self.shown[row], self._cut(row)
            if not last:  # a stop that began before the one found may be completed by what comes
                cut = cut[: max(len(self.texts[row].rstrip("\ufffd")) - longest, 0)]
            if not last and (cut == shown or not cut.startswith(shown)):
                continue
            self.shown[row] = cut
            whole = {"relaylm": self.done["relaylm"]} if last and row == len(self.shown) - 1 else {}
            yield {**self.frame, "choices": [self._choice(row, cut, stopped, last, len(shown))], **whole}
        if last and self.ask.stream_options:
            yield {**self.frame, "choices": [], "usage": self.done["usage"]}

    def _cut(self, row: int) -> tuple[str, bool]:
        """A row's text up to a stop in what was written, and whether there was one."""
        return cut_at(self.texts[row], self.ask.stop, self.leads[row])

    def _choice(self, row: int, text: str, stopped: bool, last: bool, shown: int = 0) -> dict[str, Any]:
        reason = None if not last else "stop" if stopped else "length"
        scores = self._scores(row, len(text) if stopped else None) if last and self.ask.logprobs is not None else None
        return {"index": row, "text": text[shown:], "logprobs": scores, "finish_reason": reason}

    def _scores(self, row: int, end: int | None) -> dict[str, Any]:
        """Tokens of the text, those that begin before its end, and their log-probabilities, each when it was written;
        with `echo` those given, too, without one."""
        known, at, entries = self.logprobs[row], 0, []
        for position, piece in self.done["tokens"][row]:
            if (position in known or self.ask.echo) and (end is None or at < end):
                entries.append((piece, known.get(position), at))
            at += len(piece)
        tokens, logprobs, offsets = zip(*entries, strict=True) if entries else ((), (), ())
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

"""OpenAI's text completions, made of the events of a request.

A row is written in any order. A stream can only add text at the end, so it sends the left-most finished text: what
stands before the first position that is still masked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

from relaylm.serve.request import Ask


def cut_at(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """The text up to the first stop, and whether there was one."""
    ends = [end for stop in stops if (end := text.find(stop)) >= 0]
    return (text[: min(ends)], True) if ends else (text, False)


class Completion:
    """The choices of one answer, as they come about."""

    def __init__(self, ask: Ask, start: dict[str, Any]) -> None:
        self.ask, self.created = ask, int(time.time())
        self.frame = {"id": start["id"], "object": "text_completion", "created": self.created, "model": start["family"]}
        self.given: list[list[str | None]] = start["given"]
        rows = len(self.given)
        self.written: list[dict[int, tuple[str, float | None]]] = [{} for _ in range(rows)]  # piece and logprob
        self.texts, self.shown, self.ended = [""] * rows, [""] * rows, [False] * rows
        self.done: dict[str, Any] = {}

    def take(self, name: str, event: dict[str, Any]) -> None:
        """Take note of an event."""
        if name == "written":
            pieces = zip(event["texts"], event["logprobs"], strict=True)
            self.written[event["row"]].update(zip(event["positions"], pieces, strict=True))
            self.texts[event["row"]] = event["finished"]
        elif name == "done":
            self.done, self.texts = event, event["completions"]

    def body(self) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choice(row, *cut_at(text, self.ask.stop), last=True) for row, text in enumerate(self.texts)]
        return {**self.frame, "choices": choices, "usage": self.done["usage"], "relaylm": self.done["relaylm"]}

    def chunks(self) -> Iterator[dict[str, Any]]:
        """What can be sent now and was not sent before. Text that may become a stop is held back, and half a
        character."""
        last, longest = bool(self.done), max(map(len, self.ask.stop), default=1) - 1
        for row, text in enumerate(self.texts):
            cut, stopped = cut_at(text, self.ask.stop)
            ends = last or stopped
            if not ends:
                cut = cut[: len(cut) - longest].rstrip("\ufffd")
            if self.ended[row] or not (ends or (cut != self.shown[row] and cut.startswith(self.shown[row]))):
                continue
            choice = self._choice(row, cut[len(self.shown[row]) :], stopped, last=ends)
            self.shown[row], self.ended[row] = cut, ends
            yield {**self.frame, "choices": [choice]}
        if last:
            usage = {"usage": self.done["usage"]} if self.ask.stream_options else {}
            yield {**self.frame, "choices": [], **usage, "relaylm": self.done["relaylm"]}

    def _choice(self, row: int, text: str, stopped: bool, last: bool) -> dict[str, Any]:
        reason = None if not last else "stop" if stopped else "length"
        scores = self._scores(row) if last and self.ask.logprobs is not None else None
        return {"index": row, "text": text, "logprobs": scores, "finish_reason": reason}

    def _scores(self, row: int) -> dict[str, Any]:
        """Tokens and their log-probabilities, each when it was written; with `echo` those given, too, without one."""
        entries = [(piece or "", None) for piece in self.given[row]] if self.ask.echo else []
        entries = dict(enumerate(entries)) | self.written[row]  # type: ignore[assignment]
        tokens, logprobs = zip(*(entries[at] for at in sorted(entries)), strict=True)  # type: ignore[call-overload]
        offsets = [0, *accumulate(map(len, tokens))][:-1]
        return {"tokens": tokens, "token_logprobs": logprobs, "top_logprobs": None, "text_offset": offsets}

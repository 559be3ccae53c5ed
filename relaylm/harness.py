"""A family under a schedule as a model of lm-evaluation-harness.

lm_eval 0.4 looks models up in its own registry and does not ask other packages for theirs, so a model from elsewhere
has to be registered in the process first. This module does that and then is lm_eval's command line:

    python -m relaylm.harness --model relaylm --model_args family=wiki-bpe,schedule=sandwich:25%,spacing=16 --tasks ...

In Python: `register()`, then `lm_eval.simple_evaluate(model="relaylm", model_args=...)`.

- **loglikelihood** is minus the bound on -log p(continuation | context) (`relaylm.measure.plan_likelihood`), so it is
  never too good on average. It is an estimate; its standard errors are logged and kept in `standard_errors`.
  Requests of one document share their plans, so that choices are compared with the same luck. `is_greedy` says
  whether the continuation comes out if the surest position is written first, one at a time, with the likeliest token.
- **loglikelihood_rolling** scores every token once, in windows of the family's length; the last window is full, and
  what was scored before is given in it.
- **generate_until** samples with the schedule. Without `do_sample` every call writes the likeliest tokens.

A family that was trained on rows between marks expects one at both ends: without it, the last token of a short row
would be taken for the end. So rows get a mark in front, and behind a few masked positions, which are not scored, and a
mark.
"""

from __future__ import annotations

import logging
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from relaylm.console import note, progress_bar
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError, whole
from relaylm.measure.likelihood import without_mask
from relaylm.measure.plan_likelihood import continuation_bound
from relaylm.models.family import Family
from relaylm.models.text import wrap_marks
from relaylm.sampling.engine import settings
from relaylm.sampling.policy import check_whole, resolve, static_models
from relaylm.sampling.sample import sample, settle

ROWS = 64  # that are worked on together
AFTER = 16  # masked positions behind a text, where rows end with a mark
LOG = logging.getLogger("lm_eval.relaylm")  # below lm_eval's logger, whose settings it follows


class Scheduled:
    """A family, a schedule and how its likelihood is estimated; rows of token ids in, numbers and ids out."""

    def __init__(
        self,
        family: str = "wiki-bpe",
        schedule: str = "heavy",
        spacing: str | int | None = None,
        steps: float | None = None,
        rule: str | None = None,
        calls: int = 32,
        seed: int = 0,
        light: str | None = None,
        heavy: str | None = None,
        device: str | None = None,
        dtype: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
    ) -> None:
        """`calls` is about how many network calls estimate one likelihood; the rest is as in `relaylm.sample`. Without
        a spacing, steps and a rule: the schedule's own count, else the family's own spacing, else as many steps as its
        length. Likelihoods need a rule that never looks at what was drawn, such as eb or surest."""
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"  # lm_eval says cuda:0 unless it is given another
        self.family = Family.load(family, device=device, dtype=dtype)
        check_whole(self.family.models)
        if self.family.tokenizer is None:
            raise UserError(f"{family} has no tokenizer, and tasks are text")
        self.tokenizer = self.family.tokenizer
        named = None if rule is None else str(rule)
        asked = settle(self.family, str(schedule), steps=steps, spacing=spacing, rule=named, light=light, heavy=heavy)
        assert isinstance(asked.policy, Schedule)
        self.schedule, self.steps, self.rule = asked.policy, asked.steps, asked.rule
        self.followed, self.times = resolve(asked.policy, asked.steps, asked.rule)  # refuses what does not go together
        self.models = {name: self.family[name] for name in asked.policy.models}
        self.calls, self.seed = whole(_number(calls), "calls"), whole(_number(seed), "seed", 0)
        rows = str(batch_size)  # lm_eval says 1 unless it is given another
        self.batch_size = int(rows) if rows.isdigit() and int(rows) > 1 else 32
        wraps = self.family.meta.get("preset", {}).get("packing") == "wrap"
        mark = wrap_marks(self.tokenizer)[0] if wraps else None
        self.front = [] if mark is None else [mark]
        self.back = [] if mark is None else [*[self.family.mask_id] * AFTER, mark]
        self.space = self.family.length - len(self.front) - len(self.back)  # tokens of a row
        self.standard_errors: list[float] = []  # of all log-likelihoods so far, in nats

    # -------------------------------------------------------------------------------------------- text to rows

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Tokens of context and continuation, tokenised together; blanks between them belong to the continuation."""
        kept = context.rstrip(" ")
        continuation = context[len(kept) :] + continuation
        before, whole = (self.tokenizer.encode(text, strict=False) for text in (kept, kept + continuation))
        return before, whole[len(before) :][-self.space :]

    def row(self, before: Sequence[int], after: Sequence[int]) -> list[int]:
        """One row: as much of what is before as fits, what comes after, and the marks."""
        left = self.space - len(after)
        return [*self.front, *(list(before)[-left:] if left else []), *after, *self.back]

    def scored(self, rows: Sequence[tuple[list[int], int]]) -> np.ndarray:
        """Which positions of rows of one length are scored."""
        ends = len(rows[0][0]) - len(self.back)
        place = np.arange(len(rows[0][0]))
        return (place < ends) & (place >= ends - np.array([last for _, last in rows])[:, None])

    def windows(self, text: str) -> list[tuple[list[int], int]]:
        """Rows of a text and how many tokens of each are scored, the last before its end: every token once."""
        ids = self.tokenizer.encode(text, strict=False)
        cuts = [*range(0, len(ids), self.space), len(ids)]
        return [(self.row(ids[:start], ids[start:stop]), stop - start) for start, stop in pairwise(cuts)]

    # -------------------------------------------------------------------------------------------- likelihoods

    def log_likelihoods(self, rows: Sequence[tuple[list[int], int]], numbers: Sequence[int], what: str) -> np.ndarray:
        """(N, 2): the log-likelihood of the last tokens of each row given the others, and its standard error; 0 where
        none are scored. Rows with the same number share their plans."""
        out, made = np.zeros((len(rows), 2)), 0
        with progress_bar(what, len(rows), "request", delay=1.0) as bar:
            for part in _same_length([ids if last else [] for ids, last in rows]):
                tokens = np.array([rows[index][0] for index in part])
                free = self.scored([rows[index] for index in part])
                found = continuation_bound(
                    self.models,
                    self.schedule,
                    tokens,
                    free,
                    self.family.mask_id,
                    steps=self.steps,
                    rule=self.rule,
                    calls=self.calls,
                    groups=min(4, self.calls),
                    seed=self.seed,
                    numbers_N=np.array([numbers[index] for index in part]),
                    device=self.family.device,
                    batch_size=self.batch_size,
                )
                out[part], made = np.stack([-found.nats_N, found.error_N], axis=1), made + found.calls
                bar.update(len(part))
        LOG.info("%s: %d rows, %d network calls", what, len(rows), made)
        return out

    def note(self, what: str, errors: Sequence[float]) -> None:
        """Keep and log standard errors."""
        self.standard_errors += errors
        if known := [error for error in errors if not math.isnan(error)]:
            middle, most = np.median(known), max(known)
            LOG.info("%s: standard error of an estimate %.3f nats (median), %.3f (largest)", what, middle, most)

    def are_greedy(self, rows: Sequence[tuple[list[int], int]]) -> list[bool]:
        """Whether the scored tokens of each row come out, surest position first, one at a time."""
        out = [True] * len(rows)
        for part in _same_length([ids if last else [] for ids, last in rows]):
            tokens = torch.tensor([rows[index][0] for index in part], device=self.family.device)
            last = torch.tensor([rows[index][1] for index in part], device=self.family.device)
            masked = torch.from_numpy(self.scored([rows[index] for index in part])).to(tokens.device)
            alive = np.arange(len(part))
            while len(alive):
                wrong, place = self._surest(tokens[alive], masked[alive], last[alive])
                for index in alive[wrong]:
                    out[part[index]] = False
                masked[alive, place] = False
                alive = alive[~wrong & masked[alive].any(dim=1).cpu().numpy()]
        return out

    @torch.inference_mode()
    def _surest(
        self, tokens_BL: torch.Tensor, masked_BL: torch.Tensor, last_B: torch.Tensor
    ) -> tuple[np.ndarray, torch.Tensor]:
        """The surest masked position of each row, and whether the likeliest token there is not the row's."""
        t_B = (masked_BL.sum(dim=1) / last_B).cpu().numpy().astype(np.float64)
        step_B = np.zeros(len(t_B), dtype=np.int64)
        if self.times is not None:
            rising = np.asarray(self.times[::-1])
            step_B = np.searchsorted(rising, t_B - 1e-6, side="left")
            t_B = rising[step_B]
        lookup = static_models(self.followed, tuple(self.models))
        assert lookup is not None
        model_B = lookup(step_B, t_B)
        wrong_B, place_B = np.zeros(len(t_B), dtype=bool), torch.zeros_like(last_B)
        noisy_BL = torch.where(masked_BL, self.family.mask_id, tokens_BL)
        with settings(self.family.device):
            for k, model in enumerate(self.models.values()):
                for part in np.array_split(own, -(-len(own) // 8)) if len(own := np.flatnonzero(model_B == k)) else ():
                    at = torch.from_numpy(part).to(tokens_BL.device)
                    time = torch.from_numpy(t_B[part]).to(tokens_BL.device, torch.float32)
                    logits = without_mask(model.logits(noisy_BL[at], time).float(), self.family.mask_id)
                    sure, best = logits.log_softmax(dim=-1).max(dim=-1)
                    place_B[at] = sure.masked_fill(~masked_BL[at], -torch.inf).argmax(dim=1)
                    here = torch.arange(len(at), device=at.device), place_B[at]
                    wrong_B[part] = (best[here] != tokens_BL[at][here]).cpu().numpy()
        return wrong_B, place_B

    # -------------------------------------------------------------------------------------------- generation

    def generate(self, prompts: Sequence[str], tokens: int, stops: Sequence[str], **law: Any) -> list[str]:
        """`tokens` new tokens after each prompt, cut at the first stop; fewer where a row does not hold them beside the
        prompt, of which a quarter of a row is kept at least. `law` is temperature, top_p and top_k."""
        encoded = [self.tokenizer.encode(prompt, strict=False) for prompt in prompts]
        behind = len(self.back)  # places behind the text are written too, and cut off
        new = [min(tokens, max(1, self.space - behind - min(len(ids), self.space // 4))) for ids in encoded]
        if cut := sum(count < tokens or len(ids) + count + behind > self.space for ids, count in zip(encoded, new)):
            about = cut, len(prompts), tokens, self.space
            LOG.warning("%d of %d prompts and %d new tokens are cut to rows of %d", *about)
        rows = [self.row(ids, [-1] * (count + behind)) for ids, count in zip(encoded, new)]
        rows = [[-1 if token == self.family.mask_id else token for token in row] for row in rows]
        out = [""] * len(rows)
        for part in _same_length(rows):
            given = np.array([rows[index] for index in part])
            where: dict[str, Any] = {"given": given, "seed": self.seed, "first_row": part[0]}
            drawn = sample(self.family, self.schedule, len(part), steps=self.steps, rule=self.rule, **where, **law)
            for index, row in zip(part, drawn.tokens):
                written = row[len(row) - new[index] - 2 * behind :][: new[index]]
                out[index] = self._text(written.tolist(), stops)
        return out

    def _text(self, ids: list[int], stops: Sequence[str]) -> str:
        eos = self.tokenizer.eos_id
        text = self.tokenizer.decode(ids[: ids.index(eos)] if eos in ids else ids)
        for stop in stops:
            text = text.split(stop)[0] if stop else text
        return text


def _number(value: Any) -> Any:
    """A number that was given as text."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _same_length(rows: Sequence[Sequence[int]]) -> list[list[int]]:
    """Indices of rows of one length together, at most ROWS of them; without empty rows."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        by_length[len(row)].append(index)
    by_length.pop(0, None)
    return [own[at : at + ROWS] for own in by_length.values() for at in range(0, len(own), ROWS)]


# ------------------------------------------------------------------------------------------------ lm_eval


@cache
def model_class() -> Any:
    """The class that lm_eval makes models of."""
    try:
        from lm_eval.api.model import LM
        from lm_eval.models.utils import normalize_gen_kwargs
    except ImportError:
        raise UserError("lm-evaluation-harness is missing: pip install relaylm[lm-eval]") from None

    class RelayLM(LM):
        """A family under a schedule; arguments as in `Scheduled`."""

        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.scheduled = Scheduled(**options)

        @property
        def tokenizer_name(self) -> str:
            """The family's name."""
            return self.scheduled.family.name

        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            """Log-likelihoods of continuations, and whether each is greedy."""
            rows = []
            for request in requests:
                before, after = self.scheduled.pair(*request.args)
                rows.append((self.scheduled.row(before, after), len(after)))
            numbers = [index if r.doc_id is None else int(r.doc_id) for index, r in enumerate(requests)]
            found = self.scheduled.log_likelihoods(rows, numbers, "loglikelihood")
            self.scheduled.note("loglikelihood", found[:, 1].tolist())
            result = list(zip(found[:, 0].tolist(), self.scheduled.are_greedy(rows)))
            return self._kept("loglikelihood", requests, result)

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            """Log-likelihoods of whole texts."""
            windows = [self.scheduled.windows(request.args[0]) for request in requests]
            rows = [row for each in windows for row in each]
            found = self.scheduled.log_likelihoods(rows, range(len(rows)), "loglikelihood_rolling")
            ends = np.cumsum([len(each) for each in windows])[:-1]
            parts = np.split(found, ends)
            self.scheduled.note("loglikelihood_rolling", [float(np.hypot.reduce(part[:, 1])) for part in parts])
            return self._kept("loglikelihood_rolling", requests, [float(part[:, 0].sum()) for part in parts])

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            """Texts after prompts, cut at their stops."""
            alike: dict[str, list[int]] = defaultdict(list)  # requests with the same settings
            for index, request in enumerate(requests):
                alike[repr(sorted(request.args[1].items()))].append(index)
            result = [""] * len(requests)
            with progress_bar("generate_until", len(requests), "request", delay=1.0) as bar:
                for own in alike.values():
                    options = normalize_gen_kwargs(requests[own[0]].args[1])
                    law = {key: options[key] for key in LAWS if options.get(key)}
                    law = law if options["do_sample"] else {"top_k": 1}
                    prompts = [requests[index].args[0] for index in own]
                    texts = self.scheduled.generate(prompts, options["max_gen_toks"], options["until"], **law)
                    for index, text in zip(own, texts):
                        result[index] = text
                    bar.update(len(own))
            return self._kept("generate_until", requests, result)

        def _kept(self, kind: str, requests: Sequence[Any], results: list[Any]) -> list[Any]:
            for request, result in zip(requests, results):
                self.cache_hook.add_partial(kind, request.args, result)
            return results

    return RelayLM


LAWS = ("temperature", "top_p", "top_k")


def register() -> None:
    """Make `relaylm` a model of lm_eval in this process."""
    kind = model_class()
    from lm_eval.api.registry import model_registry

    if "relaylm" not in model_registry:
        model_registry.register("relaylm", target=kind)


def main() -> int:
    """lm_eval's command line, with `relaylm` among its models."""
    try:
        register()
        from lm_eval.__main__ import cli_evaluate

        cli_evaluate()
    except UserError as error:
        note(f"relaylm: {error}")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())

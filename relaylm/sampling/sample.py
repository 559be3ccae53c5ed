"""The public `sample`: from a request in text or token ids to samples in text.

Lays the request out as token ids with -1 at free positions, makes a plan, runs it and decodes what comes out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm.core.plan import LINEAR, Alpha, make_plan
from relaylm.core.schedule import Policy, Schedule, Spacing, Timetable
from relaylm.core.spacing import spread_over
from relaylm.errors import UserError, checked, token_rows
from relaylm.models.family import Family
from relaylm.models.tokenizer import BLANK
from relaylm.sampling.denoise import denoise
from relaylm.sampling.law import Law
from relaylm.sampling.result import Event, Samples, Trace

if TYPE_CHECKING:  # rules and windows are imported where they are asked for
    from relaylm.sampling.rules import Rule


def lay_out(
    family: Family,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    length: int | None = None,
    max_new_tokens: int | None = None,
) -> np.ndarray:
    """Token ids (L,) of a request, -1 where the family is to write.

    A prompt stands at the front, a suffix at the end. `infill` is a whole text in which every `_` is one free position
    (one token; the text between blanks is tokenised by itself), and its length is its own. L is `length` if given,
    else prompt + max_new_tokens + suffix, else the family's length."""
    for key, value in (("max_new_tokens", max_new_tokens), ("length", length)):
        if value is not None and value < 1:
            raise UserError(f"{key} must be at least 1, not {value}")
    if length is not None and length > family.length:
        more = "relaylm sample --stride writes longer texts"
        raise UserError(f"length {length} is more than the family's {family.length} ({more})")
    if length is not None and max_new_tokens is not None:
        raise UserError("give length or max_new_tokens, not both")
    if infill is not None:
        if prompt or suffix or max_new_tokens is not None:
            raise UserError("infill already says what stands where: give it without prompt, suffix and max_new_tokens")
        return _lay_out_infill(family, infill, length)
    front, back = _encode(family, prompt, "prompt"), _encode(family, suffix, "suffix")
    what = "the prompt and the suffix take" if front and back else f"the {'suffix' if back else 'prompt'} takes"
    taken = len(front) + len(back)
    if max_new_tokens is not None and taken + max_new_tokens > family.length:
        known = f"{what} {taken} and " if taken else ""
        raise UserError(f"{known}max_new_tokens is {max_new_tokens}, but the family's length is {family.length}")
    length = length or (family.length if max_new_tokens is None else taken + max_new_tokens)
    if taken > length:
        raise UserError(f"{what} {taken} positions, but the length is {length}")
    if taken == length:
        raise UserError(f"nothing is left to write: {what} all {length} positions")
    return np.array(front + [-1] * (length - taken) + back, dtype=np.int64)


def _lay_out_infill(family: Family, infill: str, length: int | None) -> np.ndarray:
    first, *others = (_encode(family, piece, "infill text") for piece in infill.split(BLANK))
    ids = first + [token for piece in others for token in (-1, *piece)]
    if not others:
        raise UserError(f"nothing is left to write: the infill text has no {BLANK} (one for each free position)")
    if length is not None and length != len(ids):
        raise UserError(f"the infill text takes {len(ids)} positions, but length is {length}: leave length out")
    if len(ids) > family.length:
        raise UserError(f"the infill text takes {len(ids)} positions, but the family's length is {family.length}")
    return np.array(ids, dtype=np.int64)


def _encode(family: Family, text: str | None, what: str) -> list[int]:
    if not text:
        return []
    if family.tokenizer is None:
        raise UserError(f"this family has no tokenizer, so it cannot read the {what}: give token ids instead")
    try:
        ids = family.tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"the {what} cannot be read: {error}") from None
    if family.mask_id in ids:
        raise UserError(f"the {what} contains the mask token: use infill with {BLANK} for what is to be written")
    return ids


def checked_given(given: Any, n: int, length: int) -> np.ndarray:
    """Token ids, -1 where free: one row for all, or n rows."""
    array = token_rows(given, n)
    if array.shape[-1] > length:
        raise UserError(f"{array.shape[-1]} positions are given, but the family's length is {length}")
    return array


def pick_batch_size(family: Family, n: int, length: int, models: int) -> int:
    """Rows in a call: the family's number, but where models take turns at most half of the rows, as long as calls stay
    large enough to be efficient. A batch has one model, and the queue needs rows to choose from to keep it full."""
    whole = family.batch_size(n, length)
    least = (16384 if family.device.type == "cuda" else 1024) // length
    return whole if models < 2 else min(whole, max(1, least, n // 2))


def _draft(streamer: Any, given_L: np.ndarray, mask_id: int) -> Callable[[Event], None]:
    """A callback that shows a streamer the first row after each of its events, masks included."""
    show, tokens_L = getattr(streamer, "put_draft", None), torch.from_numpy(np.where(given_L < 0, mask_id, given_L))

    def follow(event: Event) -> None:
        if event.row == 0 and show is not None:
            tokens_L[event.positions] = torch.tensor(event.tokens)
            show(tokens_L[None].clone())

    return follow


@dataclass(frozen=True)
class Request:
    """What a call of `sample` asks for, checked and with every default filled in."""

    policy: Policy | Schedule  # with models' names, and its spacing
    steps: float | None
    rule: Rule | None
    law: Law
    greedy: bool  # under a rule: the likeliest tokens
    given: np.ndarray  # token ids, -1 where free: (L,) or (n, L)
    heavy: str
    models: dict[str, Any]  # those that may run, and the heavy one
    names: tuple[str, ...]  # those that may run

    @property
    def law_text(self) -> str:
        """What decides which positions a call writes: a rule, a spacing, or a number of steps."""
        if self.rule is not None:
            return str(self.rule)
        if isinstance(self.policy, Schedule) and self.policy.spacing is not None:
            return str(self.policy.spacing)
        own = self.policy.steps if isinstance(self.policy, Schedule | Timetable) else None
        endless = self.steps is not None and math.isinf(self.steps)
        return f"uniform:{'inf' if endless else int(own or self.steps or 0)}"


@checked
def settle(
    family: Family,
    schedule: str | Schedule | Policy = "heavy",
    n: int = 1,
    *,
    steps: float | None = None,
    spacing: str | int | Spacing | None = None,
    spread: bool = False,
    length: int | None = None,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    given: np.ndarray | None = None,
    max_new_tokens: int | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    rule: str | Rule | None = None,
    block_length: int | None = None,
    light: str | None = None,
    heavy: str | None = None,
    alpha: Alpha = LINEAR,
) -> Request:
    """The request that these options of `sample` make; refuses what does not go together."""
    light, heavy = family.roles(light, heavy)
    policy = family.bind(schedule, light, heavy) if isinstance(schedule, str | Schedule) else schedule
    if isinstance(rule, str):
        from relaylm.sampling.rules import parse_rule

        rule = parse_rule(rule, block_length)
    elif block_length is not None:
        raise UserError("a block length goes with the name of a decoding rule")
    if family.block_length and rule is not None and rule.block is not None:
        raise UserError(f"this family writes blocks of {family.block_length}: {rule.name} has blocks of its own")
    if given is None:
        given = lay_out(family, prompt, suffix, infill, length, max_new_tokens)
    elif any(option is not None for option in (prompt, suffix, infill, length, max_new_tokens)):
        raise UserError("given says all about a row: it cannot go with prompt, suffix, infill or a length")
    else:
        given = checked_given(given, n, family.length)
        if given.max() >= family.vocab_size:
            raise UserError(f"token {given.max()} is given, but the family knows ids 0 to {family.vocab_size - 1} only")
    width = family.block_length or given.shape[-1]  # positions that one run of the sampler writes
    asked = steps is not None or spacing is not None or rule is not None or alpha != LINEAR
    if spread:
        if spacing is not None:
            raise UserError("spread chooses the spacing from the number of steps: give spread or a spacing, not both")
        if steps is None or math.isinf(steps):
            raise UserError("spread needs a number of steps: about as many calls are made")
        spacing, steps = spread_over(steps, width), None
    if not asked and isinstance(policy, Schedule) and policy.takes_spacing:
        spacing = family.spacing(width)
    if spacing is not None:
        if not isinstance(policy, Schedule):
            raise UserError("a spacing goes with a schedule, not with a timetable or a dynamic policy")
        if policy.spacing is not None:
            raise UserError(f"the schedule says {policy.spacing} already: leave the spacing out")
        policy = replace(policy, spacing=Spacing.parse(spacing))
    free_form = isinstance(policy, Schedule) and (policy.steps is not None or policy.spacing is not None)
    if steps is None and not free_form and not (rule is not None and rule.adaptive):
        steps = policy.steps if isinstance(policy, Timetable) else width
    greedy = rule is not None and temperature == 0
    law = Law(1.0 if greedy else temperature, top_k, top_p)
    names = tuple(dict.fromkeys(policy.models)) if isinstance(policy, Schedule | Timetable) else family.names
    models = {name: model for name, model in family.models.items() if name in names or name == heavy}
    return Request(policy, steps, rule, law, greedy, given, heavy, models, names)


def _in_blocks(
    family: Family, request: Request, run: Callable[..., Samples], n: int, seed: int, options: dict[str, Any]
) -> Samples:
    """Samples written block after block by `run`: whole blocks, of which what was asked for is kept. Callbacks receive
    the rows' own positions, `on_calls` counts blocks."""
    from relaylm.sampling.blocks import Writing, rows_at_once, window_seed

    length, block = request.given.shape[-1], family.block_length
    given_nL = np.broadcast_to(request.given, (n, length))
    whole_nL = np.pad(given_nL, ((0, 0), (0, -length % block)), constant_values=-1)
    rows = options["batch_size"] = rows_at_once(family, options["batch_size"], whole_nL.shape[1])
    callback, on_calls, done = options["callback"], options["on_calls"], 0
    options |= {"on_calls": None}

    def run_block(inside: Mapping[str, Any], given_nb: np.ndarray, first: int, k: int) -> Samples:
        def follow(event: Event) -> None:
            pairs = zip(event.positions, event.tokens, strict=True)
            kept = [(k * block + position, token) for position, token in pairs if k * block + position < length]
            positions, tokens = [position for position, _ in kept], [token for _, token in kept]
            callback(replace(event, row=first + event.row, positions=positions, tokens=tokens))

        nonlocal done
        options["callback"] = None if callback is None else follow
        samples = run(given_nb, window_seed(seed, k), len(given_nb), first, inside)
        done += 1
        if on_calls is not None:
            on_calls(done, -(-n // rows) * (whole_nL.shape[1] // block))
        return samples

    writing = Writing(run_block, request.models, request.names, request.heavy, block, rows, family.device)
    samples = writing.samples(whole_nL)
    trace = samples.trace
    kept = Trace(trace.step_nL[:, :length], trace.u_nL[:, :length], trace.model_nL[:, :length], trace.models)
    return replace(samples, tokens=samples.tokens[:, :length], trace=kept)


@checked
def sample(
    family: Family,
    schedule: str | Schedule | Policy = "heavy",
    n: int = 1,
    *,
    steps: float | None = None,
    spacing: str | int | Spacing | None = None,
    spread: bool = False,
    length: int | None = None,
    seed: int = 0,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    given: np.ndarray | None = None,
    max_new_tokens: int | None = None,
    stop: str | None = None,
    temperature: float = 1.0,
    top_p: float | None = None,
    top_k: int | None = None,
    rule: str | Rule | None = None,
    block_length: int | None = None,
    stride: int | None = None,
    parallel: int | None = None,
    light: str | None = None,
    heavy: str | None = None,
    batch_size: int | None = None,
    first_row: int = 0,
    alpha: Alpha = LINEAR,
    callback: Callable[[Event], None] | Any = None,
    on_calls: Callable[[int, int], None] | None = None,
) -> Samples:
    """n samples from a family under a model schedule.

    `schedule` is text ("L32 H192 L32", "sandwich:25%"), a Schedule, or a dynamic policy. L and H are the family's
    smallest and largest model unless `light` and `heavy` say otherwise. `steps` is T, or infinity. `spacing` (16, or
    "16:prefix") lets a call write positions that are at least so far apart, instead of steps; `spread` chooses it so
    that about `steps` calls are made. Without any of these: the schedule's own count, else the family's own spacing
    for this length, else as many steps as positions. What is given never changes: a `prompt` at the front, a
    `suffix` at the end, an `infill` text with the tokenizer's blanks (one `_` per free position), or an array `given`
    of token ids with -1 at free positions. `temperature`, `top_p` and `top_k` change the law of the samples and are off
    by default. `rule` is a decoding rule (`relaylm.sampling.rules`), with which `temperature` may be 0 (the likeliest
    tokens); some take a `block_length`. `stride` allows a `length` beyond the family's, written in windows
    (`relaylm.sampling.blocks`). `parallel` finds the same samples in fewer rounds of more calls, so many events of a
    row at a time (`relaylm.sampling.parallel`): for few rows, where the time of one matters. A family
    of block diffusion writes block after block; steps, spacing, rule and schedule are then those of one block
    (`relaylm.sampling.blocks`). `stop` cuts each text at its first occurrence,
    after sampling. `callback` receives every event; it may also be a streamer as in transformers (`put`, `put_draft`,
    `end`), for the first row."""
    others = (suffix, infill, given, max_new_tokens, callback)
    if stride is not None and (length is None or any(option is not None for option in others)):
        raise UserError("a stride takes a length and perhaps a prompt: no suffix, infill, given, new tokens, callback")
    if stride is not None and family.block_length:
        raise UserError(f"this family writes blocks of {family.block_length} positions: leave out the stride")
    request = settle(
        family,
        schedule,
        n,
        steps=steps,
        spacing=spacing,
        spread=spread,
        length=length if stride is None else None,  # the first window is as long as the family's
        prompt=prompt,
        suffix=suffix,
        infill=infill,
        given=given,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        rule=rule,
        block_length=block_length,
        light=light,
        heavy=heavy,
        alpha=alpha,
    )
    if parallel is not None and (request.rule is not None or stride is not None or family.block_length):
        raise UserError("parallel events go with a schedule in steps or spaced: no rule, no stride, no blocks")
    policy, given_L = request.policy, np.atleast_2d(request.given)[0]
    streamer: Any = callback if hasattr(callback, "put") else None
    options: dict[str, Any] = {
        "mask_id": family.mask_id,
        "steps": request.steps,
        "alpha": alpha,
        "law": request.law,
        "batch_size": batch_size or pick_batch_size(family, n, family.block_length or len(given_L), len(request.names)),
        "heavy": request.heavy,
        "device": family.device,
        "callback": callback if streamer is None else _draft(streamer, given_L, family.mask_id),
        "on_calls": on_calls,
    }

    def run(
        given: np.ndarray, seed: int, rows: int = n, first: int = 0, models: Mapping[str, Any] = request.models
    ) -> Samples:
        plan = make_plan(rows, given.shape[-1], seed, given, first_row + first)
        if parallel is not None:
            from relaylm.sampling.parallel import denoise_ahead

            return denoise_ahead(models, policy, plan, parallel, **{**options, "batch_size": batch_size})
        if request.rule is None:
            return denoise(models, policy, plan, **options)
        from relaylm.sampling.confidence import decode

        return decode(models, policy, plan, request.rule, greedy=request.greedy, **options)

    if family.block_length:
        samples = _in_blocks(family, request, run, n, seed, options)
    elif stride is None:
        samples = run(request.given, seed)
    else:
        from relaylm.sampling.blocks import continued

        samples = continued(run, request.given, family.length, length or 0, stride, seed)
    if (highest := int(samples.tokens.max())) >= family.vocab_size:
        known = f"the family knows ids 0 to {family.vocab_size - 1} only"
        raise UserError(f"a model wrote token {highest}, but {known}: its logits are of a larger vocabulary")
    if streamer is not None:  # the whole first row, once it is written
        streamer.put(torch.from_numpy(samples.tokens[:1]))
        streamer.end()
    texts = [] if family.tokenizer is None else [family.tokenizer.decode(row) for row in samples.tokens]
    texts = [text.split(stop)[0] for text in texts] if stop else texts
    blocks = f"blocks:{family.block_length} " if family.block_length else ""
    return replace(samples, texts=texts, law=blocks + request.law_text, family=family)

"""Conversations in, and texts out up to their end."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.convert.sources import HUB_ID, Source, exists, fetch_tokenizer
from relaylm.errors import UserError, reason
from relaylm.files import expand, read_object
from relaylm.models.family import Family


def until_eos(tokens: np.ndarray | Sequence[Sequence[int]], eos_ids: Iterable[int], start: int = 0) -> list[list[int]]:
    """Each row up to, and without, the first token that ends a text, at `start` (the end of the prompt) or later."""
    ends = {int(token) for token in eos_ids}
    rows = []
    for row in tokens:
        ids = [int(token) for token in row]
        rows.append(ids[: next((i for i, token in enumerate(ids) if i >= start and token in ends), len(ids))])
    return rows


def texts(family: Family, tokens: np.ndarray | Sequence[Sequence[int]], start: int = 0) -> list[str]:
    """The texts of samples from `start` on, each cut at its end: the family's `eos_ids`, else the tokenizer's."""
    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so its tokens have no text")
    own = family.tokenizer.eos_id
    ends = family.meta.get("eos_ids") or ([] if own is None else [own])
    return [family.tokenizer.decode(row[start:]) for row in until_eos(tokens, ends, start)]


def chat_prompt(folder: Source, messages: list[dict[str, str]]) -> str:
    """A conversation as the text that an instruction-tuned model was trained to continue.

    `messages` are {"role": "user", "content": "..."} in order; the template is the one in the tokenizer's folder or
    hub repository (chat_template.jinja, or "chat_template" in tokenizer_config.json), rendered in jinja's sandbox."""
    hub = isinstance(folder, str) and HUB_ID.fullmatch(folder) and not exists(folder)
    place = fetch_tokenizer(str(folder)) if hub else expand(folder)
    inside = sorted(entry for entry in place.iterdir() if entry.is_dir()) if place.is_dir() else []
    for where in (place, *inside):  # a converted folder keeps each model's files in a folder of its own
        template, config = _template(where)
        if template is not None:
            break
    else:
        raise UserError(
            f"{place} has no chat template: its model was not tuned for conversations, or give the text itself"
        )
    from jinja2 import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
    environment.globals["raise_exception"] = refuse
    special = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        value = config.get(key)
        special[key] = value.get("content", "") if isinstance(value, dict) else value or ""
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=True, tools=None, **special
        )
    except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise UserError(f"the chat template in {place} cannot render these messages ({reason(error)})") from None


def _template(folder: Path) -> tuple[str | None, dict[str, Any]]:
    """The chat template of a folder, if it has one, and its tokenizer's configuration."""
    path, separate = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = read_object(path) if path.is_file() else {}
    template = separate.read_text(encoding="utf-8") if separate.is_file() else config.get("chat_template")
    if isinstance(template, list):  # several named ones
        by_name = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = by_name.get("default")
    return template if isinstance(template, str) else None, config

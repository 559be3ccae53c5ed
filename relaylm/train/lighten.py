r"""A light sibling for a model that has none: some of its blocks, taught to imitate the whole.

**Which blocks.** Each block is left out in turn, and the one that is missed least goes; then again, until as many are
left as were asked for. What counts is the divergence from the whole model at masked positions of the training text,

    missed  =  E_t  1/(L t)  sum_{l masked}  KL( heavy(. | z_t)  ||  rest(. | z_t) ),        nats for one token,

the very quantity that the distillation then minimises (`Objective` with a teacher), by the trainer's own loop: the same
batches, optimizers, checkpoints and processes as `relaylm train`.

It works for relaylm's own networks, those converted from MDLM and SEDD among them. Shapes: N rows, L positions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaylm.console import progress_bar
from relaylm.core.noise import uniforms
from relaylm.errors import UserError
from relaylm.files import expand, read_json, write_json
from relaylm.measure.estimate import announce_calls
from relaylm.measure.likelihood import masked_sums, spread_rows
from relaylm.models.denoiser import Transformer, build
from relaylm.models.family import Family
from relaylm.models.folder import check_name, save_family
from relaylm.train.corpus import TokenFile
from relaylm.train.family import averaged_network, heldout_text
from relaylm.train.recipe import RECIPE_SETTINGS, Preset, Recipe, check_settings, override
from relaylm.train.run import CHECKPOINT, train_model
from relaylm.train.step import world

BLOCKS = "blocks.json"
RECIPE = Recipe(
    steps=2000, batch=32, optimizer="muon", lr=5e-3, beta2=0.98, warmup=100, decay="linear", ema=0.99, dropout=0.0,
    log_every=20, eval_every=0, eval_rows=64, checkpoint_every=200,
)  # fmt: skip


def with_blocks(model: Transformer, kept: Iterable[int]) -> Transformer:
    """The network of some of a model's blocks, in their order; tensors are shared, not copied."""
    numbers = sorted(kept)
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    state = {name: value for name, value in tensors.items() if not name.startswith("blocks.")}
    for new, old in enumerate(numbers):
        prefix = f"blocks.{old}."
        mine = {name: value for name, value in tensors.items() if name.startswith(prefix)}
        state |= {f"blocks.{new}.{name.removeprefix(prefix)}": value for name, value in mine.items()}
    return build(replace(model.architecture, depth=len(numbers)), state)


def choose_blocks(model: Transformer, rows_NL: np.ndarray, blocks: int, *, progress: bool = False) -> dict[str, Any]:
    """Which blocks to keep, as the module's text says: `kept`, and the order in which the others went, each with what
    the model without it (and those before) misses in nats for one token."""
    if not 1 <= blocks <= model.depth:
        raise UserError(f"keep 1 to {model.depth} blocks of this model, not {blocks}")
    n, length = rows_NL.shape
    t_N = (np.arange(n) + 0.5) / n
    masked_NL = uniforms(0, np.arange(n), length) <= t_N[:, None]
    kept, left_out = list(range(model.depth)), []
    with progress_bar("blocks", model.depth - blocks, "block", progress) as bar:
        while len(kept) > blocks:
            rest = {f"without {i}": with_blocks(model, set(kept) - {i}) for i in kept}
            pairs = [(name, "heavy") for name in rest]
            models = {"heavy": model, **rest}
            kl_PN = masked_sums(models, pairs, rows_NL, masked_NL, t_N, model.mask_id, device=model.device).kl_PN
            missed = (kl_PN / t_N).sum(axis=1) / (n * length)
            gone = kept.pop(int(missed.argmin()))
            left_out.append({"block": gone, "missed": float(missed.min())})
            bar.update(1)
    return {"kept": kept, "left_out": left_out, "rows": n, "length": length}


def lighten(
    source: str | Path,
    corpus_folder: str | Path,
    out_folder: str | Path,
    blocks: int = 4,
    *,
    heavy: str | None = None,
    name: str | None = None,
    rows: int = 16,
    device: str | torch.device = "auto",
    progress: bool = True,
    force: bool = False,
    **overrides: Any,
) -> Path:
    """Make a sibling of `blocks` blocks of a family's heavy model, and write the family with it to OUT/family; returns
    that folder. `rows` of the corpus choose the blocks; `overrides` are fields of `Recipe`. Run again to resume."""
    check_settings(overrides, RECIPE_SETTINGS)
    recipe = override(Preset(recipe=RECIPE), **overrides).recipe
    corpus, out = TokenFile.load(corpus_folder), expand(out_folder)
    with world(device) as where:
        family = Family.load(source, device=where.device, dtype="float32")
        heavy, name = family.roles(None, heavy)[1], name or f"light{blocks}"
        model = _teachable(family, heavy, corpus)
        corpus.check_length(model.architecture.length)
        check_name(name)
        if name in family.models:
            raise UserError(f"this family has a model {name!r} already: choose another --name")
        of = {"depth": model.depth, "teacher": family.digest or str(source), "model": heavy}
        if _choice(out, of, blocks) is None and where.main:
            length, depth = model.architecture.length, model.depth
            if progress:
                calls = rows * sum(k * (k - 1) // depth + 1 for k in range(blocks + 1, depth + 1))
                announce_calls(family, "choosing blocks", calls, length, "--rows makes it shorter")
            rows_NL = spread_rows(corpus.train.reshape(-1), length, rows)
            chosen = choose_blocks(model, rows_NL, blocks, progress=progress)
            write_json(out / BLOCKS, {**of, **chosen})
        if where.size > 1:
            dist.barrier()  # the others read what was chosen
        choice = _choice(out, of, blocks)
        if choice is None:
            raise UserError(f"{out / BLOCKS} is not visible to every process: choose another folder")
        start = with_blocks(model, choice["kept"])
        about = {"teacher": of["teacher"], "blocks": choice["kept"]}
        folder = out / "models" / name
        given: dict[str, Any] = {"where": where, "label": name, "progress": progress, "force": force, "about": about}
        summary = train_model(corpus, folder, start.architecture, recipe, start=start, teacher=model, **given)
        if where.main:
            light = averaged_network(folder / CHECKPOINT, start.architecture)
            for parameter in light.parameters():  # what a family stores
                if parameter.dim() > 1:
                    parameter.data = parameter.data.bfloat16().float()
            about |= {"model": name, "of": heavy, "choice": choice, "summary": summary}
            held = family.heldout.read_text(encoding="utf-8") if family.heldout else heldout_text(corpus)
            options: dict[str, Any] = {"twins": family.twins, "length": family.length, "name": family.name}
            options |= {"judge": family.judge, "pairs": family.pairs and family.pairs.to_json()}
            options |= {"light": name, "heavy": heavy, "heldout": held, "meta": {**family.meta, "lightened": about}}
            save_family(
                out / "family", {**family.to("cpu").models, name: light}, family.tokenizer, overwrite=True, **options
            )
    return out / "family"


def _choice(out: Path, of: dict[str, Any], blocks: int) -> dict[str, Any] | None:
    """What was chosen before for this model, None if nothing was; another model's choice is refused."""
    found = read_json(out / BLOCKS)
    if found and any(found.get(key, value) != value for key, value in of.items()):
        raise UserError(f"{out / BLOCKS} is of another model ({found.get('model', 'unnamed')}): choose another folder")
    return found if found and len(found["kept"]) == blocks else None


def _teachable(family: Family, heavy: str, corpus: TokenFile) -> Transformer:
    """The model, if it can be lightened on this corpus."""
    model = family[heavy]
    if not isinstance(model, Transformer):
        raise UserError(
            f"{heavy} cannot be lightened: it runs through {type(model).__module__.split('.')[-1]}, and only relaylm's "
            "own networks can be taken apart (families of `relaylm train`, MDLM, SEDD)"
        )
    if model.block_length:
        raise UserError(f"{heavy} cannot be lightened: it writes one block of positions after another (BD3-LM)")
    if (corpus.vocab_size, corpus.mask_id) != (family.vocab_size, family.mask_id):
        raise UserError(
            f"the corpus has {corpus.vocab_size} token ids and mask {corpus.mask_id}, the family {family.vocab_size} "
            f"and {family.mask_id}: prepare it with the family's own tokenizer"
        )
    if family.tokenizer is not None and family.tokenizer.to_json() != corpus.tokenizer.to_json():
        raise UserError("the corpus was prepared with another tokenizer than the family's: the ids mean other tokens")
    return model

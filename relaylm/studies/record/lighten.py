"""A light sibling against networks of its size trained from scratch: `relaylm lighten` measured.

    python -m relaylm.studies.record.lighten FAMILY CORPUS OUT.json --work FOLDER [--blocks 4] [--steps 100]

The sibling sees N = steps x batch x length tokens of the corpus; two networks of as many blocks and the same shape are
trained from scratch, on N and on 10 N tokens with the recipe of the preset wiki-char. All are measured by their bound
on the family's held-out text and by judged samples on a spaced plan, alone and in turns with the heavy model: the same
rows, plans and seeds. Run again, what is in FOLDER is not trained again.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from relaylm.measure.judge import load_judge, score
from relaylm.measure.likelihood import bound, spread_rows
from relaylm.measure.metrics import perplexity, word_entropy
from relaylm.models.denoiser import Denoiser, Transformer
from relaylm.models.family import Family
from relaylm.sampling.sample import sample
from relaylm.studies.record.common import command, keep, text_of
from relaylm.train.corpus import TokenFile
from relaylm.train.family import averaged_network
from relaylm.train.lighten import lighten
from relaylm.train.recipe import load_preset
from relaylm.train.run import CHECKPOINT, train_model


def main() -> None:
    """The command."""
    options = command(
        __doc__,
        "family corpus out",
        work={"type": Path, "required": True},
        **{"blocks": 4, "steps": 100, "batch": 4, "spacing": "16"},
        rows=(64, "held-out rows for the bounds"),
        n=(32, "samples of each schedule"),
    )
    own = Family.load(options.family)
    text, judge = text_of(own, options.family), load_judge(None, own)
    warm = {"batch": options.batch, "warmup": options.steps // 10}
    folder = lighten(
        options.family, options.corpus, options.work / "sibling", options.blocks, steps=options.steps, **warm
    )
    family = Family.load(folder)
    made, heavy = family.meta["lightened"], family[family.heavy]
    assert isinstance(heavy, Transformer)
    models: dict[str, Denoiser] = {"sibling": family[made["model"]], family.heavy: heavy}
    trained = {"sibling": made["summary"]}
    shape = replace(heavy.architecture, depth=options.blocks)
    corpus = TokenFile.load(options.corpus)
    for times in (1, 10):
        name, changes = f"scratch{times}", {"checkpoint_every": options.steps, "eval_every": 0, "eval_rows": 16}
        recipe = load_preset("wiki-char", steps=options.steps * times, **warm, **changes).recipe
        trained[name] = train_model(corpus, options.work / name, shape, recipe, label=name)
        models[name] = averaged_network(options.work / name / CHECKPOINT, shape)
    models |= {name: own[name] for name in own.names if getattr(own[name], "depth", 0) == options.blocks}
    rows_NL = spread_rows(text, own.length, options.rows)
    bounds = {name: bound(model, rows_NL, mask_id=own.mask_id).to_json() for name, model in models.items()}
    together = Family(models, own.mask_id, own.vocab_size, own.length, own.tokenizer, heavy=family.heavy)
    lights = [name for name in models if name != family.heavy]
    schedules = [f"{name} spaced:{options.spacing}" for name in models]
    schedules += [f"{name}:50% {family.heavy}:50% spaced:{options.spacing}" for name in lights]
    found = []
    for schedule in schedules:
        drawn = sample(together, schedule, options.n, seed=0)
        scores = score(judge, drawn.tokens)
        words = float(np.mean([word_entropy(text) for text in drawn.texts]))
        quality = perplexity(scores.written_nll_n, scores.written_count_n)
        found.append({"schedule": schedule, "flops": drawn.cost.flops, **quality, "word_entropy": words})
    result = {"blocks": options.blocks, "of": made["of"], "choice": made["choice"], "n": options.n}
    result |= {"spacing": options.spacing, "training": trained, "bounds": bounds, "samples": found}
    keep(options.out, own, result)


if __name__ == "__main__":
    main()

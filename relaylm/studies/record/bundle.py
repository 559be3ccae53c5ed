"""From a training run to a family that comes with the package: some of its models, its judge, a held-out text.

    python -m relaylm.studies.record.bundle runs/wiki-char corpus relaylm/models/families/wiki-char --models 4b,8b,12b

The run is what `relaylm train` wrote, the corpus what `relaylm prepare` wrote. The text is the end of the corpus's
held-out part, at most a million characters; nothing of it was trained on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from relaylm.models.family import Family
from relaylm.models.folder import CARD, HELDOUT, save_family
from relaylm.studies.record.common import command
from relaylm.train.corpus import TokenFile
from relaylm.train.family import heldout_text
from relaylm.train.recipe import load_preset


def main() -> None:
    """The command."""
    models = {"required": True, "help": "which models, separated by commas"}
    options = command(__doc__, "run corpus out", models=models)
    folder = Path(options.run) / "family"
    family = Family.load(folder, device="cpu", dtype="float32")
    names = options.models.split(",")
    others = [f"{d}b" for d in load_preset(family.meta["preset"]["name"]).depths if f"{d}b" not in names]
    card = (folder / CARD).read_text(encoding="utf-8") + (
        f"\n**In the package**: {', '.join(names)}, the judge, and in `{HELDOUT}` the end of the held-out text, which "
        f"none of them was trained on, under the licence of the text named above. The command also trains "
        f"{', '.join(others)} and a twin of the heaviest, which are not included.\n"
    )
    about: dict[str, Any] = {
        "length": family.length,
        "name": family.name,
        "judge": family.judge,
        "card": card,
        "meta": family.meta,
    }
    text = heldout_text(TokenFile.load(options.corpus))
    kept = {name: family[name] for name in names}
    save_family(options.out, kept, family.tokenizer, heldout=text, dtype="bfloat16", overwrite=True, **about)
    size = sum(path.stat().st_size for path in options.out.rglob("*.safetensors"))
    print(f"{options.out}: {size / 1e6:.1f} MB of weights, {len(text):,} characters of held-out text")


if __name__ == "__main__":
    main()

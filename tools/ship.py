"""From a training run to a family that comes with the package: some of its models, its judge, a held-out text.

    python tools/ship.py runs/wiki-char corpus relaylm/families/wiki-char --models 4b,8b,12b

The text is the end of the corpus's held-out part, at most a million characters; nothing of it was trained on.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from relaylm.corpus import TokenFile
from relaylm.family import Family
from relaylm.family_folder import CARD, HELDOUT, save_family
from relaylm.recipe import load_preset
from relaylm.train import heldout_text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="what `relaylm train` wrote")
    parser.add_argument("corpus", type=Path, help="what `relaylm prepare` wrote")
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", required=True, help="which models, separated by commas")
    options = parser.parse_args()
    family = Family.load(options.run / "family", device="cpu", dtype="float32")
    corpus = TokenFile.load(options.corpus)
    names = options.models.split(",")
    card = (options.run / "family" / CARD).read_text(encoding="utf-8")
    preset = family.meta["preset"]
    others = [f"{depth}b" for depth in load_preset(preset["name"]).depths if f"{depth}b" not in names]
    card += (
        f"\n**What comes with the package**: {', '.join(names)}, the judge, and in `{HELDOUT}` the end of the held-out "
        f"text, which none of them has seen, under the licence of the text named above. The command also trains "
        f"{', '.join(others)} and a twin of the heaviest, which do not.\n"
    )
    save_family(
        options.out, {name: family[name] for name in names}, family.tokenizer, length=family.length, name=family.name,
        judge=family.judge, card=card, meta=family.meta, dtype="bfloat16", overwrite=True,
    )  # fmt: skip
    text = heldout_text(corpus)
    (options.out / HELDOUT).write_text(text, encoding="utf-8")
    size = sum(path.stat().st_size for path in options.out.rglob("*.safetensors"))
    print(f"{options.out}: {size / 1e6:.1f} MB of weights, {len(text):,} characters of held-out text")


if __name__ == "__main__":
    main()

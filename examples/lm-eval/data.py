"""The JSON files of this folder as datasets, wherever lm_eval is started."""

import json
from pathlib import Path
from typing import Any

import datasets


def load(file: str, **_: Any) -> dict[str, datasets.Dataset]:
    """The documents of a file, as the split `test`."""
    documents = json.loads((Path(__file__).parent / file).read_text(encoding="utf-8"))
    return {"test": datasets.Dataset.from_list(documents)}

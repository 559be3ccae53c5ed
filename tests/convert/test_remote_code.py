"""A checkpoint's own Python files are never run, whichever way a model or a tokenizer is loaded.

Every folder here holds modules that would leave a marker if they were imported, and configurations that name them for
every class that transformers looks up. Standard input answers y to whatever asks."""

from __future__ import annotations

import ast
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import relaylm
from relaylm import convert
from relaylm.errors import UserError
from relaylm.measure.judge import load_judge
from relaylm.models.family import Family
from relaylm.models.tokenizer import load_tokenizer
from tests.convert.test_convert_hf import dream, llada, masked_lm

PACKAGE = Path(relaylm.__file__).parent
AUTO = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoTokenizer")


def gpt2(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    backend = pytest.importorskip("tokenizers")
    letters = {c: i for i, c in enumerate("abcdefgh ")} | {"<|endoftext|>": 9}
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend.Tokenizer(backend.models.BPE(vocab=letters, merges=[])), eos_token="<|endoftext|>"
    )
    fast.save_pretrained(folder)
    config = transformers.GPT2Config(vocab_size=10, n_positions=16, n_embd=8, n_layer=1, n_head=1)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder, safe_serialization=True)
    return folder


def judge(spec: str) -> Any:
    return load_judge(spec, Family.load("wiki-char"))


def dream_with_vocabulary(folder: Path) -> Path:
    dream(folder)
    (folder / "vocab.json").write_text(json.dumps({c: i for i, c in enumerate("abcdefgh")}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text("{}")
    return folder


def with_gguf(folder: Path) -> Path:
    gpt2(folder)
    (folder / "judge.gguf").write_bytes(b"GGUF")
    return folder


WAYS: dict[str, tuple[Callable[[Path], Any], Callable[[Path], Any]]] = {
    "judge hf": (gpt2, lambda folder: judge(f"hf:{folder}")),
    "judge gguf": (with_gguf, lambda folder: judge(f"gguf:{folder / 'judge.gguf'}")),
    "llada": (llada, convert.load),
    "dream": (dream_with_vocabulary, convert.load),
    "masked-lm": (masked_lm, convert.load),
    "Family.load": (llada, Family.load),
    "info": (masked_lm, convert.describe),
    "tokenizer": (gpt2, lambda folder: load_tokenizer(folder)),
    "tokenizer.json": (gpt2, lambda folder: load_tokenizer(folder / "tokenizer.json")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ["known", "unknown"])
def test_no_code_of_a_checkpoint_is_run(
    way: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`unknown` is a model type that transformers does not have, for which it would need the code."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    make, load = WAYS[way]
    folder, marker = tmp_path / "model", tmp_path / "marker"
    make(folder)
    (folder / "planted.py").write_text(f"open({str(marker)!r}, 'w').close()\nclass Planted:\n    pass\n")
    for name in ("config.json", "tokenizer_config.json"):
        path = folder / name
        data = json.loads(path.read_text()) if path.exists() else {}
        data["auto_map"] = dict.fromkeys(AUTO, "planted.Planted")
        data["auto_map"]["AutoTokenizer"] = ["planted.Planted", "planted.Planted"]
        if kind == "unknown":
            data |= {"tokenizer_class": "Planted"} if name != "config.json" else {"model_type": "planted"}
        path.write_text(json.dumps(data))
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    monkeypatch.setattr(sys, "path", list(sys.path))
    try:
        load(folder)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
    assert not marker.exists()
    assert "[y/N]" not in "".join(capsys.readouterr())


def test_every_loader_refuses_remote_code() -> None:
    """In the source: each call of a `from_pretrained` that is not relaylm's own says so."""
    calls = 0
    for file in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                calls += 1
                said = {key.arg: key.value for key in node.keywords}
                value = said.get("trust_remote_code")
                assert isinstance(value, ast.Constant) and value.value is False, f"{file}:{node.lineno}"
    assert calls >= 4

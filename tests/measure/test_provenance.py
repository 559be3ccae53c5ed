"""What a result says of how it was made."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from relaylm.measure.provenance import _command


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("relaylm.__main__", ["/a/relaylm/__main__.py", "bench", "--json", "/b/d.json"], "relaylm bench --json d.json"),
        ("relaylm.studies.x", ["/a/x.py", "gguf:/b/c.gguf", "o/p"], "python -m relaylm.studies.x gguf:c.gguf o/p"),
        (None, ["/usr/bin/relaylm", "sample", "--prompt", "a/b or /c"], "relaylm sample --prompt 'a/b or /c'"),
        (None, ["tests/some.py", "--out=/b/c", "L25% H75%"], "some.py --out=c 'L25% H75%'"),
    ],
)  # fmt: skip
def test_the_command_can_be_typed_and_names_no_folder_of_this_machine(
    monkeypatch: pytest.MonkeyPatch, module: str | None, words: list[str], said: str
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else SimpleNamespace(name=module)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", words)
    assert _command() == said

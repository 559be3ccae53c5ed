"""What a result says of how it was made."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from relaylm.measure.provenance import _command


@pytest.mark.parametrize(
    ("module", "words", "said"),
    [
        ("relaylm.__main__", ["/a/__main__.py", "bench", "--json", "/b/d.json"], "relaylm bench --json /b/d.json"),
        ("relaylm.studies.x", ["/a/x.py", "wiki-bpe", "o/p"], "python -m relaylm.studies.x wiki-bpe o/p"),
        (None, ["/usr/bin/relaylm", "sample", "--prompt", "a b"], "relaylm sample --prompt 'a b'"),
        (None, ["tests/some.py", "L25% H75%"], "some.py 'L25% H75%'"),
    ],
)  # fmt: skip
def test_the_command_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, module: str | None, words: list[str], said: str
) -> None:
    main = ModuleType("__main__")
    main.__spec__ = None if module is None else SimpleNamespace(name=module)  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.setattr(sys, "argv", words)
    assert _command() == said

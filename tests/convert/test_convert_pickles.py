"""Pickles are read, never run. Payloads would create a file; none ever does, and the error is one clear line."""

from __future__ import annotations

import collections
import io
import os
import pickle
import signal
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm import convert
from relaylm.convert import pickles
from relaylm.convert.pickles import Lazy
from relaylm.errors import UserError
from relaylm.models.family import Family

OBJECT = {
    "text": "a\u00e9",
    "numbers": [1, -5, 2**40, -(2**90), 1.5, True, None],
    "nested": {"tuple": (1, (2, 3)), 7: [], "set": {1, 2}, "bytes": b"x"},
    "ordered": collections.OrderedDict([("b", 1), ("a", 2)]),
    "weight": torch.arange(12.0).reshape(3, 4),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "half": torch.ones(5, dtype=torch.bfloat16),
    "ids": torch.arange(3),
    "parameter": torch.nn.Parameter(torch.full((2, 2), 3.0)),
    "empty": torch.zeros(0, 4),
}


class Payload:
    """What an attacker writes: unpickling it runs a function."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.fixture(autouse=True)
def no_unpickling(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)


def payloads(target: Path) -> list[Any]:
    command = f"touch {target}"
    return [
        Payload(os.system, command),
        Payload(eval, f"open({str(target)!r}, 'w')"),
        Payload(exec, f"open({str(target)!r}, 'w')"),
        Payload(open, str(target), "w"),
        Payload(__import__, "os"),
        Payload(os.popen, command),
    ]


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin"])
@pytest.mark.parametrize("number", range(6))
def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path: Path, suffix: str, number: int) -> None:
    target = tmp_path / "created"
    evil = payloads(target)[number]
    for content in (
        evil,
        {"state_dict": evil},
        {"state_dict": {"backbone.vocab_embed.embedding": torch.zeros(2, 2)}, "x": evil},
    ):
        path = tmp_path / f"model{suffix}"
        torch.save(content, path)
        for attempt in (convert.recognise, convert.load, convert.describe, pickles.read):
            with pytest.raises(UserError, match="hostile") as error:
                attempt(path)
            assert "\n" not in str(error.value)
    path.write_bytes(pickle.dumps(evil))  # a bare pickle
    with pytest.raises(UserError, match="never unpickles"):
        convert.load(path)
    assert not target.exists()


def test_unknown_names_are_inert_and_useless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that acts on import is not imported; objects of it are kept as data, and are no tensors."""
    package = tmp_path / "package"
    package.mkdir()
    target = tmp_path / "created"
    (package / "quietly_evil.py").write_text(f"open({str(target)!r}, 'w')\ndef run(*a): pass\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(str(package))
    import quietly_evil  # type: ignore[import-not-found]

    target.unlink()
    thing = quietly_evil.Thing()
    thing.value = 3
    name = "backbone.blocks.0.norm1.weight"
    torch.save(
        {"good": torch.ones(2), "state_dict": {name: Payload(quietly_evil.run, 1)}, "thing": thing}, tmp_path / "a.pt"
    )
    del sys.modules["quietly_evil"]
    data = pickles.read(tmp_path / "a.pt")
    assert torch.equal(data["good"].read(), torch.ones(2))
    assert isinstance(data["thing"], pickles.Opaque) and data["thing"].state == {"value": 3}
    assert isinstance(data["state_dict"][name], pickles.Opaque)
    assert "quietly_evil" not in sys.modules and not target.exists()
    with pytest.raises(UserError):
        convert.load(tmp_path / "a.pt")


def test_a_needed_tensor_that_is_no_tensor_is_refused_by_name(tmp_path: Path) -> None:
    from test_convert_mdlm import published

    name = "backbone.blocks.1.norm1.weight"
    state: dict[str, Any] = published()
    torch.save({"state_dict": state | {name: Payload(collections.Counter, ["x"])}}, tmp_path / "a.ckpt")
    with pytest.raises(UserError, match=r"blocks\.1\.norm1\.weight is not a plain tensor but an object of collections"):
        convert.load(tmp_path / "a.ckpt")


def test_tokenizer_folders_with_pickles(tmp_path: Path) -> None:
    from test_convert_mdlm import CONFIG, published, write

    target, folder = tmp_path / "created", tmp_path / "tokenizer"
    folder.mkdir()
    source = write(tmp_path / "mdlm", published(), CONFIG)
    for name in ("tokenizer.pkl", "tokenizer.bin", "vocab.pkl"):
        (folder / name).write_bytes(pickle.dumps(Payload(os.system, f"touch {target}")))
        (source / name).write_bytes(pickle.dumps(Payload(os.system, f"touch {target}")))
        with pytest.raises(UserError, match="no tokenizer"):
            convert.load(source, tokenizer=folder)
    (folder / "tokenizer.json").write_bytes(pickle.dumps(Payload(os.system, f"touch {target}")))
    with pytest.raises(UserError, match="not a tokenizers JSON"):
        convert.load(source, tokenizer=folder)
    assert isinstance(convert.load(source), Family)  # pickles beside the weights are not opened
    assert not target.exists()


def plain(value: Any) -> Any:
    if isinstance(value, Lazy):
        return value.read().tolist()
    if isinstance(value, torch.Tensor):
        return value.detach().tolist()
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_data_and_tensors_come_back(tmp_path: Path, protocol: int) -> None:
    torch.save(OBJECT, tmp_path / "a.pt", pickle_protocol=protocol)
    data = pickles.read(tmp_path / "a.pt")
    assert plain(data) == plain(OBJECT)
    assert data["half"].dtype == torch.bfloat16 and data["transposed"].shape == (4, 3) and data["empty"].shape == (0, 4)
    assert list(data["ordered"]) == ["b", "a"]


def test_old_and_cut_files_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(4)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match="zip"):
        pickles.read(tmp_path / "old.pt")
    torch.save({"a": torch.ones(4)}, tmp_path / "a.pt")
    whole = (tmp_path / "a.pt").read_bytes()
    for size in range(0, len(whole), 37):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(UserError):
            pickles.read(tmp_path / "cut.pt")
    with pytest.raises(UserError, match="cannot read"):
        pickles.read(tmp_path / "absent.pt")


def rewrite(source: Path, target: Path, program: bytes) -> None:
    """The same zip with another data.pkl."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w") as new:
        for name in old.namelist():
            new.writestr(name, program if name.endswith("data.pkl") else old.read(name))


def program_of(path: Path) -> bytes:
    with zipfile.ZipFile(path) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def test_tensors_beyond_their_storage_are_refused(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0).reshape(2, 3)}, tmp_path / "a.pt")
    program = program_of(tmp_path / "a.pt")
    assert program.count(b"K\x02K\x03") == 1  # the shape (2, 3)
    assert program.count(b"K\x00K\x02K\x03") == 1  # and where it begins
    for wrong in (b"K\x00K\x03K\x03", b"K\x01K\x02K\x03"):  # by three numbers, by one
        rewrite(tmp_path / "a.pt", tmp_path / "b.pt", program.replace(b"K\x00K\x02K\x03", wrong))
        with pytest.raises(UserError, match="beyond"):
            pickles.read(tmp_path / "b.pt")


def test_a_part_of_a_storage_is_read_from_where_it_begins(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(4, 6)
    torch.save({"part": whole[1:3, 2:5], "turned": whole.T}, tmp_path / "a.pt")
    found = pickles.read(tmp_path / "a.pt")
    assert torch.equal(found["part"].read(), whole[1:3, 2:5]) and torch.equal(found["turned"].read(), whole.T)


def test_deep_keys_do_not_hang(tmp_path: Path) -> None:
    """A tuple of two copies of itself, sixty times over, takes 2^60 steps to hash."""
    program = b"\x80\x02}(" + b")" + b"".join(b"q\x01h\x01\x86" for _ in range(60)) + b"K\x01u."
    torch.save({}, tmp_path / "a.pt")
    rewrite(tmp_path / "a.pt", tmp_path / "b.pt", program)
    with pytest.raises(UserError, match="key"):
        pickles.read(tmp_path / "b.pt")


BUFFER = io.BytesIO()
torch.save({"state_dict": OBJECT, "x": Payload(collections.Counter, ["y"])}, BUFFER)
with zipfile.ZipFile(BUFFER) as _zip:
    PROGRAM = _zip.read(next(name for name in _zip.namelist() if name.endswith("data.pkl")))


@settings(max_examples=150, deadline=None)
@given(
    st.one_of(
        st.binary(max_size=60),
        st.tuples(st.integers(0, len(PROGRAM) - 1), st.integers(0, 255)).map(
            lambda flip: PROGRAM[: flip[0]] + bytes([flip[1]]) + PROGRAM[flip[0] + 1 :]
        ),
        st.integers(0, len(PROGRAM)).map(lambda size: PROGRAM[:size]),
    )
)
def test_any_program_gives_data_or_one_line(tmp_path_factory: pytest.TempPathFactory, program: bytes) -> None:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.pt").write_bytes(BUFFER.getvalue())
    rewrite(folder / "a.pt", folder / "b.pt", program)
    try:
        data = pickles.read(folder / "b.pt")
        for value in (
            data.get("state_dict", {}).values()
            if isinstance(data, dict) and isinstance(data.get("state_dict"), dict)
            else []
        ):
            if isinstance(value, Lazy) and value.elements < 1000:
                value.read()
    except UserError as error:
        assert str(error)


def shared(levels: int = 100) -> bytes:
    """A program that makes a list of 10 ^ levels elements out of ten references to each inner list."""
    program = b"]q\x00"
    for i in range(levels):
        program += b"](" + (b"h" + bytes([i])) * 10 + b"eq" + bytes([i + 1])
    return program


def text(word: str) -> bytes:
    return b"X" + len(word).to_bytes(4, "little") + word.encode()


DEEP = b"]" * 20_000 + b"a" * 19_999
HUGE = b"\x8b" + (40_000).to_bytes(4, "little") + b"\x01" * 40_000  # a whole number of 96,000 digits


@pytest.mark.parametrize(
    "bomb", [shared(), DEEP, b"]" + b"\x85" * 20_000, HUGE], ids=["wide", "lists", "tuples", "number"]
)
@pytest.mark.parametrize("place", ["root", "state", "model", "tensor", "key", "class", "called", "config", "average"])
def test_nested_and_huge_values_take_no_time(tmp_path: Path, bomb: bytes, place: str) -> None:
    """`info` of a small file ends at once, wherever the value lies: it is never printed or compared in full."""
    inside = {
        "root": bomb,
        "state": b"}" + text("state_dict") + bomb + b"s",
        "model": b"}" + text("model") + bomb + b"s",
        "tensor": b"}" + text("state_dict") + b"}" + text("backbone.vocab_embed.embedding") + bomb + b"ss",
        "key": b"}" + bomb + b"K\x01s",
        "class": bomb + b")\x81",
        "called": bomb + b")R",
        "config": b"}(" + text("hyper_parameters") + b"}" + text("config") + bomb + b"s"
        + text("state_dict") + b"}" + text("backbone.x") + b"Nsu",
        "average": b"}(" + text("ema") + b"}" + text("shadow_params") + bomb + b"s"
        + text("state_dict") + b"}" + text("backbone.x") + b"Nsu",
    }[place]  # fmt: skip
    path = tmp_path / "bomb.ckpt"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a/data.pkl", b"\x80\x02" + inside + b".")
    signal.alarm(60)  # ends the process: without a bound, memory would run out first
    try:
        with pytest.raises(UserError) as caught:
            convert.describe(path)
    finally:
        signal.alarm(0)
    assert len(str(caught.value)) < 2000

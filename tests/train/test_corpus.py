"""Text to token files: packing rules on documents written out by hand, and everything that can go wrong with a file."""

from __future__ import annotations

import errno
import gzip
import json
import lzma
import os
import sys
import tracemalloc
import types
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from relaylm.cli import main as cli
from relaylm.errors import UserError
from relaylm.models import text as source_text
from relaylm.models.family import Family
from relaylm.models.text import read_text
from relaylm.models.tokenizer import JsonTokenizer
from relaylm.train.corpus import TokenFile, prepare, token_dtype


def words(*extra: str) -> JsonTokenizer:
    """One token a word: a=0 .. h=7, then <s>, </s>, [PAD], and what else is asked for."""
    names = [*"abcdefgh", "<s>", "</s>", "[PAD]", *extra]
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="h"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.decoder = decoders.Fuse()
    return JsonTokenizer(backend.to_str())


BOS, EOS, PAD = 8, 9, 10


def put(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_running_text_and_its_last_share(tmp_path: Path) -> None:
    text = "the quick brown fox\n\njumps over the lazy dog. " * 10
    made = prepare(put(tmp_path / "a.txt", text), tmp_path / "c", tokenizer="bytes", holdout=0.1, progress=False)
    cut = round(len(text) * 0.9)
    assert bytes(made.train) == text[:cut].encode() and bytes(made.heldout) == text[cut:].encode()
    assert made.train.dtype == np.uint8  # the mask is never stored
    assert (made.vocab_size, made.mask_id) == (257, 256)
    facts = made.manifest["splits"]
    assert facts["train"]["characters"] == facts["train"]["tokens"] == cut
    assert made.characters_per_token() == 1.0


def test_ids_are_stored_in_the_smallest_integers_that_hold_them() -> None:
    for size, bits in ((27, 8), (256, 8), (257, 16), (65_536, 16), (65_537, 32)):
        assert token_dtype(size).itemsize * 8 == bits and size - 1 <= np.iinfo(token_dtype(size)).max


def test_text8_fits_in_a_byte(tmp_path: Path) -> None:
    made = prepare(put(tmp_path / "a.txt", "Born 12 May. " * 30), tmp_path / "c", tokenizer="text8", progress=False)
    assert made.train.dtype == np.uint8 and made.mask_id == 27
    assert made.tokenizer.decode(made.train[:18]) == "born one two may b"


def test_wrap_joins_documents_by_eos_and_wraps_chunks(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "a b c\n\nd e\n  \n\n f\ng\n\n\nh h h\n\na a a a\n")
    made = prepare(source, tmp_path / "c", tokenizer=words(), packing="wrap", length=6, holdout=0, progress=False)
    # a b c | d e | f g | h h h | a a a a, each followed by eos: 19 tokens, four chunks of 4; three are left over.
    stream = [0, 1, 2, EOS, 3, 4, EOS, 5, 6, EOS, 7, 7, 7, EOS, 0, 0, 0, 0, EOS]
    expected = [[BOS, *stream[i : i + 4], EOS] for i in (0, 4, 8, 12)]
    assert made.train.tolist() == expected
    assert made.manifest["splits"]["train"]["dropped_tokens"] == 3
    assert made.manifest["splits"]["train"]["documents"] == 5
    assert not len(made.heldout)


def test_wrap_splits_where_a_document_begins(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "a a a a\n\nb b b b\n\nc c c c")
    made = prepare(source, tmp_path / "c", tokenizer=words(), packing="wrap", length=4, holdout=0.4, progress=False)
    assert set(made.train.ravel().tolist()) == {0, 1, BOS, EOS}
    assert set(made.heldout.ravel().tolist()) == {2, BOS, EOS}


def test_pad_puts_one_sentence_in_a_row(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "a b c\n\nd\ne f g h a b c d\n")
    made = prepare(source, tmp_path / "c", tokenizer=words(), packing="pad", length=6, holdout=0, progress=False)
    assert made.train.tolist() == [[BOS, 0, 1, 2, EOS, PAD], [BOS, 3, EOS, PAD, PAD, PAD], [BOS, 4, 5, 6, 7, EOS]]
    assert made.train_real is not None and made.train_real.tolist() == [5, 3, 6]
    tokens, real = made.batch(np.array([1, 0]), 6)
    assert tokens[0, 1] == 3 and real is not None and real.tolist() == [3, 5]
    with pytest.raises(UserError, match="rows of 6, not 8"):
        made.windows(8)


@pytest.mark.parametrize("name", ["wiki-char", "wiki-bpe"])
def test_the_tokenizer_of_a_family(name: str, tmp_path: Path) -> None:
    """What `lighten` asks for: the very tokenizer that the family has."""
    made = prepare(put(tmp_path / "a.txt", "the river " * 60), tmp_path / "c", tokenizer=name, progress=False)
    family = Family.load(name)
    assert family.tokenizer is not None and made.tokenizer.to_json() == family.tokenizer.to_json()
    assert (made.vocab_size, made.mask_id) == (family.vocab_size, family.mask_id)


def test_a_tokenizer_with_its_own_mask(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "a b c\n" * 5)
    rule = {"tokenizer": words("[MASK]"), "packing": "pad", "length": 6, "holdout": 0.2}
    made = prepare(source, tmp_path / "c", progress=False, **rule)  # type: ignore[arg-type]
    assert (made.vocab_size, made.mask_id) == (12, 11)


def test_every_kind_of_file_gives_the_same_tokens(tmp_path: Path) -> None:
    documents = [f"document {i} says é and more" for i in range(30)]
    text = "".join(document + "\n\n" for document in documents)
    put(tmp_path / "plain.txt", text)
    with gzip.open(tmp_path / "t.txt.gz", "wt") as file:
        file.write(text)
    with lzma.open(tmp_path / "t.xz", "wt") as file:
        file.write(text)
    lines = "".join(json.dumps({"text": document}) + "\n" for document in documents)
    put(tmp_path / "t.jsonl", lines)
    with gzip.open(tmp_path / "t.jsonl.gz", "wt") as file:
        file.write(lines)
    made = [
        prepare(tmp_path / name, tmp_path / f"c{i}", progress=False)
        for i, name in enumerate(("plain.txt", "t.txt.gz", "t.xz", "t.jsonl", "t.jsonl.gz"))
    ]
    assert len({(bytes(m.train), bytes(m.heldout)) for m in made}) == 1
    assert read_text(tmp_path / "t.xz") == text and read_text(tmp_path / "t.jsonl") == text
    both = prepare([tmp_path / "t.xz", tmp_path / "t.jsonl"], tmp_path / "both", progress=False, holdout=0)
    assert bytes(both.train) == (text + text).encode()


@pytest.mark.parametrize("tokenizer", ["text8", "bytes", "bpe:300"])
@pytest.mark.parametrize("packing", ["running", "wrap", "pad"])
def test_the_size_of_pieces_changes_nothing(
    tokenizer: str, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if packing == "wrap" and not tokenizer.startswith("bpe"):
        pytest.skip("no end mark")
    rng = np.random.default_rng(0)
    parts = [*["word", "Anne", "x", " ", " "] * 3, "  ", "\n", "\n\n", "\n \n", "12", ", ", "ß"]
    text = "".join(rng.choice(parts, size=5000))
    source = put(tmp_path / "a.txt", text)
    results = []
    for piece in (1 << 20, 1000, 333):
        monkeypatch.setattr(source_text, "_PIECE", piece)
        folder = tmp_path / str(piece)
        results.append(prepare(source, folder, tokenizer=tokenizer, packing=packing, length=12, progress=False))
    assert len({made.train.tobytes() for made in results}) == 1
    assert len({made.heldout.tobytes() for made in results}) == 1


def test_bpe_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    text = "the cat sat on the mat " * 200 + "zyzzyva " * 100
    made = prepare(put(tmp_path / "a.txt", text), tmp_path / "c", tokenizer="bpe:280", holdout=0.2, progress=False)
    assert made.tokenizer.size <= 280 and made.tokenizer.eos_id is not None
    assert made.tokenizer.decode(made.train) + made.tokenizer.decode(made.heldout) == text
    assert len(made.tokenizer.encode(" cat")) == 1 and len(made.tokenizer.encode(" zyzzyva")) > 3
    with pytest.raises(UserError, match="at least 257"):
        prepare(tmp_path / "a.txt", tmp_path / "d", tokenizer="bpe:100", progress=False)
    for size in ("many", "\N{SUPERSCRIPT TWO}", "9" * 30, "5000000000", ""):
        with pytest.raises(UserError, match="bpe:8192"):
            prepare(tmp_path / "a.txt", tmp_path / "d", tokenizer=f"bpe:{size}", progress=False)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:270"])
def test_half_a_character_becomes_a_question_mark(tokenizer: str, tmp_path: Path) -> None:
    put(tmp_path / "a.jsonl", '{"text": "one \\ud83d two three four five"}\n' * 30)
    made = prepare(tmp_path / "a.jsonl", tmp_path / "c", tokenizer=tokenizer, holdout=0, progress=False)
    assert made.tokenizer.decode(made.train).startswith("one ? two three")


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_a_mark_of_the_encoding_is_not_text(name: str, tmp_path: Path) -> None:
    text = json.dumps({"text": "some text"}) if name == "a.jsonl" else "some text\n\n"
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert read_text(tmp_path / name) == "some text\n\n"


def test_a_folder_is_its_text_files(tmp_path: Path) -> None:
    (tmp_path / "in" / "notes.txt").mkdir(parents=True)  # a folder of that name
    put(tmp_path / "in" / "notes.txt" / "b.md", "deep. ")
    put(tmp_path / "in" / "a.TXT", "first. ")
    put(tmp_path / "in" / "c.csv", "not text")
    assert read_text(tmp_path / "in") == "first. deep. "


def test_a_text_with_the_mask_in_it_is_refused(tmp_path: Path) -> None:
    backend = Tokenizer.from_str(words("[MASK]").files()["tokenizer.json"].decode())
    backend.add_special_tokens(["[MASK]"])
    rule = {"tokenizer": JsonTokenizer(backend.to_str()), "packing": "pad", "length": 6, "holdout": 0}
    with pytest.raises(UserError, match=r"mask in it, '\[MASK\]'"):
        prepare(put(tmp_path / "a.txt", "a b\nc [MASK] d\n"), tmp_path / "c", progress=False, **rule)  # type: ignore[arg-type]
    assert not (tmp_path / "c").exists()


def test_one_document_cannot_be_held_out_in_part(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "a b c d " * 50)
    rule = {"tokenizer": words(), "packing": "wrap", "length": 6}
    with pytest.raises(UserError, match=r"no document begins in the last 0\.5"):
        prepare(source, tmp_path / "c", holdout=0.5, progress=False, **rule)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"0\.01 of this text is less than one row"):
        put(source, "a b c d " * 50 + "\n\na")
        prepare(source, tmp_path / "c", holdout=0.01, progress=False, **rule)  # type: ignore[arg-type]


def test_characters_of_a_token_leave_padding_out_and_count_what_was_cut(tmp_path: Path) -> None:
    """Held out are `a b c` and `d e f g h a`, 5 + 11 characters: in rows of 6, with <s> and </s>, 5 and 6 tokens, one
    place of padding, and two words that did not fit."""
    source = put(tmp_path / "a.txt", "a b c d\n" * 8 + "a b c\nd e f g h a\n")
    made = prepare(source, tmp_path / "c", tokenizer=words(), packing="pad", length=6, holdout=0.22, progress=False)
    assert made.heldout_real is not None and made.heldout_real.tolist() == [5, 6]
    assert made.characters_per_token() == 16 / (5 + 6 + 2)
    assert (made.tokens("train"), made.tokens("heldout")) == (8 * 6, 11)
    source = put(tmp_path / "b.txt", "a b\n\n" * 40 + "a a a a a a a")
    made = prepare(source, tmp_path / "d", tokenizer=words(), packing="wrap", length=5, holdout=0.1, progress=False)
    assert made.heldout.tolist() == [[BOS, 0, 0, 0, EOS]] * 2  # seven words and </s>: two are left over
    assert made.characters_per_token() == 13 / (10 + 2) and made.tokens("heldout") == 10


def test_the_command_counts_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    put(tmp_path / "a.txt", "a b c d e f g h a b\n\n" * 30)
    put(tmp_path / "t.json", words().files()["tokenizer.json"].decode())
    command = ["prepare", str(tmp_path / "a.txt"), str(tmp_path / "c"), "--tokenizer", str(tmp_path / "t.json")]
    assert cli.main([*command, "--packing", "wrap", "--length", "6", "--holdout", "0.1", "--json", "-"]) == 0
    said, made = json.loads(capsys.readouterr().out), TokenFile.load(tmp_path / "c")
    assert (said["train"], said["heldout"]) == (6 * len(made.train), 6 * len(made.heldout))
    assert len(made.train) == 27 * 11 // 4


def test_prepare_again_returns_what_is_there(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "some text here " * 20)
    first = prepare(source, tmp_path / "c", tokenizer="bytes", progress=False)
    assert prepare(source, tmp_path / "c", tokenizer="bytes", progress=False).identity == first.identity
    with pytest.raises(UserError, match=r"another corpus \(tokenizer differ\)"):
        prepare(source, tmp_path / "c", tokenizer="text8", progress=False)
    put(source, "other text here " * 20)
    with pytest.raises(UserError, match=r"another corpus \(sources differ\)"):
        prepare(source, tmp_path / "c", tokenizer="bytes", progress=False)
    put(tmp_path / "notes.txt", "not a corpus")
    with pytest.raises(UserError, match="not a corpus"):
        prepare(source, tmp_path, progress=False)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"\xff\xfe nonsense", "not UTF-8"),
        ("a.xz", b"not xz", "not a whole compressed file"),
        ("a.gz", gzip.compress(b"whole text", mtime=0)[:-6], "not a whole compressed file"),
        ("a.jsonl", b'{"text": "fine"}\n{"words": 1}\n', "line 2 of"),
        ("a.jsonl", b"not json\n", "line 1 of"),
        ("a.txt", b"", "no training text"),
        ("b.txt", b"short", "less than one token"),
        ("a.jsonl", b"[" * 100_000 + b"\n", "line 1 of"),
    ],
)
def test_bad_sources_are_one_sentence(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        prepare(tmp_path / name, tmp_path / "c", progress=False)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_bad_arguments(tmp_path: Path) -> None:
    source = put(tmp_path / "a.txt", "some text " * 30)
    for arguments, message in (
        ({"packing": "folded"}, "running, wrap, pad"),
        ({"packing": "wrap"}, "give their length"),
        ({"holdout": 1.0}, "held-out share"),
        ({"packing": "wrap", "length": 8, "tokenizer": "bytes"}, "does not have"),
    ):
        with pytest.raises(UserError, match=message):
            prepare(source, tmp_path / "c", progress=False, **arguments)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no text file"):
        prepare(tmp_path / "none.txt", tmp_path / "c", progress=False)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"has no \.txt"):
        prepare(tmp_path / "empty", tmp_path / "c", progress=False)


def test_a_dataset_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, configuration: str | None, **options: object) -> list[dict[str, str]]:
        asked.append((name, configuration, options["split"]))
        return [{"text": f"row {i}"} for i in range(40)]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    made = prepare("hf:wikitext", tmp_path / "c", progress=False, holdout=0)
    assert asked[0] == ("Salesforce/wikitext", "wikitext-103-raw-v1", "train")
    assert bytes(made.train) == b"".join(b"row %d\n\n" % i for i in range(40))
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"relaylm\[data\]"):
        prepare("hf:openwebtext", tmp_path / "d", progress=False)


def test_a_damaged_corpus_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    prepare(put(tmp_path / "a.txt", "some text here " * 20), folder, progress=False)
    manifest, data = (folder / "manifest.json").read_bytes(), (folder / "train.bin").read_bytes()
    for size in range(0, len(manifest) - 1, 7):
        (folder / "manifest.json").write_bytes(manifest[:size])
        with pytest.raises(UserError):
            TokenFile.load(folder)
    for broken in ("[]", "{}", '{"format": 2}', manifest.decode().replace('"mask_id": 256', '"mask_id": 999')):
        (folder / "manifest.json").write_text(broken)
        with pytest.raises(UserError):
            TokenFile.load(folder)
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "train.bin").write_bytes(data[:-2])
    with pytest.raises(UserError, match="bytes, its manifest says"):
        TokenFile.load(folder)
    (folder / "train.bin").write_bytes(bytes([data[0] ^ 1]) + data[1:])
    with pytest.raises(UserError, match="sha256"):
        TokenFile.load(folder)
    (folder / "train.bin").unlink()
    with pytest.raises(UserError, match=r"train\.bin is missing"):
        TokenFile.load(folder)
    with pytest.raises(UserError, match="is not a corpus"):
        TokenFile.load(tmp_path / "nowhere")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_leaves_nothing_behind(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = put(tmp_path / "a.txt", "some text here " * 20)
    real = getattr(os, call)
    for fails_at in range(20):
        count = 0

        def faulty(*arguments: object, fails_at: int = fails_at) -> object:
            nonlocal count
            count += 1
            if count == fails_at + 1:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, faulty)
            try:
                prepare(source, tmp_path / "c", progress=False)
            except UserError as error:
                assert "No space left" in str(error)
                assert not list(tmp_path.glob(".c.new*"))
                if (tmp_path / "c").exists():  # only the last fsync, of the parent folder, comes after the rename
                    TokenFile.load(tmp_path / "c")
                    return
                continue
        break
    assert fails_at >= 1
    TokenFile.load(tmp_path / "c")


def test_what_a_killed_run_left_is_written_anew(tmp_path: Path) -> None:
    left, mine = tmp_path / ".c.new-0123abcd", tmp_path / "c.partial"
    for folder in (left, mine):
        folder.mkdir()
        put(folder / "train.bin", "half")
    made = prepare(put(tmp_path / "a.txt", "some text here " * 20), tmp_path / "c", progress=False)
    assert len(made.train) == 294 and not left.exists()
    assert (mine / "train.bin").exists()  # a name that a user may have given


def test_memory_does_not_grow_with_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_text, "_PIECE", 1 << 14)
    monkeypatch.setattr("relaylm.train.corpus._TOGETHER", 1 << 14)
    peaks = []
    for size in (1, 16):
        source = put(tmp_path / f"{size}.txt", "some text here\n" * (20_000 * size))
        tracemalloc.start()
        prepare(source, tmp_path / f"c{size}", progress=False)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.5 * peaks[0]


def test_windows_and_phases(tmp_path: Path) -> None:
    made = prepare(put(tmp_path / "a.txt", "abcdefghij" * 3), tmp_path / "c", holdout=0, progress=False)
    assert made.windows(8) == 2 and made.phases(8) == 8  # 30 tokens: two windows of 8 from any of 8 phases
    tokens, real = made.batch(np.array([0, 1]), 8, np.array([0, 7]))
    assert real is None and [bytes(row) for row in tokens] == [b"abcdefgh", b"fghijabc"]
    assert made.windows(30) == 1 and made.phases(30) == 1
    with pytest.raises(UserError, match="less than one row"):
        made.windows(31)

"""Families: what belongs together, exact and suspicious storage, crashes while saving."""

import dataclasses
import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers import tiny_json
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm.errors import UserError
from relaylm.models import folder as folders
from relaylm.models.about import describe, list_families
from relaylm.models.denoiser import Architecture, FromLogits, Transformer
from relaylm.models.family import BUNDLED, Family, bundled, mark, pick_device
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import ByteTokenizer, JsonTokenizer, Text8Tokenizer

TEXT8 = Text8Tokenizer()


def network(depth: int = 1, seed: int = 0, **changes: Any) -> Transformer:
    numbers = {"vocab_size": 28, "length": 16, "width": 8, "depth": depth, "heads": 2, **changes}
    result = Transformer(Architecture(**numbers)).requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for parameter in result.parameters():  # `initialise` leaves zeros, which would hide mistakes
        parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return result.eval()


def two(**options: Any) -> dict[str, Any]:
    return {"models": {"big": network(2, 1), "small": network(1, 2)}, "tokenizer": TEXT8, "length": 16, **options}


def table(tokens: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return torch.zeros(*tokens.shape, 4)


def weights(family: Family) -> dict[str, torch.Tensor]:
    found = {f"{name}/{k}": v for name, model in family.models.items() for k, v in model.state_dict().items()}
    return found | {f"twin/{name}/{k}": v for name, m in family.twins.items() for k, v in m.state_dict().items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def edit(folder: Path, change: Any) -> None:
    """Change family.json the way someone would who also puts the digest right."""
    path = folder / "family.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    manifest["digest"] = folders._digest(manifest)
    path.write_text(json.dumps(manifest))


def rewrite(folder: Path, model: str, change: Any) -> None:
    """Change the tensors of a model, hash included."""

    def update(manifest: dict[str, Any]) -> None:
        (file,) = manifest["models"][model]["files"]
        tensors = safetensors.torch.load_file(folder / file)
        change(tensors)
        data = safetensors.torch.save(tensors)
        (folder / file).write_bytes(data)
        manifest["models"][model]["files"][file] = hashlib.sha256(data).hexdigest()

    edit(folder, update)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_family(tmp_path / "fam", **two())


# ------------------------------------------------------------------------------------------------ belonging together


def test_any_denoisers_make_a_family() -> None:
    family = Family(models={"a": FromLogits(table), "b": FromLogits(table)}, mask_id=3, vocab_size=4, length=3)
    assert family.names == ("a", "b") and (family.light, family.heavy) == ("a", "b")
    assert family.device == torch.device("cpu") and family.judge is None and family.twins == {}
    assert family.to("cpu") is family and family.batch_size(5, 3) == 5
    with pytest.raises(UserError, match="cannot be stored"):
        family.save_pretrained("unused")


def test_ordered_from_light_to_heavy() -> None:
    wide = network(1, width=64)  # one block, but more work than three narrow ones
    family = Family({"c": network(3), "w": wide, "a": network(1)}, mask_id=27, vocab_size=28, length=16)
    assert family.names == ("a", "c", "w")
    one, two = FromLogits(table), FromLogits(table)
    one.depth, two.depth = 3, 1  # type: ignore[attr-defined]  # which say no cost
    assert Family({"a": one, "b": two}, mask_id=3, vocab_size=4, length=3).names == ("b", "a")
    assert family.roles(None, None) == ("a", "w") and family.roles("c", "c") == ("c", "c")
    assert family["c"].depth == 3


def test_names() -> None:
    family = Family({"4b": network()}, mask_id=27, vocab_size=28, length=16)
    for ask in (lambda: family.roles("5b", None), lambda: family.check_names(["4b", "5b"]), lambda: family["5b"]):
        with pytest.raises(UserError, match="no model '5b' in this family: it has 4b"):
            ask()
    both = Family({"d4": network(), "4b": network(2)}, mask_id=27, vocab_size=28, length=16)
    assert both.named("4b") == "4b" and both.named("d4") == "d4" and family.named("d4") == "4b"
    for bad in ("L", "H", "heavy", "sandwich", "judge", "", "-a", "a b", "../a", "é", ".a", "a/b"):
        with pytest.raises(UserError, match="cannot name a model"):
            Family({bad: network()}, mask_id=27, vocab_size=28, length=16)


def test_models_that_do_not_belong_together() -> None:
    pair = {"4b": network(vocab_size=30), "12b": network()}
    sentence = "12b has vocabulary 28 and mask 27, 4b has 30 and 29: models that take turns must share both"
    with pytest.raises(UserError, match=sentence):
        Family(pair, mask_id=29, vocab_size=30, length=16)
    with pytest.raises(UserError, match="the family has vocabulary 28 and mask 26, 4b has 28 and 27"):
        Family({"4b": network()}, mask_id=26, vocab_size=28, length=16)
    with pytest.raises(UserError, match="a was trained for length 16, but the family's length is 17"):
        Family({"a": network()}, mask_id=27, vocab_size=28, length=17)
    with pytest.raises(UserError, match="256 tokens, but the models' vocabulary is 28"):
        Family({"a": network()}, mask_id=27, vocab_size=28, length=16, tokenizer=ByteTokenizer())
    with pytest.raises(UserError, match="mask 26 is an ordinary token"):
        Family({"a": network(mask_id=26)}, mask_id=26, vocab_size=28, length=16, tokenizer=TEXT8)
    for change in ({"length": 0}, {"mask_id": 4}, {"models": {}}, {"light": "z"}):
        with pytest.raises(UserError):
            Family(**{"models": {"a": FromLogits(table)}, "mask_id": 3, "vocab_size": 4, "length": 3, **change})


@pytest.mark.parametrize(
    ("n", "length", "width", "rows"),
    [(100, 256, 256, 16), (3, 256, 256, 3), (100, 4096, 768, 1), (100, 256, 8, 16), (100, 256, 4096, 4)],
)
def test_batch_size_on_the_cpu(n: int, length: int, width: int, rows: int) -> None:
    """A million activations, but 1024 to 4096 tokens."""
    one: Any = FromLogits(table)
    one.architecture = types.SimpleNamespace(width=width, length=4096)
    assert Family({"a": one}, mask_id=27, vocab_size=28, length=4096).batch_size(n, length) == rows


@pytest.mark.parametrize(
    ("free", "length", "rows"),
    [(100 << 30, 1024, 132), (100 << 30, 256, 528), (2 << 30, 1024, 32), (1 << 20, 1024, 1), (100 << 30, 200_000, 1)],
)
def test_batch_size_on_cuda(monkeypatch: pytest.MonkeyPatch, free: int, length: int, rows: int) -> None:
    family = Family({"a": network(width=768, length=length, heads=12)}, mask_id=27, vocab_size=28, length=length)
    family.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, free))
    h200 = types.SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: h200)
    assert family.batch_size(1000, length) == rows and family.batch_size(1, length) == 1


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert pick_device("auto").type in ("cpu", "cuda", "mps")
    for bad in ("gpu", "xpu", "meta", "cuda:99"):
        with pytest.raises(UserError, match=r"write auto"):
            pick_device(bad)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device("cuda:1") == torch.device("cuda:1") and pick_device("cuda").index is None
    with pytest.raises(UserError, match="no cuda:2"):
        pick_device("cuda:2")


# ------------------------------------------------------------------------------------------------------- round trips


def test_round_trip_is_bit_exact(tmp_path: Path) -> None:
    options = two(judge=network(1, 5, causal=True), twins={"small": network(1, 9)}, meta={"steps": 3}, name="a  name")
    folder = save_family(tmp_path / "deep" / "fam", **options, max_shard_bytes=2000)
    family = Family.load(folder)
    assert family.names == ("small", "big") and family.name == "a name" and family.meta == {"steps": 3}
    assert (family.mask_id, family.vocab_size, family.length) == (27, 28, 16)
    for name in family.names:
        assert same(family[name].state_dict(), options["models"][name].state_dict())
        assert not any(p.requires_grad for p in family[name].parameters())
    assert len(list(folder.glob("big/*.safetensors"))) > 1  # sharded
    assert "judge" not in vars(family) and "twins" not in vars(family)  # not read yet
    assert same(family.judge.state_dict(), options["judge"].state_dict()) and family.judge.architecture.causal
    assert same(family.twins["small"].state_dict(), options["twins"]["small"].state_dict())
    again = Family.from_pretrained(family.save_pretrained(tmp_path / "again"))
    assert same(weights(again), weights(family)) and again.judge is not None and again.name == "a name"
    assert again.meta == {"steps": 3}
    turned = dataclasses.replace(family, light="big", heavy="small")
    again = Family.load(turned.save_pretrained(tmp_path / "turned"))
    assert (again.light, again.heavy) == ("big", "small")
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]


def test_the_same_family_has_the_same_digest(tmp_path: Path) -> None:
    a, b = (Family.load(save_family(tmp_path / name, **two(name=name))) for name in "ab")
    c = Family.load(save_family(tmp_path / "c", **two(length=15)))
    assert a.digest == b.digest != c.digest and Family({"a": network()}, 27, 28, 16).digest is None


def add_one(weight: torch.Tensor) -> None:
    with torch.no_grad():
        weight.view(-1)[5] += 1


CHANGES: dict[str, Any] = {
    "in place": lambda model: add_one(model.blocks[0].attn_out.weight),
    "behind PyTorch's back": lambda model: model.blocks[0].attn_out.weight.data.neg_(),
    "through numpy": lambda model: model.output_layer.linear.bias.detach().numpy().__setitem__(3, 7.0),
    "rows swapped": lambda model: model.vocab_embed.embedding.data.copy_(model.vocab_embed.embedding.flip(0)),
    "words swapped": lambda model: model.vocab_embed.embedding.data.copy_(model.vocab_embed.embedding.flip(1)),
    "a state": lambda model: model.load_state_dict(network(model.depth, 9).state_dict()),
    "a replaced tensor": lambda model: setattr(model.blocks[0].norm1, "weight", torch.nn.Parameter(torch.zeros(8))),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("what", ["big", "judge", "twin of small"])
def test_weights_changed_in_memory_are_no_longer_those_of_the_folder(tmp_path: Path, what: str, change: str) -> None:
    options = two(judge=network(1, 5, causal=True), twins={"small": network(1, 6)})
    family = Family.load(save_family(tmp_path / "a", **options))
    model: Any = {"big": family["big"], "judge": family.judge, "twin of small": family.twins["small"]}[what]
    manifest = json.loads((tmp_path / "a/family.json").read_text())
    assert family.digest == manifest["digest"] and family.entry("small") == manifest["models"]["small"]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    CHANGES[change](model)
    assert family.digest is None and family.entry(what) is None and family.entry("small") is not None
    model.load_state_dict(before)
    assert family.digest == manifest["digest"]
    assert Family.load(family.save_pretrained(tmp_path / "b")).digest == family.digest


def test_a_mark_knows_where_a_number_stands() -> None:
    model = network(width=128)
    weight, before = model.blocks[0].mlp[0].weight, mark(model)  # (512, 128): 4096 bytes are 8 rows
    for a, b in ((weight[:8], weight[8:16]), (weight[3, :2], weight[3, 2:4])):
        kept = a.clone()
        a.copy_(b), b.copy_(kept)
        assert mark(model) != before
        b.copy_(a), a.copy_(kept)
        assert mark(model) == before


def test_another_model_under_the_name_is_not_that_of_the_folder(folder: Path) -> None:
    family = Family.load(folder)
    family.models["big"] = Transformer(dataclasses.replace(family["big"].architecture, heads=1))  # type: ignore
    family["big"].load_state_dict(Family.load(folder)["big"].state_dict())  # type: ignore[attr-defined]
    assert family.digest is None and family.entry("big") is None and family.entry("small") is not None
    family = Family.load(folder)
    del family.models["big"]  # type: ignore[attr-defined]
    assert family.digest is None and family.entry("small") is not None and family.entry("none") is None


def test_digits_that_rounding_lost_do_not_come_back(tmp_path: Path) -> None:
    family = Family.load(save_family(tmp_path / "a", **two(judge=network(1, 5, causal=True), dtype="float32")))
    assert family.judge is not None
    digest = family.digest
    assert digest is not None and family.to("cpu").digest == family.to("cpu", "float32").digest == digest
    assert family.to("cpu", "bfloat16").digest == digest  # as a family loaded in bfloat16
    assert family.to("cpu", "float32").digest is None  # rounded weights, which float32 would not have
    assert family.to("cpu", "bfloat16").digest == digest
    assert family.to("cpu", "float16").digest is None  # as many bits, other digits
    family = Family.load(tmp_path / "a", dtype="bfloat16")
    CHANGES["in place"](family["big"])
    assert family.to("cpu", "bfloat16").digest is None


def test_a_saved_family_keeps_its_texts_and_tables(tmp_path: Path) -> None:
    pairs = json.loads((BUNDLED / "wiki-char" / "pairs.json").read_text())
    folder = save_family(tmp_path / "a", **two(heldout="not seen in training\n", card="# Mine", pairs=pairs))
    family = Family.load(folder)
    again = Family.load(family.save_pretrained(tmp_path / "b"))
    assert again.heldout is not None and again.heldout.read_text() == "not seen in training\n"
    family.save_pretrained(folder, overwrite=True, name="renamed")  # over the folder that it was loaded from
    assert (folder / "heldout.txt").read_text() == "not seen in training\n"
    assert json.loads((folder / "pairs.json").read_text()) == pairs
    assert (folder / "README.md").read_text().endswith("# Mine")


def test_bfloat16_rounds_once(tmp_path: Path) -> None:
    options = two()
    first = Family.load(save_family(tmp_path / "a", **options, dtype=torch.bfloat16))
    for name, model in options["models"].items():
        for key, value in model.state_dict().items():
            rounded = value.bfloat16().float() if value.dim() > 1 else value  # vectors stay as they are
            assert torch.equal(first[name].state_dict()[key], rounded)
    second = Family.load(first.save_pretrained(tmp_path / "b"))  # no dtype given: bfloat16 already holds every digit
    assert describe(tmp_path / "b")["models"]["big"]["dtype"] == "bfloat16"
    assert same(weights(first), weights(second)) and first.digest == second.digest


def test_float64_is_kept(tmp_path: Path) -> None:
    double = network().double()
    double.vocab_embed.embedding.data += 1e-12
    folder = save_family(tmp_path / "a", {"a": double}, None, length=16)
    loaded = Family.load(folder, dtype=torch.float64)
    assert loaded.tokenizer is None and same(loaded["a"].state_dict(), double.state_dict())
    assert Family.load(folder)["a"].vocab_embed.embedding.dtype == torch.float32


def test_dtype_casts_the_blocks_alone(folder: Path) -> None:
    for family in (Family.load(folder, dtype="bfloat16"), Family.load(folder).to("cpu", torch.bfloat16)):
        assert family["big"].blocks[0].attn_qkv.weight.dtype == torch.bfloat16
        assert family["big"].vocab_embed.embedding.dtype == torch.float32
    with pytest.raises(UserError, match="int8 cannot be computed in"):
        Family.load(folder, dtype="int8")


def test_constant_adaln_is_folded_and_time_kept(tmp_path: Path) -> None:
    constant, timed = network(adaln=True, cond_dim=4), network(2, adaln=True, cond_dim=4, time_conditioning=True)
    family = Family.load(save_family(tmp_path / "a", {"c": constant, "t": timed}, TEXT8, length=16), dtype="float64")
    assert not family["c"].architecture.adaln and family["t"].architecture.adaln
    tokens, t = torch.randint(28, (2, 16), generator=torch.Generator().manual_seed(0)), torch.tensor([0.3, 0.9])
    for name, model in (("c", constant), ("t", timed)):
        torch.testing.assert_close(family[name].logits(tokens, t.double()), model.double().logits(tokens, t.double()))
    again = Family.load(family.save_pretrained(tmp_path / "b"), dtype="float64")  # folded biases need float64
    assert same(weights(again), weights(family))


def test_json_tokenizer_travels(tmp_path: Path) -> None:
    tokenizer = JsonTokenizer(tiny_json())
    big = network(vocab_size=tokenizer.size + 1)
    folder = save_family(tmp_path / "a", {"a": big}, tokenizer, length=16)
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.files()["tokenizer.json"]
    assert Family.load(folder).tokenizer.encode("a _") == tokenizer.encode("a _")
    (folder / "tokenizer.json").write_bytes(tokenizer.files()["tokenizer.json"] + b" ")
    with pytest.raises(UserError, match=r"tokenizer.json does not have the sha256"):
        Family.load(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"cannot read .*tokenizer.json"):
        Family.load(folder)


def test_hand_edits_of_names_and_roles_are_welcome(folder: Path) -> None:
    path = folder / "family.json"
    manifest = json.loads(path.read_text())
    manifest |= {"name": "mine", "roles": {"light": "big", "heavy": "small"}, "meta": {"x": [1]}}
    path.write_text(json.dumps(manifest))
    family = Family.load(folder)
    assert (family.name, family.light, family.heavy, family.meta) == ("mine", "big", "small", {"x": [1]})


def test_the_card(tmp_path: Path) -> None:
    text = (save_family(tmp_path / "a", **two(meta={"license": "mit"})) / "README.md").read_text()
    assert text.startswith('---\nlibrary_name: relaylm\nlicense: "mit"\n') and "| big | 2 | 8 |" in text
    assert (save_family(tmp_path / "b", **two(card="# Mine")) / "README.md").read_text().endswith("---\n# Mine")
    own = "---\nlicense: mit\n---\n# Mine"
    family = Family.load(save_family(tmp_path / "c", **two(card=own)))
    assert (family.save_pretrained(tmp_path / "d") / "README.md").read_text() == own


# ---------------------------------------------------------------------------------------------------------- refusals


def set_(*keys: str, to: Any) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        for key in keys[:-1]:
            manifest = manifest[key]
        manifest[keys[-1]] = to

    return change


def rename_file(to: str) -> Any:
    def change(manifest: dict[str, Any]) -> None:
        (digest,) = manifest["models"]["small"]["files"].values()
        manifest["models"]["small"]["files"] = {to: digest}

    return change


ARCHITECTURE = ("models", "small", "architecture")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_("format", to="zip"), 'its "format" must be "relaylm-family"'),
        (set_("version", to=2), "has version 2, this relaylm reads version 1"),
        (set_("length", to="16"), '"length" must be a whole number'),
        (set_("length", to=True), '"length" must be a whole number'),
        (set_("length", to=17), "small was trained for length 16, but the family's length is 17"),
        (set_("models", to=[]), '"models" must be an object'),
        (set_("models", to={}), "lists no models"),
        (set_("models", to={"L": {}}), "'L' cannot name a model"),
        (set_("models", to={"a": 1}), "model a must be an object"),
        (set_("mask_id", to=26), "the family has vocabulary 28 and mask 26"),
        (set_("roles", to={"light": "tiny"}), "no model 'tiny' in this family: it has small, big"),
        (set_("roles", to={"light": 1}), 'roles: "light" must be text'),
        (set_("tokenizer", to={"type": "exec"}), "tokenizer type 'exec' is not known"),
        (set_("tokenizer", to={"type": "bytes"}), "the tokenizer has 256 tokens"),
        (set_("judge", to={"files": {}}), 'judge: "architecture" must be an object'),
        (set_("models", "small", "dtype", to="int8"), "dtype 'int8' is not one of float64"),
        (set_("models", "small", "files", to={"a.safetensors": 1}), "the sha256 of a.safetensors must be text"),
        (set_("models", "small", "files", to={}), "tensor vocab_embed.embedding is missing"),
        (
            set_(*ARCHITECTURE, "vocab_size", to=29),
            "big has vocabulary 28 and mask 27, small has 29 and 27: models that",
        ),
        (set_(*ARCHITECTURE, "width", to=-4), "model small: width must be at least 1"),
        (set_(*ARCHITECTURE, "depth", to=10**9), "depth 1000000000 is more than"),
        (set_(*ARCHITECTURE, "causal", to=0), '"causal" must be true or false'),
        (set_(*ARCHITECTURE, "moe", to=1), "does not know 'moe' in an architecture"),
        (set_(*ARCHITECTURE, "depth", to=2), "small .*tensor blocks.1.norm1.weight is missing"),
        (set_(*ARCHITECTURE, "qkv_bias", to=True), "tensor blocks.0.attn_qkv.bias is missing"),
        (rename_file("../../etc/passwd"), "'../../etc/passwd' is not the name of a safetensors file inside the folder"),
        (rename_file("../x.safetensors"), "is not the name of a safetensors file inside"),
        (rename_file("/x.safetensors"), "is not the name of a safetensors file inside"),
        (rename_file("a/../x.safetensors"), "is not the name of a safetensors file inside"),
        (rename_file("small/x.safetensors"), r"cannot read .*small/x.safetensors"),
    ],
)
def test_refuses_a_wrong_manifest(folder: Path, change: Any, message: str) -> None:
    edit(folder, change)
    with pytest.raises(UserError, match=message) as error:
        Family.load(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b"{}", b"9" * 5000])
def test_refuses_what_is_not_a_manifest(folder: Path, content: bytes) -> None:
    (folder / "family.json").write_bytes(content)
    with pytest.raises(UserError, match=r"family.json (is not valid|must hold a JSON object|does not describe)"):
        Family.load(folder)


def test_refuses_a_changed_manifest(folder: Path) -> None:
    path = folder / "family.json"
    path.write_text(path.read_text().replace('"heads": 2', '"heads": 1'))  # the same tensors, another function
    with pytest.raises(UserError, match="does not match its own digest"):
        Family.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("output_layer.linear.bias"), "tensor output_layer.linear.bias is missing"),
        (
            lambda s: s.update(evil=torch.zeros(1)),
            r"small/model-00001-of-00001.safetensors\): tensor evil does not belong",
        ),
        (
            lambda s: s.update({"blocks.0.norm1.weight": torch.zeros(9)}),
            r"small/model.*: tensor blocks.0.norm1.weight has shape \(9,\), expected \(8,\)",
        ),
        (
            lambda s: s.update({"blocks.0.norm1.weight": torch.zeros(8, dtype=torch.int32)}),
            "small/model.*: tensor blocks.0.norm1.weight is int32, not float32",
        ),
        (
            lambda s: s.update({"blocks.0.attn_out.weight": torch.zeros(8, 8, dtype=torch.bfloat16)}),
            "tensor blocks.0.attn_out.weight is bfloat16, not float32",
        ),
    ],
)
def test_refuses_wrong_tensors(folder: Path, change: Any, message: str) -> None:
    rewrite(folder, "small", change)
    with pytest.raises(UserError, match=message):
        Family.load(folder)


def test_refuses_a_tensor_twice(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "a", **two(), max_shard_bytes=1000)

    def change(manifest: dict[str, Any]) -> None:
        files = manifest["models"]["small"]["files"]
        first = next(iter(files))
        shutil.copy(folder / first, folder / "small/more.safetensors")
        files["small/more.safetensors"] = files[first]

    edit(folder, change)
    with pytest.raises(UserError, match=r"more.safetensors: tensor .* of small is there a second time"):
        Family.load(folder)


def test_refuses_malformed_safetensors_with_the_right_hash(folder: Path) -> None:
    file = next(folder.glob("small/*.safetensors"))
    whole = file.read_bytes()
    payloads = [b"", whole[:-1], whole[:50], whole + b"x", b"\xff" * 8 + whole[8:], pickle.dumps([1])]
    for data in payloads:
        file.write_bytes(data)
        name, digest = f"small/{file.name}", hashlib.sha256(data).hexdigest()
        edit(folder, set_("models", "small", "files", to={name: digest}))
        with pytest.raises(UserError, match=r"small/model-.* is not a whole safetensors file"):
            Family.load(folder)


@pytest.mark.parametrize("name", ["model.pt", "small/pytorch_model.bin", "x.ckpt", "a/b/X.PTH", "x.pkl"])
def test_a_pickle_is_refused_and_never_run(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = folder.parent / "ran"

    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps(Payload()))
    with pytest.raises(UserError, match="never unpickles"):
        Family.load(folder)
    assert not ran.exists()


def test_nothing_of_ours_reaches_pickle(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran = folder.parent / "ran"

    class Payload:
        def __reduce__(self) -> Any:
            return (Path.touch, (ran,))

    def reached(*_: Any, **__: Any) -> None:
        raise AssertionError("unpickled")

    payload = pickle.dumps(Payload())
    for function in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, function, reached)
    monkeypatch.setattr(torch, "load", reached)
    Family.load(folder)
    file = next(folder.glob("small/*.safetensors"))  # under the name of something that is read
    file.write_bytes(payload)
    digest = hashlib.sha256(payload).hexdigest()
    edit(folder, set_("models", "small", "files", to={f"small/{file.name}": digest}))
    with pytest.raises(UserError, match="is not a whole safetensors file"):
        Family.load(folder)
    (folder / "family.json").write_bytes(payload)
    with pytest.raises(UserError, match="is not valid JSON"):
        Family.load(folder)
    assert not ran.exists()


# ---------------------------------------------------------------------------------------- damage, anywhere in a folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor], Family]:
    place = tmp_path_factory.mktemp("damage")
    options = {"twins": {"a": network(seed=4, width=4)}, "length": 16}
    folder = save_family(place / "fam", {"a": network(width=4)}, JsonTokenizer(tiny_json(20)), **options)
    family = Family.load(folder)
    return folder, weights(family), family


def survives(folder: Path, expected: dict[str, torch.Tensor], tokenizer: Any) -> bool:
    """Load a damaged folder: a UserError in one line, or exactly the same numbers. Anything else raises here."""
    try:
        family = Family.load(folder)
        found = weights(family)
    except UserError as error:
        assert len(str(error).splitlines()) == 1
        return False
    assert same(found, expected) and family["a"].architecture.heads == 2
    assert family.tokenizer.files() == tokenizer.files() and family.mask_id == 27
    return True


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_a_flipped_byte_is_noticed(whole: Any, data: st.DataObject) -> None:
    folder, expected, family = whole
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    path = data.draw(st.sampled_from(files))
    original = path.read_bytes()
    place = data.draw(st.integers(0, len(original) - 1))
    damaged = bytearray(original)
    damaged[place] ^= data.draw(st.integers(1, 255))
    try:
        path.write_bytes(damaged)
        survived = survives(folder, expected, family.tokenizer)
        assert not survived or path.name in ("README.md", "family.json", ".relaylm.json")
    finally:
        path.write_bytes(original)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_file_cut_short_is_noticed(whole: Any, data: st.DataObject) -> None:
    folder, expected, family = whole
    path = data.draw(st.sampled_from(sorted(path for path in folder.rglob("*") if path.is_file())))
    original = path.read_bytes()
    try:
        path.write_bytes(original[: data.draw(st.integers(0, len(original) - 1))])
        survived = survives(folder, expected, family.tokenizer)
        assert (
            not survived or path.name in ("README.md", ".relaylm.json") or path.read_bytes().strip() == original.strip()
        )
    finally:
        path.write_bytes(original)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_any_value_anywhere_in_the_manifest(whole: Any, data: st.DataObject) -> None:
    """Even with the digest put right, a manifest with a wrong value loads, or is refused in one line."""
    folder, _, _ = whole
    path = folder / "family.json"
    original = path.read_bytes()
    manifest = json.loads(original)
    spot, key = manifest, data.draw(st.sampled_from(sorted(manifest)))
    while isinstance(spot[key], dict) and spot[key] and data.draw(st.booleans()):
        spot = spot[key]
        key = data.draw(st.sampled_from(sorted(spot)))
    spot[key] = data.draw(json_values)
    manifest["digest"] = folders._digest({name: manifest.get(name) for name in folders.DIGESTED})
    try:
        path.write_text(json.dumps(manifest))
        for read in (Family.load, describe):
            try:
                read(folder)
            except UserError as error:
                assert len(str(error).splitlines()) == 1
    finally:
        path.write_bytes(original)


# ------------------------------------------------------------------------------------------------- crashes while saving


class Killed(BaseException):
    """The process is gone: from here on nothing more happens on disk."""


def crash_at(monkeypatch: pytest.MonkeyPatch, number: int, error: BaseException | None) -> list[str]:
    """Make the number-th change on disk fail: with an error (once, as ENOSPC would), or for good (None: killed).
    Returns the list of changes, which grows as they are made."""
    made: list[str] = []
    write = Path.write_bytes

    def guard(name: str, function: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if error is None and len(made) > number:
                raise Killed
            made.append(name)
            if len(made) == number + 1:
                if name == "write":
                    write(args[0], args[1][: len(args[1]) // 2])  # half of it reached the disk
                raise error or Killed
            return function(*args, **kwargs)

        return wrapped

    monkeypatch.setattr(Path, "write_bytes", guard("write", write))
    monkeypatch.setattr(os, "fsync", guard("fsync", os.fsync))
    monkeypatch.setattr(os, "replace", guard("replace", os.replace))
    monkeypatch.setattr(os, "unlink", guard("unlink", os.unlink))  # `shutil.rmtree` is made of these two
    monkeypatch.setattr(os, "rmdir", guard("rmdir", os.rmdir))
    monkeypatch.setattr(Path, "mkdir", guard("mkdir", Path.mkdir))
    return made


@pytest.mark.parametrize("kind", ["killed", "full disk"])
@pytest.mark.parametrize("before", ["nothing", "empty", "family"])
def test_a_crash_leaves_the_old_or_the_new(tmp_path: Path, kind: str, before: str) -> None:
    """Fail each change on disk in turn, until a save goes through."""
    old, new = {"a": network(seed=1)}, {"a": network(seed=2)}
    outcomes, number = set(), 0
    while True:
        folder = tmp_path / f"{number}" / "fam"
        folder.parent.mkdir()
        if before == "empty":
            folder.mkdir()
        if before == "family":
            save_family(folder, old, TEXT8, length=16)
        with pytest.MonkeyPatch.context() as patch:
            made = crash_at(patch, number, None if kind == "killed" else OSError(28, "No space left on device"))
            try:
                save_family(folder, new, TEXT8, length=16, overwrite=True)
                failed = False
            except Killed:
                failed = True
            except UserError as error:
                assert "No space left on device" in str(error)
                failed = True
        if len(made) <= number:
            assert not failed
            break
        try:
            loaded = Family.load(folder)["a"].state_dict()
            (found,) = (which for which, m in (("old", old), ("new", new)) if same(m["a"].state_dict(), loaded))
        except UserError as error:
            assert before != "family" and ("no family" in str(error) or "is not a family" in str(error))
            found = "none"
        outcomes.add(found)
        if kind == "full disk" and made[number] not in ("unlink", "rmdir"):
            rest = sorted(path.name for path in folder.parent.iterdir())
            in_place = made[number] in ("fsync", "replace") and found == "new"  # perhaps not for good: keep both
            assert rest in ([], ["fam"]) or in_place, "something was left behind"
        save_family(folder, new, TEXT8, length=16, overwrite=True)  # and the next save goes through
        assert same(Family.load(folder)["a"].state_dict(), new["a"].state_dict())
        assert not folder.parent.joinpath(".fam.old").exists()
        number += 1
    assert number >= 8 and outcomes == ({"old", "new"} if before == "family" else {"none", "new"})


FOREVER = """
import sys, torch
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.folder import save_family
models = []
for value in (1.0, 2.0):
    model = Transformer(Architecture(vocab_size=28, length=16, width=8, depth=1, heads=2)).requires_grad_(False)
    for parameter in model.parameters():
        parameter.fill_(value)
    models.append(model)
turn = 0
while True:
    save_family(sys.argv[1], {"a": models[turn % 2]}, None, length=16, overwrite=True, max_shard_bytes=500)
    turn += 1
    print(turn, flush=True)
"""


@pytest.mark.slow
def test_sigkill_leaves_a_whole_family(tmp_path: Path) -> None:
    folder = tmp_path / "fam"
    environment = {**os.environ, "PYTHONPATH": str(Path(folders.__file__).parents[2])}
    for round_ in range(8):
        child = subprocess.Popen([sys.executable, "-c", FOREVER, folder], stdout=subprocess.PIPE, env=environment)
        assert child.stdout is not None and child.stdout.readline()
        time.sleep(0.003 * round_)
        child.kill()
        child.wait()
        child.stdout.close()
        values = {float(value) for tensor in weights(Family.load(folder)).values() for value in tensor.unique()}
        assert values in ({1.0}, {2.0})


def test_does_not_overwrite(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "a", **two())
    with pytest.raises(UserError, match="is not empty"):
        save_family(folder, **two())
    assert save_family(folder, **two(), overwrite=True) == folder
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letters.txt").write_text("dear")
    with pytest.raises(UserError, match=r"was not written by relaylm .* so it is not overwritten"):
        save_family(tmp_path / "home", **two(), overwrite=True)
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="it is a file"):
        save_family(tmp_path / "file", **two(), overwrite=True)
    with pytest.raises(UserError, match="cannot write"):
        save_family(tmp_path / "file" / "below", **two())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "file", "home"]


@pytest.mark.parametrize("change", ["added", "edited", "linked", "git", "readme only"])
def test_files_of_others_are_never_deleted(tmp_path: Path, change: str) -> None:
    """Every folder that relaylm writes goes through `write_folder`; here a family stands for all of them."""
    folder = tmp_path / "fam"
    if change == "readme only":  # what MDLM's layout was once recognised by
        folder.mkdir()
    else:
        save_family(folder, {"a": network(seed=1)}, TEXT8, length=16)
    path = {"edited": "README.md", "git": ".git/HEAD", "readme only": "README.md"}.get(change, "notes.txt")
    (folder / path).parent.mkdir(exist_ok=True)
    if change == "linked":
        (tmp_path / "mine").mkdir()
        (folder / path).symlink_to(tmp_path / "mine")
    else:
        (folder / path).write_text("mine")
    before = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
    with pytest.raises(UserError, match="not overwritten"):
        save_family(folder, {"a": network(seed=2)}, TEXT8, length=16, overwrite=True)
    assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    if change != "readme only":  # the same family again: it is there, and what was changed stays
        save_family(folder, {"a": network(seed=1)}, TEXT8, length=16, overwrite=True)
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []


def test_a_folder_under_the_backup_name_is_not_touched(tmp_path: Path) -> None:
    mine = tmp_path / ".fam.old"
    mine.mkdir()
    (mine / "letters.txt").write_text("x")
    for _ in range(2):
        with pytest.raises(UserError, match="is in the way"):
            save_family(tmp_path / "fam", **two(), overwrite=True)
        assert [path.name for path in mine.iterdir()] == ["letters.txt"]
        (tmp_path / "fam").mkdir(exist_ok=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": {}}, "at least one model"),
        ({"models": {"a": network(), "b": network(vocab_size=30)}}, "b has vocabulary 30"),
        ({"models": {"a": network(), "A": network()}}, "differ by more than capitals"),
        ({"twins": {"c": network()}}, "there is no model 'c' for the twin"),
        ({"twins": {"big": network(vocab_size=30)}}, "the twin of big has vocabulary 30"),
        ({"dtype": "int8"}, "int8 cannot be stored"),
        ({"meta": {"x": float("nan")}}, "meta must be plain JSON"),
        ({"meta": {"x": object()}}, "meta must be plain JSON"),
        ({"max_shard_bytes": 0}, "max_shard_bytes must be at least 1"),
        ({"length": 17}, "trained for length 16"),
        ({"light": "tiny"}, "no model 'tiny'"),
    ],
)
def test_save_refuses(tmp_path: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        save_family(tmp_path / "a", **two(**options))
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------------------------------------------------------ finding


def test_not_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("nowhere", "./nowhere", "a/b/c", "x" * 5000, "a\0b", "~nobody-here/x/y", tmp_path / "nowhere"):
        with pytest.raises(UserError, match="there is no family"):
            Family.load(source)
    with pytest.raises(UserError, match=r"is not a family: it has no family.json"):
        Family.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file, but a family is a folder"):
        Family.load("file")


def hub(monkeypatch: pytest.MonkeyPatch, answer: Any) -> list[Any]:
    asked: list[Any] = []

    def snapshot_download(repo_id: str, **options: Any) -> str:
        asked.append((repo_id, options))
        if isinstance(answer, Exception):
            raise answer
        return str(answer)

    module = types.ModuleType("huggingface_hub")
    module.snapshot_download = snapshot_download  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return asked


def test_hub(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = hub(monkeypatch, folder)
    family = Family.from_pretrained("owner/name", revision="v1")
    assert same(weights(family), weights(Family.load(folder)))
    ((name, options),) = asked
    assert name == "owner/name" and options["revision"] == "v1"
    assert options["allow_patterns"] == ["*.json", "*.safetensors", "*.txt", "*.md", "*.jinja"]
    (tmp_path / "owner").mkdir()
    shutil.copytree(folder, tmp_path / "owner" / "name")
    Family.load("owner/name")  # a folder comes first
    assert len(asked) == 1
    with pytest.raises(UserError, match="a revision is for a family on the Hugging Face hub"):
        Family.load("owner/name", revision="v1")


def test_hub_out_of_reach(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    hub(monkeypatch, ConnectionError("no route\nto host"))
    sentence = r"no file or folder 'owner/name', and it could not be fetched .*\(ConnectionError: no route\)"
    with pytest.raises(UserError, match=sentence) as error:
        Family.load("owner/name")
    assert "\n" not in str(error.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(UserError, match=r"needs `pip install relaylm\[hub\]`"):
        Family.load("owner/name")


def test_bundled(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relaylm.models.family.BUNDLED", tmp_path)
    monkeypatch.chdir(folder)
    assert bundled() == ["fam"] and Family.load("fam").names == ("small", "big")
    with pytest.raises(UserError, match="the bundled families are fam"):
        Family.load("farm")


# -------------------------------------------------------------------------------------------------- what is inside


def test_describe(folder: Path) -> None:
    about = describe(folder)
    assert list(about["models"]) == ["small", "big"] and about["roles"] == {"light": "small", "heavy": "big"}
    small = about["models"]["small"]
    loaded = Family.load(folder)
    assert small["parameters"] == sum(p.numel() for p in loaded["small"].parameters())
    assert small["flops_per_call"] == loaded["small"].flops(16, 1) and small["flops_full"] == loaded["small"].flops(16)
    assert (small["depth"], small["width"], small["dtype"]) == (1, 8, "float32")
    assert (about["length"], about["vocab_size"], about["mask_id"], about["tokenizer"]) == (
        16,
        28,
        27,
        {"type": "text8"},
    )
    assert about["bytes"] == sum(path.stat().st_size for path in folder.rglob("[!.]*") if path.is_file())
    assert about["missing"] == []
    thin = save_family(folder.parent / "thin", {"a": network(2, mlp_ratio=2)}, TEXT8, length=16)
    about, loaded = describe(thin)["models"]["a"], Family.load(thin)
    assert (about["flops_per_call"], about["flops_full"]) == (loaded["a"].flops(16, 1), loaded["a"].flops(16))
    (folder / "big/model-00001-of-00001.safetensors").unlink()
    assert describe(folder)["missing"] == ["big/model-00001-of-00001.safetensors"]
    edit(folder, set_("length", to=10**400))
    with pytest.raises(UserError, match="small was trained for length 16"):
        describe(folder)


def test_list_families(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = folder.parent / "broken"
    broken.mkdir()
    (broken / "family.json").write_text("{}")
    monkeypatch.chdir(folder.parent)
    mine = [entry for entry in list_families() if not entry["bundled"]]
    assert [(entry["source"], entry["error"] is None) for entry in mine] == [("broken", False), ("fam", True)]
    assert mine[1]["models"] == ["small", "big"] and mine[1]["length"] == 16
    assert [entry["source"] for entry in list_families(folder) if not entry["bundled"]] == [str(folder)]
    for deep in ("a/b/c", "a/b/d/e", ".hidden/f"):
        shutil.copytree(folder, folder.parent / deep)
    found = {entry["source"] for entry in list_families() if not entry["bundled"]}
    assert found == {"broken", "fam", "a/b/c"}  # three folders deep, none of them hidden


def test_one_bad_family_does_not_hide_the_others(folder: Path) -> None:
    bad = shutil.copytree(folder, folder.parent / "bad")
    long = "x" * 300 + ".safetensors"  # longer than a name on disk can be
    edit(bad, lambda manifest: manifest["models"]["small"].update(files={long: "0" * 64}))
    mine = {Path(entry["source"]).name: entry for entry in list_families(folder.parent) if not entry["bundled"]}
    assert mine["fam"]["error"] is None and mine["fam"]["missing"] == []
    assert mine["bad"]["missing"] == [long]
    with pytest.raises(UserError, match="cannot read"):
        Family.load(bad)


def test_a_narrow_residual_stream_is_nearly_the_same_law_and_says_so(tmp_path: Path) -> None:
    folder = save_family(tmp_path / "f", **two(dtype="bfloat16"))
    tokens, t = torch.randint(0, 27, (4, 16), generator=torch.Generator().manual_seed(0)), torch.ones(4)
    log_p = {}
    for narrow in (False, True):
        family = Family.load(folder, dtype="bfloat16", narrow=narrow)
        assert family["big"].narrow is narrow  # type: ignore[attr-defined]
        hidden = family["big"].hidden_at(tokens, t, None)  # type: ignore[attr-defined]
        assert hidden.dtype == (torch.bfloat16 if narrow else torch.float32)
        log_p[narrow] = family["big"].logits(tokens, t).log_softmax(-1)
        assert family.precision == ("bfloat16, narrow residual" if narrow else "bfloat16")
    kl = (log_p[False].exp() * (log_p[False] - log_p[True])).sum(-1).mean()
    assert 0 < kl < 0.05

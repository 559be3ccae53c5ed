"""Converted models at work: scheduled end to end, described, copied, fetched."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from test_convert_mdlm import CONFIG, SEDD
from test_convert_mdlm import published as mdlm_state
from test_convert_mdlm import write as mdlm_write
from test_convert_smdm import HEADS as SMDM_HEADS
from test_convert_smdm import published as smdm_state
from torch.utils._python_dispatch import TorchDispatchMode

from relaylm import convert
from relaylm.cli.main import main
from relaylm.core.plan import make_plan
from relaylm.core.schedule import Schedule
from relaylm.errors import UserError
from relaylm.measure.evaluate import model_key
from relaylm.measure.timing import time_call
from relaylm.models.family import Family
from relaylm.sampling.denoise import denoise
from relaylm.sampling.sample import sample


def smdm_folder(folder: Path) -> Path:
    folder.mkdir()
    for name, blocks in (("mdm-113M", 2), ("mdm-170M", 4)):
        safetensors.torch.save_file(smdm_state(blocks, seed=blocks), folder / f"{name}.safetensors")
    return folder


def two_of(kind: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """Two checkpoints of one format, light and heavy, and the options they need."""
    if kind == "smdm":
        return smdm_folder(tmp_path / "two"), {"heads": SMDM_HEADS, "length": 8}
    if kind in ("mdlm", "sedd"):
        sources = []
        for blocks in (1, 3):
            config: dict[str, Any] = CONFIG | {"n_blocks": blocks}
            if kind == "sedd":
                config = SEDD | {"model": SEDD["model"] | {"n_blocks": blocks}}  # type: ignore[operator]
            prefix = "" if kind == "sedd" else "backbone."
            sources.append(mdlm_write(tmp_path / f"{blocks}b", mdlm_state(blocks, prefix, seed=blocks), config))
        return sources, {}
    pytest.importorskip("transformers")
    import test_convert_hf as made

    make = made.llada if kind == "llada" else made.dream
    return [make(tmp_path / f"{blocks}b", blocks=blocks)[0] for blocks in (1, 3)], {}


@pytest.mark.parametrize("kind", ["mdlm", "sedd", "smdm", "llada", "dream"])
def test_two_models_of_one_format_take_turns(tmp_path: Path, kind: str) -> None:
    sources, options = two_of(kind, tmp_path)
    family = convert.load(sources, **options)
    light, heavy = family.light, family.heavy
    assert family.names == (light, heavy) and light != heavy
    schedule = Schedule.parse("L2 H4 L2").bind(light, heavy)
    plan = make_plan(3, 8, 0)
    samples = denoise(family.models, schedule, plan, mask_id=family.mask_id, heavy=heavy)
    assert samples.tokens.shape == (3, 8) and (samples.tokens != family.mask_id).all()
    assert (samples.tokens < family.vocab_size).all()
    assert samples.cost.calls[light] > 0 and samples.cost.calls[heavy] > 0
    assert samples.cost.flops and samples.cost.flops_saved and 0 < samples.cost.flops_saved < 1
    assert samples.cost.blocks_saved is not None and samples.cost.blocks_saved > 0
    again = denoise(family.models, schedule, plan, mask_id=family.mask_id, heavy=heavy, batch_size=1)
    assert (again.tokens == samples.tokens).mean() > 0.9  # other shapes, same draws but for rounding
    both = sample(family, "sandwich:50%", n=2, steps=4, length=8)
    assert set(both.cost.calls) == {light, heavy}


class Widths(TorchDispatchMode):
    """The most rows of logits that any one tensor held (a matrix of the network's own width is no such thing)."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.vocab_size, self.width, self.most = vocab_size, width, 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-1] == self.vocab_size:
                self.most = max(self.most, 0 if value.shape[-2] == self.width else value.numel() // self.vocab_size)
        return out


@pytest.mark.parametrize("kind", ["mdlm", "sedd", "smdm"])
def test_sampling_never_makes_the_full_head(tmp_path: Path, kind: str) -> None:
    sources, options = two_of(kind, tmp_path)
    family = convert.load(sources, **options)
    schedule = Schedule.parse("L4 H8 L4").bind(family.light, family.heavy)
    with Widths(family.vocab_size, 16) as seen:
        denoise(family.models, schedule, make_plan(4, 8, 0), mask_id=family.mask_id, batch_size=4)
    assert 0 < seen.most < 4 * 8
    with Widths(family.vocab_size, 16) as seen:
        family[family.light].logits(torch.full((4, 8), family.mask_id), torch.ones(4))
    assert seen.most == 4 * 8


def test_sources_with_commas_and_names(tmp_path: Path) -> None:
    sources, _ = two_of("mdlm", tmp_path)
    text = ",".join(map(str, sources))
    assert convert.recognise(text) == "mdlm"
    assert convert.load(text).names == ("1b", "3b")
    assert convert.load(sources, names=["small", "large"]).names == ("small", "large")
    assert convert.load([sources[0], sources[0]]).names == ("1b", "1b-2")
    again = convert.load([*sources, sources[0], sources[0]], names=["a", "a-2", "a", "a"])
    assert sorted(again.names) == ["a", "a-2", "a-3", "a-4"]  # none takes the place of another
    short = mdlm_write(tmp_path / "short", mdlm_state(1), CONFIG | {"n_blocks": 1, "model_length": 6})
    assert convert.load([*sources, short]).length == convert.describe([*sources, short])["length"] == 6
    for names in ("ab", [1, 2]):
        with pytest.raises(UserError, match="names must be a list of text"):
            convert.load(sources, names=names)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="2 models to name"):
        convert.load(sources, names=["one"])
    with pytest.raises(UserError, match="not an option"):
        convert.load(sources, colour="red")


@pytest.mark.parametrize("kind", ["sedd", "smdm", "llada"])
def test_commands_run_on_what_was_converted(tmp_path: Path, kind: str) -> None:
    sources, options = two_of(kind, tmp_path)
    folder = str(convert.convert(sources, tmp_path / "out", **options))
    out = tmp_path / "out.json"
    assert main(["sample", "--family", folder, "--length", "8", "--json", str(out)]) == 0
    assert len(json.loads(out.read_text())["tokens"][0]) == 8


def test_smdm_in_a_store(tmp_path: Path) -> None:
    sources, options = two_of("smdm", tmp_path)
    family, again, other = (convert.load(sources, **options | {"heads": heads}) for heads in (2, 2, 4))
    assert time_call(family, family.heavy, 8, 8, 2, measure=False) is None  # its time is not known, but could be
    keys = [[model_key(one, name) for name in one.names] for one in (family, again, other)]
    assert keys[0] == keys[1] and len({*keys[0], *keys[2]}) == 4  # the number of heads is in no tensor


def test_number_types_after_loading(tmp_path: Path) -> None:
    sources, options = two_of("smdm", tmp_path)
    family = convert.load(sources, **options).to("cpu", "bfloat16")
    model: Any = family[family.heavy]
    assert model.h[0].qkv.dtype == torch.bfloat16 and model.wte.dtype == torch.float32
    llada, _ = two_of("llada", tmp_path / "l")
    with pytest.raises(UserError, match="1b keeps the number type that it was loaded in"):
        convert.load(llada).to("cpu", "bfloat16")
    assert convert.load(llada).to("cpu").device.type == "cpu"


@pytest.mark.parametrize("kind", ["mdlm", "sedd", "smdm", "llada"])
def test_a_converted_folder_is_the_same_family(tmp_path: Path, kind: str) -> None:
    sources, options = two_of(kind, tmp_path)
    folder = convert.convert(sources, tmp_path / "out", license="mit", **options)
    card = (folder / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: relaylm\n") and 'license: "mit"' in card
    before = convert.load(sources, **options)
    after = Family.load(folder) if kind in ("mdlm", "sedd") else convert.load(folder)
    assert after.names == before.names and after.length == before.length
    tokens, t = torch.full((1, 8), before.mask_id), torch.full((1,), 0.5)
    for name in before.names:
        torch.testing.assert_close(after[name].logits(tokens, t), before[name].logits(tokens, t), rtol=1e-5, atol=1e-5)
    if kind == "smdm":  # what the folder remembers, and what the user says now
        assert after.length == 8 and convert.load(folder, length=6).length == 6
    with pytest.raises(UserError, match="not empty"):
        convert.convert(sources, tmp_path / "out", **options)
    convert.convert(sources, tmp_path / "out", overwrite=True, **options)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError):
        convert.convert(sources, tmp_path / "mine", overwrite=True, **options)
    assert (tmp_path / "mine" / "thesis.txt").exists()
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]  # nothing half-written is left


def test_describe_reads_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from relaylm.convert import tensors

    sources, options = two_of("smdm", tmp_path)
    about = convert.describe(sources, **options)
    assert about["format"] == "smdm" and about["vocab_size"] == 13 and about["mask_id"] == 12 and about["length"] == 8
    assert [entry["depth"] for entry in about["models"].values()] == [2, 4]
    assert about["bytes"] == sum(4 * value.numel() for blocks in (2, 4) for value in smdm_state(blocks).values())
    assert about["tokenizer"] is None and "tokenizer" in about["missing"][0]
    json.dumps(about)
    read = tensors.Lazy.__init__

    def unreadable(self: Any, shape: Any, dtype: Any, read_: Any) -> None:
        def refuse() -> None:
            raise AssertionError("weights were read")

        read(self, shape, dtype, refuse)

    monkeypatch.setattr(tensors.Lazy, "__init__", unreadable)
    assert convert.describe(sources, **options) == about


@pytest.mark.parametrize(
    "option",
    [{"length": "8"}, {"length": 0}, {"heads": -1}, {"heads": 2.0}, {"mask_id": -1}, {"block_length": "4"},
     {"time_conditioning": "no"}, {"ema": 0}, {"tokenizer": 3}],
)  # fmt: skip
def test_options_of_the_wrong_kind_are_refused(tmp_path: Path, option: dict[str, Any]) -> None:
    sources, _ = two_of("mdlm", tmp_path)
    for ask in (convert.load, convert.describe, lambda s, **o: convert.convert(s, tmp_path / "out", **o)):
        with pytest.raises(UserError, match=f"{next(iter(option))} must be"):
            ask(sources[0], **option)
    (tmp_path / "1b" / "convert.json").write_text(json.dumps({"options": {"length": "8"}}))
    with pytest.raises(UserError, match="length must be"):
        convert.load(sources[0])


@pytest.mark.parametrize(
    ("card", "licence"),
    [
        ("---\ntags:\n- x\nlicense: 'apache-2.0'\n---\n# Text\nlicense: mit\n", "apache-2.0"),
        ("---\ntags:\n- x\n---\n# Text\nlicense: mit\n", "unknown"),
        ("---\nlicense:\n- mit\n---\n", "unknown"),
        ("license: mit\n", "unknown"),
    ],
)
def test_the_licence_is_that_of_the_cards_head(tmp_path: Path, card: str, licence: str) -> None:
    sources, _ = two_of("mdlm", tmp_path)
    (tmp_path / "1b" / "README.md").write_text(card)
    family = Family.load(convert.convert(sources[0], tmp_path / "out"))
    assert family.meta["license"] == licence
    assert f'license: "{licence}"' in (tmp_path / "out" / "README.md").read_text()


def test_a_revision_is_for_the_hub(tmp_path: Path) -> None:
    sources, _ = two_of("mdlm", tmp_path)
    for ask in (convert.load, convert.describe, Family.load, lambda s, **o: convert.convert(s, tmp_path / "o", **o)):
        with pytest.raises(UserError, match="a revision is for a family on the Hugging Face hub"):
            ask(sources[0], revision="main")


def test_what_could_not_be_loaded_together_is_not_copied(tmp_path: Path) -> None:
    sources, _ = two_of("llada", tmp_path)
    for ask in (convert.load, convert.describe, lambda s, **o: convert.convert(s, tmp_path / "out", **o)):
        with pytest.raises(UserError, match="256 tokens, but the models' vocabulary is 53"):
            ask(sources, tokenizer="bytes")
        with pytest.raises(UserError, match="mask 5 is an ordinary token"):
            ask(sources, tokenizer="text8", mask_id=5)
    assert not (tmp_path / "out").exists()


def test_sources_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    for odd in (None, 3, b"mdlm", [], ["", 3]):
        assert convert.recognise(odd) is None  # type: ignore[arg-type]
        for ask in (convert.load, convert.describe, lambda s: convert.convert(s, tmp_path / "out")):
            with pytest.raises(UserError, match=r"a checkpoint is a file|no file, folder or hub id"):
                ask(odd)  # type: ignore[arg-type]


def test_what_is_not_a_checkpoint(tmp_path: Path) -> None:
    assert convert.recognise("wiki-char") is None
    assert convert.recognise(tmp_path) is None
    for odd in (tmp_path / "absent", "./nowhere", "a/b/c", "x" * 5000, "a\0b", "~nobody-here/x/y", ""):
        assert convert.recognise(odd) is None
    assert convert.recognise("owner/name", hub=False) is None  # not fetched
    (tmp_path / "notes.txt").write_text("x")
    assert convert.recognise(tmp_path / "notes.txt") is None
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}))
    assert convert.recognise(tmp_path) is None
    with pytest.raises(UserError, match="no checkpoint that relaylm knows"):
        convert.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="not valid JSON"):
        convert.load(tmp_path)
    (tmp_path / "x.safetensors").write_bytes(b"\x10" + b"\0" * 30)
    with pytest.raises(UserError, match="not a whole safetensors"):
        convert.load(tmp_path / "x.safetensors")


def test_hub_ids_go_through_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    mdlm_write(tmp_path / "snapshot", mdlm_state(), CONFIG)
    (tmp_path / "snapshot" / "README.md").write_text("---\nlicense: apache-2.0\n---\n")
    calls: list[dict[str, Any]] = []

    def download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        if "absent" in name:
            raise OSError("cannot find it\nsecond line")
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert convert.recognise("kuleshov-group/mdlm-owt") == "mdlm"
    family = convert.load("kuleshov-group/mdlm-owt", revision="abc")
    assert family.names == ("mdlm-owt",) and family.meta["sources"] == ["kuleshov-group/mdlm-owt"]
    assert calls[-1]["revision"] == "abc"
    for call in calls:
        assert all(
            pattern.endswith((".safetensors", ".json", ".txt", ".jinja", ".md")) for pattern in call["allow_patterns"]
        )
        assert "local_files_only" not in call and "cache_dir" not in call  # huggingface_hub's own settings decide
    folder = convert.convert("kuleshov-group/mdlm-owt", tmp_path / "out")
    assert Family.load(folder).meta["license"] == "apache-2.0"
    with pytest.raises(UserError, match="OSError: cannot find it") as error:
        convert.load("somebody/absent")
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="434 GB"):
        convert.load("nieshen/SMDM")
    with pytest.raises(UserError, match="only safetensors"):
        convert.load("somebody/thing/model.ckpt")
    (tmp_path / "snapshot" / "mdm_safetensors").mkdir()
    file = tmp_path / "snapshot" / "mdm_safetensors" / "mdm-6M.safetensors"
    safetensors.torch.save_file(smdm_state(), file)
    family = convert.load("nieshen/SMDM/mdm_safetensors/mdm-6M.safetensors", heads=SMDM_HEADS)
    assert family.names == ("mdm-6M",) and "mdm_safetensors/mdm-6M.safetensors" in calls[-1]["allow_patterns"]
    with pytest.raises(UserError, match="has no mdm_safetensors/other"):
        convert.load("nieshen/SMDM/mdm_safetensors/other.safetensors")


def test_a_tokenizer_beside_the_weights_is_used(tmp_path: Path) -> None:
    import tokenizers

    source = mdlm_write(tmp_path / "m", mdlm_state(), CONFIG)
    symbols = {symbol: i for i, symbol in enumerate("abcdefghi ")}  # ten; the mask is the eleventh
    reader = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=symbols, merges=[]))
    reader.decoder = tokenizers.decoders.Fuse()
    reader.save(str(source / "tokenizer.json"))
    family = convert.load(source)
    assert family.tokenizer is not None and not family.meta["missing"]
    family.meta["eos_ids"] = [9]
    assert convert.texts(family, np.array([[0, 1, 9, 2, 3], [1, 1, 1, 1, 1]]), start=1) == ["b", "bbbb"]
    (source / "tokenizer.json").rename(tmp_path / "tokenizer.json")
    assert convert.load(source).tokenizer is None
    assert convert.load(source, tokenizer=tmp_path).tokenizer is not None
    folder = convert.convert(source, tmp_path / "out", tokenizer=tmp_path / "tokenizer.json")
    assert Family.load(folder).tokenizer is not None

"""The adapter over transformers, against real tiny models of the installed version and against numpy."""

from __future__ import annotations

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from helpers import tiny_json
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

transformers = pytest.importorskip("transformers")

from relaylm import Family, convert, sample  # noqa: E402
from relaylm.cli.main import main  # noqa: E402
from relaylm.convert import formats, hf  # noqa: E402
from relaylm.convert.tensors import count  # noqa: E402
from relaylm.errors import UserError  # noqa: E402

V, D, HEADS, BLOCKS, F = 53, 16, 4, 2, 24
TOKENS = torch.tensor([[3, 50, 0, 50, 50, 7, 50, 1, 9, 50], [50] * 10])
T = torch.ones(2)
POSITIONS = torch.tensor([[1, 3, 6], [9, 0, 2]])


@pytest.fixture(autouse=True)
def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()


def rand(generator: torch.Generator, *shape: int, scale: float = 0.3) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * scale


def llada(folder: Path, blocks: int = BLOCKS, kv: int = HEADS, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A LLaDA folder with the published names, written out by hand."""
    g = torch.Generator().manual_seed(0)
    head = D // HEADS
    state = {"model.transformer.wte.weight": rand(g, V, D, scale=1.0), "model.transformer.ln_f.weight": 1 + rand(g, D)}
    state["model.transformer.ff_out.weight"] = rand(g, V, D)
    for i in range(blocks):
        p = f"model.transformer.blocks.{i}."
        state |= {p + "q_proj.weight": rand(g, D, D), p + "k_proj.weight": rand(g, kv * head, D)}
        state |= {p + "v_proj.weight": rand(g, kv * head, D), p + "attn_out.weight": rand(g, D, D)}
        state |= {
            p + "ff_proj.weight": rand(g, F, D),
            p + "up_proj.weight": rand(g, F, D),
            p + "ff_out.weight": rand(g, D, F),
        }
        state |= {p + "attn_norm.weight": 1 + rand(g, D), p + "ff_norm.weight": 1 + rand(g, D)}
    config = {
        "model_type": "llada",
        "architectures": ["LLaDAModelLM"],
        "auto_map": {"AutoModel": "m.LLaDAModelLM"},
        "activation_type": "silu",
        "alibi": False,
        "attention_layer_norm": False,
        "block_type": "llama",
        "d_model": D,
        "embedding_size": V,
        "vocab_size": V,
        "include_bias": False,
        "include_qkv_bias": False,
        "layer_norm_type": "rms",
        "mask_token_id": 50,
        "eos_token_id": 1,
        "max_sequence_length": 32,
        "mlp_hidden_size": F,
        "mlp_ratio": 2,
        "n_heads": HEADS,
        "n_kv_heads": kv,
        "n_layers": blocks,
        "rms_norm_eps": 1e-5,
        "rope": True,
        "rope_theta": 500000.0,
        "scale_logits": False,
        "weight_tying": False,
    }
    return write(folder, state, config | changes), state


def dream(folder: Path, **changes: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A Dream folder: Qwen2's names."""
    return qwen(folder, "Dream", biases=True, **changes)


def qwen(
    folder: Path,
    model_type: str,
    biases: bool = False,
    head: int = 6,
    tied: bool = False,
    seed: int = 0,
    blocks: int = BLOCKS,
    **more: Any,
) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder with Qwen2's names (biases) or Qwen3's (norms of queries and keys), written out by hand."""
    g = torch.Generator().manual_seed(seed)
    head = D // HEADS if biases else head
    sizes = {"q_proj": HEADS * head, "k_proj": 2 * head, "v_proj": 2 * head}
    state = {"model.embed_tokens.weight": rand(g, V, D, scale=1.0), "model.norm.weight": 1 + rand(g, D)}
    state |= {} if tied else {"lm_head.weight": rand(g, V, D)}
    for i in range(blocks):
        p = f"model.layers.{i}."
        for name, rows in sizes.items():
            state[p + f"self_attn.{name}.weight"] = rand(g, rows, D)
            state |= {p + f"self_attn.{name}.bias": rand(g, rows)} if biases else {}
        state |= {} if biases else {p + f"self_attn.{x}_norm.weight": 1 + rand(g, head) for x in "qk"}
        state |= {p + "self_attn.o_proj.weight": rand(g, D, HEADS * head), p + "mlp.gate_proj.weight": rand(g, F, D)}
        state |= {p + "mlp.up_proj.weight": rand(g, F, D), p + "mlp.down_proj.weight": rand(g, D, F)}
        state |= {p + "input_layernorm.weight": 1 + rand(g, D), p + "post_attention_layernorm.weight": 1 + rand(g, D)}
    config = {
        "model_type": model_type,
        "auto_map": {"AutoModel": "modeling.Model"},
        "attention_bias": False,
        "hidden_size": D,
        "intermediate_size": F,
        "num_hidden_layers": blocks,
        "num_attention_heads": HEADS,
        "num_key_value_heads": 2,
        "vocab_size": V,
        "max_position_embeddings": 34,
        "mask_token_id": 50,
        "eos_token_id": 2,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "tie_word_embeddings": tied,
        "use_sliding_window": False,
    }
    return write(folder, state, config | ({} if biases else {"head_dim": head}) | more), state


def write(folder: Path, state: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(state, folder / "model.safetensors", {"format": "pt"})
    return folder


def as_llama(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    names = {
        "q_proj": "self_attn.q_proj",
        "k_proj": "self_attn.k_proj",
        "v_proj": "self_attn.v_proj",
        "attn_out": "self_attn.o_proj",
        "ff_proj": "mlp.gate_proj",
        "up_proj": "mlp.up_proj",
        "ff_out": "mlp.down_proj",
        "attn_norm": "input_layernorm",
        "ff_norm": "post_attention_layernorm",
    }
    top = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
    out = {}
    for name, value in state.items():
        parts = name.split(".")
        if parts[2] == "blocks":
            out[f"model.layers.{parts[3]}.{names[parts[4]]}.{parts[5]}"] = value
        else:
            out[f"{top[parts[2]]}.{parts[3]}"] = value
    return out


def transcription(
    state: dict[str, torch.Tensor], tokens: np.ndarray, theta: float, eps: float, block: int = 0
) -> np.ndarray:
    """A LLaMA without its causal mask, for one row: float64, loops over heads, grouped keys and values; Qwen3's norms
    of queries and keys where there are any. With a block, a position sees its own block and the blocks before it."""
    w = {name: value.double().numpy() for name, value in state.items()}
    head = len(w["model.layers.0.self_attn.q_proj.weight"]) // HEADS

    def rms(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight

    def rotary(x: np.ndarray) -> np.ndarray:
        angle = np.arange(len(x))[:, None] * theta ** (-2 * np.arange(head // 2) / head)
        a, b = x[:, : head // 2], x[:, head // 2 :]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], axis=1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(sum(name.endswith("q_proj.weight") for name in w)):
        p = f"model.layers.{i}."
        h = rms(x, w[p + "input_layernorm.weight"])
        q, k, v = (
            h @ w[p + f"self_attn.{n}_proj.weight"].T + w.get(p + f"self_attn.{n}_proj.bias", 0.0) for n in "qkv"
        )
        groups = HEADS // (k.shape[1] // head)
        unseen = np.arange(len(x))[None, :] // block > np.arange(len(x))[:, None] // block if block else False
        mixed = []
        for j in range(HEADS):
            own, shared = slice(j * head, (j + 1) * head), slice(j // groups * head, (j // groups + 1) * head)
            one, other = q[:, own], k[:, shared]
            if p + "self_attn.q_norm.weight" in w:
                one, other = rms(one, w[p + "self_attn.q_norm.weight"]), rms(other, w[p + "self_attn.k_norm.weight"])
            scores = np.where(unseen, -np.inf, rotary(one) @ rotary(other).T / math.sqrt(head))
            weights = np.exp(scores - scores.max(1, keepdims=True))
            mixed.append(weights / weights.sum(1, keepdims=True) @ v[:, shared])
        x = x + np.concatenate(mixed, 1) @ w[p + "self_attn.o_proj.weight"].T
        y = rms(x, w[p + "post_attention_layernorm.weight"])
        gate = y @ w[p + "mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ w[p + "mlp.up_proj.weight"].T)) @ w[p + "mlp.down_proj.weight"].T
    return rms(x, w["model.norm.weight"]) @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def same_at_positions(model: Any) -> torch.Tensor:
    full = model.logits(TOKENS, T)
    at = model.logits_at(TOKENS, T, POSITIONS)
    torch.testing.assert_close(at, full.gather(1, POSITIONS[..., None].expand(-1, -1, V)), rtol=1e-5, atol=1e-5)
    return full


def sees_everything(model: Any) -> None:
    """Every position's logits move with every token."""
    base = model.logits(TOKENS[:1], T[:1])
    for position in (0, 5, 9):
        other = TOKENS[:1].clone()
        other[0, position] = 11
        moved = (model.logits(other, T[:1]) - base).abs().amax(dim=-1)[0]
        assert (moved > 1e-6).all(), position


@pytest.mark.parametrize("kv", [HEADS, 2])
def test_llada(tmp_path: Path, kv: int) -> None:
    folder, state = llada(tmp_path / "llada", kv=kv)
    assert convert.recognise(folder) == "llada"
    family = convert.load(folder)
    assert (family.vocab_size, family.mask_id, family.length, family.meta["eos_ids"]) == (V, 50, 32, [1])
    full = same_at_positions(family["llada"])
    expected = np.stack([transcription(as_llama(state), row.numpy(), 500_000.0, 1e-5) for row in TOKENS])
    torch.testing.assert_close(full, torch.from_numpy(expected).float(), rtol=1e-4, atol=1e-4)
    sees_everything(family["llada"])


def test_dream_answers_one_position_early(tmp_path: Path) -> None:
    folder, state = dream(tmp_path / "dream")
    assert convert.recognise(folder) == "dream"
    model = convert.load(folder)["dream"]
    full = same_at_positions(model)
    raw = np.stack([transcription(state, row.numpy(), 1_000_000.0, 1e-6) for row in TOKENS])
    torch.testing.assert_close(full, torch.from_numpy(shifted(raw)).float(), rtol=1e-4, atol=1e-4)
    sees_everything(model)


def shifted(logits_BLV: np.ndarray) -> np.ndarray:
    return np.concatenate([logits_BLV[:, :1], logits_BLV[:, :-1]], axis=1)


@pytest.mark.parametrize(
    ("model_type", "format", "options", "block", "early"),
    [
        ("sdar", "sdar", {"block_size": 5}, 5, False),
        ("sdar", "sdar", {"head": 4}, 4, False),  # the published length, where nothing says
        ("Fast_dLLM_Qwen", "fast-dllm", {"biases": True, "bd_size": 5}, 5, True),
        ("a2d-qwen3", "a2d", {"tied": True}, 0, False),
        ("a2d-qwen2", "a2d", {"biases": True}, 0, False),
    ],
)
def test_qwen_and_its_blocks(
    tmp_path: Path, model_type: str, format: str, options: dict[str, Any], block: int, early: bool
) -> None:
    folder, state = qwen(tmp_path / "model", model_type, **options)
    assert convert.recognise(folder) == format
    family = convert.load(folder)
    assert family.block_length == block and family.mask_id == 50 and family.length == (34 - 34 % block if block else 34)
    assert any("length of its blocks" in note for note in family.meta["missing"]) == ("head" in options)
    model: Any = family["model"]
    raw = np.stack([transcription(state, row.numpy(), 1e6, 1e-6, block) for row in TOKENS])
    expected = torch.from_numpy(shifted(raw) if early else raw).float()
    torch.testing.assert_close(same_at_positions(model), expected, rtol=1e-4, atol=1e-4)
    about = convert.describe(folder)["models"]["model"]
    assert about["parameters"] == sum(value.numel() for value in state.values()) and about["block_length"] == block
    if block:  # the same with finished blocks as keys and values
        past, width = None, TOKENS.shape[1]
        for start in range(0, width - block + 1, block):
            here = TOKENS[:, start : start + block]
            found = model.head(model.hidden_at(here, T, None, past))
            torch.testing.assert_close(found, expected[:, start : start + block], rtol=1e-4, atol=1e-4)
            past = model.extend(here, past)
        samples = sample(family, "heavy", n=3, steps=2, given=np.array([1, 2, 3, 4, 5, 6, -1, -1, -1, -1, -1, -1]))
        assert samples.law == f"blocks:{block} uniform:2" and (samples.tokens != 50).all()


def test_the_length_of_blocks(tmp_path: Path) -> None:
    for name, given, block in (("SDAR-1.7B-Chat-b8", None, 8), ("SDAR-1.7B-Chat-b8", 2, 2), ("SDAR-8B-Chat", None, 4)):
        folder, _ = qwen(tmp_path / name, "sdar")
        assert convert.load(folder, block_length=given).block_length == block
    folder, _ = qwen(tmp_path / "Qwen3-0.6B-diffusion-bd3lm-v0.1", "a2d-qwen3", tied=True)
    with pytest.raises(UserError, match="give block_length"):
        convert.load(folder)
    assert convert.load(folder, block_length=4).block_length == 4
    with pytest.raises(UserError, match="share the length of their blocks"):
        convert.load([tmp_path / "SDAR-1.7B-Chat-b8", tmp_path / "SDAR-8B-Chat"])


def test_two_sizes_take_turns_in_blocks_and_survive_conversion(tmp_path: Path) -> None:
    folders = [qwen(tmp_path / f"SDAR-{name}-b2", "sdar", seed=seed)[0] for seed, name in enumerate(("small", "large"))]
    convert.convert(folders, tmp_path / "both", names=["small", "large"])
    family = Family.load(tmp_path / "both")
    assert family.block_length == 2
    samples = sample(family, "small:1 large:1", n=2, length=7, batch_size=2)
    assert samples.tokens.shape == (2, 7) and all(samples.cost.calls.values())


@pytest.mark.parametrize("one", [one for one in formats.REFUSED if one.types], ids=lambda one: one.types[0])
def test_what_is_refused_says_why(tmp_path: Path, one: formats.Refused) -> None:
    for model_type in one.types:
        folder = write(tmp_path / model_type, {"x": torch.zeros(1)}, {"model_type": model_type})
        for call in (convert.recognise, convert.load, convert.describe):
            with pytest.raises(UserError, match=one.why):
                call(folder)
    folder, _ = llada(tmp_path / "moe", num_experts=64)
    with pytest.raises(UserError, match="experts"):
        convert.load(folder)


def test_the_list_of_formats_is_what_is_recognised() -> None:
    named = {one.name for one in formats.LOADED}
    assert named == {"mdlm", "lightning", "bd3lm", "sedd", "smdm", *hf.FORMATS}


def test_the_explicit_mask_gives_the_same(tmp_path: Path) -> None:
    """The way for versions of transformers that have no switch for bidirectional attention."""
    folder, _ = llada(tmp_path / "llada")
    model: Any = convert.load(folder)["llada"]
    without = model.logits(TOKENS, T)
    model._explicit_mask = True
    torch.testing.assert_close(model.logits(TOKENS, T), without, rtol=1e-5, atol=1e-5)
    for module in model.trunk.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = True
    model.trunk.config.is_causal = True
    torch.testing.assert_close(model.logits(TOKENS, T), without, rtol=1e-5, atol=1e-5)
    model._explicit_mask = False
    assert not model._sees_ahead()  # and the check would notice


SIZES = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": BLOCKS, "num_attention_heads": HEADS}
SIZES |= {"intermediate_size": F, "max_position_embeddings": 32}
MASKED = {
    "Bert": SIZES,
    "ModernBert": {
        **{**SIZES, "num_hidden_layers": 4, "local_attention": 4, "global_attn_every_n_layers": 2},
        **{"pad_token_id": 0, "eos_token_id": 2, "bos_token_id": 3, "cls_token_id": 3, "sep_token_id": 2},
    },
    "Roberta": {**SIZES, "max_position_embeddings": 34, "pad_token_id": 1},
    **{
        kind: {**SIZES, "max_position_embeddings": 34, "pad_token_id": 1}
        for kind in ("MPNet", "Data2VecText", "IBert", "RobertaPreLayerNorm", "XLMRobertaXL")
    },
    "Xmod": {**SIZES, "languages": ["en_XX", "de_DE"], "default_language": None},
    "DistilBert": {
        **{"vocab_size": V, "dim": D, "n_layers": BLOCKS, "n_heads": HEADS},
        **{"hidden_dim": F, "max_position_embeddings": 32},
    },
}


def masked_lm(folder: Path, kind: str = "Bert") -> Any:
    """A masked LM of transformers with random weights, saved; the model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**MASKED[kind])
    model = getattr(transformers, f"{kind}ForMaskedLM")(config)
    with torch.no_grad():
        for value in model.parameters():
            value.add_(torch.randn_like(value) * 0.3)
    model.eval().save_pretrained(folder)
    return model


@pytest.mark.parametrize("kind", ["Bert", "ModernBert", "Roberta", "DistilBert"])
def test_masked_language_models(tmp_path: Path, kind: str) -> None:
    original = masked_lm(tmp_path / "model", kind)
    assert convert.recognise(tmp_path / "model") == "masked-lm"
    with pytest.raises(UserError, match="mask"):
        convert.load(tmp_path / "model")
    family = convert.load(tmp_path / "model", mask_id=50)
    assert family.length == 32
    full = same_at_positions(family["model"])
    with torch.no_grad():
        torch.testing.assert_close(full, original(input_ids=TOKENS).logits, rtol=1e-4, atol=1e-4)
    about = convert.describe(tmp_path / "model", mask_id=50)
    assert about["models"]["model"]["parameters"] == sum(value.numel() for value in original.parameters())


@pytest.mark.parametrize("kind", ["MPNet", "Data2VecText", "IBert", "RobertaPreLayerNorm", "XLMRobertaXL"])
def test_positions_that_stand_for_padding_are_no_length(tmp_path: Path, kind: str) -> None:
    """With 34 positions, from 2 up, a row has 32."""
    original = masked_lm(tmp_path / "model", kind)
    family = convert.load(tmp_path / "model", mask_id=50)
    assert family.length == 32 and convert.load(tmp_path / "model", mask_id=50, length=9).length == 9
    tokens = torch.arange(32)[None] + 5
    with torch.no_grad():
        expected = original(input_ids=tokens).logits
    torch.testing.assert_close(family["model"].logits(tokens, T[:1]), expected, rtol=1e-4, atol=1e-4)
    for load in (convert.load, convert.describe):
        with pytest.raises(UserError, match="positions for a length of 32, not of 33"):
            load(tmp_path / "model", mask_id=50, length=33)


def test_masks_of_no_token_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    masked_lm(tmp_path / "m")
    llada(tmp_path / "l", mask_token_id=V)
    for folder, options in ((tmp_path / "m", {"mask_id": V}), (tmp_path / "l", {})):
        for ask in (convert.load, convert.describe, partial(convert.convert, folder=tmp_path / "out")):
            with pytest.raises(UserError, match=rf"mask_id must lie in 0\.\.{V - 1}, not {V}"):
                ask(folder, **options)
    assert not (tmp_path / "out").exists()
    folder, _ = llada(tmp_path / "n", mask_token_id=None)  # null is as good as nothing
    backend = Backend(WordLevel({"x": 0, "y": 1}, unk_token="x"))
    backend.add_special_tokens(["[MASK]", "<other>"])
    (folder / "tokenizer.json").write_text(backend.to_str())
    assert convert.load(folder).mask_id == 2 and convert.load(folder, mask_id=9).mask_id == 9
    other = convert.load(folder, mask_id=3)  # of several special tokens the model's own
    assert other.tokenizer is not None and other.mask_id == other.tokenizer.mask_id == 3
    with pytest.raises(UserError, match="mask 1 is an ordinary token"):
        convert.load(folder, mask_id=1)


def test_embeddings_that_are_padded_count(tmp_path: Path) -> None:
    folder, _ = llada(tmp_path / "m", vocab_size=V - 2)  # and embedding_size V, as OLMo rounds up
    assert convert.load(folder).vocab_size == V


def test_a_head_that_does_more_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    masked_lm(tmp_path / "m")
    monkeypatch.setattr("relaylm.convert.adapter._head_parts", lambda model: (model.cls.predictions.decoder,))
    with pytest.raises(UserError, match="BertForMaskedLM does more between trunk and logits"):
        convert.load(tmp_path / "m", mask_id=50)


def test_a_model_that_wants_more_than_tokens_is_refused(tmp_path: Path) -> None:
    masked_lm(tmp_path / "m", "Xmod")
    with pytest.raises(UserError, match="XmodForMaskedLM cannot be run on tokens alone"):
        convert.load(tmp_path / "m", mask_id=50)


@pytest.mark.parametrize("kind", ["llada", "dream", "a2d-qwen3", "Bert", "Roberta", "DistilBert", "ModernBert"])
def test_cost_is_that_of_the_products(tmp_path: Path, kind: str) -> None:
    """PyTorch counts the operations. Qwen3's heads together are wider here than its trunk."""
    make: Any = {"llada": partial(llada, kv=2), "dream": dream}.get(kind)
    if kind == "a2d-qwen3":
        make = partial(qwen, model_type=kind, head=10)
    (make or partial(masked_lm, kind=kind))(tmp_path / "m")
    model: Any = convert.load(tmp_path / "m", mask_id=50)["m"]
    for ask, k in ((lambda: model.logits(TOKENS, T), None), (lambda: model.logits_at(TOKENS, T, POSITIONS), 3)):
        with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
            ask()
        assert counted.get_total_flops() == 2 * model.flops(10, k)


def test_cost_after_finished_blocks_is_that_of_the_products(tmp_path: Path) -> None:
    qwen(tmp_path / "m", "sdar", block_size=2)
    model: Any = convert.load(tmp_path / "m")["m"]
    past = model.extend(TOKENS[:, :8])
    with FlopCounterMode(display=False) as counted, sdpa_kernel(SDPBackend.MATH):
        model.head(model.hidden_at(TOKENS[:, 8:], T, POSITIONS[:, 1:2] * 0, past))
    assert counted.get_total_flops() == 2 * model.flops(2, 1, past=8)


class Widths(TorchDispatchMode):
    """Every result that has a row of the vocabulary: how many such rows it has."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(value, torch.Tensor) and value.dim() >= 2 and value.shape[-1] == V and value.shape[-2] != D:
                self.rows.append(value.numel() // V)
        return out


@pytest.mark.parametrize("make", [masked_lm, partial(masked_lm, kind="ModernBert"), llada, dream])
def test_the_full_head_is_never_made(tmp_path: Path, make: Any) -> None:
    make(tmp_path / "model")
    model = convert.load(tmp_path / "model", mask_id=50)["model"]
    with Widths() as seen:
        model.logits_at(TOKENS, T, POSITIONS[:, :1])
    assert seen.rows and max(seen.rows) == 2
    with Widths() as seen:
        model.logits(TOKENS, T)
    assert max(seen.rows) == TOKENS.numel()  # the test can see a full head


@pytest.mark.parametrize("make", [llada, dream])
def test_broken_folders_are_refused_by_name(tmp_path: Path, make: Any) -> None:
    folder, state = make(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    names = [name for name in state if "1.up_proj" in name or "mlp.up_proj" in name or "wte" in name or "embed" in name]
    for name in names:
        without = {key: value for key, value in state.items() if key != name}
        broken = [without, without | {name + "_old": state[name]}, state | {name: state[name].T.contiguous()}]
        for wrong in broken:
            with pytest.raises(UserError, match="tensor " + name.replace(".", r"\.")):
                convert.load(write(folder, wrong, config))


def test_broken_masked_lm_is_refused_by_name(tmp_path: Path) -> None:
    masked_lm(tmp_path / "m")
    path = tmp_path / "m" / "model.safetensors"
    state = safetensors.torch.load_file(path)
    name = "bert.encoder.layer.1.intermediate.dense.weight"
    for wrong in (
        {key: value for key, value in state.items() if key != name},
        state | {name: state[name].T.contiguous()},
    ):
        safetensors.torch.save_file(wrong, path, {"format": "pt"})
        with pytest.raises(UserError, match=name.replace(".", r"\.")):
            convert.load(tmp_path / "m", mask_id=50)
    for odd, message in (
        (state[name] * math.nan, "not finite"),
        (state[name].to(torch.int8), name + " holds torch.int8, expected floating"),
    ):
        safetensors.torch.save_file(state | {name: odd}, path, {"format": "pt"})
        with pytest.raises(UserError, match=message):
            convert.load(tmp_path / "m", mask_id=50)
    safetensors.torch.save_file(state | {"bert.embeddings.position_ids": torch.arange(32)}, path, {"format": "pt"})
    assert convert.load(tmp_path / "m", mask_id=50).length == 32  # older versions stored a buffer
    path.unlink()
    torch.save(state, tmp_path / "m" / "pytorch_model.bin")
    with pytest.raises(UserError, match="safetensors"):
        convert.load(tmp_path / "m", mask_id=50)


def test_configurations_beyond_the_published_ones_are_refused(tmp_path: Path) -> None:
    odd = {"clip_qkv": 1.0}, {"rope_theta": "x"}, {"rms_norm_eps": None}
    for change in ({"alibi": True}, {"block_type": "sequential"}, {"attention_layer_norm": True}, *odd):
        folder, _ = llada(tmp_path / "m", **change)
        with pytest.raises(UserError, match=next(iter(change))):
            convert.load(folder)
    folder, _ = llada(tmp_path / "r", mlp_hidden_size=None)  # then it is the ratio, 2, of the width
    with pytest.raises(UserError, match=rf"expected \({2 * D}, {D}\)"):
        convert.load(folder)
    for change in ({"use_sliding_window": True}, {"hidden_act": "gelu"}, {"rms_norm_eps": -1}, {"rope_theta": [1]}):
        folder, _ = dream(tmp_path / "d", **change)
        with pytest.raises(UserError, match=next(iter(change))):
            convert.load(folder)
    folder, _ = qwen(tmp_path / "s", "sdar", attention_bias=True)
    with pytest.raises(UserError, match="attention_bias"):
        convert.load(folder)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    for change in ({"rope_scaling": yarn}, {"rope_parameters": yarn}, {"rope_scaling": {"type": "linear"}}):
        folder, _ = dream(tmp_path / "d", **change)
        with pytest.raises(UserError, match="scaled rotary positions"):
            convert.load(folder)


def test_plain_rotary_positions_in_every_spelling(tmp_path: Path) -> None:
    plain = {"rope_type": "default"}
    for change in ({"rope_scaling": plain}, {"rope_theta": None, "rope_parameters": plain | {"rope_theta": 1e6}}):
        folder, state = dream(tmp_path / "d", **change)
        model: Any = convert.load(folder)["d"]
        raw = np.stack([transcription(state, row.numpy(), 1e6, 1e-6) for row in TOKENS])
        expected = torch.from_numpy(shifted(raw)).float()
        torch.testing.assert_close(model.logits(TOKENS, T), expected, rtol=1e-4, atol=1e-4)


def test_published_parameter_counts() -> None:
    keys = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers", "num_attention_heads")

    def parameters(kind: str, *numbers: int, kv: int, head: int | None = None) -> int:
        sizes = dict(zip(keys, numbers, strict=True)) | {"num_key_value_heads": kv, "head_dim": head}
        return count(hf.layout(hf.KINDS[kind], sizes | {"tie_word_embeddings": False}))

    assert parameters("llada", 4096, 12_288, 126_464, 32, 32, kv=32) == 8_015_581_184
    assert parameters("dream", 3584, 18_944, 152_064, 28, 28, kv=4) == 7_615_616_512
    sdar_17b = parameters("sdar", 2048, 6144, 151_936, 28, 16, kv=8, head=128)
    assert sdar_17b * 2 // 10**7 == 406  # model.safetensors has 4.06 GB


@pytest.mark.parametrize(
    ("kind", "vocab_size", "mask"),
    [("llada", 126_464, 126_336), ("dream", 152_064, 151_666), ("sdar", 151_936, 151_669),
     ("fast_dllm_qwen", 151_936, 151_665), ("fast_dllm_qwen", 152_064, 151_665)],
)  # fmt: skip
def test_published_masks(tmp_path: Path, kind: str, vocab_size: int, mask: int) -> None:
    """Of LLaDA-8B, Dream-7B, SDAR and Fast-dLLM v2, whose configurations do not all say it."""
    folder, state = llada(tmp_path / "m") if kind == "llada" else qwen(tmp_path / "m", kind, biases=kind != "sdar")
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": vocab_size, "embedding_size": vocab_size}
    del config["mask_token_id"]
    big = {name: torch.zeros(vocab_size, D) if len(value) == V else value for name, value in state.items()}
    assert convert.describe(write(folder, big, config))["mask_id"] == mask


def test_llada_and_dream_cannot_take_turns(tmp_path: Path) -> None:
    one, _ = llada(tmp_path / "LLaDA-8B")
    two, _ = dream(tmp_path / "Dream-7B", mask_token_id=51)
    message = r"Dream-7B \(dream\) has vocabulary 53 and mask 51, LLaDA-8B \(llada\) has 53 and 50: models that"
    with pytest.raises(UserError, match=message):
        convert.load([one, two])


def test_dtype_is_the_users(tmp_path: Path) -> None:
    folder, _ = llada(tmp_path / "m")
    model: Any = convert.load(folder, dtype="bfloat16")["m"]
    assert model.model.dtype == torch.bfloat16 and model.logits(TOKENS, T).dtype == torch.float32
    stored = {k: v.bfloat16() for k, v in safetensors.torch.load_file(folder / "model.safetensors").items()}
    safetensors.torch.save_file(stored, folder / "model.safetensors", {"format": "pt"})
    kept: Any = convert.load(folder)["m"]
    assert kept.model.dtype == torch.bfloat16  # what is stored is kept unless the user says otherwise


# -------------------------------------------------------------------------------------------------------------- chat

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_chat_prompt(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": " Hello "}]
    with pytest.raises(UserError, match="no chat template"):
        convert.chat_prompt(tmp_path, messages)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "{{ bos_token }}" + CHATML, "bos_token": {"content": "<s>"}}))
    assert convert.chat_prompt(tmp_path, messages) == "<s><|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('only one') }}")
    with pytest.raises(UserError, match="only one"):
        convert.chat_prompt(tmp_path, messages)
    escape = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    (tmp_path / "chat_template.jinja").write_text(escape)
    with pytest.raises(UserError, match="cannot render"):
        convert.chat_prompt(tmp_path, messages)


@pytest.mark.parametrize("kind", ["sdar", "llada"])
def test_chat_from_the_command_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    """The template, the published rule in blocks, and the answer alone."""
    if kind == "sdar":
        folder, _ = qwen(tmp_path / "model", "sdar", mask_token_id=0)
        options = ["--rule", "low-confidence", "--steps", "4"]
    else:
        folder, _ = llada(tmp_path / "model", mask_token_id=0)
        options = ["--rule", "low-confidence", "--block-length", "4", "--steps", "4"]
    template = "{% for m in messages %}<A>{{ m['content'] }}</A>{% endfor %}<B>"
    (folder / "tokenizer.json").write_text(tiny_json(letters=49))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    asked = ["--chat", "--prompt", "!!", "--max-new-tokens", "8", "--temperature", "0", "--json", "-", *options]
    assert main(["sample", "--family", str(folder), *asked]) == 0
    out, error = capfd.readouterr()
    assert "Loading weights" not in error
    found = json.loads(out)
    prompt = convert.chat_prompt(folder, [{"role": "user", "content": "!!"}])
    family = convert.load(folder)
    assert family.tokenizer is not None
    start = len(family.tokenizer.encode(prompt))
    assert found["texts"] == convert.texts(family, found["tokens"], start) and len(found["tokens"][0]) == start + 8
    given = family.tokenizer.encode(prompt)
    assert found["tokens"][0][:start] == given and "rule=low-confidence" in found["changes_law"][0]


def test_chat_prompt_is_what_transformers_renders(tmp_path: Path) -> None:
    """Templates use more of jinja than loops: namespaces, slices, methods of strings, tests, controls of loops."""
    template = (
        "{%- set ns = namespace(last='') %}{%- for m in messages[::-1] %}{% if m.role == 'user' and m.content is string"
        " %}{% set ns.last = m.content.split('!')[0].lstrip() %}{% break %}{% endif %}{% endfor %}\n"
        "{%- for m in messages %}\n    {%- if loop.first and m.role == 'system' %}{{ m.content | upper }}\n"
        "    {%- continue %}{%- endif %}<{{ m['role'] }}>{{ m.content | tojson }}{{ eos_token }}\n{%- endfor %}\n"
        "{%- if add_generation_prompt %}[{{ ns.last }}]{% if tools is none %}<answer>{% endif %}{% endif %}"
    )
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " Why <b>? é! Really"},
        {"role": "assistant", "content": "so"},
    ]
    (tmp_path / "model").mkdir()  # where a converted family keeps it
    (tmp_path / "model" / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    backend = Backend(WordLevel({"</s>": 0, "x": 1}, unk_token="x"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    options = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    assert convert.chat_prompt(tmp_path, messages) == tokenizer.apply_chat_template(messages, **options)


def test_the_end_of_a_turn_is_found_without_a_tokenizer_json(tmp_path: Path) -> None:
    folder, _ = dream(tmp_path / "dream")
    (folder / "added_tokens.json").write_text(json.dumps({"<|im_end|>": 7, "<|im_start|>": 8}))
    assert convert.load(folder).meta["eos_ids"] == [2, 7]


def test_texts_end_with_the_tokenizers_own_token_where_the_model_says_none() -> None:
    words = SimpleNamespace(eos_id=3, decode=lambda ids: " ".join(map(str, ids)))
    family: Any = SimpleNamespace(tokenizer=words, meta={})
    assert convert.texts(family, [[3, 1, 3, 2], [1, 2, 4, 5]], start=1) == ["1", "2 4 5"]
    family.meta = {"eos_ids": [4, 5]}
    assert convert.texts(family, [[3, 1, 3, 2], [1, 2, 4, 5]]) == ["3 1 3 2", "1 2"]


def test_until_eos() -> None:
    rows = [[5, 1, 7, 9, 2], [1, 1, 1, 1, 1], [3, 4, 5, 6, 7]]
    assert convert.until_eos(rows, [9, 1], start=2) == [[5, 1, 7], [1, 1], [3, 4, 5, 6, 7]]
    assert convert.until_eos(np.array(rows), []) == rows


def test_dream_tokenizer_from_vocabulary_and_merges(tmp_path: Path) -> None:
    folder, _ = dream(tmp_path / "dream")
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "ab"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(letters)}))
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    added = {"50": {"content": "<|mask|>", "special": True}, "28": {"content": "<|endoftext|>", "special": True}}
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "DreamTokenizer",
                "added_tokens_decoder": added,
                "auto_map": {"AutoTokenizer": ["t.T", None]},
            }
        )
    )
    family = convert.load(folder)
    if family.tokenizer is None:
        pytest.skip("this transformers cannot build Qwen2's tokenizer from these files")
    assert family.tokenizer.decode(family.tokenizer.encode("ab cab")) == "ab cab"


@pytest.mark.parametrize("names", [{"a": 3}, {"a": ["x"], "b": "model.safetensors"}, {"a": None}, [1], "x", None])
def test_a_weight_index_of_other_things_than_text_is_refused(tmp_path: Path, names: Any) -> None:
    folder, _ = dream(tmp_path / "dream")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(UserError, match="weight_map"):
        convert.describe(folder)

"""Families without weights: all that the HTTP side says of a family is what the family itself says."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch

import relaylm
from relaylm.models.family import Family
from relaylm.serve.families import describe, describe_schedule, outline
from relaylm.serve.request import Ask


def sent(family: Family) -> tuple[Family, int]:
    """A family as the other process receives it, and the bytes that took."""
    data = pickle.dumps(outline(family))
    return pickle.loads(data), len(data)


def adapted() -> Any:
    """A tiny network of transformers."""
    transformers = pytest.importorskip("transformers")
    from relaylm.convert.adapter import Adapter, Shape

    config = transformers.BertConfig(
        vocab_size=28, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32
    )
    return Adapter(transformers.BertForMaskedLM(config), Shape(28, 27, 64, 16, 2, 2))


@pytest.mark.parametrize("kind", ["own", "bundled", "adapted"])
def test_an_outline_says_what_the_family_says(family: Family, kind: str) -> None:
    if kind == "bundled":
        family = Family.load("wiki-bpe")
    if kind == "adapted":
        family = Family({"a": adapted(), "3b": family["3b"]}, 27, 28, 32, family.tokenizer)
    numbers = sum(parameter.numel() for model in family.models.values() for parameter in model.parameters())  # type: ignore[attr-defined]
    bare, size = sent(family)
    tokenizer = 0 if family.tokenizer is None else len(pickle.dumps(family.tokenizer))
    assert size < tokenizer + 20_000 and size < numbers and b"transformers." not in pickle.dumps(outline(family))
    assert describe("x", bare, 0) == describe("x", family, 0)
    for ask in (Ask(schedule="L25% H75%", steps=8), Ask(prompt="the ", spacing=4)):
        assert describe_schedule(bare, ask) == describe_schedule(family, ask)
    for name, model in family.models.items():
        flops = [(length, k) for length in (5, 32) for k in (1, 3, None)]
        assert [bare[name].flops(*each) for each in flops] == [model.flops(*each) for each in flops]  # type: ignore[attr-defined]


def test_the_family_itself_keeps_its_weights(family: Family) -> None:
    before = relaylm.sample(family, steps=4, length=8, seed=1).texts
    outline(family)
    assert relaylm.sample(family, steps=4, length=8, seed=1).texts == before
    assert isinstance(family["3b"], torch.nn.Module) and family.parameters["3b"] > 0

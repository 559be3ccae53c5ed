"""A family that computes in a millisecond, with all that serving needs."""

import pytest
import torch

from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer


def tiny_family(length: int = 32) -> Family:
    """Two networks with random weights over the 27 symbols of text8."""
    torch.manual_seed(0)
    models = {f"{depth}b": Transformer(Architecture(28, length, 32, depth, 2)) for depth in (1, 3)}
    for model in models.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    return Family(models, 27, 28, length, Text8Tokenizer(), name="tiny")


@pytest.fixture(scope="session")
def family() -> Family:
    """As `tiny_family`."""
    return tiny_family()


@pytest.fixture(scope="session")
def wide_family() -> Family:
    """With room for the prompts of the examples."""
    return tiny_family(64)

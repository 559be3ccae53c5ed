r"""Every number of a training run, and the presets that hold them.

A `Recipe` is how one network is trained; a `Preset` is a family's shape with a recipe, read from TOML. The defaults are
MDLM's, which the paper uses; presets state their own where runs are short. Standard library only, so that a command
line can list and check settings before anything heavy is imported.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaylm.errors import UserError, meant

if TYPE_CHECKING:
    from relaylm.models.denoiser import Architecture

PRESETS = Path(__file__).parents[1] / "models" / "presets"


@dataclass(frozen=True)
class Recipe:
    """Every number of a training run. The defaults are MDLM's, which the paper uses."""

    steps: int = 1_000_000
    """Updates of the weights."""
    batch: int = 512
    """Rows in an update, over all processes."""
    micro_batch: int = 0
    """Rows a process sends through the network at once; 0: its whole share. Does not change the result."""
    optimizer: str = "adamw"
    """adamw, or muon for the blocks' matrices with adamw for the rest."""
    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    """AdamW's, of all that it updates, norms and biases too; matrices that muon has do not decay."""
    clip: float = 1.0
    """Largest norm of the gradient; 0: no clipping."""
    warmup: int = 2500
    """Steps over which the learning rate rises linearly."""
    decay: str = "constant"
    """After the warm-up: constant, cosine or linear."""
    final_lr: float = 0.0
    """Where cosine and linear end, as a share of lr."""
    ema: float = 0.9999
    """Decay of the moving average; ramped up as min(ema, (1 + n) / (10 + n)) after n updates."""
    dropout: float = 0.1
    init: float = 0.0
    """Standard deviation of fresh matrices; 0: 1/sqrt(3 width), which is MDLM's (0.0208 at width 768)."""
    floor: float = 1e-3
    """The smallest time."""
    seed: int = 0
    precision: str = "auto"
    """bf16 (autocast; weights and optimizer stay fp32), fp32, or auto: bf16 on CUDA, fp32 elsewhere."""
    compile: str = "auto"
    """torch.compile: on, off, or auto: on CUDA with Triton."""
    attention: str = "auto"
    """Which fused attention CUDA uses: flash, cudnn, or auto, which leaves it to PyTorch."""
    shard: bool = False
    """Split weights and optimizer over the processes (fully_shard), for what does not fit; otherwise each has a
    copy."""
    log_every: int = 50
    eval_every: int = 5000
    """Steps between validation bounds; 0: only at the end."""
    eval_rows: int = 256
    """Held-out rows for them; four times as many at the end."""
    sample_every: int = 0
    """Steps between samples; 0: none."""
    checkpoint_every: int = 1000
    stages: tuple[int, ...] = ()
    """Steps after which the averaged weights are kept beside the checkpoint, to study how models change."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, float) and not math.isfinite(value):
                raise UserError(f"{name} must be a finite number, not {value}")
        if self.seed > _LARGEST_SEED:
            raise UserError(f"seed must be at most {_LARGEST_SEED}, not {self.seed}")
        for least, names in _LEAST.items():
            for name in names.split():
                if getattr(self, name) < least:
                    raise UserError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for name in ("beta1", "beta2", "ema", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 0 and below 1, not {getattr(self, name)}")
        if not (self.lr > 0 and self.eps > 0 and 0 < self.floor < 1 and 0 <= self.final_lr <= 1):
            raise UserError("lr and eps must be above 0, floor between 0 and 1, final_lr a share of lr from 0 to 1")
        if any(not 0 < step < self.steps for step in self.stages):
            raise UserError(f"stages are steps before the last, 1 to {self.steps - 1}, not {list(self.stages)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UserError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")


_LEAST = {
    1: "steps batch log_every checkpoint_every eval_rows",
    0: "micro_batch warmup eval_every sample_every seed weight_decay clip init",
}
_LARGEST_SEED = 2**64 - 2  # the twin's is one more
_CHOICES = {
    "optimizer": ("adamw", "muon"),
    "decay": ("constant", "cosine", "linear"),
    "precision": ("auto", "bf16", "fp32"),
    "compile": ("auto", "on", "off"),
    "attention": ("auto", "flash", "cudnn"),
}
# What may change between a run and its resumption, because it does not change the weights (or only their last bits).
OPERATIONAL = {"micro_batch", "compile", "attention", "shard", "stages"}
OPERATIONAL |= {"log_every", "eval_every", "eval_rows", "sample_every", "checkpoint_every"}


@dataclass(frozen=True)
class Preset:
    """A family's shape and its recipe. `tokenizer` and `packing` are what `prepare` should be given; `tied` is whether
    the embedding is the output layer's matrix too; `names` is how a model of so many blocks is called."""

    name: str = "custom"
    tokenizer: str = "bytes"
    packing: str = "running"
    length: int = 256
    width: int = 768
    heads: int = 12
    depths: tuple[int, ...] = (4, 6, 8, 10, 12)
    twin: int | None = None
    judge: int | None = None
    time_conditioning: bool = False
    tied: bool = False
    names: str = "{}b"
    description: str = ""
    recipe: Recipe = field(default_factory=Recipe)

    def __post_init__(self) -> None:
        for name in ("twin", "judge"):  # 0 is none, so that a preset's can be left out
            object.__setattr__(self, name, getattr(self, name) or None)
        if not self.depths or any(depth < 1 for depth in self.depths) or len(set(self.depths)) < len(self.depths):
            raise UserError(f"depths must be different numbers of blocks, at least one, not {list(self.depths)}")
        if self.twin is not None and self.twin not in self.depths:
            raise UserError(f"the twin repeats a model of the family: its depth must be one of {list(self.depths)}")
        if self.judge is not None and self.judge < 1:
            raise UserError(f"the judge must have at least 1 block, not {self.judge}")
        if self.judge is not None and self.length < 2:
            raise UserError(f"a judge predicts from the tokens before: rows must have at least 2, not {self.length}")
        if self.names.count("{}") != 1 or set(self.names.replace("{}", "")) & set("{}"):
            raise UserError(f"names must say once where the number of blocks goes, as d{{}} does, not {self.names!r}")

    def model_name(self, depth: int) -> str:
        """What a model of so many blocks is called."""
        return self.names.format(depth)

    def to_json(self) -> dict[str, Any]:
        """All settings, the recipe's included."""
        return asdict(self)

    def architecture(self, depth: int, vocab_size: int, mask_id: int, causal: bool = False) -> Architecture:
        """The numbers of a network of so many blocks; a causal one, the judge, has no time conditioning."""
        from relaylm.models.denoiser import Architecture

        timed = self.time_conditioning and not causal
        same = {"adaln": timed, "time_conditioning": timed, "causal": causal, "tied": self.tied}
        return Architecture(vocab_size, self.length, self.width, depth, self.heads, mask_id, **same)


_DEFAULTS = {f.name: f.default for kind in (Recipe, Preset) for f in fields(kind) if f.name not in ("name", "recipe")}
_DEFAULTS |= {"twin": 0, "judge": 0}
SETTINGS = frozenset(_DEFAULTS)  # what can be changed of a preset and its recipe
RECIPE_SETTINGS = frozenset(f.name for f in fields(Recipe))


def presets() -> list[str]:
    """The names of the presets that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.toml"))


def load_preset(name_or_path: str | Path, **overrides: Any) -> Preset:
    """A preset by name or from a TOML file with a description and the tables [data], [model] and [train]; overridden by
    keyword, with the names of the fields of `Preset` and `Recipe`. An override of None is none."""
    path = Path(name_or_path)
    if path.suffix != ".toml":
        path = PRESETS / f"{name_or_path}.toml"
        if not path.is_file():
            hint = meant(str(name_or_path), presets()) or ":"
            choice = f"choose {', '.join(presets())}, or a .toml file"
            raise UserError(f"there is no preset {str(name_or_path)!r}{hint} {choice}")
    try:
        tables = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    values = {"description": tables.pop("description", "")}
    for table, allowed in (
        ("data", _DEFAULTS.keys() - RECIPE_SETTINGS),
        ("model", _DEFAULTS.keys() - RECIPE_SETTINGS),
        ("train", RECIPE_SETTINGS),
    ):
        entries = tables.pop(table, {})
        if not isinstance(entries, dict):
            raise UserError(f"{path.name} has an entry {table!r} that is not a table: write [{table}]")
        if unknown := sorted(set(entries) - allowed):
            listed = ", ".join(sorted(allowed))
            raise UserError(f"{path.name} has an unknown entry {table}.{unknown[0]}: allowed are {listed}")
        values |= entries
    if tables:
        raise UserError(
            f"{path.name} has an unknown entry {next(iter(tables))!r}: it has the tables data, model, train"
        )
    return override(Preset(path.stem), **values | {key: value for key, value in overrides.items() if value is not None})


def override(preset: Preset, **overrides: Any) -> Preset:
    """A preset with some of its settings, or of its recipe's, changed; None leaves one as it is."""
    values = {key: _checked(key, value) for key, value in overrides.items() if value is not None}
    recipe = replace(preset.recipe, **{key: values.pop(key) for key in list(values) if key in RECIPE_SETTINGS})
    return replace(preset, recipe=recipe, **values)


def check_settings(keys: Iterable[str], known: frozenset[str] = SETTINGS) -> None:
    """Refuse the name of a setting that there is not."""
    for key in keys:
        if key not in known:
            raise UserError(f"there is no setting {key!r}: there are {', '.join(sorted(known))}")


def _checked(key: str, value: Any) -> Any:
    """A setting with the type of its default (TOML and command lines are loose about int and float)."""
    check_settings([key])
    default = _DEFAULTS[key]
    if isinstance(default, tuple):
        if not isinstance(value, list | tuple) or not all(type(item) is int for item in value):
            raise UserError(f"{key} must be a list of whole numbers, not {value!r}")
        return tuple(value)
    if isinstance(default, float) and type(value) is int:
        value = float(value)
    if type(value) is not type(default):
        kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
        raise UserError(f"{key} must be {kinds.get(type(default), type(default).__name__)}, not {value!r}")
    return value


def lr_at(recipe: Recipe, step: int) -> float:
    """The learning rate of update `step` (0 is the first): (step + 1) / warmup of lr until it is reached, then as
    `decay` says, arriving at final_lr * lr with the last update."""
    if step < recipe.warmup:
        return recipe.lr * (step + 1) / recipe.warmup
    if recipe.decay == "constant":
        return recipe.lr
    done = (step + 1 - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    falling = (1 + math.cos(math.pi * done)) / 2 if recipe.decay == "cosine" else 1 - done
    return recipe.lr * (recipe.final_lr + (1 - recipe.final_lr) * falling)


def ema_decay(recipe: Recipe, updates: int) -> float:
    """MDLM's ramp: min(ema, (1 + n) / (10 + n)) at the n-th update (1 is the first)."""
    return min(recipe.ema, (1 + updates) / (10 + updates))

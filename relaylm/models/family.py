"""Denoisers that may take turns, as one value, on one device.

A family shares vocabulary, mask, length and tokenizer (`folder` has the rules, and stores a family). Any denoisers are
allowed, a table in a test included. A source is a folder, the name of a family that came with the package, or a Hugging
Face id; public checkpoints of other formats are sources too, which `relaylm.convert` reads.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from relaylm.core import cost
from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError, brief, meant, reason
from relaylm.files import backup, expand, read_bytes, read_object
from relaylm.models.denoiser import Architecture, Denoiser, Transformer
from relaylm.models.folder import (
    CARD,
    DTYPES,
    HELDOUT,
    MANIFEST,
    PAIRS,
    check_known,
    check_models,
    files_of,
    load_network,
    place,
    read_manifest,
    refuse_pickles,
    save_family,
)
from relaylm.models.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:
    from relaylm.core.pairs import PairTable

BUNDLED = Path(__file__).parent / "families"


def pick_device(device: str | torch.device) -> torch.device:
    """The device of that name, which must be present; "auto" is the fastest one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not a device: write auto, cpu, cuda or mps")
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[chosen.type]
    if not present or (chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"this machine has no {chosen} that PyTorch can use: write auto or cpu")
    return chosen


def cpu_has_bfloat16() -> bool:
    """True if this CPU has instructions for products of bfloat16; PyTorch computes them on any, but slowly."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # named so from PyTorch 2.6 on
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type the blocks compute in: by default bfloat16 on CUDA, float32 elsewhere."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None or (chosen == torch.float64 and device.type == "mps"):
        raise UserError(f"{dtype} cannot be computed in on {device.type}: write float32, bfloat16 or float16")
    return chosen


def bundled() -> list[str]:
    """Names of the families that came with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{MANIFEST}"))


def on_disk(source: str | Path) -> Path:
    """Where a source would lie: as given, under its backup name (a save was killed between its two renames), or among
    the bundled families."""
    folder = Path(os.path.expanduser(str(source)))  # os.path, here and below: never raises, whatever the text
    if not os.path.exists(folder):
        if os.path.isdir(backup(folder)):
            return backup(folder)
        if str(source) in bundled():
            return BUNDLED / str(source)
    return folder


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a family: given as such, bundled, or fetched from the Hugging Face hub into its cache."""
    text, folder = str(source), on_disk(source)
    if os.path.isdir(folder):
        if revision is not None:
            raise UserError(f"a revision is for a family on the Hugging Face hub, but {text!r} is a folder")
        return folder
    if os.path.exists(folder):
        raise UserError(f"{text!r} is a file, but a family is a folder")
    from relaylm.models.hub import HUB_FILES, HUB_ID, download

    if isinstance(source, str) and HUB_ID.fullmatch(text):
        return download(text, revision, HUB_FILES)
    known = f"the bundled families are {', '.join(bundled())}" if bundled() else "no families are bundled"
    hint = meant(text, bundled()) or ":"
    raise UserError(f"there is no family {text!r}{hint} no such folder, {known}, and a hub id is written owner/name")


@dataclass(frozen=True)
class Stored:
    """Where a family came from, for the parts that are loaded on first use."""

    folder: Path
    manifest: dict[str, Any]
    dtype: torch.dtype
    narrow: bool = False


@dataclass(repr=False)
class Family:
    """Denoisers that may take turns, ordered from light to heavy."""

    models: Mapping[str, Denoiser]
    mask_id: int
    vocab_size: int  # counts the mask
    length: int  # the longest sequence; shorter ones are allowed
    tokenizer: Tokenizer | None = None
    name: str = ""
    light: str = ""  # the model that L means; by default the smallest
    heavy: str = ""  # the model that H means; by default the largest
    device: torch.device = torch.device("cpu")  # that of the models, if they have one  # noqa: RUF009
    meta: dict[str, Any] = field(default_factory=dict)
    stored: Stored | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.models = check_models(self.models, self.mask_id, self.vocab_size, self.length, self.tokenizer)
        self.light, self.heavy = self.light or self.names[0], self.heavy or self.names[-1]
        self.check_names((self.light, self.heavy))
        devices = {model.device for model in self.models.values() if hasattr(model, "device")}
        if len(devices) > 1:
            raise UserError(f"the models are on different devices: {', '.join(sorted(map(str, devices)))}")
        self.device = devices.pop() if devices else torch.device(self.device)

    @property
    def block_length(self) -> int:
        """Positions of a block, where the models write block after block; else 0."""
        return next((getattr(model, "block_length", 0) for model in self.models.values()), 0)

    @property
    def names(self) -> tuple[str, ...]:
        """The models' names, from light to heavy."""
        return tuple(self.models)

    @cached_property
    def parameters(self) -> dict[str, int]:
        """How many numbers each model has that were learned, of those that say."""
        counted = {name: model for name, model in self.models.items() if isinstance(model, torch.nn.Module)}
        return {name: sum(tensor.numel() for tensor in model.parameters()) for name, model in counted.items()}

    def __repr__(self) -> str:
        sizes = ", ".join(self.names)
        return f"<Family {self.name or 'without a name'}: {sizes}; length {self.length}, vocabulary {self.vocab_size}>"

    def __getitem__(self, name: str) -> Denoiser:
        return self.models[self.named(name)]

    def named(self, name: str) -> str:
        """The name of one of the models; `4b` and `d4` both find the one of four blocks."""
        depth = re.fullmatch(r"d([0-9]+)|([0-9]+)b", name)
        other = "" if depth is None else f"{depth[1]}b" if depth[1] else f"d{depth[2]}"
        name = other if name not in self.models and other in self.models else name
        self.check_names((name,))
        return name

    def bind(self, schedule: str | Schedule, light: str, heavy: str) -> Schedule:
        """A schedule with names of this family's models in place of roles and of other spellings."""
        parsed = Schedule.parse(schedule) if isinstance(schedule, str) else schedule
        bound = parsed.bind(light, heavy)
        names = {name: self.named(name) for name in bound.models}
        segments = tuple(dataclasses.replace(segment, model=names[segment.model]) for segment in bound.segments)
        return dataclasses.replace(bound, segments=segments)

    def check_names(self, names: Iterable[str]) -> None:
        """Refuse a name that no model of the family has."""
        check_known(names, self.models)

    def roles(self, light: str | None = None, heavy: str | None = None) -> tuple[str, str]:
        """The names that L and H stand for: the given ones, else the family's own."""
        return self.named(light or self.light), self.named(heavy or self.heavy)

    def batch_size(self, n: int, length: int) -> int:
        """The default number of rows in a call, at most n.

        CPU: about a million activations (B * length * width), 1024 to 4096 tokens, so that a block's working set stays
        in the caches; a power of two. CUDA: 1024 tokens for each multiprocessor (132 rows of 1024 on an H200), so that
        the tiles of a product come out even; or, where half of the free memory does not hold them at 40 bytes for each
        of a row's activations and 16 for each logit of 8 due positions, a power of two that it holds."""
        width = max(getattr(getattr(model, "architecture", None), "width", 256) for model in self.models.values())
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            even = 1024 * torch.cuda.get_device_properties(self.device).multi_processor_count // length
            rows = free // 2 // (40 * length * width + 16 * 8 * self.vocab_size)
            if even <= rows:
                return max(1, min(n, even))
        else:
            rows = min(4096, max(1024, (1 << 20) // width)) // length
        return max(1, min(n, 1 << max(0, int(rows).bit_length() - 1)))

    def to(self, device: str | torch.device, dtype: str | torch.dtype | None = None) -> Family:
        """Move the models, in place; `dtype` as in `load`, None leaves it."""
        device = pick_device(device)
        chosen = None if dtype is None else pick_dtype(dtype, device)
        extras = [*self.__dict__.get("twins", {}).values(), self.__dict__.get("judge")]
        for model in (*self.models.values(), *extras):
            if isinstance(model, Transformer):
                place(model, device, chosen)
            elif hasattr(model, "to"):
                model.to(device)
        self.device = device
        if self.stored is not None and chosen is not None:
            self.stored = dataclasses.replace(self.stored, dtype=chosen)
        return self

    @cached_property
    def judge(self) -> Transformer | None:
        """The left-to-right model that scores the family's samples, loaded on first use."""
        entry = self.stored and self.stored.manifest["judge"]
        return self._load_stored("judge", entry) if entry else None

    @cached_property
    def twins(self) -> dict[str, Transformer]:
        """Models trained like those of the same name from another seed: they show how far apart equal models are."""
        entries = self.stored.manifest["twins"] if self.stored is not None else {}
        return {name: self._load_stored(f"twin of {name}", entry) for name, entry in entries.items()}

    def _load_stored(self, what: str, entry: dict[str, Any]) -> Transformer:
        assert self.stored is not None
        return load_network(self.stored.folder, what, entry, self.device, self.stored.dtype)

    @property
    def folder(self) -> Path | None:
        """The folder it was loaded from."""
        return self.stored.folder if self.stored is not None else None

    @property
    def heldout(self) -> Path | None:
        """A text that came with the family and that it was not trained on (heldout.txt in its folder)."""
        path = None if self.folder is None else self.folder / HELDOUT
        return path if path is not None and path.is_file() else None

    @cached_property
    def pairs(self) -> PairTable | None:
        """The heavy model's table of pairs, where its folder has one."""
        from relaylm.core.pairs import PairTable

        path = None if self.folder is None else self.folder / PAIRS
        return PairTable.from_json(read_object(path)) if path is not None and path.is_file() else None

    def spacing(self, length: int) -> Spacing | None:
        """The spacing that rows of `length` positions are written with by default: the family's own, and for shorter
        rows a smaller one where its table of pairs predicts no more loss than in as many uniform steps as positions."""
        if self.meta.get("spacing") is None:
            return None
        own = Spacing.parse(self.meta["spacing"])
        if length >= self.length or self.pairs is None:
            return own
        from relaylm.core.pairs import default_spacing

        return min(own, default_spacing(self.pairs, length, own.form), key=lambda spacing: spacing.distance)

    @property
    def digest(self) -> str | None:
        """A sha256 of everything that determines what the family computes, as stored; None for one made in memory."""
        return self.stored.manifest["digest"] if self.stored is not None else None

    @property
    def precision(self) -> str:
        """What the models compute in, in words; it affects the bits of a sample."""
        narrow = ", narrow residual" if any(getattr(model, "narrow", False) for model in self.models.values()) else ""
        return ("as given" if self.stored is None else str(self.stored.dtype).removeprefix("torch.")) + narrow

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        narrow: bool = False,
    ) -> Family:
        """A family from a folder, by the name of a bundled one, or by its Hugging Face id "owner/name"; or from public
        checkpoints (`relaylm.convert`).

        `dtype` is what the blocks compute in: by default bfloat16 on CUDA and float32 elsewhere (the rest is float32
        either way; float64 is for tests). `narrow` puts the residual stream in that type as well, which is faster on a
        GPU and only nearly the same law. adaLN without time conditioning is folded into the weights."""
        if source is None or isinstance(source, bool | int | float):
            raise UserError(f"a family is loaded from a folder, a bundled name or a hub id, not from {brief(source)}")
        if os.path.isfile(on_disk(source) / MANIFEST):
            return load_family(locate(source, revision), device, dtype, narrow)
        from relaylm.convert import open_family  # the one import of a higher floor: it knows every other format

        return open_family(source, device, dtype, revision, narrow)

    from_pretrained = load

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
        """Store what is in memory, judge and twins included; options as for `save_family`. A family loaded on CUDA has
        its blocks rounded to bfloat16: load on the CPU to keep all digits."""
        card = None
        if self.folder is not None and (self.folder / CARD).is_file():
            card = read_bytes(self.folder / CARD).decode("utf-8", errors="replace")
        given: dict[str, Any] = {
            "name": self.name or None,
            "length": self.length,
            "light": self.light,
            "heavy": self.heavy,
            "judge": self.judge,
            "twins": self.twins,
            "card": card,
            "meta": self.meta,
            "pairs": self.pairs and self.pairs.to_json(),
        }
        return save_family(folder, self.models, self.tokenizer, overwrite=overwrite, **{**given, **options})


def load_family(
    folder: Path, device: str | torch.device = "cpu", dtype: str | torch.dtype | None = None, narrow: bool = False
) -> Family:
    """The family in a folder with a family.json; `Family.load` has the arguments."""
    manifest = read_manifest(folder)
    refuse_pickles(folder)
    where = pick_device(device)
    chosen = pick_dtype(dtype, where)
    tokenizer = None if manifest["tokenizer"] is None else load_tokenizer(manifest["tokenizer"], folder)
    models = {key: load_network(folder, key, entry, where, chosen) for key, entry in manifest["models"].items()}
    for model in models.values():
        model.narrow = narrow
    return Family(
        models,
        manifest["mask_id"],
        manifest["vocab_size"],
        manifest["length"],
        tokenizer,
        manifest["name"],
        manifest["roles"]["light"],
        manifest["roles"]["heavy"],
        where,
        manifest["meta"],
        Stored(folder, manifest, chosen, narrow),
    )


def describe(source: str | Path) -> dict[str, Any]:
    """What `relaylm info` shows of a stored family. Reads family.json and the sizes of the files, not the weights.

    `flops_per_call` is one row through the network with logits at one position, as the exact sampler mostly calls it;
    `flops_full` has logits at every position, as published samplers do."""
    folder = locate(source)
    manifest = read_manifest(folder)
    length, roles, judge = manifest["length"], manifest["roles"], manifest["judge"]
    models = {name: _describe_entry(folder, entry, length) for name, entry in manifest["models"].items()}
    names = sorted(models, key=lambda name: models[name]["flops_per_call"])
    files = {file: folder / file for file in files_of(manifest)}
    return {
        "name": manifest["name"],
        "folder": str(folder),
        "length": length,
        "vocab_size": manifest["vocab_size"],
        "mask_id": manifest["mask_id"],
        "tokenizer": manifest["tokenizer"],
        "roles": {"light": roles["light"] or names[0], "heavy": roles["heavy"] or names[-1]},
        "models": {name: models[name] for name in names},
        "judge": None if judge is None else _describe_entry(folder, judge, length),
        "twins": {name: _describe_entry(folder, entry, length) for name, entry in manifest["twins"].items()},
        "bytes": _size(files.values()),
        "missing": [file for file, path in files.items() if not os.path.isfile(path)],
        "digest": manifest["digest"],
        "meta": manifest["meta"],
    }


def list_families(*places: str | Path) -> list[dict[str, Any]]:
    """What `relaylm ls` shows: the bundled families, and those under each of `places` (the current folder if none is
    given), three folders deep. A folder that cannot be read is listed with its error."""
    found: dict[Path, str] = {BUNDLED / name: name for name in bundled()}
    for outer in places or (Path("."),):
        root = expand(outer)
        for manifest in sorted(path for depth in range(4) for path in root.glob(f"{depth * '*/'}{MANIFEST}")):
            hidden = any(part.startswith(".") for part in manifest.relative_to(root).parts)
            if not hidden and os.path.isfile(manifest) and BUNDLED.resolve() not in manifest.resolve().parents:
                found.setdefault(manifest.parent, str(manifest.parent))
    listed = []
    for folder, source in found.items():
        entry: dict[str, Any] = {"source": source, "bundled": folder.parent == BUNDLED}
        try:
            about = describe(folder)
            keys = ("name", "length", "vocab_size", "bytes", "missing")
            entry |= {key: about[key] for key in keys} | {"models": list(about["models"]), "error": None}
            entry["sizes"] = {name: model["parameters"] for name, model in about["models"].items()}
        except (UserError, OSError) as error:
            entry["error"] = str(error) if isinstance(error, UserError) else reason(error)
        listed.append(entry)
    return listed


def _describe_entry(folder: Path, entry: Mapping[str, Any], length: int) -> dict[str, Any]:
    a = Architecture(**entry["architecture"])
    numbers = a.depth, a.width, a.vocab_size, length
    return {
        "depth": a.depth,
        "width": a.width,
        "heads": a.heads,
        "parameters": entry["parameters"],
        "time_conditioning": a.time_conditioning,
        "block_length": a.block_length,
        "flops_per_call": cost.call_flops(*numbers, 1, a.mlp_ratio),
        "flops_full": cost.call_flops(*numbers, None, a.mlp_ratio),
        "dtype": entry["dtype"],
        "bytes": _size(folder / file for file in entry["files"]),
    }


def _size(files: Iterable[Path]) -> int:
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file))

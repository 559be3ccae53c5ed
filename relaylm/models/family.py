"""Denoisers that may take turns, as one value, on one device.

A family shares vocabulary, mask, length and tokenizer (`folder` has the rules, and stores a family). Any denoisers are
allowed, a table in a test included. A source is a folder, the name of a family that came with the package, or a Hugging
Face id; public checkpoints of other formats are sources too, which `relaylm.convert` reads.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from relaylm.core.schedule import Schedule, Spacing
from relaylm.errors import UserError, brief, meant
from relaylm.files import backup, read_bytes, read_object
from relaylm.models.denoiser import Denoiser, Transformer
from relaylm.models.folder import (
    CARD,
    DTYPES,
    HELDOUT,
    MANIFEST,
    PAIRS,
    check_known,
    check_models,
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
WORDS = 512  # of 8 bytes, in a row of words


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


def mark(network: Transformer) -> str:
    """A hash of the architecture and, of every tensor, the sums of its bits along rows and along columns of words: ten
    times faster than a hash of all bytes, and different after any change that is not made to deceive it. (PyTorch's
    counters of versions would miss what is written through `.data` or numpy.)"""
    total = hashlib.sha256(repr(network.architecture).encode())
    for name, value in network.state_dict().items():
        total.update(f"{name} {tuple(value.shape)} {value.dtype}\n".encode())
        data = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        whole = len(data) - len(data) % (8 * WORDS)
        words = data[:whole].view(np.uint64).reshape(-1, WORDS)
        for part in (words.sum(axis=0), words.sum(axis=1), data[whole:]):
            total.update(part.tobytes())
    return total.hexdigest()


@dataclass(frozen=True)
class Stored:
    """Where a family came from, for the parts that are loaded on first use; and marks of the weights that were loaded,
    by model, "judge" or "twin of NAME"."""

    folder: Path
    manifest: dict[str, Any]
    dtype: torch.dtype
    marks: dict[str, str] = field(default_factory=dict, repr=False)


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
        for name, model in self.models.items():
            if chosen is not None and hasattr(model, "to") and not hasattr(model, "cast"):
                raise UserError(f"{name} keeps the number type that it was loaded in: give dtype to Family.load")
        stored, loaded = self.stored, self._loaded()
        # Rounded weights are those of the files in fewer digits; digits that were lost do not come back.
        rounds = stored is not None and chosen is not None and chosen.itemsize < stored.dtype.itemsize
        same = [what for what in loaded if rounds and self.entry(what) is not None]
        for model in loaded.values():
            if hasattr(model, "cast"):
                place(model, device, chosen)
            elif hasattr(model, "to"):
                model.to(device)
        self.device = device
        if stored is not None and chosen is not None:
            marks = {**stored.marks, **{what: mark(loaded[what]) for what in same}}
            self.stored = dataclasses.replace(stored, dtype=chosen, marks=marks)
        return self

    def _loaded(self) -> dict[str, Any]:
        """The models, and those of judge and twins that are in memory, by the names of their marks."""
        twins = {f"twin of {name}": twin for name, twin in self.__dict__.get("twins", {}).items()}
        judge = self.__dict__.get("judge")
        return {**self.models, **twins, **({} if judge is None else {"judge": judge})}

    def entry(self, what: str) -> dict[str, Any] | None:
        """What family.json says of a model (of "judge", of "twin of NAME"); None if it says nothing, or no longer holds
        because the weights in memory are not those that were loaded."""
        if self.stored is None:
            return None
        manifest, model = self.stored.manifest, self._loaded().get(what)
        if model is not None and not (isinstance(model, Transformer) and self.stored.marks.get(what) == mark(model)):
            return None
        twins = {f"twin of {name}": entry for name, entry in manifest["twins"].items()}
        found: dict[str, Any] | None = {**manifest["models"], **twins, "judge": manifest["judge"]}.get(what)
        return found

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
        network = load_network(self.stored.folder, what, entry, self.device, self.stored.dtype)
        self.stored.marks[what] = mark(network)
        return network

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
        """A sha256 of everything that determines what the family computes, as stored; None for one that was made or
        changed in memory."""
        if self.stored is None or self.models.keys() != self.stored.manifest["models"].keys():
            return None
        unchanged = all(self.entry(what) is not None for what in self._loaded())
        return self.stored.manifest["digest"] if unchanged else None

    @property
    def precision(self) -> str:
        """What the models compute in, in words; it affects the bits of a sample."""
        narrow = ", narrow residual" if self.narrow else ""
        return ("as given" if self.stored is None else str(self.stored.dtype).removeprefix("torch.")) + narrow

    @property
    def narrow(self) -> bool:
        """True if a model's residual stream is in the blocks' type."""
        return any(getattr(model, "narrow", False) for model in self.models.values())

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
        """Store what is in memory, judge and twins included, with the card and the held-out text of its folder; options
        as for `save_family`. A family loaded on CUDA has its blocks rounded to bfloat16: load on the CPU to keep all
        digits."""
        card, heldout = (
            read_bytes(path).decode("utf-8", errors="replace") if path is not None and path.is_file() else None
            for path in (self.folder and self.folder / CARD, self.heldout)
        )
        given: dict[str, Any] = {
            "name": self.name or None,
            "length": self.length,
            "light": self.light,
            "heavy": self.heavy,
            "judge": self.judge,
            "twins": self.twins,
            "card": card,
            "heldout": heldout or "",
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
        Stored(folder, manifest, chosen, {key: mark(model) for key, model in models.items()}),
    )

"""Denoisers that may take turns, as one value; which of them L and H are, how a request is laid out, what is inside.

Models that take turns along one trajectory must read and write the same tokens, so a family shares vocabulary, mask,
length and tokenizer; `Family` refuses what does not belong together (`relaylm.members` has the rules). Any denoisers
will do (a table in a test). How a family is kept on disk is in `relaylm.family_folder`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaylm import cost
from relaylm.denoiser import Architecture, Denoiser, Transformer
from relaylm.errors import UserError
from relaylm.family_folder import (
    BUNDLED,
    CARD,
    HELDOUT,
    MANIFEST,
    bundled,
    files_of,
    load_network,
    locate,
    read_bytes,
    read_manifest,
    refuse_pickles,
    save_family,
)
from relaylm.members import (
    check_lengths,
    check_name,
    check_together,
    check_tokenizer,
    numbers_of,
    pick_device,
    pick_dtype,
    place,
)
from relaylm.tokenizer import BLANK, Tokenizer, load_tokenizer


@dataclass(frozen=True)
class _Stored:
    """Where a family came from, for the parts that are loaded when they are first asked for."""

    folder: Path
    manifest: dict[str, Any]
    dtype: torch.dtype
    narrow: bool = False


@dataclass
class Family:
    """Denoisers that may take turns, ordered from light to heavy."""

    models: Mapping[str, Denoiser]
    mask_id: int
    vocab_size: int  # counts the mask
    length: int  # the longest sequence; shorter ones are fine
    tokenizer: Tokenizer | None = None
    name: str = ""
    light: str = ""  # the model that L means; the smallest unless said otherwise
    heavy: str = ""  # the model that H means; the largest
    device: torch.device = torch.device("cpu")  # of the models, where they say  # noqa: RUF009
    meta: dict[str, Any] = field(default_factory=dict)
    stored: _Stored | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("a family needs at least one model")
        for name in self.models:
            check_name(name)
        if not 0 <= self.mask_id < self.vocab_size:
            most = self.vocab_size - 1
            raise UserError(f"the mask must be one of the family's tokens, 0 to {most}, not {self.mask_id}")
        numbers = {name: numbers_of(model) for name, model in self.models.items()}
        known = {name: pair for name, pair in numbers.items() if pair is not None}
        check_together({**known, "the family": (self.vocab_size, self.mask_id)})
        trained = {name: getattr(model, "architecture", None) for name, model in self.models.items()}
        check_lengths({name: a.length for name, a in trained.items() if a is not None}, self.length)
        check_tokenizer(self.tokenizer, self.vocab_size, self.mask_id)
        self.models = dict(sorted(self.models.items(), key=lambda item: self._weight(item[1])))
        self.light, self.heavy = self.light or self.names[0], self.heavy or self.names[-1]
        self.check_names((self.light, self.heavy))
        devices = {model.device for model in self.models.values() if hasattr(model, "device")}
        if len(devices) > 1:
            raise UserError(f"the models are on different devices: {', '.join(sorted(map(str, devices)))}")
        self.device = devices.pop() if devices else torch.device(self.device)

    def _weight(self, model: Denoiser) -> tuple[float, float]:
        """Cost of a call, for the order; a denoiser that does not say keeps its place among its like."""
        flops = model.flops(self.length, 1) if hasattr(model, "flops") else 0.0
        return flops, getattr(model, "depth", 0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.models)

    def __getitem__(self, name: str) -> Denoiser:
        self.check_names((name,))
        return self.models[name]

    def check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.models:
                raise UserError(f"there is no model {name!r} in this family: it has {', '.join(self.models)}")

    def roles(self, light: str | None = None, heavy: str | None = None) -> tuple[str, str]:
        """The names that L and H stand for: the family's own unless the caller says otherwise."""
        names = light or self.light, heavy or self.heavy
        self.check_names(names)
        return names

    def batch_size(self, n: int, length: int) -> int:
        """Rows in a call, where nobody has said, at most n.

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
        """The left-to-right model that the family's samples are judged by, loaded when first asked for."""
        entry = self.stored and self.stored.manifest["judge"]
        return self._load_stored("judge", entry) if entry else None

    @cached_property
    def twins(self) -> dict[str, Transformer]:
        """Models trained like those of the same name from another seed: how far apart two equals are."""
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

    @property
    def digest(self) -> str | None:
        """A sha256 of all that fixes what the family computes, as stored; None for one made in memory."""
        return self.stored.manifest["digest"] if self.stored is not None else None

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
        narrow: bool = False,
    ) -> Family:
        """A family from a folder, by the name of a bundled one, or by its Hugging Face id "owner/name".

        `dtype` is what the blocks compute in: by default bfloat16 on CUDA and float32 elsewhere (the rest is float32
        either way; float64 is for tests). `narrow` puts the residual stream in that type as well, which is faster on a
        GPU and only nearly the same law. adaLN without time conditioning is folded into the weights."""
        from relaylm import convert

        if convert.recognise(source, revision, hub=False) is not None:  # files, lists, checkpoint folders
            return convert.load(source, device, dtype, revision)._narrowed(narrow)
        folder = locate(source, revision)
        if convert.recognise(folder) is not None:  # a checkpoint on the hub
            return convert.load(source, device, dtype, revision)._narrowed(narrow)
        manifest = read_manifest(folder)
        refuse_pickles(folder)
        where = pick_device(device)
        chosen = pick_dtype(dtype, where)
        tokenizer = None if manifest["tokenizer"] is None else load_tokenizer(manifest["tokenizer"], folder)
        models = {k: load_network(folder, k, entry, where, chosen) for k, entry in manifest["models"].items()}
        return cls(
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
            _Stored(folder, manifest, chosen, narrow),
        )._narrowed(narrow)

    from_pretrained = load

    def _narrowed(self, narrow: bool) -> Family:
        for model in self.models.values():
            if isinstance(model, Transformer):
                model.narrow = narrow
        return self

    @property
    def precision(self) -> str:
        """What the models compute in, in words; part of what fixes the bits of a sample."""
        if self.stored is None:
            return "as given"
        return str(self.stored.dtype).removeprefix("torch.") + (", narrow residual" if self.stored.narrow else "")

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
        """Store what is in memory, judge and twins included; options as for `save_family`. A family loaded on CUDA has
        its blocks rounded to bfloat16: load on the CPU to keep all digits."""
        card = None
        if self.folder is not None and (self.folder / CARD).is_file():
            card = read_bytes(self.folder / CARD).decode("utf-8", errors="replace")
        given: dict[str, Any] = {
            "name": self.name or None,
            "judge": self.judge,
            "twins": self.twins,
            "card": card,
            "meta": self.meta,
        }
        given |= {"light": self.light, "heavy": self.heavy, "length": self.length}
        return save_family(folder, self.models, self.tokenizer, overwrite=overwrite, **{**given, **options})


# ------------------------------------------------------------------------------------------------ laying out a request


def lay_out(
    family: Family,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    length: int | None = None,
    max_new_tokens: int | None = None,
) -> np.ndarray:
    """Token ids (L,) of a request, -1 where the family is to write.

    A prompt stands at the front, a suffix at the end. `infill` is a whole text in which every `_` is one free position
    (one token; the text between blanks is tokenised by itself), and its length is its own. L is `length` if given,
    else prompt + max_new_tokens + suffix, else the family's length."""
    for key, value in (("max_new_tokens", max_new_tokens), ("length", length)):
        if value is not None and value < 1:
            raise UserError(f"{key} must be at least 1, not {value}")
    if length is not None and length > family.length:
        raise UserError(f"length {length} is more than the family's {family.length}")
    if length is not None and max_new_tokens is not None:
        raise UserError("give length or max_new_tokens, not both")
    if infill is not None:
        if prompt or suffix or max_new_tokens is not None:
            raise UserError("infill already says what stands where: give it without prompt, suffix and max_new_tokens")
        return _lay_out_infill(family, infill, length)
    front, back = _encode(family, prompt, "prompt"), _encode(family, suffix, "suffix")
    what = "the prompt and the suffix take" if front and back else f"the {'suffix' if back else 'prompt'} takes"
    taken = len(front) + len(back)
    if max_new_tokens is not None:
        length = taken + max_new_tokens
        if length > family.length:
            known = f"{what} {taken} and " if taken else ""
            raise UserError(f"{known}max_new_tokens is {max_new_tokens}, but the family's length is {family.length}")
    length = length or family.length
    if taken > length:
        raise UserError(f"{what} {taken} positions, but the length is {length}")
    if taken == length:
        raise UserError(f"nothing is left to write: {what} all {length} positions")
    return np.array(front + [-1] * (length - taken) + back, dtype=np.int64)


def _lay_out_infill(family: Family, infill: str, length: int | None) -> np.ndarray:
    ids: list[int] = []
    for number, piece in enumerate(infill.split(BLANK)):
        ids += ([-1] if number else []) + _encode(family, piece, "infill text")
    if -1 not in ids:
        raise UserError(f"nothing is left to write: the infill text has no {BLANK} (one for each free position)")
    if length is not None and length != len(ids):
        raise UserError(f"the infill text takes {len(ids)} positions, but length is {length}: leave length out")
    if len(ids) > family.length:
        raise UserError(f"the infill text takes {len(ids)} positions, but the family's length is {family.length}")
    return np.array(ids, dtype=np.int64)


def _encode(family: Family, text: str | None, what: str) -> list[int]:
    if not text:
        return []
    if family.tokenizer is None:
        raise UserError(f"this family has no tokenizer, so it cannot read the {what}: give token ids instead")
    try:
        ids = family.tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"the {what} cannot be read: {error}") from None
    if family.mask_id in ids:
        raise UserError(f"the {what} contains the mask token: use infill with {BLANK} for what is to be written")
    return ids


# -------------------------------------------------------------------------------------------------- what is inside


def describe(family: Family | str | Path) -> dict[str, Any]:
    """What `relaylm info` shows. From a source it reads family.json and the sizes of the files, not the weights.

    `flops_per_call` is one row through the network with logits at one position, as the exact sampler mostly calls it;
    `flops_full` has logits at every position, as published samplers do."""
    if isinstance(family, Family) and family.stored is not None:
        family = family.stored.folder
    if isinstance(family, Family):
        about = _outline(family.name, family.length, family.vocab_size, family.mask_id, family.light, family.heavy)
        about["tokenizer"] = None if family.tokenizer is None else family.tokenizer.to_json()
        about["models"] = {name: _describe_model(model, family.length) for name, model in family.models.items()}
        return {**about, "meta": family.meta}
    from relaylm import convert

    if convert.recognise(family) is not None:
        return convert.describe(family)
    folder = locate(family)
    manifest = read_manifest(folder)
    length = manifest["length"]
    entries = sorted(manifest["models"].items(), key=lambda item: _entry_flops(item[1], length, 1))
    names = [name for name, _ in entries]
    roles = manifest["roles"]
    light, heavy = roles["light"] or names[0], roles["heavy"] or names[-1]
    about = _outline(manifest["name"], length, manifest["vocab_size"], manifest["mask_id"], light, heavy)
    about["tokenizer"] = manifest["tokenizer"]
    about["models"] = {name: _describe_entry(folder, entry, length) for name, entry in entries}
    judge = manifest["judge"]
    about["judge"] = None if judge is None else _describe_entry(folder, judge, length)
    about["twins"] = {name: _describe_entry(folder, entry, length) for name, entry in manifest["twins"].items()}
    files = list(files_of(manifest))
    about["bytes"] = sum((folder / file).stat().st_size for file in files if (folder / file).is_file())
    about["missing"] = [file for file in files if not (folder / file).is_file()]
    return {**about, "folder": str(folder), "digest": manifest["digest"], "meta": manifest["meta"]}


def list_families(*places: str | Path) -> list[dict[str, Any]]:
    """What `relaylm ls` shows: the bundled families, and those directly inside each of `places` (the current folder if
    none is given). A folder that cannot be read is listed with its error."""
    found: dict[Path, str] = {BUNDLED / name: name for name in bundled()}
    for outer in places or (Path("."),):
        root = Path(outer).expanduser()
        for manifest in (root / MANIFEST, *sorted(root.glob(f"*/{MANIFEST}"))):
            if manifest.is_file() and not manifest.parent.name.startswith("."):
                found.setdefault(manifest.parent, str(manifest.parent))
    listed = []
    for folder, source in found.items():
        entry: dict[str, Any] = {"source": source, "bundled": folder.parent == BUNDLED}
        try:
            about = describe(folder)
            keys = ("name", "length", "vocab_size", "bytes", "missing")
            entry |= {key: about[key] for key in keys} | {"models": list(about["models"]), "error": None}
        except UserError as error:
            entry["error"] = str(error)
        listed.append(entry)
    return listed


def _outline(name: str, length: int, vocab_size: int, mask_id: int, light: str, heavy: str) -> dict[str, Any]:
    return {
        "name": name,
        "folder": None,
        "length": length,
        "vocab_size": vocab_size,
        "mask_id": mask_id,
        "tokenizer": None,
        "roles": {"light": light, "heavy": heavy},
        "models": {},
        "judge": None,
        "twins": {},
        "bytes": None,
        "missing": [],
        "digest": None,
    }


def _describe_model(model: Denoiser, length: int) -> dict[str, Any]:
    architecture = getattr(model, "architecture", None)
    flops = getattr(model, "flops", None)
    parameters = getattr(model, "parameters", None)
    return {
        "depth": getattr(model, "depth", None),
        "width": getattr(architecture, "width", None),
        "heads": getattr(architecture, "heads", None),
        "parameters": None if parameters is None else sum(value.numel() for value in parameters()),
        "time_conditioning": getattr(model, "time_conditioning", None),
        "flops_per_call": None if flops is None else flops(length, 1),
        "flops_full": None if flops is None else flops(length, None),
        "dtype": None,
        "bytes": None,
    }


def _describe_entry(folder: Path, entry: Mapping[str, Any], length: int) -> dict[str, Any]:
    a = Architecture(**entry["architecture"])
    return {
        "depth": a.depth,
        "width": a.width,
        "heads": a.heads,
        "parameters": entry["parameters"],
        "time_conditioning": a.time_conditioning,
        "flops_per_call": _entry_flops(entry, length, 1),
        "flops_full": _entry_flops(entry, length, None),
        "dtype": entry["dtype"],
        "bytes": sum((folder / file).stat().st_size for file in entry["files"] if (folder / file).is_file()),
    }


def _entry_flops(entry: Mapping[str, Any], length: int, positions: int | None) -> float:
    a = Architecture(**entry["architecture"])
    return cost.call_flops(a.depth, a.width, a.vocab_size, length, positions, a.mlp_ratio)

"""Families on the Hugging Face hub: fetched and pushed. Only JSON, text and safetensors go either way.

huggingface_hub's own settings apply: HF_HOME, HF_ENDPOINT, HF_TOKEN, and HF_HUB_OFFLINE, under which only what is in
the cache is found and nothing is pushed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from relaylm.errors import UserError, reason
from relaylm.models.folder import CARD, TAGS, files_of, read_manifest, refuse_pickles

HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.md", "*.jinja")  # nothing that could be code or a pickle
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
PROMPT = "the history of"  # what the hub's page offers to try


def download(name: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The files of a hub repository that match the patterns, from the cache or the network."""
    run = Path(name).parent  # of a family that `relaylm train` writes at its end
    if (run / "config.json").is_file() and (run / "models").is_dir():
        raise UserError(f"there is no family in {name!r} yet: training there has not ended; `relaylm train` goes on")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no file or folder {name!r}, and fetching it from the Hugging Face hub needs "
            f"`pip install relaylm[hub]`"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(patterns)))
    except Exception as error:  # the hub's errors come from several libraries; all of them mean: not fetched
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"there is no file or folder {name!r}, and it could not be fetched from the Hugging Face hub{at} "
            f"({type(error).__name__}: {reason(error)})"
        ) from None


def push(folder: Path, name: str, *, private: bool = False, message: str = "") -> str:
    """Upload a family's folder to the hub repository `name`, made if need be, with a card that has what the hub reads;
    returns the address of the commit. The folder itself stays as it is."""
    if not HUB_ID.fullmatch(name):
        raise UserError(f"{name!r} is no name on the hub: write owner/name")
    try:
        from huggingface_hub import CommitOperationAdd, HfApi, constants
    except ImportError:
        raise UserError("pushing to the Hugging Face hub needs `pip install relaylm[hub]`") from None
    if constants.HF_HUB_OFFLINE:
        raise UserError("HF_HUB_OFFLINE is set, so nothing can be pushed")
    manifest = read_manifest(folder)
    refuse_pickles(folder)
    if missing := [file for file in files_of(manifest) if file != CARD and not (folder / file).is_file()]:
        raise UserError(f"{folder} is not whole: {missing[0]} is missing")
    card = (folder / CARD).read_text(encoding="utf-8") if (folder / CARD).is_file() else f"# {manifest['name']}\n"
    files = {path for pattern in HUB_FILES for path in folder.rglob(pattern) if path.name != CARD and path.is_file()}
    changes = [CommitOperationAdd(CARD, hub_card(card, manifest).encode())]
    changes += [CommitOperationAdd(str(path.relative_to(folder)), str(path)) for path in sorted(files)]
    try:
        api = HfApi(library_name="relaylm")
        api.create_repo(name, private=private or None, exist_ok=True)
        done = api.create_commit(name, changes, commit_message=message or f"Add {manifest['name']}")
    except Exception as error:  # as above: not pushed
        raise UserError(f"{name} could not be pushed to the hub ({type(error).__name__}: {reason(error)})") from None
    return str(done.commit_url)


def hub_card(card: str, manifest: Mapping[str, Any]) -> str:
    """A card with the entries that the hub reads; what it says already stays."""
    from huggingface_hub import ModelCard

    found = ModelCard(card, ignore_metadata_errors=True)
    meta = manifest["meta"]
    defaults: dict[str, Any] = {
        "library_name": "relaylm",
        "license": meta.get("license", "unknown"),
        "pipeline_tag": "text-generation",
        "datasets": meta.get("datasets"),
        "tags": list(TAGS),
        "widget": [{"text": PROMPT}],
    }
    for key, value in defaults.items():
        if value is not None and not getattr(found.data, key, None):
            setattr(found.data, key, value)
    return str(found)

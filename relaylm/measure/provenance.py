"""Records: how a result was made (command, machine, versions, commit and day), and records of earlier runs.

They are JSON under a folder such as this project's results/, which a wheel does not contain.
"""

from __future__ import annotations

import datetime
import json
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import relaylm
from relaylm.files import expand
from relaylm.measure.timing import device_name


def how_made(device: torch.device) -> dict[str, Any]:
    """The provenance of a result that was computed on a device, as JSON values."""
    cpu = device_name(torch.device("cpu"))
    gpu = device_name(device) if device.type == "cuda" else None
    return {
        "machine": {"platform": platform.platform(), "cpu": cpu, "threads": torch.get_num_threads(), "gpu": gpu},
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "relaylm": relaylm.__version__},
        "command": _command(),
        "commit": _commit(),
        "date": datetime.date.today().isoformat(),
    }


def _command() -> str:
    """As it could be typed: `python -m relaylm` is relaylm."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    module = "" if spec is None else spec.name.removesuffix(".__main__")
    start = ["python", "-m", module] if "." in module else [module or Path(sys.argv[0]).name]
    return shlex.join([*start, *sys.argv[1:]])


def _commit() -> str | None:
    """The commit of the checkout that this file is tracked in, "-dirty" where it has changes; None elsewhere."""
    here = Path(__file__).resolve()

    def git(*words: str) -> str:
        command = ["git", "-C", str(here.parent), *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        git("ls-files", "--error-unmatch", here.name)  # a package installed inside some repository is not tracked there
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return None


def records_folder(folder: str | Path | None = None) -> Path | None:
    """The folder of records: the one that is named, else `results` in the current folder, else None."""
    if folder is not None:
        return expand(folder)
    return Path("results") if Path("results").is_dir() else None


def load_record(file: Path | None) -> dict[str, Any] | None:
    """A record, or None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None

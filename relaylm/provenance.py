"""How a result was made: the command, the machine, the versions, the commit, the day. Every file under results/ holds
them."""

from __future__ import annotations

import datetime
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import relaylm
from relaylm.timing import device_name


def how_made(device: torch.device) -> dict[str, Any]:
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
    program = Path(sys.argv[0])
    name = program.parent.name if program.name == "__main__.py" else program.name
    return shlex.join([name, *sys.argv[1:]])


def _commit() -> str | None:
    """Of the checkout that this package lies in, if it does; "-dirty" where that has changes."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists():
        return None
    try:
        command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None

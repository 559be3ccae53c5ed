"""The examples run as they are."""

from __future__ import annotations

import configparser
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from test_http import Running

from relaylm.cli.main import build_parser
from relaylm.models.family import Family

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def running(wide_family: Family) -> Iterator[Running]:
    one = Running(wide_family)
    yield one
    one.close()


@pytest.mark.parametrize("name", ["curl.sh", "openai_client.py", "watch.py"])
def test_an_example_runs(running: Running, name: str) -> None:
    if name.endswith(".sh") and shutil.which("curl") is None:
        pytest.skip("there is no curl")
    command = ["bash"] if name.endswith(".sh") else [sys.executable]
    done = subprocess.run([*command, str(EXAMPLES / name), running.url], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "calls" in done.stdout


def test_the_unit_of_the_documents_has_no_comment_behind_a_value() -> None:
    """systemd would take it for a part of the value."""
    text = (EXAMPLES.parent / "docs" / "serve.md").read_text(encoding="utf-8")
    unit = configparser.ConfigParser()
    unit.optionxform = str  # type: ignore[assignment, method-assign]
    unit.read_string(text.partition("```ini\n")[2].partition("```")[0])
    values = dict(unit["Service"])
    assert not [value for value in values.values() if "#" in value]
    most = build_parser().parse_args(["serve"]).timeout
    assert int(values["TimeoutStopSec"]) > most and values["EnvironmentFile"].startswith("/")


def test_the_notebook_runs() -> None:
    nbformat = pytest.importorskip("nbformat", reason="the notebook needs nbclient")
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    notebook = nbformat.read(EXAMPLES / "serve.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)  # kept without outputs
    nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
    printed = "".join(out.get("text", "") for cell in notebook.cells for out in cell.get("outputs", []))
    assert "sandwich:50%" in printed and "t = 1.00" in printed

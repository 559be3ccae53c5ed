"""What is released: the wheel and the source archive, installed; metadata that agree; the site."""

from __future__ import annotations

import json
import os
import pwd
import re
import runpy
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import relaylm

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LARGEST = 120_000_000  # bytes of a wheel


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stderr
    return str(done.stdout)


def test_versions_agree() -> None:
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (.*)$", citation, re.MULTILINE) == [PROJECT["version"]] == [relaylm.__version__]
    assert f"## {PROJECT['version']}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_citation_has_what_the_format_requires() -> None:
    yaml = pytest.importorskip("yaml", reason="no YAML reader is installed")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation) and citation["cff-version"] == "1.2.0"
    assert citation["license"] == PROJECT["license"]
    for reference in citation["references"]:
        assert {"type", "title", "authors"} <= set(reference)


def test_extras_are_named_and_all_has_them() -> None:
    extras = PROJECT["optional-dependencies"]
    (everything,) = extras["all"]
    named = set(re.search(r"\[(.*)\]", everything).group(1).split(","))  # type: ignore[union-attr]
    assert named == set(extras) - {"all", "dev", "docs", "mauve", "campaign", "kernels"}
    used = set()
    for path in (ROOT / "relaylm").rglob("*.py"):
        used |= set(re.findall(r"relaylm\[([a-z-]+)\]", path.read_text(encoding="utf-8")))
    assert used <= set(extras), used - set(extras)


def test_the_description_for_a_package_index_has_no_relative_link() -> None:
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    text = "Fast ([how](a.md)), [well](b.md#c) [made](https://x.org).\n\n![A curve](c.svg)\n\n*Red.*\n\n[Top](#fast)\n"
    assert description(text) == "Fast, well [made](https://x.org).\n\n[Top](#fast)\n"
    linked = description(text, "https://y.org/z")
    assert "![A curve](https://y.org/z/raw/HEAD/c.svg)\n\n*Red.*" in linked
    assert "([how](https://y.org/z/blob/HEAD/a.md)), [well](https://y.org/z/blob/HEAD/b.md#c)" in linked
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for shown in (description(readme), description(readme, "https://y.org/z")):
        assert all(target.startswith("https://") for target in re.findall(r"\]\(([^)]*)\)", shown))
        assert shown.count("\n## ") == readme.count("\n## ") and shown.count("\n| ") == readme.count("\n| ")


def built(folder: Path) -> tuple[Path, Path, list[str]]:
    """The wheel, the source archive, and the files that are tracked."""
    pytest.importorskip("build", reason="build is not installed")
    pytest.importorskip("setuptools", reason="setuptools is not installed")
    source = folder / "source"
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in tracked:
        if name.startswith(("relaylm/", "pyproject", "setup.py", "README", "LICENSE")) and (ROOT / name).is_file():
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", source)
    (wheel,), (archive,) = (list((folder / "dist").glob(pattern)) for pattern in ("*.whl", "*.tar.gz"))
    return wheel, archive, tracked


def interpreter(version: str) -> str | None:
    """A Python of this version that runs, of pyenv or on the path."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)  # tests have a HOME of their own
    own = sorted((home / ".pyenv" / "versions").glob(f"{version}.*/bin/python"))
    for found in (*own, shutil.which(f"python{version}")):
        if found is not None and subprocess.run([found, "--version"], capture_output=True, check=False).returncode == 0:
            return str(found)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", ["3.12", "3.13"])
def test_the_wheel_with_all_it_needs_on_other_interpreters(tmp_path: Path, version: str) -> None:
    """With the dependencies of its own, from the package index; that all extras resolve is asked of pip alone."""
    if (found := interpreter(version)) is None:
        pytest.skip(f"there is no Python {version}")
    wheel, _, _ = built(tmp_path)
    home = tmp_path / "venv"
    run(found, "-m", "venv", home)
    python, same = home / "bin" / "python", ("--disable-pip-version-check", "-q", "-c", ROOT / "constraints.txt")
    run(python, "-m", "pip", "install", *same, wheel)
    extras = ",".join(sorted(set(PROJECT["optional-dependencies"]) - {"campaign", "mauve"}))
    run(python, "-m", "pip", "install", "--dry-run", *same, f"relaylm[{extras}] @ file://{wheel}")
    assert run(home / "bin" / "relaylm", "--version", cwd=tmp_path).strip() == f"relaylm {PROJECT['version']}"
    words = ("sample", "--family", "wiki-char", "--length", "16", "--seed", "1", "--json", "-")
    said = run(home / "bin" / "relaylm", *words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})
    assert len(json.loads(said)["texts"][0]) == 16


@pytest.mark.slow
def test_wheel_and_source_archive_install_into_an_empty_environment(tmp_path: Path) -> None:
    wheel, archive, tracked = built(tmp_path)
    assert wheel.stat().st_size < LARGEST
    with zipfile.ZipFile(wheel) as files:
        names = files.namelist()
        metadata = Parser().parsestr(files.read(next(n for n in names if n.endswith("METADATA"))).decode())
    with tarfile.open(archive) as files:
        assert any(name.endswith("relaylm/models/families/wiki-bpe/family.json") for name in files.getnames())
    tracked_files = {name for name in tracked if name.startswith("relaylm/") and (ROOT / name).is_file()}
    assert tracked_files <= set(names), sorted(tracked_files - set(names))
    assert set(metadata.get_all("Provides-Extra")) == set(PROJECT["optional-dependencies"])
    assert metadata["Version"] == PROJECT["version"]
    assert metadata["Description-Content-Type"] == "text/markdown" and "](docs/" not in metadata.get_payload()
    assert str(metadata.get_payload()).startswith("# relaylm\n")
    # `build` makes the wheel from the source archive, so installing it tests both. Torch and its like are lent from
    # this environment: only relaylm itself is installed.
    home = tmp_path / "venv"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site,) = (home / "lib").glob("python*/site-packages")
    (site / "lent.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel)
    assert run(home / "bin" / "relaylm", "--version", cwd=tmp_path).strip() == f"relaylm {PROJECT['version']}"
    code = "import relaylm; print(relaylm.__file__, *relaylm.sample(relaylm.Family.load('wiki-char'), length=8).texts)"
    assert str(site) in run(python, "-c", code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": ""})


@pytest.mark.slow
def test_the_site_builds_strictly_and_asks_no_other_host(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="mkdocs-material is not installed")
    run(sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path / "site", cwd=ROOT)
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > 10 and (tmp_path / "site" / "player.html").is_file()
    loads = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*(?:src|href)=[\"']?((?:https?:)?//[^\"'> ]+)")
    asked = {(page.name, host) for page in pages for host in loads.findall(page.read_text(encoding="utf-8"))}
    assert not asked

"""Supply: every package that relaylm and its extras bring in, with version and licence; packages that the code imports
without declaring them; and known vulnerabilities, where pip-audit is installed and its database can be reached.
Example: python tests/campaigns/supply.py"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from importlib import metadata, util
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.campaigns.common import ROOT, Campaign

FOLDERS = ("relaylm", "tests", "docs")
COPYLEFT = re.compile(r"\b(?:A?GPL|GNU (?:Affero )?General)", re.IGNORECASE)  # the lesser one is allowed


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> dict[str, list[str]]:
    """Requirements of the project, by extra ("" for the core)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": project["dependencies"], **project.get("optional-dependencies", {})}


def names_of(requirements: list[str]) -> list[str]:
    return [normal(re.match(r"[A-Za-z0-9._-]+", text)[0]) for text in requirements]  # type: ignore[index]


def closure() -> dict[str, dict[str, Any]]:
    """Every installed package that the project's requirements bring in, extras included."""
    waiting = [name for texts in declared().values() for name in names_of(texts)]
    found: dict[str, dict[str, Any]] = {}
    while waiting:
        name = waiting.pop()
        if name in found:
            continue
        try:
            package = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            found[name] = {"version": None, "licence": None}
            continue
        about = package.metadata
        classified = [text.rpartition(" :: ")[2] for text in about.get_all("Classifier") or [] if "License ::" in text]
        licence = (
            about.get("License-Expression") or ", ".join(classified) or (about.get("License") or "").split("\n")[0]
        )
        found[name] = {"version": package.version, "licence": licence or None}
        plain = [text for text in package.requires or [] if "extra ==" not in text and applies(text)]
        waiting += names_of(plain)
    return dict(sorted(found.items()))


def applies(requirement: str) -> bool:
    """Whether a requirement's marker holds on this machine; where that cannot be said, it does."""
    _, _, marker = requirement.partition(";")
    try:
        from packaging.markers import Marker

        return not marker.strip() or Marker(marker).evaluate()
    except Exception:
        return True


def imports() -> dict[str, str]:
    """Top-level modules that the code imports, each with a file that does."""
    found: dict[str, str] = {}
    for file in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.partition(".")[0], str(file.relative_to(ROOT)))
    return found


CALLED = {"mauve": "mauve-text"}  # packages of another name than their module, where they are not installed
BROUGHT = {"jinja2": "torch", "triton": "torch"}  # what a declared package requires itself, where it can use it


def undeclared() -> dict[str, str]:
    """Imports of installed packages that no requirement names."""
    known = {name for texts in declared().values() for name in names_of(texts)}
    packages = metadata.packages_distributions()
    own = {"relaylm", *(path.stem for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))}
    own |= {path.name for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.is_dir()}
    missing = {}
    for module, file in imports().items():
        if module in sys.stdlib_module_names or module in own or module in FOLDERS:
            continue
        by = names_of(metadata.requires(BROUGHT[module]) or []) if module in BROUGHT else []
        absent = module not in packages  # on a machine without a GPU, or planted by a test
        if module in by or (absent and (module in BROUGHT or file.startswith("tests"))):
            continue
        if not {normal(name) for name in packages.get(module, [CALLED.get(module, module)])} & known:
            missing[module] = file
    return missing


def audit() -> Any:
    """pip-audit's findings, or why there are none."""
    if util.find_spec("pip_audit") is None:
        return "pip-audit is not installed"
    command = [sys.executable, "-m", "pip_audit", "--progress-spinner", "off", "-f", "json"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return "pip-audit did not answer in two minutes"
    try:
        import json

        found = json.loads(done.stdout)["dependencies"]
        return {one["name"]: [hit["id"] for hit in one["vulns"]] for one in found if one.get("vulns")}
    except (ValueError, KeyError):
        return f"pip-audit could not run: {(done.stderr.strip().splitlines() or ['no reason given'])[-1][:300]}"


def main(argv: list[str] | None = None) -> int:
    campaign = Campaign("supply", __doc__ or "", 1, argv)
    for _ in campaign.cases():
        packages = closure()
        campaign.details["packages"] = packages
        campaign.counts["packages"] = len(packages)
        campaign.counts["installed"] = sum(one["version"] is not None for one in packages.values())
        for name, one in packages.items():
            if one["version"] is not None and one["licence"] is None:
                campaign.counts["licence not stated"] += 1
            if one["licence"] and COPYLEFT.search(one["licence"]):
                campaign.details.setdefault("copyleft", []).append(name)
        for module, file in undeclared().items():
            campaign.fail(module, f"{file} imports it, and pyproject.toml does not declare it")
        campaign.details["known vulnerabilities"] = audit()
    return campaign.finish()


if __name__ == "__main__":
    sys.exit(main())

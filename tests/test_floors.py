"""The floors of the package: a module uses the floors below its own and modules of its own, nothing above or beside.

Every import counts, those inside functions and those for type checkers included.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "relaylm"

# From the ground up. Floors in one set stand beside each other and do not use each other.
FLOORS: list[set[str]] = [
    {"errors"},
    {"files", "console"},
    {"core"},
    {"kernels"},
    {"models"},
    {"convert"},
    {"sampling"},
    {"measure"},
    {"show"},
    {"search", "train", "serve", "harness"},
    {"cluster"},
    {"studies"},
    {"cli"},
]
LEVEL = {name: level for level, names in enumerate(FLOORS) for name in names}
# Family.load reaches up to the loader of checkpoints; Samples, in a notebook, to what draws them.
EXCEPTIONS = {("models/family.py", "convert"), ("sampling/result.py", "show")}


def imported(path: Path) -> Iterator[str]:
    """Every module of the package that a file imports, by its dotted name below `relaylm`."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("relaylm."))
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "relaylm":
            base = node.module.partition(".")[2]
            for alias in node.names:
                whole = f"{base}.{alias.name}".strip(".")
                yield whole if is_module(whole) else base
        assert not (isinstance(node, ast.ImportFrom) and node.level), f"{path}: write imports out in full"


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


def modules() -> list[Path]:
    top = {"__init__.py", "__main__.py"}  # the public names and the command, which stand outside
    return [p for p in sorted(PACKAGE.rglob("*.py")) if not (p.parent == PACKAGE and p.name in top)]


@pytest.mark.parametrize("path", modules(), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_use_lower_floors_only(path: Path) -> None:
    here = str(path.relative_to(PACKAGE))
    floor = here.partition("/")[0].removesuffix(".py")
    wrong = [
        name
        for name in imported(path)
        if (other := name.partition(".")[0]) and other != floor and LEVEL[other] >= LEVEL[floor]
        if (here, other) not in EXCEPTIONS
    ]
    assert not wrong, f"{here} uses {', '.join(sorted(set(wrong)))}"


def test_no_module_imports_itself_in_a_circle() -> None:
    names = {
        str(p.relative_to(PACKAGE).with_suffix("")).replace("/", ".").removesuffix(".__init__"): p for p in modules()
    }
    uses = {name: {other for other in imported(path) if other in names} - {name} for name, path in names.items()}
    for here, above in EXCEPTIONS:
        name = here.removesuffix(".py").replace("/", ".")
        uses[name] -= {other for other in uses[name] if other.partition(".")[0] == above}
    done: set[str] = set()
    while ready := [name for name in uses if name not in done and uses[name] <= done]:
        done.update(ready)
    assert not (left := sorted(set(uses) - done)), f"these use each other: {', '.join(left)}"


COUNT = """
import sys
from relaylm.cli.main import main
assert main(["sample", "--family", "wiki-char", "--length", "8", "--spacing", "8"]) == 0
ours = {name: module for name, module in sys.modules.items() if name.startswith("relaylm.")}
print(*sorted(name for name, module in ours.items() if not hasattr(module, "__path__")))
"""


def test_sampling_a_native_family_imports_what_it_uses() -> None:
    """No reader of foreign checkpoints, no other command, no decoding rule, no kernel for a device that is not used."""
    run = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, check=True)
    used = [name.removeprefix("relaylm.") for name in run.stdout.splitlines()[-1].split()]
    floors = [name.partition(".")[0] for name in used]
    assert not {"convert", "measure", "search", "train", "studies", "cluster"} & set(floors)
    assert [name for name in used if name.startswith("cli.")] == ["cli.main", "cli.options", "cli.sample", "cli.tools"]
    engine = [name for name, floor in zip(used, floors) if LEVEL[floor] <= LEVEL["sampling"] and floor != "console"]
    assert "sampling.denoise" in engine and len(engine) <= 20, engine

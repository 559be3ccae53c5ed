"""Files that are whole or not there: what killed writers leave, and writers at the same time."""

import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from relaylm import files
from relaylm.errors import UserError

WRITER = """
import sys
from pathlib import Path
from relaylm.files import atomic_write
for number in range(300):
    atomic_write(Path(sys.argv[1]), sys.argv[2] * 1000)
"""
posix = pytest.mark.skipif(files.fcntl is None, reason="needs locks")


@posix
def test_what_a_killed_writer_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "[a].json"
    child = os.fork()
    if child == 0:
        os.replace = os.fsync = lambda *_: os._exit(9)  # type: ignore[assignment]
        files.atomic_write(path, "half")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (left,) = tmp_path.iterdir()
    mine = tmp_path / f"{left.name}.txt"
    mine.write_text("mine")
    files.atomic_write(path, "whole")
    assert sorted(tmp_path.iterdir()) == sorted([mine, path]) and path.read_text() == "whole"


def test_numbers_that_json_lacks(tmp_path: Path) -> None:
    files.write_json(tmp_path / "a.json", {"a": [math.inf, -math.inf, math.nan], 1: (0.5, "text")})
    found = files.read_json(tmp_path / "a.json")
    assert found == {"a": ["inf", "-inf", None], "1": [0.5, "text"]}
    assert files.with_infinities(found) == {"a": [math.inf, -math.inf, None], "1": [0.5, "text"]}


def test_what_relaylm_amended_is_its_own_to_replace(tmp_path: Path) -> None:
    def fill(text: str) -> Callable[[Path], None]:
        return lambda new: (new / "model.txt").write_text(text) and None

    folder = files.write_folder(tmp_path / "a", fill("one"), overwrite=False)
    for value in ([1], [2], [1]):
        files.amend_folder(folder, "pairs.json", value)
    files.write_folder(folder, fill("two"), overwrite=True)
    assert (folder / "model.txt").read_text() == "two" and not (folder / "pairs.json").exists()
    files.amend_folder(folder, "pairs.json", [3])
    (folder / "pairs.json").write_text("[4]")  # by someone else, also if it is amended later
    files.amend_folder(folder, "pairs.json", [5])
    with pytest.raises(UserError, match=r"pairs\.json in it is not as relaylm wrote it"):
        files.write_folder(folder, fill("three"), overwrite=True)
    assert (folder / "model.txt").read_text() == "two"


@posix
def test_writers_of_one_file_do_not_disturb_each_other(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[1])}
    words = [sys.executable, "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*words, letter], env=environment, stderr=subprocess.PIPE) for letter in "abc"]
    for writer in writers:
        assert writer.wait() == 0, writer.stderr.read() if writer.stderr else ""
        writer.stderr.close() if writer.stderr else None
    assert [one.name for one in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() in {letter * 1000 for letter in "abc"}

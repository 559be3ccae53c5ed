"""Families to the hub and back, against a stand-in of its HTTP interface on this machine."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from relaylm import Family, UserError
from relaylm.models import hub
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.folder import read_manifest, save_family
from relaylm.models.tokenizer import Text8Tokenizer

pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
ROOT = Path(__file__).parents[2]
COMMIT = "a" * 40


class Hub(ThreadingHTTPServer):
    """One repository, in memory, with the few addresses that pushing and fetching ask for."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files: dict[str, bytes] = {}
        self.asked: list[str] = []
        self.token = ""

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Answers(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def answer(self, value: Any = None, status: int = 200, body: bytes = b"", **headers: str) -> None:
        data = body if value is None else json.dumps(value).encode()
        self.send_response(status)
        for name, text in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name.replace("_", "-"), text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def do_POST(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        hub.asked.append(path)
        hub.token = self.headers.get("Authorization", hub.token)
        if path == "/api/repos/create":
            self.answer({"url": f"{hub.address}/user/tiny", "name": "user/tiny", "id": "user/tiny"})
        elif path == "/api/validate-yaml":
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            paths = [file["path"] for file in json.loads(content)["files"]]
            modes = [{"path": p, "uploadMode": "regular", "shouldIgnore": False, "oid": None} for p in paths]
            self.answer({"files": modes})
        elif "/commit/" in path:
            for line in content.splitlines():
                change = json.loads(line)
                if change["key"] == "file":
                    hub.files[change["value"]["path"]] = base64.b64decode(change["value"]["content"])
            done = {"commitUrl": f"{hub.address}/user/tiny/commit/{COMMIT}", "commitOid": COMMIT, "success": True}
            self.answer(done)
        else:
            self.answer({"error": path}, 404)

    def do_GET(self) -> None:
        hub, path = self.server, self.path.split("?")[0]
        hub.asked.append(path)
        if path.startswith("/api/models/user/tiny/tree/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in hub.files.items()
            ]
            self.answer(entries)
        elif path.startswith("/api/models/user/tiny"):
            siblings = [{"rfilename": name} for name in hub.files]
            self.answer({"id": "user/tiny", "sha": COMMIT, "siblings": siblings, "private": False, "tags": []})
        elif path.startswith("/user/tiny/resolve/"):
            data = hub.files[path.split("/", 5)[5]]
            tag = f'"{hashlib.sha1(data).hexdigest()}"'
            self.answer(body=data, ETag=tag, X_Repo_Commit=COMMIT)
        else:
            self.answer({"error": path}, 404, X_Error_Code="RepoNotFound")

    do_HEAD = do_GET


@pytest.fixture
def server() -> Iterator[Hub]:
    with Hub() as found:
        thread = threading.Thread(target=found.serve_forever, daemon=True)
        thread.start()
        yield found
        found.shutdown()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = {}
    for depth, name in enumerate(("small", "large"), 1):
        a = Architecture(vocab_size=28, length=16, width=16, depth=depth, heads=2)
        models[name] = Transformer(a).initialise(torch.Generator().manual_seed(depth)).eval()
    made = tmp_path_factory.mktemp("hub") / "tiny"
    meta = {"license": "mit", "datasets": ["wikipedia"]}
    return save_family(made, models, Text8Tokenizer(), length=16, name="tiny", card="# tiny\n\nA card.\n", meta=meta)


def run(code: list[str], cache: Path, server: Hub | None, **more: str) -> subprocess.CompletedProcess[str]:
    """Python in a process of its own, since huggingface_hub reads its settings once."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HOME": str(cache), "HF_TOKEN": "hf_" + "x" * 34, **more}
    environment["HF_ENDPOINT"] = server.address if server is not None else "http://127.0.0.1:9"
    environment = {k: v for k, v in environment.items() if k.lower() not in ("http_proxy", "https_proxy", "all_proxy")}
    return subprocess.run(
        [sys.executable, *code], env=environment, cwd=cache, capture_output=True, text=True, check=False
    )


LOAD = "import relaylm; f = relaylm.Family.from_pretrained('user/tiny'); print(f.digest, relaylm.sample(f).texts)"


def test_a_family_goes_to_the_hub_and_back(server: Hub, folder: Path, tmp_path: Path) -> None:
    before = sorted(path.name for path in folder.rglob("*"))
    pushed = run(["-m", "relaylm", "push", str(folder), "user/tiny"], tmp_path, server)
    assert pushed.returncode == 0, pushed.stderr
    assert pushed.stdout.strip() == f"{server.address}/user/tiny/commit/{COMMIT}"
    assert sorted(path.name for path in folder.rglob("*")) == before
    assert server.token == "Bearer hf_" + "x" * 34
    assert {Path(name).suffix for name in server.files} == {".json", ".safetensors", ".md"}
    assert all((folder / name).read_bytes() == data for name, data in server.files.items() if name != "README.md")

    fetched = run(["-c", LOAD], tmp_path, server)
    assert fetched.returncode == 0, fetched.stderr
    assert fetched.stdout.split()[0] == read_manifest(folder)["digest"]

    asked = len(server.asked)  # without the network the cache is enough, and what is not there is one line
    others = f"from relaylm.cli.main import main; main(['info', 'user/other']); main(['push', {str(folder)!r}, 'u/x'])"
    offline = run(["-c", f"{LOAD}; {others}"], tmp_path, server, HF_HUB_OFFLINE="1")
    assert offline.stdout == fetched.stdout and len(server.asked) == asked
    missing, refused = offline.stderr.splitlines()
    assert "could not be fetched" in missing and "HF_HUB_OFFLINE" in refused


def test_the_card_has_what_the_hub_reads(folder: Path) -> None:
    from huggingface_hub import ModelCard

    manifest = read_manifest(folder)
    data = ModelCard(hub.hub_card("# no head\n", manifest)).data
    assert (data.library_name, data.license, data.pipeline_tag) == ("relaylm", "mit", "text-generation")
    assert data.datasets == ["wikipedia"] and data.widget == [{"text": hub.PROMPT}] and "masked-diffusion" in data.tags
    own = ModelCard(hub.hub_card("---\nlicense: apache-2.0\n---\n# mine\n", manifest))
    assert own.data.license == "apache-2.0" and own.data.library_name == "relaylm" and "# mine" in own.text


@pytest.mark.parametrize("name", ["wiki-char", "wiki-bpe"])
def test_bundled_cards_say_all_of_it(name: str) -> None:
    from huggingface_hub import ModelCard

    card = ROOT / "relaylm" / "models" / "families" / name / "README.md"
    data = ModelCard(card.read_text(encoding="utf-8")).data
    assert data.library_name == "relaylm" and data.license and data.datasets and data.pipeline_tag and data.widget


def test_what_cannot_be_pushed_is_refused_before_anything_is_sent(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="owner/name"):
        hub.push(folder, "tiny")
    broken = shutil.copytree(folder, tmp_path / "broken")
    next(broken.rglob("*.safetensors")).unlink()
    with pytest.raises(UserError, match="is missing"):
        hub.push(broken, "user/tiny")
    (folder / "evil.bin").write_bytes(b"")
    try:
        with pytest.raises(UserError, match="never unpickles"):
            hub.push(folder, "user/tiny")
    finally:
        (folder / "evil.bin").unlink()


@pytest.mark.parametrize("private", [True, False])
def test_what_is_to_be_private_is_made_private(folder: Path, monkeypatch: pytest.MonkeyPatch, private: bool) -> None:
    asked = {}

    class Api:
        def __init__(self, **_: Any) -> None: ...

        def create_repo(self, name: str, **options: Any) -> None:
            asked.update(options, name=name)

        def create_commit(self, *_: Any, **options: Any) -> Any:
            return SimpleNamespace(commit_url=options["commit_message"])

    monkeypatch.setattr("huggingface_hub.HfApi", Api)
    assert hub.push(folder, "user/tiny", private=private) == "Add tiny"
    assert asked == {
        "name": "user/tiny",
        "private": private or None,
        "exist_ok": True,
    }  # None: as the user's account says


def test_save_pretrained_is_the_way_back(folder: Path, tmp_path: Path) -> None:
    family = Family.from_pretrained(str(folder))
    again = Family.from_pretrained(str(family.save_pretrained(tmp_path / "again")))
    assert again.digest == family.digest

"""Fuzz: inputs made by a coverage-guided fuzzer (atheris, or mutate.py where that is not installed) for the parsers
that read what strangers write. An input may be refused with a UserError (or the server's Refused); any other exception,
more than a second or more than 500 MB is a failure. Inputs that reached new code are kept for the next process.
Example: python tests/campaigns/fuzz.py --jobs 2 (--size: inputs, shared out over the targets)"""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.campaigns import mutate
from tests.campaigns.common import JOBS, ROOT, Campaign, Outcome

CORPUS = ROOT / ".hypothesis" / "fuzz"  # ignored by git, like hypothesis' own examples
SECONDS, MEGABYTES = 1, 500
PORTION = 100_000  # inputs that one process tries, of a target with share 1
WEIGHTS = {"store": 0.1, "pickle": 0.4, "config": 0.4, "manifest": 0.4}  # fewer inputs where each takes milliseconds


def text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")  # half characters too, as in odd file names


def schedule() -> Callable[[bytes], object]:
    from relaylm.core.schedule import Schedule

    def one(data: bytes) -> None:
        found = Schedule.parse(text(data))
        assert Schedule.parse(str(found)) == found
        assert Schedule.from_json(found.to_json()) == found

    return one


def rule() -> Callable[[bytes], object]:
    from relaylm.sampling.rules import parse_rule

    return lambda data: parse_rule(text(data))


def budget() -> Callable[[bytes], object]:
    from relaylm.core.cost import parse_budget

    return lambda data: parse_budget(text(data))


def share() -> Callable[[bytes], object]:
    from relaylm.core.notation import parse_share

    return lambda data: parse_share(text(data))


def in_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """The input as a file, in memory where the machine has such a folder."""
    folder = tempfile.TemporaryDirectory(prefix="fuzz-", dir=os.environ.get("FUZZ"))
    path = Path(folder.name, name)

    def one(data: bytes, _folder: object = folder) -> None:  # which is removed when this function is no longer used
        path.write_bytes(data)
        read(path)

    return one


def config() -> Callable[[bytes], object]:
    from relaylm.cli.main import apply_config, build_parser

    parser = build_parser(["sample"])
    return in_file("c.toml", lambda path: apply_config(parser, ["sample", "--config", str(path)]))


def manifest() -> Callable[[bytes], object]:
    from relaylm.models import folder

    def read(path: Path) -> None:
        try:
            data = json.loads(path.read_bytes())
            data["digest"] = folder._digest({name: data.get(name) for name in folder.DIGESTED})
            path.write_text(json.dumps(data))
        except (ValueError, TypeError, RecursionError, AttributeError):
            pass
        folder.read_manifest(path.parent)

    return in_file("family.json", read)


def pickle() -> Callable[[bytes], object]:
    from relaylm.convert import describe

    def read(path: Path) -> None:
        program = path.read_bytes()
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("a/data.pkl", program)
        describe(path)

    return in_file("a.ckpt", read)


def safetensors() -> Callable[[bytes], object]:
    from relaylm.convert.tensors import open_safetensors

    def read(path: Path) -> None:
        header = path.read_bytes()
        path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(64))
        for lazy in open_safetensors([path]).values():
            lazy.read()

    return in_file("a.safetensors", read)


def store() -> Callable[[bytes], object]:
    from relaylm.measure.store import FILE, Store

    def read(path: Path) -> None:
        for left in path.parent.iterdir():
            if left.name != FILE:
                left.unlink()
        opened = Store(path.parent)
        try:
            list(opened.records())
        finally:
            opened.close()

    return in_file(FILE, read)


def tokenizer() -> Callable[[bytes], object]:
    from relaylm.models.tokenizer import load_tokenizer

    def read(path: Path) -> None:
        made = load_tokenizer(path)
        made.decode(made.encode("the history of"))

    return in_file("tokenizer.json", read)


def http() -> Callable[[bytes], object]:
    import dataclasses

    from relaylm.models.family import Family
    from relaylm.serve.families import settled
    from relaylm.serve.request import Ask, read_ask, read_json

    family = Family.load("wiki-char")
    allowed = frozenset(item.name for item in dataclasses.fields(Ask))

    def one(data: bytes) -> None:
        ask = read_ask(read_json(data), allowed)
        for prompt in ask.prompts[:2]:
            settled(family, ask, prompt)

    return one


def store_file() -> bytes:
    from relaylm.measure.store import FILE, Store

    with tempfile.TemporaryDirectory() as name:
        made = Store(name)
        made.put("a" * 64, {"kind": "x", "law": "y", "values": [1, 2]})
        made.close()
        return (Path(name) / FILE).read_bytes()


def tokenizer_file() -> bytes:
    sys.path.insert(0, str(ROOT / "tests"))
    from helpers import tiny_json

    return tiny_json(20).encode()


def checkpoint() -> bytes:
    import torch

    data = io.BytesIO()
    torch.save({"state_dict": {"backbone.vocab_embed.embedding": torch.zeros(2, 2)}, "epoch": 3}, data)
    with zipfile.ZipFile(data) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("data.pkl")))


def seeds(target: str) -> list[bytes]:
    """Valid inputs to begin with."""
    family = ROOT / "relaylm" / "models" / "families" / "wiki-char" / "family.json"
    header = b'{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]},"__metadata__":{"format":"pt"}}'
    body = b'{"model": "wiki-char", "prompt": "the ", "max_tokens": 8, "schedule": "L25% H75%", "steps": 4, "n": 2}'
    return {
        "schedule": [b"L125 H750 L125", b"L12.5% H75% L1/8", b"L8@25% H200@65% L8@10%", b"random:7(4b:25% 12b:75%)"]
        + [b"sandwich:25%", b"quarter:2", b"1000000111", b"cells(4b 8b 12b)", b"heavy spaced:16:prefix"],
        "rule": [b"low-confidence", b"threshold:0.9", b"surest:16:2", b"remdm-loop:0.02:0.55:0.05:0.9", b"eb:0.1"],
        "budget": [b"25%", b"0.5", b"3e12 flops", b"10 ms", b"2 joules"],
        "share": [b"12.5%", b"1/8", b"0.125", b"33.3%"],
        "config": [b'n = 2\nschedule = "heavy"\nwatch = true\n', b"steps = 8\nseed = 1"],
        "manifest": [family.read_bytes()],
        "pickle": [checkpoint()] if target == "pickle" else [],
        "safetensors": [header],
        "store": [store_file()] if target == "store" else [],
        "tokenizer": [tokenizer_file()] if target == "tokenizer" else [],
        "http": [body, b'{"infill": "a __ b", "rule": "eb:0.1"}', b'{"prompt": ["a", "b"], "stream": true}'],
    }[target]


TARGETS: dict[str, Callable[[], Callable[[bytes], object]]] = {
    "schedule": schedule,
    "rule": rule,
    "budget": budget,
    "share": share,
    "config": config,
    "manifest": manifest,
    "pickle": pickle,
    "safetensors": safetensors,
    "store": store,
    "tokenizer": tokenizer,
    "http": http,
}


def guarded(one: Callable[[bytes], object]) -> Callable[[bytes], str]:
    """A target that returns the message of a refusal, or an empty one."""
    from relaylm.errors import UserError

    allowed: tuple[type[BaseException], ...] = (UserError,)
    if "relaylm.serve.request" in sys.modules:
        allowed += (sys.modules["relaylm.serve.request"].Refused,)

    def run(data: bytes) -> str:
        try:
            one(bytes(data))
        except allowed as error:
            assert len(str(error).splitlines()) <= 1 and len(str(error)) < 3000, "a message must be one short line"
            return str(error)
        return ""

    return run


def fuzz(target: str, inputs: int, seed: int) -> None:
    """In a process of its own: fuzz one target, and leave inputs that reached new code in the corpus."""
    folder = CORPUS / target
    folder.mkdir(parents=True, exist_ok=True)
    for data in seeds(target):
        (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    longest = max(4096, *(2 * len(data) for data in seeds(target)))
    if importlib.util.find_spec("atheris") is None:
        mutate.fuzz(lambda: guarded(TARGETS[target]()), folder, inputs, seed, longest, SECONDS, MEGABYTES)
        return
    import atheris

    with atheris.instrument_imports(include=["relaylm"]):
        one = guarded(TARGETS[target]())
    size = mutate.megabytes() + MEGABYTES
    words = [f"-runs={inputs}", f"-timeout={SECONDS}", f"-rss_limit_mb={size}", f"-seed={seed % 2**31 or 1}"]
    words += ["-print_final_stats=1", f"-max_len={longest}", f"-artifact_prefix={folder}-"]
    atheris.Setup([sys.argv[0], *words, str(folder)], one)
    atheris.Fuzz()


def portion(target: str, inputs: int, seed: int) -> Outcome:
    """So many inputs for a target, in a process of its own."""
    command = [sys.executable, __file__, "--target", target, str(inputs), str(seed)]
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="fuzz-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as place:
        own = {**os.environ, "RELAYLM_FAMILY": "wiki-char", "OMP_NUM_THREADS": "1", "FUZZ": place}
        own["CUDA_VISIBLE_DEVICES"] = ""
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=3600, env=own)
        except subprocess.TimeoutExpired:
            outcome.failures.append((target, "it hung for an hour"))
            return outcome
    said = done.stderr + done.stdout
    executed = re.search(r"stat::number_of_executed_units:\s*(\d+)", said) or re.search(r"#(\d+)\s*DONE", said)
    count = int(executed[1]) if executed else 0
    outcome.counts += {target: count, "inputs": count}
    if done.returncode:
        outcome.failures.append((target, done.stderr[-1500:] + done.stdout[-400:]))
    print(f"fuzz: {target}: {count:,} inputs", flush=True)
    return outcome


def main(argv: list[str]) -> int:
    if argv[:1] == ["--target"]:
        fuzz(argv[1], *map(int, argv[2:4]))
        return 0
    engine = "atheris" if importlib.util.find_spec("atheris") else "sys.monitoring"
    if engine != "atheris" and sys.version_info < (3, 12):
        print("fuzz: skipped, it needs atheris, or Python 3.12 for the coverage of its own fuzzer")
        return 0
    campaign = Campaign("fuzz", __doc__ or "", 10_000_000, argv, jobs=JOBS)
    targets, asked = campaign.wanted([name for name in TARGETS if not lacking(name)]), campaign.size
    shares = {target: WEIGHTS.get(target, 1.0) for target in targets}
    plan = []  # portions of a few minutes at most, of all targets in turn
    for target, share in shares.items():
        inputs = round(asked * share / sum(shares.values()))
        parts = -(-inputs // round(PORTION * share))
        plan += [((part + 0.5) / parts, target, inputs // parts + (part < inputs % parts)) for part in range(parts)]
    plan.sort()
    campaign.size = len(plan)
    campaign.each(lambda case: portion(*plan[case][1:], campaign.seed + case), campaign.options.jobs)
    if missing := [name for name in TARGETS if lacking(name)]:
        campaign.details["skipped, a package is not installed"] = missing
    return campaign.finish(asked=asked, engine=engine, jobs=campaign.options.jobs)


def lacking(target: str) -> bool:
    return target == "http" and any(importlib.util.find_spec(name) is None for name in ("starlette", "uvicorn"))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

r"""Tensors out of a PyTorch file without unpickling it. Read by hand because `torch.load`
has run code out of crafted files even with `weights_only` (CVE-2025-32434), and with it refuses real checkpoints, which
carry configuration objects.

`torch.save` writes a zip with a pickle, `data.pkl`, that describes the object, and one file of raw numbers for each
storage. A pickle is a program; Python's unpickler runs it. Here the program is read, not run: `pickletools` splits it
into opcodes and a small machine follows those that build plain data (numbers, text, lists, tuples, dicts, sets) and the
one description of a tensor that PyTorch writes. Nothing is imported, looked up by name or called. The name of a class
or function becomes an inert `Opaque`, and so does all that is made from it; a checkpoint may carry such things (its
configuration, its tokenizer), but where a tensor is needed one is refused.

A file that names one of the few functions by which pickles run commands is refused altogether: not for safety, which
does not depend on it, but because its author meant harm and its numbers deserve no trust.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.errors import UserError, brief, reason

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
LARGEST_PICKLE = 1 << 26  # bytes of data.pkl; a real one has a few megabytes
LARGEST_INTEGER = 1 << 12  # bits; a real one has 128
# Modules that a checkpoint has no reason to name, and functions of builtins that are as bad.
HOSTILE = {
    "os", "posix", "nt", "subprocess", "sys", "io", "_io", "importlib", "runpy", "shutil", "socket", "ctypes", "pty",
    "code", "operator", "_operator", "commands", "webbrowser", "pickle", "_pickle", "marshal", "multiprocessing",
    "asyncio", "timeit", "cProfile", "pdb", "bdb",
}  # fmt: skip
HOSTILE_BUILTINS = {
    "eval", "exec", "execfile", "compile", "open", "__import__", "getattr", "setattr", "globals", "breakpoint", "input",
    "apply",
}  # fmt: skip

STORAGES = {
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Lazy:
    """A stored tensor: its shape and type, and a function that reads it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(eq=False)
class Opaque:
    """Something that only running code could make. Kept as data: its name and what it would have been made from."""

    name: str
    arguments: Any = None
    state: Any = None
    items: list[Any] = field(default_factory=list)

    def __repr__(self) -> str:
        return f"an object of {self.name}"


@dataclass(frozen=True, eq=False)
class _Global:
    """A name that the pickle would import. It is never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(frozen=True, eq=False)
class _Storage:
    key: str
    dtype: torch.dtype
    elements: int


class _Archive:
    """The zip, and the raw numbers in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                zipped = file.read(2) == b"PK"
        except OSError as error:
            raise UserError(f"cannot read {path}: {reason(error)}") from None
        if not zipped:
            raise UserError(
                f"{path} is not a file of torch.save since PyTorch 1.6 (a zip): relaylm never unpickles, and reads "
                f"safetensors or such zips only"
            )
        try:
            self.zip = zipfile.ZipFile(path)
        except (OSError, zipfile.BadZipFile, ValueError, NotImplementedError) as error:
            raise UserError(f"{path} is not a whole file of torch.save ({error})") from None
        pickles = [name for name in self.zip.namelist() if name.rpartition("/")[2] == "data.pkl"]
        if len(pickles) != 1:
            raise UserError(f"{path} is not a file of torch.save: it should hold one data.pkl, not {len(pickles)}")
        self.root = pickles[0][: -len("data.pkl")]
        if self.root + "byteorder" in self.zip.namelist() and self.bytes("byteorder", 16).strip() != b"little":
            raise UserError(f"{path} holds big-endian numbers, which relaylm does not read")

    def bytes(self, name: str, most: int) -> bytes:
        try:
            entry = self.zip.getinfo(self.root + name)
            if entry.file_size > most or entry.compress_type != zipfile.ZIP_STORED:
                raise UserError(f"{self.path}: {name} in it is compressed or larger than it can be")
            return self.zip.read(entry)
        except KeyError:
            raise UserError(f"{self.path}: {name} is missing from it") from None
        except (OSError, zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            raise UserError(f"{self.path}: {name} in it is damaged ({error})") from None

    def lazy(self, storage: _Storage, offset: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Lazy:
        def read() -> Tensor:
            size = storage.elements * storage.dtype.itemsize
            data = self.bytes(f"data/{storage.key}", size)
            if len(data) != size:
                raise UserError(f"{self.path}: data/{storage.key} in it is cut short")
            flat = torch.frombuffer(bytearray(data), dtype=storage.dtype) if size else torch.empty(0).to(storage.dtype)
            return flat.as_strided(shape, stride, offset).contiguous()

        return Lazy(shape, storage.dtype, read)


def read(path: str | Path) -> Any:
    """The object in a PyTorch file: plain containers, `Lazy` tensors, and `Opaque` for everything else."""
    archive = _Archive(Path(path))
    program = archive.bytes("data.pkl", LARGEST_PICKLE)
    try:
        return _Machine(archive).run(program)
    except UserError:
        raise
    except Exception as error:  # whatever a malformed program trips over, it is the file that is wrong
        raise UserError(
            f"{path}: the description of its tensors cannot be read ({type(error).__name__}: {error})"
        ) from None


def state_of(data: Any, path: Path) -> dict[str, Any]:
    """The state dict in what was read: under "state_dict" or "model", or the object itself."""
    if not isinstance(data, dict):
        raise UserError(f"{path} does not hold a checkpoint but {brief(data)}")
    for key in ("state_dict", "model"):
        data = data[key] if isinstance(data.get(key), dict) else data
    return data


_MARK = object()


class _Machine:
    """A stack and a memo. An opcode that is not here is an error, and so is whatever a malformed program trips over."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self.stack.pop()
            if isinstance(argument, int) and argument.bit_length() > LARGEST_INTEGER:
                raise UserError(f"{self.archive.path}: a number of {argument.bit_length()} bits has no place in it")
            if opcode.name in _PUSHED:
                self.stack.append(_PUSHED[opcode.name](self, argument))
            elif opcode.name not in ("PROTO", "FRAME"):
                self.change(opcode.name, argument)
        raise UserError(f"{self.archive.path}: the description of its tensors is cut short")

    def change(self, op: str, argument: Any) -> None:
        """Opcodes that drop, remember or change what is on the stack."""
        stack = self.stack
        if op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self.to_mark()
        elif op in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            self.memo[len(self.memo) if op == "MEMOIZE" else argument] = stack[-1]
        elif op in ("APPEND", "APPENDS", "ADDITEMS"):
            items = self.pop(1) if op == "APPEND" else self.to_mark()
            if isinstance(target := stack[-1], Opaque):
                target.items += items
            elif isinstance(target, set if op == "ADDITEMS" else list):
                target.update(map(_key, items)) if isinstance(target, set) else target.extend(items)
            else:
                raise TypeError(f"items for a {type(target).__name__}")
        elif op in ("SETITEM", "SETITEMS"):
            pairs = _pairs(self.pop(2) if op == "SETITEM" else self.to_mark())
            if isinstance(target := stack[-1], Opaque):
                target.items += pairs
            elif isinstance(target, dict):
                target.update((_key(key), value) for key, value in pairs)
            else:
                raise TypeError(f"keys for a {type(target).__name__}")
        elif op == "BUILD":
            state = stack.pop()
            if isinstance(target := stack[-1], Opaque):
                target.state = state
            elif not isinstance(target, dict):  # an OrderedDict's attributes (_metadata) are of no interest
                stack[-1] = Opaque(f"a {type(target).__name__} with attributes", target, state)
        else:
            raise UserError(f"{self.archive.path}: opcode {op} has no place in a checkpoint")

    def pop(self, count: int) -> list[Any]:
        return [self.stack.pop() for _ in range(count)][::-1]

    def to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def name(self, module: Any, name: Any) -> _Global:
        if not isinstance(module, str) or not isinstance(name, str):
            raise TypeError("a name that is not text")
        root = module.partition(".")[0]
        if root in HOSTILE or (root in ("builtins", "__builtin__") and name.partition(".")[0] in HOSTILE_BUILTINS):
            raise UserError(
                f"{self.archive.path} asks for {module}.{name}, by which pickles run commands: the file is hostile. "
                f"Nothing of it was run"
            )
        return _Global(module, name)

    def reduce(self, function: Any, arguments: Any) -> Any:
        known = str(function) if isinstance(function, _Global) else ""
        match known, arguments if isinstance(arguments, tuple) else None:
            case "collections.OrderedDict", ():
                return {}
            case "collections.OrderedDict", (list() as pairs,):
                return {_key(key): value for key, value in pairs}
            case (("builtins.set" | "__builtin__.set"), (list() as items,)):
                return set(map(_key, items))
            case "_codecs.encode", (str() as text, _):  # how protocol 2 writes bytes
                return text.encode("latin1")
            case "torch.Size", (tuple() as sizes,):
                return sizes
            case "torch._utils._rebuild_tensor_v2", (storage, offset, shape, stride, *_):
                return self.tensor(storage, offset, shape, stride)
            case "torch._utils._rebuild_parameter", (data, *_):
                return data
        return Opaque(known or brief(function), arguments)

    def storage(self, identity: Any) -> Any:
        if isinstance(identity, tuple) and len(identity) == 5:
            word, kind, key, _, elements = identity
            dtype = STORAGES.get(kind.name) if isinstance(kind, _Global) and kind.module == "torch" else None
            named = isinstance(key, str) and key.replace("_", "").isalnum()
            if word == "storage" and dtype is not None and named and _is_count(elements):
                return _Storage(key, dtype, elements)
        return Opaque("a storage of an unknown kind", identity)

    def tensor(self, storage: Any, offset: Any, shape: Any, stride: Any) -> Any:
        whole = _is_count(offset) and all(isinstance(x, tuple) and all(map(_is_count, x)) for x in (shape, stride))
        if not isinstance(storage, _Storage) or not whole or len(shape) != len(stride):
            return Opaque("a tensor of an unknown kind", (storage, offset, shape, stride))
        elements = math.prod(shape)
        last = offset + sum((size - 1) * step for size, step in zip(shape, stride, strict=True)) if elements else -1
        if last >= storage.elements or elements > storage.elements:
            raise UserError(
                f"{self.archive.path}: a tensor of shape {shape} reaches beyond its {storage.elements} numbers"
            )
        return self.archive.lazy(storage, offset, shape, stride)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 48


def _pairs(items: list[Any]) -> list[tuple[Any, Any]]:
    if len(items) % 2:
        raise ValueError("a key without a value")
    return list(zip(items[::2], items[1::2], strict=True))


def _key(value: Any) -> Any:
    """What may be a key: scalars, text, inert names, and flat tuples of scalars (hashing deep ones takes forever)."""
    plain = (str, int, float, bool, bytes, type(None))
    if isinstance(value, (*plain, Opaque, _Global)) or (
        isinstance(value, tuple) and all(isinstance(item, plain) for item in value)
    ):
        return value
    raise TypeError(f"a {type(value).__name__} as a key")


def _made(kind: Any, *arguments: Any) -> Opaque:
    return Opaque(str(kind) if isinstance(kind, _Global) else brief(kind), arguments)


# Opcodes that push one value, made from the argument and what they take off the stack.
_PUSHED: dict[str, Callable[[_Machine, Any], Any]] = {
    "NONE": lambda machine, _: None,
    "NEWTRUE": lambda machine, _: True,
    "NEWFALSE": lambda machine, _: False,
    "MARK": lambda machine, _: _MARK,
    "DUP": lambda machine, _: machine.stack[-1],
    "EMPTY_LIST": lambda machine, _: [],
    "EMPTY_DICT": lambda machine, _: {},
    "EMPTY_SET": lambda machine, _: set(),
    "EMPTY_TUPLE": lambda machine, _: (),
    "LIST": lambda machine, _: machine.to_mark(),
    "TUPLE": lambda machine, _: tuple(machine.to_mark()),
    "TUPLE1": lambda machine, _: tuple(machine.pop(1)),
    "TUPLE2": lambda machine, _: tuple(machine.pop(2)),
    "TUPLE3": lambda machine, _: tuple(machine.pop(3)),
    "FROZENSET": lambda machine, _: frozenset(map(_key, machine.to_mark())),
    "DICT": lambda machine, _: {_key(key): value for key, value in _pairs(machine.to_mark())},
    "GLOBAL": lambda machine, name: machine.name(*name.split(" ", 1)),
    "STACK_GLOBAL": lambda machine, _: machine.name(*machine.pop(2)),
    "REDUCE": lambda machine, _: machine.reduce(*machine.pop(2)),
    "NEWOBJ": lambda machine, _: _made(*machine.pop(2)),
    "NEWOBJ_EX": lambda machine, _: _made(*machine.pop(3)),
    "OBJ": lambda machine, _: _made(*machine.to_mark()),
    "INST": lambda machine, name: _made(machine.name(*name.split(" ", 1)), *machine.to_mark()),
    "PERSID": lambda machine, identity: machine.storage(identity),
    "BINPERSID": lambda machine, _: machine.storage(machine.stack.pop()),
}
_PUSHED |= dict.fromkeys(("GET", "BINGET", "LONG_BINGET"), lambda machine, at: machine.memo[at])
_PUSHED |= dict.fromkeys(
    ("INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
     "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
     "BINBYTES8", "BYTEARRAY8"), lambda machine, literal: literal
)  # fmt: skip

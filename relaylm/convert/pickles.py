r"""Tensors out of a PyTorch file without unpickling it.

`torch.save` writes a zip with a pickle, `data.pkl`, that describes the object, and one file of raw numbers for each
storage. A pickle is a program; Python's unpickler runs it, and with it whatever a stranger wrote there. Here the
program is read, not run: `pickletools` splits it into opcodes and a small machine follows those that build plain data
(numbers, text, lists, tuples, dicts, sets) and the one description of a tensor that PyTorch writes. Nothing is
imported, nothing is looked up by name and nothing is called. A name of a class or function becomes an inert `Opaque`,
and so does all that is made from it; a checkpoint may carry such things (its configuration, its tokenizer), but
nobody who needs a tensor will accept one in its place.

A file that names one of the few functions by which pickles run commands is refused altogether: not for safety, which
does not depend on it, but because its author meant harm and its numbers deserve no trust.
"""

from __future__ import annotations

import math
import pickletools
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.convert.tensors import Lazy
from relaylm.errors import UserError

SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
LARGEST_PICKLE = 1 << 28  # of data.pkl; a real one is a few megabytes
# Modules that a checkpoint has no reason to name, and functions of builtins that are as bad.
HOSTILE = [
    "os",
    "posix",
    "nt",
    "subprocess",
    "sys",
    "io",
    "_io",
    "importlib",
    "runpy",
    "shutil",
    "socket",
    "ctypes",
    "pty",
    "code",
    "operator",
    "_operator",
    "commands",
    "webbrowser",
    "pickle",
    "_pickle",
    "marshal",
    "multiprocessing",
    "asyncio",
    "timeit",
    "cProfile",
    "pdb",
    "bdb",
]
HOSTILE_BUILTINS = [
    "eval",
    "exec",
    "execfile",
    "compile",
    "open",
    "__import__",
    "getattr",
    "setattr",
    "globals",
    "breakpoint",
    "input",
    "apply",
]

STORAGES = {
    "DoubleStorage": torch.float64,
    "FloatStorage": torch.float32,
    "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16,
    "LongStorage": torch.int64,
    "IntStorage": torch.int32,
    "ShortStorage": torch.int16,
    "CharStorage": torch.int8,
    "ByteStorage": torch.uint8,
    "BoolStorage": torch.bool,
}


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
                start = file.read(2)
            if start != b"PK":
                raise UserError(
                    f"{path} is not a file of torch.save since PyTorch 1.6 (a zip): relaylm never unpickles, and reads "
                    f"safetensors or such zips only"
                )
            self.zip = zipfile.ZipFile(path)
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror or error}") from None
        except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
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
            flat = (
                torch.frombuffer(bytearray(data), dtype=storage.dtype) if size else torch.empty(0, dtype=storage.dtype)
            )
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


_MARK = object()
_PUSH = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_LITERALS = {
    "INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT", "STRING", "BINSTRING",
    "SHORT_BINSTRING", "UNICODE", "BINUNICODE", "SHORT_BINUNICODE", "BINUNICODE8", "BINBYTES", "SHORT_BINBYTES",
    "BINBYTES8", "BYTEARRAY8",
}  # fmt: skip
_EMPTY = {"EMPTY_LIST": list, "EMPTY_DICT": dict, "EMPTY_SET": set, "EMPTY_TUPLE": tuple}


class _Machine:
    """A stack and a memo. One method for each kind of opcode; an opcode that is not here is an error."""

    def __init__(self, archive: _Archive) -> None:
        self.archive = archive
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self, program: bytes) -> Any:
        for opcode, argument, _ in pickletools.genops(program):
            if opcode.name == "STOP":
                return self.stack.pop()
            self.step(opcode.name, argument)
        raise UserError(f"{self.archive.path}: the description of its tensors is cut short")

    def step(self, op: str, argument: Any) -> None:
        stack, memo = self.stack, self.memo
        if op in _LITERALS:
            stack.append(argument)
        elif op in _PUSH:
            stack.append(_PUSH[op])
        elif op in _EMPTY:
            stack.append(_EMPTY[op]())
        elif op in ("PROTO", "FRAME"):
            pass
        elif op == "MARK":
            stack.append(_MARK)
        elif op == "POP":
            stack.pop()
        elif op == "POP_MARK":
            self.to_mark()
        elif op == "DUP":
            stack.append(stack[-1])
        elif op in ("PUT", "BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif op == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif op in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif op in ("TUPLE", "LIST", "FROZENSET", "DICT"):
            items = self.to_mark()
            if op == "DICT":
                made: Any = {}
                self.set_items(made, items)
            else:
                made = tuple(items) if op == "TUPLE" else items if op == "LIST" else frozenset(map(_key, items))
            stack.append(made)
        elif op in ("TUPLE1", "TUPLE2", "TUPLE3"):
            size = int(op[-1])
            if len(stack) < size:
                raise IndexError("pop from empty stack")
            stack[-size:] = [tuple(stack[-size:])]
        elif op in ("APPEND", "APPENDS", "ADDITEMS"):
            items = [stack.pop()] if op == "APPEND" else self.to_mark()
            self.add_items(stack[-1], items, op == "ADDITEMS")
        elif op in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if op == "SETITEM" else self.to_mark()
            self.set_items(stack[-1], items)
        elif op == "GLOBAL":
            module, _, name = argument.partition(" ")
            stack.append(self.name(module, name))
        elif op == "STACK_GLOBAL":
            name, module = stack.pop(), stack.pop()
            stack.append(self.name(module, name))
        elif op == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(self.reduce(function, arguments))
        elif op in ("NEWOBJ", "NEWOBJ_EX"):
            keywords = stack.pop() if op == "NEWOBJ_EX" else None
            arguments, kind = stack.pop(), stack.pop()
            stack.append(Opaque(str(kind), (arguments, keywords)))
        elif op in ("INST", "OBJ"):
            items = self.to_mark()
            kind = argument if op == "INST" else items.pop(0)
            if op == "INST":
                self.name(*str(argument).split(" ", 1))
            stack.append(Opaque(str(kind), tuple(items)))
        elif op == "BUILD":
            state = stack.pop()
            if isinstance(stack[-1], Opaque):
                stack[-1].state = state
            elif not isinstance(stack[-1], dict):  # an OrderedDict's attributes (_metadata) are of no interest
                stack[-1] = Opaque(f"a {type(stack[-1]).__name__} with attributes", stack[-1], state)
        elif op in ("BINPERSID", "PERSID"):
            stack.append(self.storage(stack.pop() if op == "BINPERSID" else argument))
        else:
            raise UserError(f"{self.archive.path}: opcode {op} has no place in a checkpoint")

    def to_mark(self) -> list[Any]:
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def add_items(self, target: Any, items: list[Any], to_set: bool) -> None:
        if isinstance(target, Opaque):
            target.items += items
        elif to_set and isinstance(target, set):
            target.update(map(_key, items))
        elif not to_set and isinstance(target, list):
            target.extend(items)
        else:
            raise TypeError(f"items for a {type(target).__name__}")

    def set_items(self, target: Any, items: list[Any]) -> None:
        if len(items) % 2:
            raise ValueError("a key without a value")
        pairs = list(zip(items[::2], items[1::2], strict=True))
        if isinstance(target, Opaque):
            target.items += pairs
        elif isinstance(target, dict):
            target.update((_key(key), value) for key, value in pairs)
        else:
            raise TypeError(f"keys for a {type(target).__name__}")

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
        if isinstance(arguments, tuple):
            if known == "collections.OrderedDict" and not arguments:
                return {}
            if known == "collections.OrderedDict" and len(arguments) == 1 and isinstance(arguments[0], list):
                return {_key(key): value for key, value in arguments[0]}
            if known in ("builtins.set", "__builtin__.set") and len(arguments) == 1 and isinstance(arguments[0], list):
                return set(map(_key, arguments[0]))
            if known == "_codecs.encode" and len(arguments) == 2 and isinstance(arguments[0], str):
                return arguments[0].encode("latin1")  # how protocol 2 writes bytes
            if known == "torch.Size" and len(arguments) == 1 and isinstance(arguments[0], tuple):
                return arguments[0]
            if known == "torch._utils._rebuild_tensor_v2" and len(arguments) >= 4:
                return self.tensor(*arguments[:4])
            if known == "torch._utils._rebuild_parameter" and arguments:
                return arguments[0]
        return Opaque(known or repr(function), arguments)

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


def _key(value: Any) -> Any:
    """What may be a key: scalars, text, inert names, and flat tuples of scalars (deep ones take for ever to hash)."""
    plain = (str, int, float, bool, bytes, type(None))
    if isinstance(value, (*plain, Opaque, _Global)) or (
        isinstance(value, tuple) and all(isinstance(item, plain) for item in value)
    ):
        return value
    raise TypeError(f"a {type(value).__name__} as a key")

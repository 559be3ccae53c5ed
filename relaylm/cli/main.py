"""The command `relaylm`: its parser, config files, `--json` and exit codes.

Each command is a module of its name: its docstring is the help, `add_arguments(parser)` defines the flags, `run(args)`
does the work and returns the content of `--json`. Results go to standard output, progress and notes to standard error.
Heavy imports are inside `run`, so `relaylm --help` does not import torch. It is plain argparse because `--config`
reuses the flags' own types and checks.

Exit codes: 0 done, 1 failed, 2 bad input (one line that says what was wrong and what is allowed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import errno
import io
import json
import os
import sys
import textwrap
import tomllib
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NoReturn

from relaylm import __version__
from relaylm.cli.options import add_shared
from relaylm.cli.tools import check_plot, check_writable, note, write_text
from relaylm.errors import UserError, meant, reason
from relaylm.files import expand, plain

COMMANDS = (
    *("sample", "info", "ls", "compare", "compose", "cost", "importance", "pairs", "search"),
    *("prepare", "train", "lighten", "bound", "convert", "push", "serve", "bench", "reproduce", "demo"),
)
NO_SETTINGS = ("run", "json", "config", "last", "completion")  # of the parsed flags, those that change no result
RESUMED = ("train", "lighten", "reproduce")  # commands that keep what is done without being told where
MISUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.EEXIST, errno.ENOTDIR, errno.EISDIR)  # a path of the user's
COMPLETION = 'print completion for a shell; in bash: eval "$(relaylm --completion bash)"'
DESCRIPTION = """\
Fast, exact sampling from masked diffusion language models.

A schedule says which positions a network call writes together, and which network makes it. Under "heavy spaced:16" a
call writes all positions that are at least 16 apart: a fraction of the calls, at little or no loss. In "L25% H75%
spaced:16" a light model (L) makes the first calls and a heavy one (H) the rest."""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


class _Completion(argparse.Action):
    """Print the completion of a shell, made from the parser itself."""

    def __call__(self, parser: argparse.ArgumentParser, args: Any, shell: Any, option: str | None = None) -> None:
        """Print and exit."""
        try:
            import shtab
        except ImportError:
            raise UserError("shell completion needs shtab: `pip install relaylm[completion]`") from None
        print(shtab.complete(build_parser(), shell=shell))
        parser.exit()


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help with the default of every flag that has a value; paragraphs fill the terminal, examples stay as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts = text.split("\n\n")
        return "\n\n".join(part if "\n  " in part else textwrap.fill(part, width) for part in parts)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        bare = action.default in (None, "", [], argparse.SUPPRESS) or action.default is False
        return action.help if bare else f"{action.help} (default: %(default)s)"


def build_parser(names: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The parser of commands, whose modules are imported. `docs/reference.md` is made from that of all commands."""
    parser = _Parser(prog="relaylm", description=DESCRIPTION, formatter_class=_Help)
    parser.add_argument("--version", action="version", version=f"relaylm {__version__}")
    parser.add_argument("--completion", action=_Completion, choices=("bash", "zsh", "tcsh"), help=COMPLETION)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name in names:
        module = import_module(f"relaylm.cli.{name}")
        what, _, example = " ".join((module.__doc__ or name).split()).partition(" Example: ")
        texts: dict[str, Any] = {"description": what, "epilog": f"example:\n  {example}"}
        texts["help"] = what[0].lower() + what[1:].rstrip(".")
        command = commands.add_parser(name, formatter_class=_Help, allow_abbrev=False, **texts)
        module.add_arguments(command)
        add_shared(command, "json config")
        command.set_defaults(run=module.run)
    return parser


def apply_config(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """The flags, with values from --config FILE for those the command line does not give."""
    finder = _Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    config = finder.parse_known_args(argv)[0].config
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    if config is None or not argv or argv[0] not in commands:
        return _parsed(parser, commands, argv)
    path = expand(config)
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:  # a number of too many digits is a plain ValueError
        raise UserError(f"cannot read {path}: {reason(error)}") from None
    flags = {a.option_strings[-1].lstrip("-"): a for a in commands[argv[0]]._actions if a.option_strings}
    known = {name: flag for name, flag in flags.items() if name not in ("help", "config")}
    words = []
    for name, value in values.items():
        action = known.get(name.replace("_", "-"))
        if action is None:
            hint = meant(name.replace("_", "-"), known) or ":"
            raise UserError(f"{path} sets {name!r}, which relaylm {argv[0]} does not have{hint} {', '.join(known)}")
        flag = action.option_strings[-1]
        if isinstance(action, argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise UserError(f"{path} sets {name} to {value!r}: it is true or false")
            words += [flag] if value else []
        elif isinstance(action, argparse._AppendAction):
            words += [f"{flag}={text}" for text in (value if isinstance(value, list) else [value])]
        else:
            words += [f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    # The command line comes last, so it wins.
    return _parsed(parser, commands, [argv[0], *words, *argv[1:]])


def _parsed(parser: argparse.ArgumentParser, commands: Mapping[str, Any], argv: list[str]) -> argparse.Namespace:
    """The flags; one that the command does not have is an error with the nearest that it has."""
    args, unknown = parser.parse_known_args(argv)
    if not unknown:
        return args
    flags = [flag for action in commands[args.command]._actions for flag in action.option_strings if flag[:2] == "--"]
    word = next((word for word in unknown if word.startswith("-")), unknown[0])
    hint = meant(word.partition("=")[0], flags)
    raise UserError(f"unrecognized arguments: {' '.join(unknown)}{hint} (see {parser.prog} {args.command} --help)")


def write_json(path: str, value: Any) -> None:
    """Valid JSON (infinity as text) to a file, or to standard output for -."""
    text = json.dumps(plain(value), indent=1, default=str, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
    else:
        write_text(path, text)


def main(argv: list[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    argv = sys.argv[1:] if argv is None else argv
    args = None
    _open_streams()
    try:
        if argv and argv[0] not in COMMANDS and not argv[0].startswith("-"):
            hint = meant(argv[0], COMMANDS) or ";"
            raise UserError(f"there is no command {argv[0]!r}{hint} the commands are {', '.join(COMMANDS)}")
        args = apply_config(build_parser(argv[:1] if argv and argv[0] in COMMANDS else COMMANDS), argv)
        for name in ("json", "csv", "svg", "html", "markdown"):  # flags that name a file to be written
            path = getattr(args, name, None)
            check_writable(None if name == "json" and path == "-" else path)
        check_plot(getattr(args, "plot", None))
        result = args.run(args)
        if args.json is not None and os.environ.get("RANK", "0") == "0":
            config = {key: value for key, value in vars(args).items() if key not in NO_SETTINGS}
            write_json(args.json, {"relaylm": __version__, "config": config, **result})
        for draw in getattr(args, "last", ()):  # pictures: what they show is already written
            draw()
        sys.stdout.flush()
    except UserError as error:
        note(f"relaylm: {error}")
        return 2
    except KeyboardInterrupt:
        again = "run again with the same --store" if getattr(args, "store", None) is not None else None
        again = "run the same command again" if getattr(args, "command", None) in RESUMED else again
        note("relaylm: interrupted" + (f"; {again} to go on" if again else ""))
        return 130
    except BrokenPipeError:  # the reader of our output (a pager, head) has ended; that is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("RELAYLM_DEBUG"):
            raise
        if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EIO):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # files are named in such an error
            note(f"relaylm: cannot write to standard output: {reason(error)}")
            return 2
        if isinstance(error, OSError) and error.filename is not None and error.errno in MISUSED:
            note(f"relaylm: cannot use {error.filename}: {reason(error)}")
            return 2
        note(f"relaylm: failed: {type(error).__name__}: {reason(error)} (RELAYLM_DEBUG=1 shows where)")
        return 1
    return 0


def _open_streams() -> None:
    """Standard output and error as streams that take any text: one that the caller closed leads nowhere, and half a
    character (a lone surrogate in a name) is written as an escape."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  (open for as long as the process runs)
        if isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


if __name__ == "__main__":
    sys.exit(main())

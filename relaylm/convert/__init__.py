"""Public checkpoints in: what a source is, and a family made of it.

A source is a file, a folder, a hub id (`owner/name`, or `owner/name/path/to/file`), or several of these with commas
between them, which then form one family. `formats` lists what loads, by the names that `recognise` gives, and what is
refused. Nothing is ever unpickled, and no code that comes with a checkpoint is run.
"""

from relaylm.convert.chat import chat_prompt, texts, until_eos
from relaylm.convert.family import convert, describe, load, open_family
from relaylm.convert.mdlm import export
from relaylm.convert.sources import fetch, recognise

__all__ = [
    "chat_prompt",
    "convert",
    "describe",
    "export",
    "fetch",
    "load",
    "open_family",
    "recognise",
    "texts",
    "until_eos",
]

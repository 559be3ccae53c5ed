"""Serve families over HTTP, and a page to try them on. Example: relaylm serve --family wiki-bpe --port 8000"""

import argparse
import os

from relaylm.cli import tools
from relaylm.cli.options import add_shared, natural, positive, seconds_type
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--family", action="append", help="a family to serve, NAME=SOURCE or SOURCE; several allowed")
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=natural, default=8000, help="port to listen on; 0 picks a free one")
    add("--api-key", metavar="KEY", help="clients must send it as a bearer token (default: RELAYLM_API_KEY, or none)")
    add("--max-rows", type=positive, default=64, help="rows in flight")
    add("--max-queue", type=positive, default=256, help="rows that may wait; over that a request is answered 429")
    add("--timeout", type=seconds_type, default=600.0, help="time for a request, waiting included: 90s, 10m")
    add_shared(parser, "batch-size", **{"batch-size": "rows in every network call (auto: by the device)"})
    add("--log-prompts", action="store_true", help="write the fields of requests to the log, prompts included")
    add_shared(parser, "dtype device cluster")
    add("--replicas", type=positive, help="with --cluster: how many (default: one for each GPU, else one)")


def api_key(given: str | None) -> str | None:
    """The key that clients must send. One that no client can send, such as an empty one, is an error: with it the
    server would refuse everybody, without it nobody."""
    key = os.environ.get("RELAYLM_API_KEY") if given is None else given
    if key is not None and (not key or key != key.strip() or not key.isprintable()):
        raise UserError("the API key (--api-key or RELAYLM_API_KEY) must be text without spaces around it")
    return key


def run(args: argparse.Namespace) -> tools.Result:
    """Load the families and serve until interrupted."""
    try:
        from relaylm.serve.server import serve
    except ModuleNotFoundError as error:
        raise UserError(f"relaylm serve needs {error.name}: pip install 'relaylm[serve]'") from None
    from relaylm.serve.app import Settings
    from relaylm.serve.request import Limits

    if args.port > 65535:
        raise UserError(f"--port must be a whole number from 0 to 65535, not {args.port}")
    limits = Limits(**tools.chosen(args, "max_rows max_queue timeout batch_size"))
    settings = Settings(api_key(args.api_key), log_prompts=args.log_prompts)
    if args.replicas is not None and args.cluster is None:
        raise UserError("--replicas goes with --cluster")
    sources, address = args.family or [tools.default_family(None)], (args.host, args.port)
    serve(sources, args.device, args.dtype, limits, settings, address, args.cluster, args.replicas)
    return {}

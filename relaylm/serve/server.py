"""The process: families loaded, a server on a port, the log, and a clean end."""

from __future__ import annotations

import argparse
import logging
import os

import uvicorn

from relaylm.models.family import Family
from relaylm.serve.app import JsonLines, Settings, create_app
from relaylm.serve.host import Host


def serve(sources: list[str], args: argparse.Namespace) -> None:
    """Serve until interrupted."""
    families = {}
    for text in sources:
        name, _, source = text.rpartition("=")
        family = Family.load(source, device=args.device, dtype=args.dtype)
        families[name or family.name or source] = family
    app = create_app(Host(families), Settings(args.api_key or os.environ.get("RELAYLM_API_KEY")))
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler], force=True)
    uvicorn.run(app, host=args.host, port=args.port, log_config=None, access_log=False)

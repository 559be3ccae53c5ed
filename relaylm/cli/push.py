"""Upload a family to the Hugging Face hub. Example: relaylm push out/family user/name"""

import argparse

from relaylm.cli import tools


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("family", help="a family's folder, or the name of a bundled one")
    parser.add_argument("name", help="the repository on the hub, owner/name; it is made if need be")
    parser.add_argument("--private", action="store_true", help="a new repository is private")
    parser.add_argument("--message", default="", help="of the commit")


def run(args: argparse.Namespace) -> tools.Result:
    """Upload, and print the address of the commit."""
    from relaylm.models.family import locate
    from relaylm.models.hub import push

    address = push(locate(args.family), args.name, **tools.chosen(args, "private message"))
    tools.show(args, address)
    tools.note(f"load it with relaylm.Family.load({args.name!r})")
    return {"name": args.name, "commit": address}

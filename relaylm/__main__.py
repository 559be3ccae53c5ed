"""The command `relaylm`, and `python -m relaylm`."""

import sys


def main() -> int:
    """Run the command line. Ctrl-C is quiet already while its modules are imported; then `cli.main` handles it."""
    try:
        from relaylm.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

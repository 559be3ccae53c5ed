"""The command `relaylm`, and `python -m relaylm`. Ctrl-C ends it quietly from the first moment on, while the modules of
the command line are still being imported, too; from then on `cli.main` sees to it."""

import sys


def main() -> int:
    try:
        from relaylm.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

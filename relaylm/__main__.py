"""The command `relaylm`, and `python -m relaylm`. Ctrl-C ends it quietly from the first moment on, while the modules of
the command line are still being imported, too; from then on `cli.main` sees to it."""

import os
import sys


def main() -> int:
    # Threads that wait for each other asleep and not spinning: on an idle machine that costs next to nothing, on one
    # that has anything else to do spinning makes a small network ten times slower. To be set before torch is loaded.
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"} & os.environ.keys():
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    try:
        from relaylm.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

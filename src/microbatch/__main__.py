"""``python -m microbatch``, and the command that the installation puts on the path."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        from microbatch.cli.app import run

        status = run(sys.argv[1:])
    except KeyboardInterrupt:
        status = 130
    from microbatch.cli.quick import leave

    leave(status)


if __name__ == "__main__":
    main()

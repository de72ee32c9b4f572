"""The forms in which items come and results go: a table by media type.

JSON and MessagePack hold documents, which may say more than the item; a .npy file or a safetensors file is the item, or
with ``Microbatch-Many: true`` the items in its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from microbatch.errors import InvalidRequest
from microbatch.web.arrays import Array, as_array, from_npy, from_safetensors, to_npy, to_safetensors
from microbatch.web.plain import encoded, plain, to_json

ARRAY_EXTENSION = 78
"""MessagePack's type number for an array, whose payload is a .npy file; "N" in ASCII."""
ITEM, RESULT = "item", "result"
"""The name of a safetensors file's only tensor when it is no dict."""


@dataclass(frozen=True, slots=True)
class Codec:
    """One form.

    Attributes:
        media_type: its name.
        aliases: names in use for it.
        documents: what is decoded is a document, not yet the item; and errors of single items fit in beside results.
        decode: from a body.
        encode: a document, or one result, to a body.
        encode_rows: several results to a body; None for documents, which hold lists.
    """

    media_type: str
    aliases: tuple[str, ...]
    documents: bool
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    encode_rows: Callable[[Sequence[Any]], bytes] | None = None


def rows_of(value: Any) -> list[Any]:
    """The items of a body with many: the rows of its array, or of all of its named arrays.

    Raises:
        InvalidRequest: there are no rows, or not as many in each.
    """
    if not isinstance(value, Mapping):
        if value.ndim == 0:
            raise InvalidRequest("A single number has no rows.", "Send an array whose rows are the items.")
        return list(value)
    counts = {name: array.shape[0] if array.ndim else 0 for name, array in value.items()}
    if len(set(counts.values())) > 1:
        raise InvalidRequest(f"The tensors have different numbers of rows: {counts}.", "Send as many rows in each.")
    return [dict(zip(value, row)) for row in zip(*value.values())]


def _from_json(body: bytes) -> Any:
    return _decoded(msgspec.json.decode, body, "JSON")


def _from_msgpack(body: bytes) -> Any:
    return _decoded(_unpacker.decode, body, "MessagePack")


def _decoded(decode: Callable[[bytes], Any], body: bytes, form: str) -> Any:
    try:
        return decode(body)
    except InvalidRequest:
        raise
    except Exception as error:  # msgspec's own, recursion too deep, keys that cannot be keys
        reason = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise InvalidRequest(f"The body is no {form}: {reason}.", "Correct it, or name another type.") from None


def _extension(code: int, data: memoryview) -> Any:
    if code != ARRAY_EXTENSION:
        raise InvalidRequest(f"MessagePack's extension {code} is not known here.", f"Arrays are {ARRAY_EXTENSION}.")
    return from_npy(bytes(data))


def _packed(value: Any) -> Any:
    """Tensors and arrays as .npy files, everything else as in JSON."""
    if hasattr(value, "shape"):
        return msgspec.msgpack.Ext(ARRAY_EXTENSION, to_npy(as_array(value)))
    return plain(value)


_packer = msgspec.msgpack.Encoder(enc_hook=_packed)
_unpacker = msgspec.msgpack.Decoder(ext_hook=_extension)


def _to_msgpack(value: Any) -> bytes:
    return encoded(_packer.encode, value, "MessagePack")


def _single(tensors: dict[str, Array]) -> Any:
    return tensors[ITEM] if list(tensors) == [ITEM] else tensors


def _named(result: Any) -> dict[str, Array]:
    """A result as named arrays: members by their names, those of a tuple or list of arrays by their places."""
    if isinstance(result, Mapping):
        return {str(name): as_array(value) for name, value in result.items()}
    if isinstance(result, tuple):
        return {str(place): as_array(value) for place, value in enumerate(result)}
    return {RESULT: as_array(result)}


def _npy_or_refuse(result: Any) -> bytes:
    return _fitting(lambda: to_npy(as_array(result)), "a .npy file")


def _npy_rows(results: Sequence[Any]) -> bytes:
    return _fitting(lambda: to_npy(np.stack([as_array(result) for result in results])), "one .npy file")


def _tensors_or_refuse(result: Any) -> bytes:
    return _fitting(lambda: to_safetensors(_named(result)), "a safetensors file")


def _tensor_rows(results: Sequence[Any]) -> bytes:
    def stacked() -> bytes:
        named = [_named(result) for result in results]
        return to_safetensors({name: np.stack([each[name] for each in named]) for name in named[0]})

    return _fitting(stacked, "one safetensors file")


def _fitting(encode: Callable[[], bytes], form: str) -> bytes:
    """A result in a form that holds numbers of one shape only.

    Raises:
        InvalidRequest: this one does not fit in (406).
    """
    try:
        return encode()
    except Exception as error:
        raise InvalidRequest(
            f"The result does not fit into {form}: {str(error).splitlines()[0][:200] if str(error) else error!r}.",
            "Accept application/json or application/msgpack.", status=406,
        ) from error  # fmt: skip


CODECS: tuple[Codec, ...] = (
    Codec("application/json", (), True, _from_json, to_json),
    Codec(
        "application/msgpack",
        ("application/x-msgpack", "application/vnd.msgpack"),
        True,
        _from_msgpack,
        _to_msgpack,
    ),
    Codec("application/x-npy", ("application/npy",), False, from_npy, _npy_or_refuse, _npy_rows),
    Codec(
        "application/safetensors",
        ("application/x-safetensors",),
        False,
        lambda body: _single(from_safetensors(body)),
        _tensors_or_refuse,
        _tensor_rows,
    ),
)
"""Every form. The first one is what is answered when nothing is said."""

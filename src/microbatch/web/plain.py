"""Results as plain values: how what a model returns becomes JSON or MessagePack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from microbatch.errors import InvalidOutput, InvalidRequest


def plain(value: Any) -> Any:
    """What msgspec does not know by itself: tensors, arrays and numbers of numpy, and results with ``to_json``.

    Raises:
        TypeError: it has no plain form.
    """
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "to_json"):
        return value.to_json()
    raise TypeError(f"a {type(value).__name__}")


_encoder = msgspec.json.Encoder(enc_hook=plain)


def to_json(value: Any) -> bytes:
    """A JSON document. Numbers that JSON has no word for, NaN and infinities, are null.

    Raises:
        InvalidOutput: something in it has no form in JSON.
    """
    return encoded(_encoder.encode, value, "JSON")


def encoded(encode: Callable[[Any], bytes], value: Any, form: str) -> bytes:
    """A value in a form of which the encoder is given.

    Raises:
        InvalidOutput: the encoder refuses it, for whatever reason.
        InvalidRequest: it is nested too deeply.
    """
    try:
        return encode(value)
    except RecursionError:  # what came in so deep that it could only just be read goes out one deeper
        raise InvalidRequest(f"The result is nested too deeply for {form}.", "Send and return flatter items.") from None
    except Exception as error:
        raise InvalidOutput(
            f"The result has no form in {form}: {error}.",
            "Return numbers, texts, lists, dicts, arrays or tensors.",
        ) from error

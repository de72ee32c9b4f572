"""What the items of an engine look like, so that a body is checked and converted once, before anything runs.

It is read off the annotation of the function (``def embed(items: list[str])``) or off the engine's examples. An item
that came as JSON, MessagePack or an array reaches the function in the form of its examples, whichever it was.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args, get_origin, get_type_hints

import msgspec

from microbatch.errors import InvalidRequest, MicrobatchError
from microbatch.web.array_items import form_of_arrays, is_array
from microbatch.web.engine import Engine
from microbatch.web.statuses import answer_to

Outline = Any


@dataclass(frozen=True, slots=True)
class Form:
    """The form of an engine's items.

    Attributes:
        schema: in JSON Schema, for the OpenAPI document.
        read: from a decoded value to the item; raises `InvalidRequest` for one that cannot be one.
        components: schemas that `schema` refers to.
        outlines: sizes that the examples had; empty when nothing is known.
    """

    schema: dict[str, Any]
    read: Callable[[Any], Any]
    components: dict[str, Any] = field(default_factory=dict)
    outlines: frozenset[Outline] = frozenset()

    def unlike(self, item: Any) -> bool:
        """Whether an item has other sizes than every example, so that it, not the function, may be at fault."""
        return bool(self.outlines) and outline(item) not in self.outlines


def _as_it_is(value: Any) -> Any:
    return value


ANYTHING = Form({}, _as_it_is)


def form_of(engine: Engine) -> Form:
    """The form of an engine's items, as far as it can be known."""
    examples = tuple(getattr(engine, "examples", ()))
    outlines = frozenset(map(outline, examples))
    annotated = _annotated(getattr(engine, "run", None))
    if annotated is not None:
        return replace(annotated, outlines=outlines)
    return replace(_of_examples(examples), outlines=outlines) if examples else ANYTHING


def outline(value: Any, depth: int = 8) -> Outline:
    """The sizes in an item, down to some depth: shapes of arrays, lengths of lists, names of members."""
    if depth == 0:
        return None
    if is_array(value):
        return ("array", tuple(value.shape))
    if isinstance(value, Mapping):
        return tuple(sorted((str(name), outline(member, depth - 1)) for name, member in value.items()))
    if isinstance(value, list | tuple):
        return (len(value), outline(value[0], depth - 1)) if value else (0, None)
    return None


def blamed(result: Any, form: Form, item: Any) -> Any:
    """What a client is told: an item unlike every example that makes the function fail is the client's fault.

    Results, and errors of the server's own, are returned as they are.
    """
    if not isinstance(result, Exception) or isinstance(result, MicrobatchError) or not form.unlike(item):
        return result
    answer = answer_to(result)
    return InvalidRequest(
        f"{answer.type} for an item of other sizes than the examples: {answer.message}", "Send items like the examples."
    )


def _annotated(run: Any) -> Form | None:
    """The form that a function's annotation ``list[T]`` names; None where it names none that msgspec knows."""
    if not callable(run) or hasattr(run, "forward"):
        return None
    function = run if inspect.isroutine(run) else type(run).__call__
    try:
        hints = get_type_hints(function, include_extras=True)  # bounds of msgspec.Meta are kept
        first = next(name for name in inspect.signature(run).parameters)
        kind = hints[first]
        if get_origin(kind) not in (list, Sequence, Iterable) or get_args(kind)[0] is Any:
            return None
        return _of_type(get_args(kind)[0])
    except Exception:  # names that only a type checker sees, or types that no document can hold
        return None


def _of_type(kind: Any) -> Form:
    """A type that msgspec knows.

    Raises:
        TypeError: it does not.
    """
    (schema,), components = msgspec.json.schema_components([kind], ref_template="#/components/schemas/{name}")

    def read(value: Any) -> Any:
        value = value.tolist() if hasattr(value, "tolist") else value
        try:
            return msgspec.convert(value, kind)
        except Exception as error:
            raise InvalidRequest(f"The item is not as expected: {error}.", "See /openapi.json for its form.") from None

    return Form(schema, read, components)


def _of_examples(examples: Sequence[Any]) -> Form:
    if all(is_array(example) for example in examples):
        schema, read = form_of_arrays(examples)
        return Form(schema, read)
    if all(isinstance(example, Mapping) for example in examples):
        return _of_members(examples)
    if all(isinstance(example, tuple) for example in examples) and len({len(example) for example in examples}) == 1:
        return _of_places(examples)
    return _of_type(_type_of(examples))


def _of_members(examples: Sequence[Mapping[str, Any]]) -> Form:
    """A dict; a member that only some examples have may be left out."""
    names = {name: [example[name] for example in examples if name in example] for each in examples for name in each}
    forms = {name: _of_member(values, examples) for name, values in names.items()}
    required = [name for name, values in names.items() if len(values) == len(examples)]

    def read(value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise InvalidRequest(f"The item is a {_word(value)}.", f"Send an object with {', '.join(map(str, forms))}.")
        missing, unknown = set(required) - value.keys(), value.keys() - forms.keys()
        if missing or unknown:
            wrong = f"lacks {_listed(missing)}" if missing else f"has {_listed(unknown)} besides"
            raise InvalidRequest(f"The item {wrong}.", f"Send an object with {', '.join(map(str, forms))}.")
        return {name: _inside(name, forms[name], member) for name, member in value.items()}

    schema = {
        "type": "object",
        "properties": {str(name): form.schema for name, form in forms.items()},
        "required": [str(name) for name in required],
        "additionalProperties": False,
    }
    return Form(schema, read, _components(forms.values()))


def _of_member(values: Sequence[Any], examples: Sequence[Mapping[str, Any]]) -> Form:
    """Beside an ``attention_mask`` the length is free: it is what the mask is for."""
    masks = [example["attention_mask"] for example in examples if "attention_mask" in example]
    if masks and all(map(is_array, values)) and all(map(is_array, masks)):
        schema, read = form_of_arrays(values, free={mask.shape[0] for mask in masks if mask.shape})
        return Form(schema, read)
    return _of_examples(values)


def _of_places(examples: Sequence[tuple[Any, ...]]) -> Form:
    """A tuple; a list in JSON."""
    forms = [_of_examples(values) for values in zip(*examples)]

    def read(value: Any) -> Any:
        if not isinstance(value, list | tuple) or len(value) != len(forms):
            raise InvalidRequest(f"The item is a {_word(value)}.", f"Send a list of {len(forms)} members.")
        return tuple(_inside(place, form, member) for place, (form, member) in enumerate(zip(forms, value)))

    schema = {
        "type": "array",
        "prefixItems": [form.schema for form in forms],
        "minItems": len(forms),
        "maxItems": len(forms),
    }
    return Form(schema, read, _components(forms))


def _inside(name: object, form: Form, value: Any) -> Any:
    """A member of an item, its error with its name."""
    try:
        return form.read(value)
    except InvalidRequest as error:
        raise InvalidRequest(f"In {name!r}: {error.message}", error.remedy) from None


def _type_of(values: Sequence[Any]) -> Any:
    """The type of msgspec that all of these values have; whole numbers may stand where one is fractional."""
    kinds = {type(value) for value in values}
    if kinds and kinds <= {int, float}:
        return float if float in kinds else int
    if kinds == {list}:
        return list[_type_of([member for value in values for member in value])]  # type: ignore[misc]
    if len(kinds) == 1 and (kind := kinds.pop()) in (str, bool, bytes):
        return kind
    return Any


def _components(forms: Iterable[Form]) -> dict[str, Any]:
    return {name: schema for form in forms for name, schema in form.components.items()}


def _word(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, list | tuple) else type(value).__name__


def _listed(names: Iterable[Any]) -> str:
    return ", ".join(sorted(repr(name)[:40] for name in names)[:5])

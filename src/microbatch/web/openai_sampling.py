"""The members of a body that say how text is to be generated: OpenAI's, and what vLLM takes beside them.

A member that is not known, or known but not offered, is refused by name: an answer that silently left out what was
asked for would be a wrong one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from microbatch.errors import InvalidRequest
from microbatch.llm.sampling_params import LONGEST_STOP, MOST_ANSWERS, MOST_STOPS, SamplingParams, check_params
from microbatch.web.openai_errors import InvalidMember
from microbatch.web.request import Request

MOST_TOP = 20
"""Likely tokens that may be asked for at each place, as OpenAI's chat has it."""
MOST_BIASES = 1024
"""Token ids in a `logit_bias`, which is gone through for every token."""

Top = Annotated[int, Meta(ge=0, le=MOST_TOP)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Stop = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Count = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    """What a stream tells besides text.

    Attributes:
        include_usage: a last event with the tokens counted.
    """

    include_usage: bool = False


class Sampled(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Members that completions and chats share; those that are null or left out are as `SamplingParams` has them.

    Attributes:
        model: the name of an engine.
        stream: parts of the text as they come.
        stream_options: for a stream.
        max_tokens: generated at most.
        temperature, top_p, frequency_penalty, presence_penalty, n, seed, stop, logit_bias: OpenAI's.
        top_k, min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, include_stop_str_in_output,
            prompt_logprobs: vLLM's.
        return_token_ids: vLLM's: the ids of prompt and answer go with the text.
        user, safety_identifier, metadata: of the client; not used.
    """

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    n: Annotated[int, Meta(ge=1, le=MOST_ANSWERS)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=MOST_STOPS)] | None = None
    logit_bias: Annotated[dict[str, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MOST_BIASES)] | None = (
        None
    )
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Meta(gt=0)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MOST_STOPS)] | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: Top | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    safety_identifier: str | None = None
    metadata: dict[str, Any] | None = None


AS_THEY_ARE = (
    "temperature", "top_p", "frequency_penalty", "presence_penalty", "n", "seed", "min_p", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip
"""Members that `SamplingParams` calls the same and takes as they come."""

NOT_OFFERED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "priority": (0,),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Members that clients know and this server does not offer, with the values that ask for nothing; null does neither."""
INSTEAD = {"best_of": "Ask for n answers.", "priority": "Send the header Microbatch-Priority."}
"""What does the same, where something does; else the member is to be left out."""

Form = TypeVar("Form", bound=msgspec.Struct)
Body = TypeVar("Body", bound=Sampled)


async def read(request: Request, form: type[Body]) -> Body:
    """The body of a request.

    Raises:
        InvalidRequest: it cannot be read, or asks for what is not offered (400).
    """
    document = await request.json(dict[str, Any])
    refuse_not_offered(document, NOT_OFFERED)
    asked = converted({name: whole(value) for name, value in document.items() if name not in NOT_OFFERED}, form)
    if asked.stream_options is not None and not asked.stream:
        raise InvalidMember("stream_options", "stream_options is only for a stream.", "Send stream as true with it.")
    return asked


def refuse_not_offered(document: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]], where: str = "") -> None:
    """Check that an object asks for nothing that is not offered.

    Args:
        document: as it came.
        table: names with the values that ask for nothing.
        where: the path of the object in the body.

    Raises:
        InvalidMember: it does.
    """
    for name, value in document.items():
        if name in table and value is not None and value not in table[name]:
            remedy = INSTEAD.get(name, "Leave it out.")
            raise InvalidMember(f"{where}{name}", f"{where}{name} is not offered by this server.", remedy)


def converted(document: Any, form: type[Form], where: str = "") -> Form:
    """A document as a struct.

    Args:
        document: as it came.
        form: of it.
        where: its path in the body, with a dot at the end.

    Raises:
        InvalidMember: with the path of what is wrong.
    """
    try:
        return msgspec.convert(document, form)
    except msgspec.ValidationError as error:
        text = str(error)
        found = re.search(r"`\$\.?([^`]*)`$", text) or re.search(r"field `([^`]*)`", text)
        param = where + found[1] if found else where.rstrip(".") or None
        told = text.replace("`$.", f"`$.{where}") if where else text
        raise InvalidMember(param, f"The body is not as expected: {told}.", "Correct it.") from None


def whole(value: Any) -> Any:
    """JSON knows one kind of numbers: 2.0 is as good as 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def sampling(
    asked: Sampled, vocabulary: int, *, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """How a request wants its tokens chosen.

    Args:
        asked: the body.
        vocabulary: token ids are below it.
        max_tokens: None for as many as there is room for.
        logprobs, prompt_logprobs: likely tokens to tell at each place; None for nothing.

    Raises:
        InvalidMember: members that contradict each other, or an id that there is not.
    """
    given = {name: getattr(asked, name) for name in AS_THEY_ARE}
    given |= {
        "top_k": 0 if asked.top_k == -1 else asked.top_k,  # vLLM's word for all of them
        "stop": None if asked.stop is None else (asked.stop,) if isinstance(asked.stop, str) else tuple(asked.stop),
        "stop_token_ids": None if asked.stop_token_ids is None else tuple(asked.stop_token_ids),
        "include_stop_in_output": asked.include_stop_str_in_output,
        "logit_bias": None if asked.logit_bias is None else _biases(asked.logit_bias),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    try:
        params = SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **chosen)
        check_params(params, vocabulary)
    except InvalidRequest as error:
        blamed = re.match(r"\w+", error.message)
        raise InvalidMember(blamed and blamed[0], error.message, error.remedy) from None
    return params


def _biases(given: Mapping[str, float]) -> dict[int, float]:
    for name in given:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise InvalidMember(
                "logit_bias", f"logit_bias has {name[:40]!r}, which is no token id.", "Send ids as names."
            )
    return {int(name): bias for name, bias in given.items()}

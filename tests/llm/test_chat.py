"""Chat templates: the prompt that transformers makes, and clear errors from templates of strangers."""

# ruff: noqa: E501 - templates stand as they are written

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Reader
from tokenizers import models
from transformers import PreTrainedTokenizerFast

from microbatch.errors import InvalidModel, InvalidRequest
from microbatch.llm import sandbox
from microbatch.llm.chat import ChatTemplate, find_template
from microbatch.llm.tokenizer import Tokenizer

CHATML = """{%- if tools %}
{{- '<|im_start|>system\\n# Tools' }}
{%- for tool in tools %}
{{- "\\n" }}{{- tool | tojson }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
  {%- if message.role == "user" and ns.last == messages|length - 1 %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.content is string %}{%- set content = message.content %}{%- else %}{%- set content = '' %}{%- endif %}
{%- if '</think>' in content %}{%- set content = content.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if message.role == 'tool' and loop.first %}{{- raise_exception('a tool speaks first') }}{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' ~ content }}
{%- if message.reasoning_content %}{{- '[' ~ message.reasoning_content|trim ~ ']' }}{%- endif %}
{%- if message.tool_calls %}{%- for call in message.tool_calls %}
{{- call.function.name ~ call.function.arguments | tojson(indent=2) }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>' }}{%- endif %}{%- endif %}"""
LLAMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}
{% set system_message = messages[0]['content'] %}{% else %}{% set loop_messages = messages %}
{% set system_message = false %}{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {% endif %}
    {% if loop.index0 == 0 and system_message %}
{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}
    {% else %}{% set content = message['content'] %}{% endif %}
{% if message['role'] == 'user' %}{{ '[INST] ' + content.strip() + ' [/INST]' }}
{% elif message['role'] == 'assistant' %}{% generation %}{{ ' '  + content.strip() + ' ' + eos_token }}{% endgeneration %}
{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{%- macro turn(role, text) -%}{{ '<start_of_turn>' + role + '\\n' }}
{%- if text is string -%}{{ text | trim }}{%- elif text is iterable -%}
{%- for item in text -%}{%- if item['type'] == 'image' -%}{{ '<image>' }}{%- continue -%}{%- endif -%}
{{ item['text'] | trim }}{%- endfor -%}{%- endif -%}{{ '<end_of_turn>\\n' }}{%- endmacro -%}
{%- for message in messages -%}{{ turn('model' if message['role'] == 'assistant' else message['role'], message['content']) }}
{%- if loop.index > 30 -%}{%- break -%}{%- endif -%}{%- endfor -%}
{%- for key, value in {'a': 1, 'b': [1, 'é<&>']}.items() -%}{{ key }}={{ value | tojson }}{%- endfor -%}
{%- for role, group in messages | groupby('role') -%}{{ role }}{{ group | length }}{%- endfor -%}
{{ messages | map(attribute='role') | join(', ') }}{{ '%s|%5d' % ('x', 3) }}{{ '{:>5}'.format('y') }}{{ 'ab' * 3 }}
{%- if add_generation_prompt -%}{{ '<start_of_turn>model\\n' }}{%- endif -%}{{ dict(a=1) | tojson }}{{ strftime_now('%Y') }}"""
USER = {"role": "user", "content": "  Wie spät ist es? 日本 <b>\n"}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [USER],
    [{"role": "system", "content": "Be brief."}, USER, {"role": "assistant", "content": "x</think>\nNow.", "name": None}, USER],
    [
        USER,
        {
            "role": "assistant", "content": None, "reasoning": " hm ",
            "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"a": [1, "é"]}}}],
        },
    ],
    [{"role": "user", "content": [{"type": "text", "text": " a "}, {"type": "image"}, {"type": "text", "text": "b"}]}],
    [USER, USER],
    [{"role": "tool", "content": "5"}],
]  # fmt: skip
TOOLS = [{"type": "function", "function": {"name": "f", "description": "does é", "parameters": {"type": "object"}}}]


def theirs(source: str) -> Any:
    made = Reader(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    make: Any = PreTrainedTokenizerFast
    tokenizer = make(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = source
    return tokenizer


def answer(render: Any) -> str:
    try:
        return str(render())
    except Exception as error:
        return f"refused: {'alternate' in str(error)} {'speaks first' in str(error)}"


@pytest.mark.parametrize("source", [CHATML, LLAMA, GEMMA], ids=["chatml", "llama", "gemma"])
@pytest.mark.parametrize("conversation", range(len(CONVERSATIONS)))
@pytest.mark.parametrize(
    "options", [{}, {"tools": TOOLS}, {"add_generation_prompt": False}, {"enable_thinking": False}]
)
def test_the_prompt_is_that_of_transformers(source: str, conversation: int, options: dict[str, Any]) -> None:
    messages = CONVERSATIONS[conversation]
    made = Reader(models.WordLevel({"<s>": 0, "</s>": 1}, "<s>"))
    ours = Tokenizer(made, special_tokens={"bos_token": "<s>", "eos_token": "</s>"}, templates={"default": source})
    given = {"add_generation_prompt": True, **options}
    expected = answer(lambda: theirs(source).apply_chat_template(messages, tokenize=False, **given))
    assert answer(lambda: ours.chat_prompt(messages, **given)) == expected


HOSTILE = {
    "attributes": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ cycler.__init__.__globals__ }}",
    "self": "{{ self.__init__.__globals__ }}",
    "format": "{{ '{0.__class__.__mro__}'.format(1) }}",
    "namespace": "{% set ns = namespace(__class__=1) %}",
    "change": "{{ messages.append(1) }}",
    "loops": "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}",
    "kept loops": "{% set l = range(9000)|list %}{% for a in l %}{% for b in l %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "times": "{{ 'a' * 10000000000 }}",
    "list times": "{{ ['a' * 1000000] * 1000 }}",
    "power": "{{ 10 ** 10000000 }}",
    "numbers": "{% set ns = namespace(a=7) %}{% for i in range(99) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "center": "{{ 'a' | center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(100000000) }}",
    "indent": "{{ ('a\n' * 100000) | indent(100000) }}",
    "json": "{{ (range(1000) | list) | tojson(indent=1000000) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "width": "{{ '{:>999999999}'.format(1) }}",
    "date": "{{ strftime_now('%999999999Y') }}",
    "replace": "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "join": "{{ (range(100000) | list) | join('b' * 100000) }}",
    "method join": "{{ ('b' * 100000).join(['x'] * 100000) }}",
    "tilde": "{% set ns = namespace(a='ab') %}{% for i in range(99) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}",
    "plus": "{% set ns = namespace(a='ab') %}{% for i in range(99) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "lists": "{% set ns = namespace(a=[1]) %}{% for i in range(99) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}",
    "objects": "{% set ns = namespace(a=1) %}{% for i in range(99) %}{% set ns.a = dict(a=ns.a, b=ns.a) %}{% endfor %}",
    "blocks": "{% set ns = namespace(a='ab') %}{% for i in range(99) %}{% set b %}{{ ns.a }}{{ ns.a }}{% endset %}"
    "{% set ns.a = b %}{% endfor %}",
    "lazy join": "{{ range(100000) | join('b' * 300000) }}",
    "lazy method join": "{{ ('b' * 300000).join(range(100000) | map('string')) }}",
    "lazy batch": "{{ ('a' * 1000000) | batch(1) | join('b' * 100000) }}",
    "computed width": "{{ '%*d' % (4000000000, 1) }}",
    "computed digits": "{{ '%.*f' % (4000000000, 1.0) }}",
    "nested width": "{{ '{:{}}'.format('a', '4000000000') }}",
    "nested place": "{{ '{0[0]:{0[1]}}'.format([1, 4000000000]) }}",
    "format filter": "{{ '%*d' | format(400000000, 1) }}",
    "slices": "{% set s = 'a' * 1000000 %}" + "".join(f"{{% set a{i} = s[1:] %}}" for i in range(300)),
    "list of slices": "{% set s = 'a' * 1000000 %}{% set t = [" + "s[1:], " * 300 + "] %}",
    "sum": "{{ ('a' * 90000) | batch(1) | sum(start=[]) }}",
    "deep json": "{% set ns = namespace(a=1) %}{% for i in range(300) %}{% set ns.a = [ns.a] %}{% endfor %}"
    "{{ ns.a | tojson(indent=100000) }}",
    "many dates": "{{ strftime_now('%9999d' * 1000000) }}",
    "own text": "{% for a in range(90000) %}" + "x" * 10000 + "{% endfor %}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_with_a_clear_error(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 100_000)  # the same bounds, reached sooner
    with pytest.raises(InvalidModel, match=r"chat template.*(must not|too much)"):
        ChatTemplate(HOSTILE[name]).render([USER])


@pytest.mark.parametrize("name", ["step", "environment", "concatenated", "measured"])
def test_a_template_cannot_hide_what_counts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_STEPS", 1000)
    source = f"{{% set {name} = 1 %}}{{% for i in range(5000) %}}{{% endfor %}}"
    with pytest.raises(InvalidModel, match="too much"):
        ChatTemplate(source).render([USER])


def test_time_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MOST_SECONDS", -1.0)
    with pytest.raises(InvalidModel, match="seconds"):
        ChatTemplate("{% for m in messages %}{% endfor %}").render([USER])


@pytest.mark.parametrize("source", ["{% for %}", "{{ x", "{% include 'a' %}{% endfor %}", "x" * (1 << 20) + "y"])
def test_a_broken_template_is_the_models_fault(source: str) -> None:
    with pytest.raises(InvalidModel, match="chat template"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize("source", ["{{ a.b }}", "{{ messages[0]['x'] + 1 }}", "{% include 'os' %}", "{{ 1 // 0 }}"])
def test_what_a_template_cannot_do_with_messages_is_told(source: str) -> None:
    with pytest.raises(InvalidRequest, match="cannot render"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "messages", [[], "hi", None, [5], [{}], [{"role": 3}], [{"role": "user", "content": object()}]]
)
def test_what_are_no_messages_is_refused(messages: Any) -> None:
    with pytest.raises(InvalidRequest):
        ChatTemplate("x").render(messages)


def test_values_nested_too_deep_are_refused() -> None:
    deep: Any = "x"
    for _ in range(100):
        deep = [deep]
    with pytest.raises(InvalidRequest, match="deep"):
        ChatTemplate("x").render([{"role": "user", "content": deep}])


def test_a_long_conversation_is_within_the_bounds() -> None:
    messages = [{"role": "user" if i % 2 == 0 else "assistant", "content": "word " * 500} for i in range(1001)]
    assert len(ChatTemplate(CHATML).render(messages, {"add_generation_prompt": True})) > 2_500_000


def test_a_folder_has_its_template_in_a_file_or_in_its_settings(tmp_path: Path) -> None:
    assert find_template(tmp_path, {}) == {}
    assert find_template(tmp_path, {"chat_template": "a"}) == {"default": "a"}
    several = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert find_template(tmp_path, {"chat_template": several}) == {"default": "a", "tool_use": "b"}
    with pytest.raises(InvalidModel):
        find_template(tmp_path, {"chat_template": 5})
    (tmp_path / "chat_template.jinja").write_text("c")
    assert find_template(tmp_path, {"chat_template": "a"}) == {"default": "c"}


def test_tools_take_the_template_for_tools() -> None:
    made = Reader(models.WordLevel({"<s>": 0}, "<s>"))
    tokenizer = Tokenizer(made, templates={"default": "plain", "tool_use": "{{ tools | tojson }}"})
    assert tokenizer.chat_prompt([USER]) == "plain"
    assert json.loads(tokenizer.chat_prompt([USER], tools=TOOLS)) == TOOLS
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenizer(made).chat_prompt([USER])

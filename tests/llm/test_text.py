"""Text out of tokens: whole characters, nothing of a stop string shown, the same wherever it is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reader

from microbatch.errors import InvalidModel, InvalidRequest
from microbatch.llm.detokenize import Detokenizer
from microbatch.llm.stop import StopFilter
from microbatch.llm.tokenizer import Tokenizer

TEXTS = ["hello world, the cat and the hat", "日本語の文章", "naïve café 😀😀 👩‍👩‍👧", "  two  spaces\n\n\tand tabs "]
LOST = "\N{REPLACEMENT CHARACTER}"


def byte_level() -> Reader:
    made = Reader(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False))
    made.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    made.add_tokens([AddedToken("<tool call>", special=False)])
    return made


def byte_fallback() -> Reader:
    """As the Llama 2 family has it: words begin with ▁, without the first one's space; the rest in bytes."""
    words = ["▁", "▁hello", "▁world", "hello", ",", "▁the", "▁c", "at", "é", "語", LOST, *"abcdefghijklmnop"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    made = Reader(models.BPE({token: i for i, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("<unk>"), AddedToken("<s>"), AddedToken("</s>")])
    return made


def metaspace() -> Reader:
    made = Reader(models.WordLevel({"<s>": 0, "▁hello": 1, "▁world": 2, "ly": 3, "▁": 4, "日": 5}, "<s>"))
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken("<s>")])
    return made


def word_piece() -> Reader:
    made = Reader(models.WordPiece({"[UNK]": 0, "hello": 1, "world": 2, "##ly": 3, "日": 4}, unk_token="[UNK]"))
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens([AddedToken("[UNK]")])
    return made


KINDS = {make.__name__: Tokenizer(make()) for make in (byte_level, byte_fallback, metaspace, word_piece)}


def streamed(tokenizer: Tokenizer, ids: list[int], prompt: list[int] | None = None, **options: Any) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt or [], **options)
    return [*(detokenizer.push(token_id) for token_id in ids), detokenizer.finish()]


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_pieces_of_any_tokens_join_to_their_text(kind: str, data: st.DataObject) -> None:
    tokenizer, skip = KINDS[kind], data.draw(st.booleans())
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=25))
    text = tokenizer.text_of(ids, skip)
    if kind == "byte_fallback" and LOST in text:
        return  # the package shows bytes before a broken one as broken as well; ours have been shown by then
    assert "".join(streamed(tokenizer, ids, skip_special=skip)) == text


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=20), st.data())
def test_text_goes_on_after_a_prompt_wherever_it_is_cut(text: str, data: st.DataObject) -> None:
    tokenizer = KINDS["byte_level"]
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    prompt = tokenizer.text_of(ids[:cut]).rstrip(LOST) if LOST not in text else None
    pieces = streamed(tokenizer, ids[cut:], ids[:cut])
    if prompt is not None:
        assert prompt + "".join(pieces) == text
    assert all(LOST not in piece for piece in pieces) or LOST in text


def test_an_incomplete_character_waits_and_is_shown_as_lost_at_the_end() -> None:
    tokenizer = KINDS["byte_fallback"]
    ids = [3 + byte for byte in "日x😀".encode()]
    assert streamed(tokenizer, ids) == ["", "", "日", "x", "", "", "", "😀", ""]
    assert streamed(tokenizer, ids[:-1])[-1] == LOST
    assert streamed(tokenizer, [ids[0], ids[3]]) == ["", f"{LOST}x", ""]


def test_a_character_that_the_prompt_began_is_shown_whole_once_it_is_complete() -> None:
    tokenizer = KINDS["byte_fallback"]
    first, second, third = (3 + byte for byte in "日".encode())
    assert streamed(tokenizer, [second, third], [first]) == ["", "日", ""]
    assert streamed(tokenizer, [3 + ord("x")], [first, second]) == ["x", ""]
    assert streamed(tokenizer, [], [first, second]) == [""]


def test_a_word_keeps_its_space_after_a_prompt_and_loses_it_at_the_beginning() -> None:
    tokenizer = KINDS["byte_fallback"]
    hello, world = tokenizer.encode("▁hello")[0], tokenizer._tokenizer.token_to_id("▁world")
    hello = tokenizer._tokenizer.token_to_id("▁hello")
    assert streamed(tokenizer, [hello, world]) == ["hello", " world", ""]
    assert streamed(tokenizer, [hello, world], [1, world]) == [" hello", " world", ""]
    assert streamed(tokenizer, [1, hello]) == ["", "hello", ""]
    space = tokenizer._tokenizer.token_to_id("▁")
    assert streamed(tokenizer, [space, hello]) == ["", " hello", ""]
    assert tokenizer.text_of([space, hello]) == " hello"


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
def test_bytes_of_tokens_join_to_the_bytes_of_the_text(kind: str) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode("a😀語é")
    assert b"".join(tokenizer.bytes_of_token(token_id) for token_id in ids) == "a😀語é".encode()
    assert tokenizer.bytes_of_token(10**6) == b"" == tokenizer.bytes_of_token(-1)
    assert {tokenizer.token_text(i) for i in ids[1:3]} <= {LOST, "😀", *"😀"} or len(ids) < 4


def test_an_added_token_is_shown_as_it_is_and_a_special_one_only_if_wanted() -> None:
    tokenizer = KINDS["byte_level"]
    ids = [tokenizer._tokenizer.token_to_id(token) for token in ("<s>", "<tool call>", "</s>")]
    assert streamed(tokenizer, ids) == ["", "<tool call>", "", ""]
    assert streamed(tokenizer, ids, skip_special=False) == ["<s>", "<tool call>", "</s>", ""]


def cut_up(text: str, cuts: list[int], stops: list[str], include: bool) -> tuple[str, str | None]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    stop_filter, shown, matched = StopFilter(stops, include), "", None
    for start, end in pairwise(places):
        piece, matched = stop_filter.push(text[start:end])
        shown += piece
    return shown + stop_filter.finish(), matched


def offline(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The plain way: the shortest text that ends with a stop string, without the longest such."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end if include else end - len(longest)], longest
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("ab日", max_size=14),
    stops=st.lists(st.text("ab日", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(0, 14), max_size=8),
    include=st.booleans(),
)
def test_what_is_shown_does_not_depend_on_the_cuts(text: str, stops: list[str], cuts: list[int], include: bool) -> None:
    assert cut_up(text, cuts, stops, include) == offline(text, stops, include)


@settings(max_examples=200, deadline=None)
@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=5))
def test_text_that_can_be_no_stop_any_more_is_shown_at_once(text: str, stop: str) -> None:
    stop_filter, shown, read = StopFilter([stop]), "", ""
    for character in text:
        read += character
        piece, matched = stop_filter.push(character)
        shown += piece
        if matched:
            break
        waiting = read[len(shown) :]
        assert stop.startswith(waiting) and len(waiting) < len(stop)
        assert not any(stop.startswith(read[-size:]) for size in range(len(waiting) + 1, min(len(stop), len(read) + 1)))


def test_a_stop_that_ends_inside_a_token_of_half_a_character_shows_nothing_of_it() -> None:
    tokenizer = KINDS["byte_fallback"]
    ids = [*tokenizer.encode("abc"), *(3 + byte for byte in "日本".encode())]
    detokenizer, stops = Detokenizer(tokenizer), StopFilter(["c日"])
    found = [stops.push(detokenizer.push(token_id)) for token_id in ids]
    assert "".join(piece for piece, _ in found) == "ab"
    assert [matched for _, matched in found] == [None] * 5 + ["c日"] * 4


def folder(path: Path, **files: Any) -> Path:
    byte_level().save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def test_a_folder_says_where_answers_end(tmp_path: Path) -> None:
    named = folder(tmp_path, tokenizer_config={"eos_token": {"content": "</s>"}, "bos_token": "<s>"})
    tokenizer = Tokenizer.from_folder(named)
    assert tokenizer.special_tokens == {"eos_token": "</s>", "bos_token": "<s>"}
    assert [tokenizer.token_text(i) for i in tokenizer.eos_ids] == ["</s>"]
    folder(tmp_path, config={"eos_token_id": 7, "vocab_size": 512})
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert (tokenizer.eos_ids, tokenizer.vocab_size) == ((7,), 512)
    folder(tmp_path, generation_config={"eos_token_id": [5, 6]})
    assert Tokenizer.from_folder(tmp_path).eos_ids == (5, 6)
    folder(tmp_path, generation_config={"eos_token_id": ["x"]})
    with pytest.raises(InvalidModel, match="eos_token_id"):
        Tokenizer.from_folder(tmp_path)


def test_a_folder_without_a_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidModel, match=r"tokenizer\.json.*save_pretrained"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidModel, match="cannot be read"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("text", [5, None, "half \ud800"])
def test_what_is_no_text_is_refused(text: Any) -> None:
    with pytest.raises(InvalidRequest):
        KINDS["byte_level"].encode(text)

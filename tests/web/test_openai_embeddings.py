"""OpenAI's API over real HTTP: texts, token ids, base64, fewer dimensions, usage, and its form of errors."""

from __future__ import annotations

import base64
import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.loading.load import load_served
from tests.serving.functions import double
from tests.serving.sentence_folders import TEXTS, plain, tokens_of, write_sentence_folder
from tests.web.running import running

KEY = "a-key-of-this-test"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sentence_folder(tmp_path_factory.mktemp("openai") / "model")


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    engine = load_served(str(folder), "minilm", {"max_queue": 16}).engine
    with running({"minilm": engine, "double": DynamicBatcher(double)}, keys=[KEY]) as found:
        yield found


def asked(url: str, path: str, document: Any = None, *, key: str = KEY) -> tuple[int, Any]:
    body = None if document is None else json.dumps(document).encode()
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url + path, body, headers), timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def embed(url: str, given: Any, **more: Any) -> tuple[int, Any]:
    return asked(url, "/v1/embeddings", {"model": "minilm", "input": given, **more})


def vectors(document: Any) -> np.ndarray[Any, Any]:
    assert [row["index"] for row in document["data"]] == list(range(len(document["data"])))
    return np.array([row["embedding"] for row in document["data"]])


def test_texts_in_order_with_their_tokens_counted(url: str, folder: Path) -> None:
    status, document = embed(url, list(TEXTS))
    assert status == 200
    expected = np.stack([plain(folder, text).numpy() for text in TEXTS])
    assert np.allclose(vectors(document), expected, atol=1e-5)
    tokens = sum(len(tokens_of(folder, text, 24)) for text in TEXTS)
    assert document["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (document["object"], document["model"]) == ("list", "minilm")
    assert {row["object"] for row in document["data"]} == {"embedding"}


def test_one_text_token_ids_and_lists_of_them_agree(url: str, folder: Path) -> None:
    ids = tokens_of(folder, TEXTS[2], 24)
    (text,) = vectors(embed(url, TEXTS[2])[1])
    (row,) = vectors(embed(url, ids)[1])
    rows = vectors(embed(url, [ids, [2, 3]])[1])
    assert np.allclose(text, row, atol=1e-6)
    assert np.allclose(text, rows[0], atol=1e-6)
    assert len(rows) == 2


def test_base64_holds_the_same_numbers(url: str) -> None:
    numbers = vectors(embed(url, ["a text"])[1])
    (row,) = embed(url, ["a text"], encoding_format="base64")[1]["data"]
    assert np.allclose(np.frombuffer(base64.b64decode(row["embedding"]), dtype="<f4"), numbers[0], atol=1e-6)


@pytest.mark.parametrize("form", ["float", "base64"])
def test_fewer_dimensions_are_cut_and_of_length_one(url: str, form: str) -> None:
    whole = vectors(embed(url, ["a text"])[1])[0]
    (row,) = embed(url, ["a text"], dimensions=5, encoding_format=form)[1]["data"]
    given = row["embedding"]
    short = np.array(given) if form == "float" else np.frombuffer(base64.b64decode(given), dtype="<f4")
    assert np.allclose(short, whole[:5] / np.linalg.norm(whole[:5]), atol=1e-6)
    assert embed(url, "a", dimensions=32)[0] == embed(url, "a", dimensions=8.0)[0] == 200
    assert embed(url, "a", dimensions=None, user=None)[0] == 200


REFUSED: dict[str, tuple[dict[str, Any], int, str]] = {
    "an unknown model": ({"model": "gpt", "input": "a"}, 404, "'gpt' is not served here"),
    "a model of no texts": ({"model": "double", "input": "a"}, 404, "gives no embeddings"),
    "no model": ({"input": "a"}, 400, "model"),
    "no input": ({"model": "minilm"}, 400, "input"),
    "an empty list": ({"model": "minilm", "input": []}, 400, "empty list"),
    "a number": ({"model": "minilm", "input": 7}, 400, "input"),
    "a mixture": ({"model": "minilm", "input": ["a", 7]}, 400, "unmixed"),
    "truths": ({"model": "minilm", "input": [True]}, 400, "unmixed"),
    "an empty list of ids": ({"model": "minilm", "input": [[2, 3], []]}, 400, "input[1]"),
    "an unknown token": ({"model": "minilm", "input": [[2], [2, 999_999]]}, 400, "input[1]: There is no token 999999"),
    "too many tokens": ({"model": "minilm", "input": [3] * 25}, 413, "25 token ids"),
    "too many texts": ({"model": "minilm", "input": ["a"] * 17}, 413, "17 items"),
    "too many dimensions": ({"model": "minilm", "input": "a", "dimensions": 33}, 400, "32 dimensions, not 33"),
    "half a dimension": ({"model": "minilm", "input": "a", "dimensions": 1.5}, 400, "not 1.5"),
    "half a token": ({"model": "minilm", "input": [2.5, 3]}, 400, "neither a text nor"),
    "no dimensions": ({"model": "minilm", "input": "a", "dimensions": 0}, 400, "dimensions"),
    "an unknown format": ({"model": "minilm", "input": "a", "encoding_format": "hex"}, 400, "hex"),
    "an unknown member": ({"model": "minilm", "input": "a", "dimension": 5}, 400, "dimension"),
    "no object": ([1], 400, "expected"),  # type: ignore[dict-item]
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_answered_is_told_in_openai_s_form(url: str, case: str) -> None:
    document, status, words = REFUSED[case]
    found, answer = asked(url, "/v1/embeddings", document)
    assert found == status
    assert set(answer["error"]) == {"message", "type", "param", "code"}
    assert words in answer["error"]["message"]
    assert answer["error"]["type"] == "invalid_request_error"
    assert answer["error"]["code"] == {404: "model_not_found"}.get(status)


def test_a_key_is_asked_for(url: str) -> None:
    status, answer = asked(url, "/v1/embeddings", {"model": "minilm", "input": "a"}, key="another-key")
    assert (status, answer["error"]["code"]) == (401, "invalid_api_key")


def test_models(url: str) -> None:
    status, document = asked(url, "/v1/models")
    assert status == 200
    assert [row["id"] for row in document["data"]] == ["minilm"]
    assert asked(url, "/v1/models/minilm") == (200, document["data"][0])
    assert asked(url, "/v1/models/double")[0] == asked(url, "/v1/models/other")[0] == 404


def test_the_document_names_it(url: str) -> None:
    status, document = asked(url, "/openapi.json")
    assert status == 200
    schema = document["paths"]["/v1/embeddings"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["model"]["enum"] == ["minilm"]
    assert schema["properties"]["dimensions"]["maximum"] == 32
    refused = document["paths"]["/v1/embeddings"]["post"]["responses"]["415"]["content"]["application/json"]["schema"]
    assert set(refused["properties"]["error"]["required"]) == {"message", "type", "param", "code"}
    items = document["paths"]["/predict/minilm"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert '"maxLength": 1000000' in json.dumps(items)


def test_without_embeddings_it_is_not_in_the_document() -> None:
    with running(DynamicBatcher(double)) as url:
        _, document = asked(url, "/openapi.json")
        assert not [path for path in document["paths"] if path.startswith("/v1/")]
        assert asked(url, "/v1/models") == (200, {"object": "list", "data": []})


def test_predict_takes_texts_as_well(url: str, folder: Path) -> None:
    status, document = asked(url, "/predict/minilm", {"items": ["a text", 7]})
    assert status == 200
    assert np.allclose(document["results"][0], plain(folder, "a text").numpy(), atol=1e-5)
    assert document["errors"][0]["status"] == 400


def test_openai_s_own_client(url: str, folder: Path) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0) as client:
        found = client.embeddings.create(model="minilm", input=list(TEXTS))
        assert np.allclose(found.data[2].embedding, plain(folder, TEXTS[2]).numpy(), atol=1e-5)
        assert [model.id for model in client.models.list()] == ["minilm"]
        with pytest.raises(openai.NotFoundError):
            client.embeddings.create(model="gpt", input="a")

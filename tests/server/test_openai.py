"""A real server, with the bundled model, through OpenAI's own client: what README promises."""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import openai
import pytest

from nibble import LLM

HELLO = [{"role": "user", "content": "Hello"}]
PROMPT = "def read_lines(path):\n    with open(path"


@pytest.fixture(scope="module")
def client(server: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", kv_format="nvfp4", kv_memory="64MiB", max_running=32, device="cpu")


def test_chat(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.chat.completions.create(model="demo", messages=HELLO, max_tokens=16, temperature=0)
    expected = llm.chat(HELLO, max_tokens=16)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == expected.completions[0].finish_reason
    assert answer.usage.completion_tokens == len(expected.completions[0].token_ids)


def test_a_stream_says_what_the_whole_says(client: openai.OpenAI) -> None:
    asked = {"model": "demo", "messages": HELLO, "max_tokens": 24, "temperature": 0.9, "seed": 5, "n": 3}
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage = ["", "", ""], {}, None
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
    assert texts == [choice.message.content for choice in whole.choices] and len(set(texts)) > 1
    assert [reasons[i] for i in range(3)] == [choice.finish_reason for choice in whole.choices]
    assert usage and usage.completion_tokens == whole.usage.completion_tokens


def test_completions_with_stop_and_echo(client: openai.OpenAI, llm: LLM) -> None:
    answer = client.completions.create(
        model="demo", prompt=PROMPT, max_tokens=32, temperature=0, stop=[":"], echo=True
    )
    expected = llm.generate(PROMPT, max_tokens=32, stop=(":",))
    assert answer.choices[0].text == PROMPT + expected.text
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=HELLO, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert "".join(entry.token for entry in entries) == answer.choices[0].message.content
    for entry in entries:
        assert len(entry.top_logprobs) == 3 and entry.logprob == entry.top_logprobs[0].logprob <= 0
    old = client.completions.create(model="demo", prompt=PROMPT, max_tokens=4, temperature=0, logprobs=2)
    assert "".join(old.choices[0].logprobs.tokens) == old.choices[0].text
    assert len(old.choices[0].logprobs.token_logprobs) == 4


def test_seeds_and_cached_tokens(client: openai.OpenAI) -> None:
    asked = {
        "model": "demo",
        "prompt": "import os\nimport sys\n" * 20,
        "max_tokens": 12,
        "temperature": 1.0,
        "seed": 11,
    }
    first, second = client.completions.create(**asked), client.completions.create(**asked)
    assert first.choices[0].text == second.choices[0].text
    assert second.usage.prompt_tokens_details.cached_tokens > 32
    salted = client.completions.create(**asked, extra_body={"cache_salt": "mine"})
    assert salted.usage.prompt_tokens_details.cached_tokens == 0, "another tenant's pages are not shared"
    assert salted.choices[0].text == first.choices[0].text
    urgent = client.completions.create(**asked, extra_body={"priority": -1})
    assert urgent.choices[0].text == first.choices[0].text


def test_a_prefix_cache_that_is_reset(client: openai.OpenAI, server: str) -> None:
    asked = {"model": "demo", "prompt": "import this\n" * 20, "max_tokens": 4, "temperature": 0}
    counts, texts = [], set()
    for reset in (False, False, True):
        if reset:
            assert httpx.post(f"{server}/reset_prefix_cache").json() == {"status": "reset"}
        answer = client.completions.create(**asked)
        counts.append(answer.usage.prompt_tokens_details.cached_tokens)
        texts.add(answer.choices[0].text)
    assert counts[0] == counts[2] == 0 < counts[1] and len(texts) == 1


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="gpt", prompt="x")
    with pytest.raises(openai.BadRequestError, match="context length is 8192"):
        client.completions.create(model="demo", prompt="x = 1\n" * 8000)
    with pytest.raises(openai.BadRequestError, match="out of range"):
        client.completions.create(model="demo", prompt=[1, 2, 99999])
    assert client.models.list().data[0].id == "demo"


def test_many_at_once_say_what_each_says_alone(client: openai.OpenAI, llm: LLM) -> None:
    prompts = [f"def f{i}(x):\n    return" for i in range(24)]
    expected = [output.text for output in llm.generate(prompts, max_tokens=20)]

    def ask(prompt: str) -> str:
        chunks = client.completions.create(
            model="demo", prompt=prompt, max_tokens=20, temperature=0, stream=True
        )
        return "".join(chunk.choices[0].text for chunk in chunks)

    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        assert list(pool.map(ask, prompts)) == expected


def test_json_by_schema(client: openai.OpenAI) -> None:
    schema = {
        "type": "object", "properties": {"city": {"type": "string", "maxLength": 10}, "size": {"enum": [1, 2, 3]}},
        "required": ["city", "size"], "additionalProperties": False,
    }  # fmt: skip
    asked = {"model": "demo", "messages": HELLO, "max_tokens": 100, "temperature": 1.0, "seed": 2}
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    found = json.loads(
        client.chat.completions.create(**asked, response_format=form).choices[0].message.content
    )
    assert set(found) == {"city", "size"} and found["size"] in {1, 2, 3}
    words = {"guided_choice": ["red", "green"]}
    answer = client.chat.completions.create(**asked, extra_body=words)
    assert answer.choices[0].message.content in words["guided_choice"]
    with pytest.raises(openai.BadRequestError, match="cannot be"):
        client.chat.completions.create(**asked, extra_body={"guided_regex": "("})
    with pytest.raises(openai.BadRequestError, match="one of response_format"):
        client.chat.completions.create(**asked, response_format=form, extra_body=words)

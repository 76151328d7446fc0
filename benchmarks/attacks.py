"""What serve_attacks.py sends: requests as bytes, by the name of the attack.

Malformed and hostile JSON, huge fields, grammars that explode, and HTTP that is none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

CHAT, TEXT, HELLO = "/v1/chat/completions", "/v1/completions", [{"role": "user", "content": "Hello"}]
MIB = 1 << 20
LOOPS = "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}"
FORM = "application/x-www-form-urlencoded"
CLOSE = b"HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"


def request(path: str, body: bytes, *extra: str, kind: str = "application/json") -> bytes:
    head = [
        f"POST {path} HTTP/1.1",
        "Host: x",
        f"Content-Type: {kind}",
        f"Content-Length: {len(body)}",
        *extra,
    ]
    return "\r\n".join([*head, "Connection: close", "", ""]).encode() + body


def chat(**fields: Any) -> bytes:
    return request(CHAT, json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 8, **fields}).encode())


def text(**fields: Any) -> bytes:
    return request(TEXT, json.dumps({"model": "demo", "prompt": "x", "max_tokens": 8, **fields}).encode())


def raw_chat(fields: str) -> bytes:
    """With fields that json.dumps would not write."""
    start = json.dumps({"model": "demo", "messages": HELLO, "max_tokens": 8})[:-1]
    return request(CHAT, f"{start}, {fields}}}".encode(errors="surrogatepass"))


def schema(**body: Any) -> bytes:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": body}}
    return chat(response_format=form, max_tokens=16)


def tower(depth: int, inside: Any, wrap: Callable[[Any], Any]) -> Any:
    for _ in range(depth):
        inside = wrap(inside)
    return inside


def recursive() -> dict[str, Any]:
    node = {"type": "object", "properties": {name: {"$ref": "#/$defs/n"} for name in "abcdefgh"}}
    return {"$defs": {"n": node}, "$ref": "#/$defs/n"}


def doubling() -> dict[str, Any]:
    """Definitions that grow to 2**24 when they are written out."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for i in range(1, 25):
        part = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {"type": "object", "properties": {"a": part, "b": part}, "required": ["a", "b"]}
    return {"$defs": defs, "$ref": "#/$defs/d24"}


BODIES: dict[str, Callable[[], Iterable[bytes]]] = {
    # JSON itself
    "nested 100,000 deep": lambda: [request(CHAT, b"[" * 100_000), request(TEXT, b'{"a":' * 100_000)],
    "nested in fields": lambda: [
        raw_chat(f'"{name}": {"[" * depth}{"]" * depth}')
        for name in ("metadata", "logit_bias", "tools", "messages", "chat_template_kwargs")
        for depth in (200, 3000, 100_000)
    ],
    "invalid UTF-8": lambda: [request(CHAT, b'{"model": "\xff\xfe"}'), request(TEXT, "{}".encode("utf-16"))],
    "lone surrogates": lambda: [
        raw_chat('"messages": [{"role": "user", "content": "\\ud800"}]'),
        request(TEXT, b'{"model": "demo", "prompt": "\\udfff\\u0000", "max_tokens": 4}'),
        raw_chat('"stop": ["\\ud800"]'),
        raw_chat('"cache_salt": "\\ud800"'),
        raw_chat('"guided_regex": "\\ud800"'),
        raw_chat('"guided_choice": ["\\ud800"]'),
        raw_chat('"model": "\\ud800"'),
        raw_chat('"messages": [{"role": "\\ud800", "content": "a"}]'),
        request("/tokenize", b'{"prompt": "\\ud800"}'),
    ],
    "duplicate keys": lambda: [raw_chat('"n": 1, "n": 2, "max_tokens": 1'), raw_chat('"model": "x"')],
    "NaN and Infinity": lambda: [
        raw_chat(f'"{name}": {value}')
        for name in ("temperature", "top_p", "timeout", "repetition_penalty", "n", "seed", "min_p")
        for value in ("NaN", "Infinity", "-Infinity", "1e999", "1" * 5000)
    ],
    "NaN in logit_bias": lambda: [
        raw_chat('"logit_bias": {"1": NaN}'),
        raw_chat('"logit_bias": {"1": 1e999}'),
    ],
    # Sizes
    "10 MB body": lambda: [request(TEXT, b'"' + b"x" * 10**7 + b'"')],
    "8 MB of text": lambda: [text(prompt="x " * (4 * MIB - 100)), request("/tokenize", big_tokenize())],
    "8 MB of one word": lambda: [text(prompt="a" * (8 * MIB - 100)), text(prompt="\u0301" * (MIB))],
    "8 MB of messages": lambda: [chat(messages=HELLO * 10_000), chat(messages=HELLO * 150_000)],
    "8 MB of token ids": lambda: [
        request(TEXT, b'{"model": "demo", "prompt": [' + b"1," * (4 * MIB - 50) + b"1]}")
    ],
    "8 MB of negative ids": lambda: [
        request(TEXT, b'{"model": "demo", "prompt": [' + b"-1," * (2 * MIB) + b"1]}"),
        request("/detokenize", b'{"tokens": [' + b"-1," * (2 * MIB) + b"1]}"),
    ],
    "8 MB to detokenize": lambda: [request("/detokenize", b'{"tokens": [' + b"9," * (4 * MIB - 50) + b"1]}")],
    "a million prompts": lambda: [
        request(TEXT, b'{"model": "demo", "prompt": [' + b'"a",' * (2 * MIB - 50) + b'"a"]}'),
        request(TEXT, b'{"model": "demo", "prompt": [' + b"[1]," * (2 * MIB - 50) + b"[1]]}"),
    ],
    "nested token lists": lambda: [
        text(prompt=[[[1]]]),
        text(prompt=[[1], [-1]]),
        text(prompt=[[]]),
        text(prompt=[[], [1]]),
    ],
    "logit_bias of 400,000": lambda: [
        chat(logit_bias={str(i): 1 for i in range(400_000)}),
        chat(logit_bias={f"{i:06}": 1 for i in range(400_000)}),
    ],
    "stop of 100,000": lambda: [chat(stop=["a"] * 100_000), chat(stop=["ab" * 2000] * 16, max_tokens=200)],
    "stop of 4 MB": lambda: [chat(stop=["e" * (MIB // 4)] * 16, max_tokens=400)],
    "stop_token_ids of a million": lambda: [chat(stop_token_ids=[7] * 1_000_000)],
    "n = 10**9": lambda: [
        chat(n=10**9),
        chat(n=-1),
        chat(n=0),
        text(best_of=10**9),
        text(max_tokens=10**9, n=128, stop="a"),
    ],
    "128 tools, 1 MB": lambda: [chat(tools=[tool(f"f{i}", 8000) for i in range(128)])],
    "10,000 unknown fields": lambda: [chat(**{f"f{i}": i for i in range(10_000)})],
    # Templates
    "chat templates": lambda: [
        chat(chat_template_kwargs={"chat_template": LOOPS}),
        chat(chat_template_kwargs={"chat_template": "{{ ''.__class__.__mro__ }}"}),
        chat(chat_template_kwargs={"tokenize": True}),
        chat(chat_template_kwargs={"return_tensors": "pt"}),
        chat(chat_template_kwargs={"messages": 1, "conversation": 2}),
    ],
    # Grammars
    "regex: nested counts": lambda: [
        chat(guided_regex="((a{0,500}){0,500}){0,500}"),
        chat(guided_regex="(((a{1,99}b?){1,99}c?){1,99}d?){1,99}"),
    ],
    "regex: wide": lambda: [
        chat(guided_regex="(a|b)*a(a|b){3000}"),
        chat(guided_regex="|".join(f"w{i}" for i in range(30_000))),
        chat(guided_regex="(.*a.*b.*c.*d.*e.*f.*g.*){40}", max_tokens=32),
    ],
    "regex: malformed": lambda: [
        chat(guided_regex=r) for r in ("(", "(?=a)b", r"\1", "a{9999999999}", "[z-a]", "(?P<")
    ],
    "regex: 250 kB": lambda: [chat(guided_regex="(ab?c*)+" * 30_000)],
    "choice of 20,000": lambda: [chat(guided_choice=[f"word {i}" for i in range(20_000)])],
    "lark": lambda: [
        chat(guided_grammar=g, max_tokens=32)
        for g in (
            'start: start start | "a" | ',
            "start: a\na: b\nb: a",
            'start: x\nx: x x x x x x | "a"',
            "start: /(a|b)*a(a|b){800}/",
            "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(2000)), 'r2000: "a"']),
            "start: %json {",
            "",
        )
    ],
    "schema: recursive": lambda: [
        schema(**recursive()),
        schema(**{"$ref": "#"}),
        schema(allOf=[{"$ref": "#"}]),
    ],
    "schema: doubling": lambda: [schema(**doubling())],
    "schema: towers": lambda: (
        [
            schema(**tower(depth, {"type": "string"}, lambda inner: {"type": "array", "items": inner}))
            for depth in (60, 400)
        ]
        + [
            schema(
                **tower(
                    12,
                    {"type": "string"},
                    lambda inner: {"anyOf": [inner, {"type": "array", "items": inner}]},
                )
            )
        ]
    ),
    "schema: huge counts": lambda: [
        schema(type="string", minLength=10**9),
        schema(type="array", items={"type": "integer"}, minItems=10**9),
        schema(type="string", maxLength=10**7),
        schema(type="integer", minimum=-(10**300), maximum=10**300),
        schema(type="number", multipleOf=1e-300),
        schema(type="string", pattern="(a{1,999}){1,999}"),
    ],
    "schema: 20,000 properties": lambda: [
        schema(
            type="object",
            properties={f"p{i}": {"type": "string"} for i in range(5_000)},
            additionalProperties=False,
        ),
        schema(enum=[f"value {i}" for i in range(20_000)]),
        schema(anyOf=[{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(1_000)]),
    ],
    "schema: addresses": lambda: [
        schema(**{"$ref": "http://127.0.0.1:9/x"}),
        schema(**{"$ref": "file:///etc/passwd"}),
    ],
    # Odd but short
    "odd values": lambda: [
        text(prompt=""),
        text(prompt=[]),
        text(prompt=[2**40]),
        text(prompt=[-1]),
        text(prompt=None),
        text(prompt={}),
        chat(messages=[{"role": "", "content": None}]),
        chat(messages=[{"role": "user", "content": [{"type": "text"}]}]),
        chat(
            messages=[
                {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{" * 10_000}}]}
            ]
        ),
        chat(messages=[{"role": "user", "content": "x", "tool_calls": 5}]),
        chat(messages=[{"role": "user", "name": {}}]),
        chat(timeout=1e-9),
        chat(timeout=1e308),
        chat(seed=2**63),
        chat(temperature=-1),
        chat(top_logprobs=9**9, logprobs=True),
        chat(cache_salt="x" * 10_000),
        chat(response_format={"type": "json_schema"}),
        chat(stream_options=[]),
        text(echo=True, logprobs=20, n=8),
        text(suffix="x"),
        chat(model="../../etc/passwd"),
        chat(model=""),
    ],
    # HTTP
    "kinds of content": lambda: [
        request(CHAT, b"{}", kind=kind)
        for kind in ("text/plain", "multipart/form-data; boundary=x", FORM, "x" * 4000, "")
    ],
    "a gzip bomb": lambda: [request(CHAT, bytes.fromhex("1f8b0800") + b"\0" * MIB, "Content-Encoding: gzip")],
    "headers injected": lambda: (
        [
            request(CHAT, b"{}", f"X-Request-Id: a{end}Set-Cookie: x=1")
            for end in ("\n", "\r", "\r\n", "\0", "\x0b")
        ]
        + [request(CHAT, b"{}", f"X-Request-Id: {'x' * size}") for size in (1000, 60_000, 200_000)]
        + [
            request(CHAT, b"{}", *(f"X-{i}: 1" for i in range(4000))),
            request(CHAT, b"{}", "X-Request-Id: \xff\x80"),
        ]
    ),
    "lengths that lie": lambda: [
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %s\r\nConnection: close\r\n\r\n{}\r\n"
        % length
        for length in (
            b"-1",
            b"1e9",
            b"2, 3",
            b"99999999999999999999",
            b"2\r\nContent-Length: 3",
            b"2\r\nTransfer-Encoding: chunked",
        )
    ],
    "HTTP/1.0 and others": lambda: [
        b"GET /v1/models HTTP/1.0\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"\0" * 70_000,
        b"GET " + b"/" * 70_000,
        b"TRACE / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/..%2f..%2f..%2fetc/passwd " + CLOSE,
        b"GET /v1/models/%ff%00%0a " + CLOSE,
        b"HEAD /v1/models " + CLOSE,
        b"GET http://other/v1/models " + CLOSE,
    ],
}


def big_tokenize() -> bytes:
    return json.dumps({"prompt": "x " * (4 * MIB - 100)}).encode()


def tool(name: str, size: int) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "description": "x" * size}}

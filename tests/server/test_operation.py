"""What an operator meets: ports in use, the end of a drain, causes in the log, bodies that are too large, CORS, a proxy's
path, TLS, several names."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest
from test_app import CHAT, TEXT, with_app
from test_process import LONG, SMALL, opened, reading, until

from conftest import FakeEngine, FakeTokens, free_port, listening, running  # type: ignore[attr-defined]
from nibble.errors import ConfigError, NibbleError
from nibble.server.app import make_app
from nibble.server.engine_client import State
from nibble.server.listen import check_tls, listen, url_of
from nibble.server.middleware import cause_of
from nibble.server.settings import Settings

SECRET = "xyzzy"
ORIGIN = "https://chat.example.com"


def closed(sockets: list[socket.socket]) -> None:
    for one in sockets:
        one.close()


def test_a_port_in_use_is_said_before_anything_is_started() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "nibble", "serve", "demo", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"error: port {port} is in use: name another with --port\n"


def test_sockets_listen_from_the_beginning() -> None:
    settings = Settings(host="localhost", port=0, root_path="/llm")
    sockets = listen(settings)
    port = sockets[0].getsockname()[1]
    try:
        assert url_of(settings, sockets) == f"http://localhost:{port}/llm"
        socket.create_connection(("127.0.0.1", port), timeout=5).close()
        with pytest.raises(NibbleError, match=f"port {port} is in use"):
            listen(Settings(port=port))
    finally:
        closed(sockets)
    closed(listen(Settings(port=port)))


def test_a_host_that_is_not_here() -> None:
    with pytest.raises(ConfigError, match="no host 'no such host'"):
        listen(Settings(host="no such host"))
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1 is no address of this machine"):
        listen(Settings(host="192.0.2.1"))


@pytest.mark.slow
def test_a_drain_that_runs_out_says_so_to_every_client(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running(*SMALL, "--drain", "1", log=log) as url:
        streams: list[str] = []
        whole: list[str] = []
        long = {**LONG, "max_tokens": 4000}
        begun = [threading.Event() for _ in range(2)]
        threads = [reading(url, streams, long, event) for event in begun]
        threads.append(reading(url, whole, {**long, "stream": False}))
        until(lambda: opened(url) == 3)
        assert all(event.wait(300) for event in begun)
        os.kill(url.pid, signal.SIGTERM)
        for thread in threads:
            thread.join(300)
    assert len(streams) == 2 and len(whole) == 1
    for text in streams:
        assert '"message":"the server is shutting down"' in text and text.endswith("data: [DONE]\n\n")
    assert whole[0].startswith('{"error":{"message":"the server is shutting down"')
    lines = log.read_text()
    assert "Traceback" not in lines and "Exception" not in lines
    assert lines.count("drain ran out") == 1 and "ended_requests=3" in lines and "status=503" in lines


BAD: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/completions", {**TEXT, "prompt": SECRET, "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {**TEXT, "prompt": {SECRET: 1}}, 400, "prompt"),
    ("/v1/completions", {**TEXT, SECRET: 1}, 400, f"{SECRET}: "),  # the name of a field is no text of a prompt
    ("/v1/completions", {**TEXT, f"a {SECRET}": 1}, 400, "a field: "),
    ("/v1/completions", {**TEXT, "model": SECRET}, 404, "the model ... is not served here"),
    ("/v1/completions", {**TEXT, "stop": [SECRET, 1]}, 400, "stop"),
    ("/v1/completions", {**TEXT, "logit_bias": {SECRET: 1}}, 400, "logit_bias"),
    ("/v1/completions", {**TEXT, "guided_regex": f"({SECRET}"}, 400, "the grammar cannot be followed"),
    ("/v1/completions", {**TEXT, "prompt": SECRET * 20}, 400, "the prompt is too long"),
    ("/v1/chat/completions", {**CHAT, "tool_choice": {"type": "function", "function": {"name": SECRET}}}, 400, "this tool"),
    ("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": [{"type": SECRET}]}]}, 400, "messages.0"),
    ("/v1/chat/completions", {**CHAT, "chat_template_kwargs": {"tokenize": SECRET}}, 400, "chat_template_kwargs"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "cause"), BAD)
def test_the_log_has_the_cause_and_no_text(
    path: str, body: dict[str, Any], status: int, cause: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, "nibble.server")

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        assert (await client.post(path, json=body)).status_code == status

    with_app(test)
    (line,) = [r.facts for r in caplog.records if r.getMessage() == "request"]  # type: ignore[attr-defined]
    assert line["error"].startswith(cause) and len(line["error"]) > 12
    assert SECRET not in line["error"].removeprefix(f"{SECRET}: ")


@pytest.mark.parametrize(
    ("message", "cause"),
    [
        ("it's 'a' and not \"it's b\"", "it's ... and not ..."),
        (f"stop must be a list, not {['x', 1, {'y': SECRET}]!r}", "stop must be a list, not [..., 1, {..."),
        (f"the model {chr(39) + SECRET!r} is not", "the model ... is not"),
        (f"the grammar fails: {SECRET}", "the grammar fails"),
        (f"a prompt is text ({SECRET})", "a prompt is text"),
    ],
)  # fmt: skip
def test_what_messages_quote_is_left_out(message: str, cause: str) -> None:
    assert cause_of(message) == cause


def test_a_body_that_is_too_large_is_read_before_the_connection_closes() -> None:
    """Else a client that sends all before it reads meets a reset connection, and not the reason."""
    app = make_app(FakeEngine(), FakeTokens(), "m", Settings(max_body="64KiB"))
    size = 16 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {size}\r\n\r\n"
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    piece = b"%x\r\n" % (1 << 20) + b"x" * (1 << 20) + b"\r\n"
    with listening(app) as url:
        for sent in (head.encode() + b"x" * size, chunked + 16 * piece + b"0\r\n\r\n"):
            with socket.create_connection(("127.0.0.1", httpx.URL(url).port), timeout=120) as client:
                client.sendall(sent)
                answer = b"".join(iter(lambda c=client: c.recv(1 << 16), b""))  # type: ignore[misc]
            assert answer.startswith(b"HTTP/1.1 413") and b"request_too_large" in answer
            assert b"connection: close" in answer.lower()


def test_pages_of_named_origins_may_call() -> None:
    preflight = {"Origin": ORIGIN, "Access-Control-Request-Method": "POST"}
    preflight["Access-Control-Request-Headers"] = "authorization,content-type"

    async def allowed(client: httpx.AsyncClient, _: FakeEngine) -> None:
        found = await client.options("/v1/chat/completions", headers=preflight)
        assert found.status_code == 200 and found.headers["access-control-allow-origin"] == ORIGIN
        assert "authorization" in found.headers["access-control-allow-headers"]
        other = await client.options(
            "/v1/chat/completions", headers={**preflight, "Origin": "https://evil.com"}
        )
        assert other.status_code == 400 and "access-control-allow-origin" not in other.headers
        refused = await client.post("/v1/chat/completions", json=CHAT, headers={"Origin": ORIGIN})
        # the page must be able to read the error, and the request's id
        assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == ORIGIN
        assert "x-request-id" in refused.headers["access-control-expose-headers"].lower()

    async def closed(client: httpx.AsyncClient, _: FakeEngine) -> None:
        found = await client.options("/v1/chat/completions", headers=preflight)
        assert found.status_code == 405 and "access-control-allow-origin" not in found.headers

    with_app(allowed, allowed_origins=(f"http://a.b,{ORIGIN}",), api_key="k")
    with_app(allowed, allowed_origins=(f'["{ORIGIN}"]',), api_key="k")
    with_app(closed)


def test_a_proxy_s_path_may_be_cut_off_or_not() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        for path in ("/llm/v1/chat/completions", "/v1/chat/completions"):
            assert (await client.post(path, json=CHAT)).status_code == 401
            found = await client.post(path, json=CHAT, headers={"Authorization": "Bearer k"})
            assert found.status_code == 200
        assert (await client.get("/llm/health")).status_code == 200
        assert (await client.get("/llm")).headers["content-type"].startswith("text/html")
        assert (await client.get("/llmx/health")).status_code == 401
        document = (await client.get("/openapi.json", headers={"Authorization": "Bearer k"})).json()
        assert document["servers"] == [{"url": "/llm"}]
        metrics = (await client.get("/llm/metrics", headers={"Authorization": "Bearer k"})).text
        assert '"/v1/chat/completions"' in metrics and "/llm/" not in metrics

    with_app(test, root_path="/llm", api_key="k")


def test_a_model_has_several_names() -> None:
    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [entry["id"] for entry in listed] == ["m", "gpt-4o", "b"]
        for name in ("m", "gpt-4o", "b"):
            body = (await client.post("/v1/completions", json={**TEXT, "model": name})).json()
            assert body["model"] == "m"
            assert (await client.get(f"/v1/models/{name}")).json()["id"] == name
        assert (await client.post("/v1/completions", json={**TEXT, "model": "c"})).status_code == 404

    with_app(test, served_model_name=("m", "gpt-4o, b"))


def test_no_cache_is_shown_while_there_is_none() -> None:
    engine = FakeEngine()
    engine.state = State.STARTING

    async def test(client: httpx.AsyncClient, _: FakeEngine) -> None:
        found = await client.get("/v1/cache")
        assert found.status_code == 503 and "the engine is starting" in found.text

    with_app(test, engine)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"allowed_origins": ("example.com",)}, "allowed_origins are as https://"),
        ({"allowed_origins": ("[1]",)}, "is a list of texts"),
        ({"root_path": "llm"}, "root_path is a path"),
        ({"root_path": "/llm/"}, "root_path is a path"),
        ({"ssl_keyfile": "k.pem"}, "HTTPS needs ssl_certfile"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 2}, "needs ssl_ca_certs"),
        ({"ssl_certfile": "c.pem", "ssl_cert_reqs": 3}, "0, 1 or 2"),
    ],
)
def test_settings_that_cannot_be(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Settings(**options)


def certificate(folder: Path) -> tuple[Path, Path]:
    """A key, and a certificate of localhost."""
    key, cert = folder / "key.pem", folder / "cert.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=localhost",
    ]
    command += [
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout",
        str(key),
        "-out",
        str(cert),
    ]
    try:
        subprocess.run(command, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl makes no certificate")
    return key, cert


def test_files_of_tls_are_checked_at_the_start(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    check_tls(Settings(ssl_certfile=str(cert), ssl_keyfile=str(key), ssl_ca_certs=str(cert), ssl_cert_reqs=1))
    with pytest.raises(ConfigError, match=r"TLS cannot be had with /nowhere/c\.pem"):
        check_tls(Settings(ssl_certfile="/nowhere/c.pem"))
    with pytest.raises(ConfigError, match="TLS cannot be had"):
        check_tls(Settings(ssl_certfile=str(cert), ssl_keyfile=str(cert)))


@pytest.mark.slow
def test_https(tmp_path: Path) -> None:
    key, cert = certificate(tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "nibble", "serve", "demo", *SMALL, "--port", str(port), "--json"]
    command += ["--ssl-certfile", str(cert), "--ssl-keyfile", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            announced = "".join(process.stdout.readline() for _ in range(4))
            assert f'"url": "https://127.0.0.1:{port}"' in announced
            import ssl

            found = httpx.get(
                f"https://127.0.0.1:{port}/health", verify=ssl.create_default_context(cafile=cert)
            )
            assert found.json()["status"] == "ready"
        finally:
            process.terminate()
        assert process.wait(120) == 0

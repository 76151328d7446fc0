"""The page: its files and their headers, what it says of the cache, and itself in a browser, where there is one."""

from __future__ import annotations

import asyncio
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from conftest import FakeEngine, FakeTokens, listening  # type: ignore[attr-defined]
from nibble.server import middleware as pages
from nibble.server import worker as wire
from nibble.server.app import make_app
from nibble.server.metrics import cache_view
from nibble.server.settings import Settings

ABOUT: dict[str, Any] = {
    "hardware": {"name": "cpu", "memory": 1 << 30},
    "page_size": 16,
    "groups": [
        {
            "name": "full", "kind": "mha", "layers": [0, 1, 2, 3, 4, 5], "window": None, "scheme": "nvfp4",
            "streams": {name: {"format": "nvfp4", "bytes_per_token": 72} for name in "kv"},
            "routes": {"decode": {"backend": "torch_ref", "stage_to": None, "runnable": True, "cites": "tests"}},
        }
    ],
    "bytes_per_token": 864,
    "bytes_per_token_16bit": 3072,
    "budget": {"memory": 1 << 30, "weights": 1 << 20, "pool": 1 << 20, "pages": 128, "tokens": 2048, "limit": "memory"},
    "hisparse": None,
    "notes": ["packing nhd: all routes read it"],
}  # fmt: skip
STATS = {
    "waiting": 1.0, "running": 2.0, "steps": 129.0, "decode_tokens": 381.0, "prompt_tokens": 110.0,
    "preemptions": 3.0, "preempted_tokens": 40.0, "finished": 4.0, "cache_total": 128.0, "cache_free": 100.0,
    "cache_in_use": 15.0, "cache_cached": 20.0, "cache_idle": 13.0, "cache_evicted": 5.0,
    "cache_lookup_tokens": 270.0, "cache_hit_tokens": 108.0,
}  # fmt: skip
TIER = {
    "buffer": 256,
    "frames": 64,
    "tables": 1,
    "host": 4096,
    "host_bytes_per_token": 9,
    "host_format": ["a"],
}
CERTIFICATE: dict[str, Any] = {
    "line": "certified 2026-11-23 on NVIDIA H200 (SM90): KL 0.004", "yardstick": "bf16", "kl": 0.004, "kl_p99": 0.05,
    "perplexity_ratio": 1.003, "top1": 0.98, "recall": {"8192": 0.97}, "yardstick_recall": {"8192": 1.0},
}  # fmt: skip
TIER_STATS = {
    "tier_frames": 64.0, "tier_free": 4.0, "tier_idle": 10.0, "tier_hot": 34.0,
    "tier_spilled": 2.0, "tier_saved": 7.0, "tier_loaded": 1.0, "tier_dropped": 6.0,
}  # fmt: skip
WINDOW_STATS = {
    "window_total": 40.0, "window_free": 12.0, "window_in_use": 20.0, "window_idle": 8.0, "window_attached": 11.0,
    "window_evicted": 3.0, "window_snapshot_hits": 6.0, "window_snapshot_misses": 2.0, "window_replayed_tokens": 96.0,
}  # fmt: skip

STATE_STATS = {
    "states_total": 9.0, "states_free": 2.0, "states_in_use": 4.0, "states_idle": 3.0, "states_attached": 5.0,
    "states_evicted": 1.0, "states_snapshot_hits": 7.0, "states_snapshot_misses": 2.0, "states_replayed_tokens": 48.0,
    "fidelity_uncovered_layers": 6.0,
}  # fmt: skip
STATES = {"format": "int8", "bytes_per_slot": 26 << 20}


def page_app(engine: FakeEngine, **settings: Any) -> FastAPI:
    about = {**ABOUT, "hisparse": TIER, "kv_window": 64, "dtype": "bfloat16", "states": STATES}
    engine.ready = wire.Ready(64, 256, about)
    engine.stats = STATS | TIER_STATS | WINDOW_STATS | STATE_STATS
    return make_app(engine, FakeTokens(), "m", Settings(**settings))


def fetched(path: str, **headers: str) -> httpx.Response:
    async def get() -> httpx.Response:
        app = FastAPI()
        pages.mount_page(app)
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app), base_url="http://test"
        ) as client:
            return await client.get(path, headers=headers)

    return asyncio.run(get())


# The files


@pytest.mark.parametrize("path", sorted(pages.PAGE_PATHS))
def test_a_file_is_served_and_kept(path: str) -> None:
    response = fetched(path)
    assert response.status_code == 200 and response.content
    assert response.headers["content-type"] == pages.PAGE_FILES[path][1]
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert "unsafe" not in policy and "*" not in policy and "http" not in policy
    again = fetched(path, **{"If-None-Match": f'"other", W/{response.headers["etag"]}'})
    assert again.status_code == 304 and not again.content
    assert again.headers["content-security-policy"] == policy


@pytest.mark.parametrize("path", sorted(pages.PAGE_PATHS))
def test_a_file_stays_at_home(path: str) -> None:
    text = fetched(path).text
    assert set(re.findall(r"https?:[^\s\"')]*", text)) <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"[\"'(]//\w", text), "an address without a scheme"
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|Storage", text)
    assert not re.search(r"\son\w+=\"|\sstyle=\"|<style|<script(?! type=\"module\" src=)", text)


def test_every_named_file_is_served() -> None:
    named = {"/" + name for name in re.findall(r"(?:src|href)=\"([^\"]+)\"", fetched("/").text)}
    for path in pages.PAGE_PATHS:
        named |= {"/" + name for name in re.findall(r"from \"\./([^\"]+)\"", fetched(path).text)}
    assert named | {"/"} == pages.PAGE_PATHS


def test_files_need_no_key_and_calls_do() -> None:
    async def test() -> None:
        engine = FakeEngine()
        transport = httpx.ASGITransport(app=page_app(engine, api_key="secret"))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            for path in pages.PAGE_PATHS:
                assert (await client.get(path)).status_code == 200
            for path in ("/v1/cache", "/v1/plan", "/v1/models", "/page.js/../v1/cache", "/page.jsx"):
                assert (await client.get(path)).status_code == 401
            response = await client.get("/v1/cache", headers={"Authorization": "Bearer secret"})
            assert engine.ready and response.json() == cache_view(engine.stats, engine.ready.about)

    asyncio.run(test())


# The picture


def test_counts_add_up() -> None:
    view = cache_view(STATS, ABOUT)
    found = view["pages"]
    assert found == {
        "total": 128, "free": 100, "held": 15, "own": 8, "shared": 7, "idle": 13, "size": 16
    }  # fmt: skip
    assert found["free"] + found["own"] + found["shared"] + found["idle"] == found["total"]
    assert found["held"] == STATS["cache_in_use"]
    assert view["prefix"]["hit_rate"] == pytest.approx(0.4)
    assert view["requests"]["running"] == 2 and view["tokens"] == {"prompt": 110, "decode": 381}
    group = view["groups"][0]
    assert group["layers"] * group["bytes_per_token"] == view["bytes_per_token"]
    assert view["host"] is None and view["at"] is None
    assert cache_view({**STATS, "time": 1.5}, ABOUT)["at"] == 1.5


def test_before_the_first_counts_all_is_free() -> None:
    view = cache_view({}, ABOUT)
    assert view["pages"]["free"] == view["pages"]["total"] == 128
    assert view["prefix"]["hit_rate"] is None


def test_frames_of_a_host_tier_add_up() -> None:
    host = cache_view({**STATS, **TIER_STATS}, {**ABOUT, "hisparse": TIER})["host"]
    assert host["free"] + host["idle"] + host["hot"] + host["pinned"] == host["frames"] == 64
    assert host["only_host_pages"] == 28 - (64 - 4 - 34), "used pages that lie in no frame"
    new = cache_view({}, {**ABOUT, "hisparse": TIER})["host"]
    assert new["free"] == 64 and new["only_host_pages"] == 0


def test_pages_of_an_exact_window_add_up() -> None:
    about = {**ABOUT, "kv_window": 64, "dtype": "bfloat16"}
    found = cache_view({**STATS, **WINDOW_STATS}, about)["window"]
    assert found == {
        "tokens": 64, "dtype": "bfloat16", "pages": 40, "free": 12, "held": 20, "idle": 8, "snapshots": 11,
        "evicted_pages": 3, "hits": 6, "misses": 2, "replayed_tokens": 96,
    }  # fmt: skip
    assert found["free"] + found["held"] + found["idle"] == found["pages"]
    assert cache_view(STATS, ABOUT)["window"] is cache_view({}, about)["window"] is None


def test_slots_of_recurrent_states_add_up() -> None:
    found = cache_view({**STATS, **STATE_STATS}, {**ABOUT, "states": STATES})["states"]
    assert found == {
        "format": "int8", "bytes_per_slot": 26 << 20, "unwatched_layers": 6, "slots": 9, "free": 2, "held": 4, "idle": 3, "snapshots": 5,
        "evicted_slots": 1, "hits": 7, "misses": 2, "replayed_tokens": 48,
    }  # fmt: skip
    assert cache_view(STATS, ABOUT)["states"] is cache_view({}, {**ABOUT, "states": STATES})["states"] is None


def test_drafts_are_counted() -> None:
    stats = {**STATS, "drafts_steps": 4.0, "drafts_drafted": 20.0, "drafts_accepted": 9.0}
    found = cache_view(stats, {**ABOUT, "drafter": "lookup"})["drafts"]
    assert found == {
        "drafter": "lookup", "steps": 4, "drafted": 20, "accepted": 9, "accept_rate": 0.45, "tokens_per_step": 3.25,
    }  # fmt: skip
    assert cache_view({}, {**ABOUT, "drafter": "lookup"})["drafts"]["accept_rate"] is None
    assert cache_view(STATS, ABOUT)["drafts"] is None


# In a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    driver = pytest.importorskip("playwright.sync_api", exc_type=ImportError)
    program = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chromium-browser"))), None)
    if not program:
        pytest.skip("no browser")
    with driver.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield found
        found.close()


@contextmanager
def opened(browser: Any, engine: FakeEngine, **settings: Any) -> Iterator[Any]:
    """The page. Nothing may go wrong in its console but answers with an error's status."""
    with listening(page_app(engine, **settings)) as url:
        page = browser.new_page()
        wrong: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda line: wrong.append(line.text) if line.type == "error" else None)
        page.goto(url)
        yield page
        page.close()
        assert not [line for line in wrong if "the server responded with a status" not in line], wrong


def say(page: Any, text: str) -> None:
    page.fill("#text", text)
    page.press("#text", "Enter")
    page.wait_for_selector("#send:enabled")


@pytest.mark.slow
def test_an_exact_window_is_shown(browser: Any) -> None:
    with opened(browser, FakeEngine()) as page:
        page.wait_for_selector("#window:not([hidden])")
        assert page.text_content("#window-title") == "Exact window: the newest 64 tokens in bfloat16"
        assert "held by requests: 20" in page.text_content("#window-legend")
        assert "6 went on at a snapshot, 2 had none" in page.text_content("#window-note")


@pytest.mark.slow
def test_recurrent_states_are_shown(browser: Any) -> None:
    with opened(browser, FakeEngine()) as page:
        page.wait_for_selector("#states:not([hidden])")
        assert page.text_content("#states-title") == "Recurrent states in int8: 26.0 MiB a request"
        assert "slots held by requests: 4" in page.text_content("#states-legend")
        assert "7 went on at a snapshot, 2 had none" in page.text_content("#states-note")
        assert "watch does not compare the states of 6 layers" in page.text_content("#states-note")


@pytest.mark.slow
def test_a_chat(browser: Any) -> None:
    with opened(browser, FakeEngine()) as page:
        page.wait_for_selector(".state.good")
        say(page, "<img src=x>\n```py\na = 1\n```")
        answer = page.locator(".turn.assistant").last
        assert answer.locator(".prose").first.text_content() == "<img src=x>"
        assert answer.locator("pre code").text_content() == "a = 1\n"
        assert page.locator("img").count() == 0
        assert "2 of 27 prompt tokens cached" in answer.locator(".foot").text_content()
        page.get_by_role("button", name="Regenerate").click()
        page.wait_for_selector("#send:enabled")
        assert page.locator(".turn").count() == 2
        say(page, "more" * 9)
        assert "the prompt is too long" in page.locator(".turn.assistant .error").text_content()
        page.get_by_role("button", name="New chat").click()
        page.fill("#system", "s")
        page.fill("#max_tokens", "3")
        say(page, "hello")
        assert page.locator(".turn.assistant .prose").text_content() == "s|h"
        page.fill("#temperature", "7")
        page.locator("#settings summary").click()
        page.fill("#text", "x")
        page.press("#text", "Enter")
        assert page.locator("#settings").get_attribute("open") is not None, "what is wrong is shown"
        assert page.locator(".turn").count() == 2


@pytest.mark.slow
def test_an_answer_is_stopped(browser: Any) -> None:
    engine = FakeEngine()
    engine.pause = 0.2
    with opened(browser, engine) as page:
        page.wait_for_selector(".state.good")
        page.fill("#text", "a long answer, so it seems")
        page.press("#text", "Enter")
        page.wait_for_selector(".turn.assistant .prose:has-text('a l')")
        page.get_by_role("button", name="Stop").click()
        page.wait_for_selector("#send:enabled")
        assert "stopped" in page.locator(".turn.assistant .foot").text_content()
        assert page.evaluate("document.activeElement.id") == "text"
        while engine.open:
            time.sleep(0.02)
    assert engine.aborted == 1


@pytest.mark.slow
def test_the_picture_and_the_plan(browser: Any) -> None:
    with opened(browser, FakeEngine()) as page:
        page.wait_for_selector("#legend li")
        assert "idle, in the prefix cache: 13" in page.locator("#grid").get_attribute("aria-label")
        assert "hot buffers: 34" in page.locator("#frames").get_attribute("aria-label")
        painted = (
            "new Set(document.getElementById('grid').getContext('2d').getImageData(0, 0, 400, 100).data)"
        )
        assert page.evaluate(f"{painted}.size") > 4
        page.locator("#plan summary").click()
        page.wait_for_selector("#notes li")
        assert "torch_ref" in page.locator("#routes").text_content()
        assert "was not measured" in page.locator("#quality-note").text_content()
        assert not page.locator("#quality").is_visible()


@pytest.mark.slow
def test_what_was_certified(browser: Any) -> None:
    engine = FakeEngine()
    app = page_app(engine)
    assert engine.ready
    about = {**engine.ready.about, "certificate": CERTIFICATE}
    engine.ready = wire.Ready(64, 256, about)
    with listening(app) as url:
        page = browser.new_page()
        page.goto(url)
        page.wait_for_selector("#figures tr")
        assert page.locator("#quality-note").text_content() == CERTIFICATE["line"]
        text = page.locator("#figures").text_content()
        for piece in ("0.0040", "1.003 times", "98 %", "Recall at 8,192 tokens", "bf16 has 100 %"):
            assert piece in text
        page.close()


@pytest.mark.slow
def test_a_key_is_asked_for(browser: Any) -> None:
    with opened(browser, FakeEngine(), api_key="secret") as page:
        page.wait_for_selector(".state.bad")
        assert "API key" in page.locator("#cache-error").text_content()
        page.fill("#key", "secret")
        page.wait_for_selector(".state.good")
        say(page, "hello")
        assert page.locator(".turn.assistant .prose").text_content() == "hello"

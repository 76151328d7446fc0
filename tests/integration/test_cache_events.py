"""Events of a real engine tell its prefix tree, with decoding, preemption, eviction and a reset."""

from __future__ import annotations

import random

import pytest

from nibble import LLM
from nibble.cache.events import BlockRemoved, KVEvent, page_hashes, root_hash
from nibble.config import SamplingParams
from nibble.engine.kv_events import KVEventBatch, encode
from nibble.routing.router import Router
from vllm_events import FollowedTree


@pytest.mark.slow
def test_the_tree_of_an_engine_is_known() -> None:
    llm = LLM("demo", kv_format="nvfp4", kv_memory="432KiB", max_context=448, max_running=8, device="cpu")
    engine, rng = llm.engine, random.Random(5)
    tree, router, log = FollowedTree(), Router[str](), list[KVEvent]()
    size = engine.scheduler.manager.page_size
    router.add("it", engine.namespace, size)
    for sink in (
        lambda events: tree.take(encode(KVEventBatch(0.0, list(events)))),
        lambda events: router.update("it", events),
        log.extend,
    ):
        engine.observe_cache(sink)
    starts = [[rng.randrange(3, 250) for _ in range(rng.randint(20, 150))] for _ in range(3)]
    prompts = [
        rng.choice(starts) + [rng.randrange(3, 250) for _ in range(rng.randint(1, 40))] for _ in range(20)
    ]
    params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
    ended: list[str] = []
    for i, prompt in enumerate(prompts):
        engine.submit(prompt, params, lambda delta: ended.append(delta.finish_reason or ""), salt=str(i % 2))
    while engine.busy:
        engine.step()
        assert len(tree.pages) == router.num_pages("it") == engine.scheduler.metrics.cache.cached
    assert ended.count("length") == 20
    assert any(isinstance(event, BlockRemoved) for event in log), (
        "nothing was evicted: the cache is too large"
    )
    for name, (salt, tokens) in tree.pages.items():
        assert list(page_hashes(root_hash(f"{engine.namespace}/{salt}"), [*tokens, 0], size))[-1] == name
    # What the router expects is what the engine finds.
    for i in (18, 19):
        expected = router.facts(prompts[i], salt=str(i % 2))["it"].cached_tokens
        (request,) = engine.submit(prompts[i], params, lambda _: None, salt=str(i % 2))
        while engine.busy:
            engine.step()
        assert request.num_prefix_hit_tokens == expected > 0
    engine.reset_prefix_cache()
    assert not tree.pages and router.num_pages("it") == 0
    llm.close()

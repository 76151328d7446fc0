"""AsyncLLM: tasks whose requests are batched, pieces and whole answers, cancellation, and a close that nobody survives."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from nibble import LLM, AsyncLLM, NibbleError, PromptTooLong, RequestError, SamplingParams

OPTIONS: dict[str, Any] = {"kv_memory": "2MiB", "max_running": 8, "token_budget": 64}
PROMPTS = ["def f(x):", "the quick brown fox jumps over the lazy dog", "a", "0123456789" * 12]
LONG: dict[str, Any] = {"max_tokens": 900, "ignore_eos": True}


def served(folder: Path, test: Callable[[AsyncLLM], Awaitable[None]]) -> None:
    """Runs a test; no request and no thread may be left over."""

    async def run() -> None:
        async with AsyncLLM(str(folder), **OPTIONS) as llm:
            async with asyncio.timeout(60):
                await test(llm)
                while llm._llm.engine.busy:
                    await asyncio.sleep(0.01)
            llm._llm.engine.scheduler.check_integrity()
            assert llm._llm.engine.scheduler.manager.stats.in_use == 0

    asyncio.run(run())
    assert "nibble-engine" not in {thread.name for thread in threading.enumerate()}


@pytest.fixture(scope="module")
def llm(tiny: Path) -> Iterator[LLM]:
    with LLM(str(tiny), **OPTIONS) as llm:
        yield llm


def test_answers_are_those_of_llm_and_are_batched(tiny: Path, llm: LLM) -> None:
    params = [SamplingParams(max_tokens=9, temperature=0.8, seed=i, n=1 + i % 2) for i in range(len(PROMPTS))]
    expected = llm.generate(PROMPTS, params)
    sizes = []

    async def test(served: AsyncLLM) -> None:
        forward, submit, submitted = served._llm.engine.runner.forward, served._llm.engine.submit, []

        def counting_submit(*args: Any, **options: Any) -> Any:
            submitted.append(1)
            return submit(*args, **options)

        def counting(batch: Any, **options: Any) -> Any:
            end = time.monotonic() + 60
            # They come through threads, which may take longer than all steps of the first.
            while (
                len(submitted) + served._stepper._commands.qsize() < len(PROMPTS) and time.monotonic() < end
            ):
                time.sleep(0.001)
            sizes.append(len(batch.scheduled))
            return forward(batch, **options)

        served._llm.engine.submit = counting_submit  # type: ignore[method-assign]
        served._llm.engine.runner.forward = counting  # type: ignore[method-assign]
        outputs = await asyncio.gather(*map(served.generate, PROMPTS, params))
        assert [output.completions for output in outputs] == [output.completions for output in expected]
        assert [output.prompt for output in outputs] == PROMPTS

    served(tiny, test)
    assert max(sizes) >= len(PROMPTS)


def test_pieces_as_they_come(tiny: Path, llm: LLM) -> None:
    expected = llm.generate(PROMPTS[0], max_tokens=12)

    async def test(served: AsyncLLM) -> None:
        pieces = [piece async for piece in served.generate({"prompt": PROMPTS[0]}, max_tokens=12)]
        assert len(pieces) > 3 and pieces[-1].finish_reason == "length"
        assert "".join(piece.text for piece in pieces) == expected.text
        assert (
            tuple(token for piece in pieces for token in piece.token_ids) == expected.completions[0].token_ids
        )

    served(tiny, test)


def test_a_cancelled_task_aborts_its_request(tiny: Path) -> None:
    async def test(served: AsyncLLM) -> None:
        whole = asyncio.create_task(served.generate(PROMPTS[0], **LONG).output())
        begun = served.generate(PROMPTS[1], **LONG)
        await anext(begun)
        waiting = asyncio.create_task(_drain(begun))
        early = asyncio.create_task(served.generate(PROMPTS[2], **LONG).output())
        await asyncio.sleep(0)  # it has hardly begun
        for task in (whole, waiting, early):
            task.cancel()
        results = await asyncio.gather(whole, waiting, early, return_exceptions=True)
        assert [type(result) for result in results] == [asyncio.CancelledError] * 3
        # served() waits until nothing runs, which 900 tokens would not end in time.
        assert (await served.generate(PROMPTS[2], max_tokens=2)).completions[0].finish_reason == "length"

    served(tiny, test)


async def _drain(stream: Any) -> None:
    async for _ in stream:
        pass


def test_leaving_the_loop_aborts_the_request(tiny: Path) -> None:
    async def test(served: AsyncLLM) -> None:
        async for _ in served.generate(PROMPTS[0], **LONG):
            break
        gc.collect()
        stream = served.generate(PROMPTS[1], **LONG)
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    served(tiny, test)


def test_refusals(tiny: Path) -> None:
    async def test(served: AsyncLLM) -> None:
        with pytest.raises(RequestError, match="a prompt is a text"):
            served.generate(b"ab")
        with pytest.raises(RequestError, match="one prompt, not a list"):
            served.generate(["a", "b"])  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="did you mean 'temperature'"):
            served.generate("a", temprature=1)  # type: ignore[call-arg]
        with pytest.raises(PromptTooLong):
            await served.generate([1] * 2000)
        with pytest.raises(RequestError, match="out of range"):
            await anext(served.generate([1, 9999]))
        with pytest.raises(RequestError, match="grammar"):
            await served.generate("a", grammar="regex:(")
        with pytest.raises(RequestError, match="chat template"):
            await served.chat([{"role": "user", "content": "hello"}])
        stream = served.generate("ab", max_tokens=2)
        await anext(stream)
        with pytest.raises(RequestError, match="await it, or iterate"):
            await stream
        assert [piece.finish_reason async for piece in stream] == ["length"]

    served(tiny, test)


def test_a_conversation_and_a_grammar() -> None:
    async def run() -> None:
        async with AsyncLLM("demo", kv_format="nvfp4", kv_memory="16MiB") as llm:
            output = await llm.chat([{"role": "user", "content": "hello"}], max_tokens=5)
            assert 1 <= len(output.completions[0].token_ids) <= 5
            answer = await llm.generate("x = ", grammar='choice:["yes"]', max_tokens=9)
            assert answer.text == "yes"
            assert llm.get_default_sampling_params().temperature == 0 and "nvfp4" in repr(llm) + str(llm.plan)

    asyncio.run(run())


def test_close_ends_what_waits_and_gives_memory_back(tiny: Path) -> None:
    async def run() -> None:
        llm = AsyncLLM(str(tiny), **OPTIONS)
        pool = weakref.ref(llm._llm.engine.runner.pool)
        stream = llm.generate(PROMPTS[0], **LONG)
        await anext(stream)
        waiting = asyncio.create_task(_drain(stream))
        await asyncio.sleep(0)
        await llm.close()
        await llm.close()
        with pytest.raises(NibbleError, match="closed before this answer ended"):
            await waiting
        with pytest.raises(NibbleError, match="closed"):
            llm.generate("a")
        assert pool() is None

    asyncio.run(run())


def test_one_that_is_dropped_ends_its_thread(tiny: Path) -> None:
    llm = AsyncLLM(str(tiny), **OPTIONS)
    asyncio.run(_once(llm))
    asyncio.run(_once(llm))  # another event loop
    del llm
    gc.collect()
    assert "nibble-engine" not in {thread.name for thread in threading.enumerate()}


async def _once(llm: AsyncLLM) -> None:
    assert (await llm.generate("ab", max_tokens=2)).text is not None


def test_a_failing_engine_is_told_to_all_that_wait(tiny: Path) -> None:
    async def run() -> None:
        async with AsyncLLM(str(tiny), **OPTIONS) as llm:

            def broken(*_: object) -> None:
                raise ZeroDivisionError("no luck")

            stream = llm.generate(PROMPTS[0], **LONG)
            await anext(stream)
            llm._llm.engine.scheduler.schedule = broken  # type: ignore[method-assign,assignment]
            for _ in range(2):
                with pytest.raises(NibbleError, match="the engine failed: ZeroDivisionError: no luck"):
                    while True:
                        await anext(stream)
                stream = llm.generate(PROMPTS[1], **LONG)

    asyncio.run(run())

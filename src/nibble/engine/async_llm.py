"""AsyncLLM: the Python interface for asyncio. One thread steps the engine, any number of tasks wait for answers.

Commands (submit, abort) are functions that the thread runs between two steps, so no task waits for a lock. What a step
adds goes to the event loop in one call.
"""

from __future__ import annotations

import asyncio
import os
import queue
import threading
from asyncio import AbstractEventLoop
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from types import TracebackType
from typing import Any, Self, Unpack
from weakref import finalize, ref

from nibble.attention.planner.plan import Plan
from nibble.config import SamplingParams
from nibble.engine.answers import Collector, Encoded, encode, sampling_params_of
from nibble.engine.engine import Engine
from nibble.engine.llm import LLM
from nibble.engine.prompts import Message, Prompt, parse_conversations, parse_prompt
from nibble.engine.request import Delta, Output, Request
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import NibbleError, RequestError
from nibble.options import ConfigOptions, SamplingOptions

CLOSED = "this AsyncLLM is closed"


class AsyncLLM:
    """A model that is being served in this process, to the tasks of an event loop.

        async with AsyncLLM("demo", kv_format="nvfp4") as llm:
            async for piece in llm.generate("def fibonacci(n):", max_tokens=64):
                print(piece.text, end="")
            output = await llm.generate("import os", max_tokens=64)

    Requests of all tasks are batched. A request ends with the task that waits for it, and with its iterator. The model
    loads in the constructor, which takes a while: make it before the loop has other work.

    Args:
        model: local folder, hub name, or `demo`.
        calibrate: texts to measure KV scales with.
        options: fields of Config.

    Raises:
        ConfigError: the options cannot be had (Unsupported), or KV scales are missing (ScaleError).
        WeightError: there is no such model, or its weights cannot be loaded.
        CapacityError: the memory does not suffice.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        calibrate: str | Sequence[str] | None = None,
        **options: Unpack[ConfigOptions],
    ) -> None:
        self._llm = LLM(model, calibrate=calibrate, **options)
        self._stepper = Stepper(self._llm.engine)
        # Also at the end of the process, before Python takes the modules apart under the thread.
        self._finalizer = finalize(self, self._stepper.stop)

    def __repr__(self) -> str:
        return f"<Async{repr(self._llm)[1:]}"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give all memory back, on the device too; open requests end with an error. Closing twice does no harm."""
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._finalizer()
        self._llm.close()
        # The tasks that wait hear of it.
        self._stepper.deliver()

    @property
    def plan(self) -> Plan:
        """Return the routes, page size and packing; printed, it is what `nibble plan` says."""
        return self._llm.plan

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer; raise RequestError where the checkpoint has none."""
        return self._llm.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """Return how requests are sampled that say nothing: by the model's generation_config.json."""
        return self._llm.get_default_sampling_params()

    def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Return the answer to a prompt: `async for` gives its pieces as they come, `await` all of it.

        Args:
            prompt: text or token ids, bare or as vLLM's `{"prompt": ...}`, `{"prompt_token_ids": ...}`.
            sampling_params: of the request.
            priority: a lower one is served first.
            options: fields of SamplingParams, in place of `sampling_params`; the model's defaults for the others.

        Raises:
            RequestError: the prompt or the options are malformed; what depends on the tokens is raised when waited for.
        """
        parsed, engine = parse_prompt(prompt), self._llm.engine
        return self._stream(lambda: encode(engine, parsed), sampling_params, priority, options)

    def chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: int = 0,
        **options: Unpack[SamplingOptions],
    ) -> AsyncStream:
        """Return the answer to a conversation, by the model's chat template; see generate().

        Args:
            messages: with `role` and `content`.
            sampling_params: of the request.
            tools: functions that the model may call, in OpenAI's form; calls are in the answer's text.
            chat_template_kwargs: for the template.
            priority: a lower one is served first.
            options: fields of SamplingParams, in place of `sampling_params`; the model's defaults for the others.

        Raises:
            RequestError: the messages or the options are malformed.
        """
        conversations, single = parse_conversations(messages)
        if not single:
            raise RequestError(
                "this takes one conversation; ask for several in a task each, as by asyncio.gather"
            )
        chat, template = self._llm.tokenizer.chat, chat_template_kwargs or {}
        return self._stream(
            lambda: (chat(conversations[0], tools, **template), None), sampling_params, priority, options
        )

    def _stream(
        self,
        encode: Callable[[], Encoded],
        sampling_params: SamplingParams | None,
        priority: int,
        options: Mapping[str, Any],
    ) -> AsyncStream:
        (params,) = sampling_params_of(self._llm.engine, sampling_params, options, 1)
        return AsyncStream(self, self._stepper, encode, params, priority)


class AsyncStream(AsyncIterator[Delta]):
    """The answers to one prompt: iterate over their pieces, or await them all.

    Raises:
        RequestError: when waited for: the request cannot be served.
        NibbleError: when waited for: the engine fails, or is closed.
    """

    def __init__(
        self,
        owner: AsyncLLM,
        stepper: Stepper,
        encode: Callable[[], Encoded],
        params: SamplingParams,
        priority: int,
    ) -> None:
        self._owner = owner  # lives as long as somebody waits
        self._stepper, self._encode, self._params, self._priority = stepper, encode, params, priority
        self._pieces: deque[Delta] = deque()
        self._arrived = asyncio.Event()
        self._requests: tuple[Request, ...] = ()
        self._num_open = params.n
        self._started = False

    def __await__(self) -> Generator[Any, None, Output]:
        return self.output().__await__()

    async def output(self) -> Output:
        """Return all answers, detokenized once, at their end. It is what `await` gives; create_task() wants this."""
        if self._started:
            raise RequestError("pieces of this answer were taken already: await it, or iterate over it")
        text = await self._start(final_only=True)
        collector = Collector(text, self._params)
        collector.requests = self._requests
        async for piece in self:
            collector.add(piece)
        if collector.num_open:
            raise NibbleError("this request was aborted")
        return collector.output()

    async def __anext__(self) -> Delta:
        if not self._started:
            await self._start(final_only=False)
        try:
            while self._num_open and not self._pieces:
                self._arrived.clear()
                await self._arrived.wait()
        except BaseException:  # the task was cancelled
            self.close()
            raise
        if not self._pieces:
            raise StopAsyncIteration
        piece = self._pieces.popleft()
        self._num_open -= piece.finish_reason is not None
        if piece.error:
            self.close()
            raise NibbleError(piece.error)
        return piece

    async def _start(self, *, final_only: bool) -> str | None:
        """Encode and submit the prompt, and return its text, where it was given. Neither waits in the event loop."""
        self._started = True
        loop = asyncio.get_running_loop()
        engine, take = self._stepper.engine, self._stepper.sender(loop, ref(self))
        try:
            ids, text = await asyncio.to_thread(self._encode)
            # A large grammar takes seconds, for which no answer is to wait.
            matcher = await asyncio.to_thread(engine.matcher, self._params) if self._params.grammar else None

            def submit() -> tuple[Request, ...]:
                requests = engine.submit(
                    ids, self._params, take, priority=self._priority, final_only=final_only, matcher=matcher
                )
                self._requests = requests
                return requests

            await asyncio.wrap_future(self._stepper.call(submit))
        except BaseException:
            self.close()
            raise
        return text

    def take(self, piece: Delta) -> None:
        """Take a piece, in the event loop."""
        if self._num_open:
            self._pieces.append(piece)
            self._arrived.set()

    def close(self) -> None:
        """Abort what is unfinished; its pages are free before the next step."""
        if self._num_open:
            self._num_open = 0
            self._pieces.clear()
            self._arrived.set()
            # After a submit that is still to be run, should there be one.
            self._stepper.post(self._abort)

    async def aclose(self) -> None:
        """Do as close(): `contextlib.aclosing` calls it."""
        self.close()

    def _abort(self) -> None:
        self._stepper.engine.abort(self._requests)

    def __del__(self) -> None:
        # An object whose __init__ failed is deleted too. The command must not keep what is being deleted.
        if getattr(self, "_num_open", 0) and self._requests:
            self._stepper.post(partial(self._stepper.engine.abort, self._requests))


class Stepper:
    """The thread that steps an engine, while it has requests.

    Args:
        engine: whose submit() and abort() are called by this thread alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._outbox: list[tuple[AbstractEventLoop, ref[AsyncStream], Delta]] = []
        self._error: NibbleError | None = None
        """Why there is no thread any more."""
        self._thread = threading.Thread(target=self._run, name="nibble-engine", daemon=True)
        self._thread.start()

    def post(self, command: Callable[[], object]) -> None:
        """Let the thread run a function before its next step. A thread that has ended left nothing to abort."""
        if self._error is None:
            self._commands.put(command)

    def call(self, function: Callable[[], object]) -> Future[object]:
        """Let the thread run a function before its next step, and return its result in the future."""
        future: Future[object] = Future()

        def run() -> None:
            # A task that was cancelled meanwhile has cancelled this too.
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._error:
                    raise self._error
                future.set_result(function())
            except BaseException as error:  # whoever waits for it gets it
                future.set_exception(error)

        self._commands.put(run)
        # Put first and looked at then: a thread that ends meanwhile has emptied the queue, or this does.
        if self._error:
            self._run_rest()
        return future

    def sender(self, loop: AbstractEventLoop, stream: ref[AsyncStream]) -> Callable[[Delta], None]:
        """Return what takes the pieces of a stream from the engine."""
        return lambda piece: self._outbox.append((loop, stream, piece))

    def deliver(self) -> None:
        """Hand the pieces of a step to the event loops that wait for them."""
        outbox, self._outbox = self._outbox, []
        by_loop: dict[AbstractEventLoop, list[tuple[ref[AsyncStream], Delta]]] = {}
        for loop, stream, piece in outbox:
            by_loop.setdefault(loop, []).append((stream, piece))
        for loop, pieces in by_loop.items():
            # A loop that is closed has no tasks that wait.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(_take, pieces)

    def stop(self) -> None:
        """End the thread after the commands that it has."""
        self._commands.put(None)
        # The last reference to an AsyncLLM may go in this very thread.
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        error = NibbleError(CLOSED)
        try:
            while self._execute():
                if self.engine.busy:
                    self.engine.step()
                self.deliver()
        except Exception as failure:  # nobody else would say so to the tasks that wait
            error = NibbleError(f"the engine failed: {type(failure).__name__}: {failure}")
            self.engine.fail(str(error))
            self.deliver()
        self._error = error
        self._run_rest()

    def _execute(self) -> bool:
        """Run the commands that have come; an idle engine waits for one. Return whether to go on."""
        wait = not self.engine.busy
        while True:
            try:
                command = self._commands.get(block=wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()
            wait = False

    def _run_rest(self) -> None:
        """Run what is left in the queue, so that nobody waits for it: calls fail, and nothing is left to abort."""
        with suppress(queue.Empty):
            while True:
                if command := self._commands.get_nowait():
                    command()


def _take(pieces: Sequence[tuple[ref[AsyncStream], Delta]]) -> None:
    """Hand out pieces, in the event loop."""
    for stream, piece in pieces:
        if taker := stream():
            taker.take(piece)

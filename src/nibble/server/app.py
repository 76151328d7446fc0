"""The routes: from a request in OpenAI's shape to the engine, and back as JSON or as server-sent events.

Owns Api and make_app(). Every request is open in the engine for no longer than its client waits for it. Must not know
how the engine runs (client.py).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import nibble
from nibble.config import SamplingParams
from nibble.engine.outputs import Delta
from nibble.errors import PromptTooLong, RequestError
from nibble.server import chat_format, openapi, pages
from nibble.server.cache_view import cache_view
from nibble.server.engine_client import Ask, EngineClient, EngineDiedError, Piece, State
from nibble.server.errors import error_of, install_handlers
from nibble.server.fidelity_view import warning
from nibble.server.guards import BodyLimit, JsonRoute, KeyGuard
from nibble.server.http_log import RequestLogMiddleware, Sink, access_log, http_log_of
from nibble.server.metrics import Meters, Timer
from nibble.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Message,
    Sampling,
    StreamOptions,
    TokenizeRequest,
)
from nibble.server.responses import ChatWriter, TextWriter, Writer
from nibble.server.settings import PRIORITY, Settings
from nibble.server.streaming import Events, Gate, event, merged, unless_gone
from nibble.server.structured import GrammarCheck
from nibble.server.tools import Tool, arguments_as_text, message_for_template, tools_for_template

LONG_TEXT = 20_000
"""Characters from which a text is tokenised in a thread."""
LARGEST_ANSWER = 1 << 20
SHOWN = {"running": "running", "waiting": "waiting", "held_pages": "cache_held"}
"""What /health tells of the engine's counts."""


class Tokens(chat_format.Tokens, Protocol):
    """What the server asks of a tokenizer."""

    def encode(self, text: str) -> list[int]: ...
    def for_grammars(self, vocabulary: int, eos_ids: list[int]) -> Any: ...
    @property
    def longest(self) -> int: ...
    def chat(self, messages: Any, tools: Any = None, **kwargs: Any) -> list[int]: ...


class Api:
    """The routes' functions."""

    def __init__(self, client: EngineClient, tokens: Tokens | None, name: str, settings: Settings) -> None:
        self.client, self._tokens, self.name, self.settings = client, tokens, name, settings
        self.gate = Gate(settings.max_queue, settings.wait_when_full)
        self.meters = Meters(client, name)
        self.chat_format = chat_format.ChatFormat(tokens, settings.tool_format, settings.reasoning_parser)
        self.grammars = GrammarCheck(tokens)
        self._since = int(time.time())

    @property
    def tokens(self) -> Tokens:
        if self._tokens is None:
            raise RequestError("this model has no tokenizer: send token ids to /v1/completions")
        return self._tokens

    # What is served

    async def models(self) -> dict[str, Any]:
        ready = self.client.ready
        entry = {"id": self.name, "object": "model", "created": self._since, "owned_by": "nibble"}
        sizes = {"max_model_len": ready and ready.max_context, "vocab_size": ready and ready.vocab_size}
        return {"object": "list", "data": [entry | sizes]}

    async def model(self, name: str) -> dict[str, Any]:
        self._check_model(name)
        listed: dict[str, Any] = (await self.models())["data"][0]
        return listed

    async def plan(self) -> dict[str, Any]:
        if self.client.ready is None:
            raise EngineDiedError("the engine has not started yet")
        return {"model": self.name, **self.client.ready.about}

    async def cache(self) -> dict[str, Any]:
        if self.client.ready is None:
            raise EngineDiedError("the engine has not started yet")
        return cache_view(self.client.stats, self.client.ready.about)

    async def health(self) -> JSONResponse:
        state, stats = self.client.state, self.client.stats
        counts = {name: int(stats.get(key, 0)) for name, key in SHOWN.items()}
        about = {"status": state.value, "version": nibble.__version__, "restarts": self.client.restarts}
        if told := warning(stats):
            about["warning"] = told
        return JSONResponse({**about, "open": self.gate.open, **counts}, 200 if state is State.READY else 503)

    async def live(self) -> dict[str, str]:
        return {"status": "live"}

    async def metrics(self) -> Response:
        text, kind = self.meters.render()
        return Response(text, media_type=kind)

    async def tokenize(self, asked: TokenizeRequest) -> dict[str, Any]:
        if asked.prompt is not None:
            ids = await self._encoded(asked.prompt)
        else:
            ids = await self._conversation(asked.messages or ())
        return {
            "tokens": ids,
            "count": len(ids),
            "max_model_len": self.client.ready and self.client.ready.max_context,
        }

    async def detokenize(self, asked: DetokenizeRequest) -> dict[str, str]:
        size = self.client.ready.vocab_size if self.client.ready else 0
        beyond = [token for token in asked.tokens if not 0 <= token < size]
        if beyond:
            raise RequestError(f"token {beyond[0]} is out of range: the vocabulary has {size} tokens")
        return {"prompt": await asyncio.to_thread(self.tokens.decode, asked.tokens)}

    # Answers

    async def completions(self, request: Request, asked: CompletionRequest) -> Response:
        self._opened(request, asked, "text_completion")
        prompts = asked.prompts()
        ids = [await self._encoded(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        self._check_room(max(map(len, ids)))
        params = asked.params(asked.max_tokens or self._room(max(map(len, ids))), asked.logprobs)
        texts = [p if isinstance(p, str) else self.tokens.decode(p) for p in prompts] if asked.echo else []
        echoes = [text for text in texts for _ in range(params.n)]
        lens = [len(prompt) for prompt in ids]
        writer = TextWriter(self.name, self._word, lens, echoes, asked.logprobs is not None, not asked.stream)
        return await self._answer(
            request, asked, writer, [self._ask(asked, prompt, params) for prompt in ids]
        )

    async def chat(self, request: Request, asked: ChatRequest) -> Response:
        self._opened(request, asked, "chat")
        ids = await self._conversation(
            asked.messages, asked.callable_tools(), **asked.chat_template_kwargs or {}
        )
        form = self.chat_format.answer_format(asked, ids)
        wanted = asked.max_completion_tokens or asked.max_tokens or self._room(len(ids))
        params = form.params(asked.params(wanted, asked.wanted_logprobs()))
        reader = form.parsers(eager=asked.stream)
        writer = ChatWriter(self.name, self._word, [len(ids)], asked.logprobs, reader, not asked.stream)
        return await self._answer(request, asked, writer, [self._ask(asked, ids, params)])

    async def _conversation(
        self, messages: Sequence[Message], tools: Sequence[Tool] = (), **kwargs: Any
    ) -> list[int]:
        """Tokens of a conversation, by its template. kwargs: for the template."""
        as_text = arguments_as_text(self.tokens.chat_template)
        said = [message_for_template(message.plain(), as_text=as_text) for message in messages]
        offered = tools_for_template(tools)
        size = sum(len(message["content"]) for message in said) + len(json.dumps(offered or []))
        self._check_room(size // self.tokens.longest)
        if size > LONG_TEXT:
            return await asyncio.to_thread(self.tokens.chat, said, offered, **kwargs)
        return self.tokens.chat(said, offered, **kwargs)

    def _word(self, ids: Sequence[int]) -> str:
        """A token as log-probabilities name it: special ones too, for the end may well be among the likeliest."""
        return self._tokens.decode(ids, None) if self._tokens else ""

    def _ask(self, asked: Sampling, prompt: list[int], params: SamplingParams) -> Ask:
        if asked.priority and self.settings.scheduling != PRIORITY:
            raise RequestError(
                "priorities are not honoured here; start the server with --scheduling priority"
            )
        return Ask(prompt, params, asked.cache_salt, asked.priority)

    def _opened(self, request: Request, asked: Sampling, operation: str) -> None:
        """Note what the request is about; raises RequestError where another model is meant."""
        self._check_model(asked.model)
        http_log = http_log_of(request.scope)
        http_log.operation, http_log.model = operation, self.name
        http_log.fields = partial(asked.model_dump, exclude_unset=True)

    def _check_model(self, name: str) -> None:
        if name != self.name:
            said = f"the model {name!r} is not served here; {self.name!r} is"
            raise RequestError(said, 404, "model_not_found")

    def _room(self, prompt: int) -> int:
        """Tokens of answer that the context has room for."""
        ready = self.client.ready
        return max(1, min(LARGEST_ANSWER, ready.max_context - prompt if ready else 1))

    def _check_room(self, tokens: int) -> None:
        """Refuses what cannot fit, however it will be made into tokens, before that costs anything."""
        ready = self.client.ready
        if ready and tokens > ready.max_context:
            raise PromptTooLong(
                f"the prompt is too long: it has {tokens} tokens at least, and this model's maximum context length is "
                f"{ready.max_context} tokens"
            )

    async def _encoded(self, text: str) -> list[int]:
        self._check_room(len(text) // self.tokens.longest)
        if len(text) > LONG_TEXT:
            return await asyncio.to_thread(self.tokens.encode, text)
        return self.tokens.encode(text)

    async def _answer(
        self, request: Request, asked: Sampling, writer: Writer, asks: Sequence[Ask]
    ) -> Response:
        times = [limit for limit in (asked.timeout, self.settings.timeout) if limit is not None]
        http_log = http_log_of(request.scope)
        http_log.timers = timers = [self.meters.request(len(ask.prompt), ask.params.n) for ask in asks]
        writer.id = http_log.response_id = f"{writer.prefix}-{http_log.id}"
        choices = self._choices(writer, asks, timers, min(times, default=None))
        work = self._stream(writer, choices, asked) if asked.stream else self._collected(writer, choices)
        return await unless_gone(request, work)

    async def _stream(
        self, writer: Writer, choices: AsyncGenerator[list[dict[str, Any]]], asked: Sampling
    ) -> Response:
        """Waits for the first piece: what cannot be served is told by a status, and not in a stream."""
        try:
            first: list[dict[str, Any]] = await anext(choices, [])
        except BaseException:
            await choices.aclose()
            raise
        told = asked.stream_options or StreamOptions()
        return StreamingResponse(self._events(writer, first, choices, told), media_type="text/event-stream")

    async def _choices(
        self, writer: Writer, asks: Sequence[Ask], timers: Sequence[Timer], timeout: float | None
    ) -> AsyncGenerator[list[dict[str, Any]]]:
        """Choices of chunks, as they come; usage is the writer's. timeout: in seconds, all waiting included."""
        caches: dict[int, int] = {}
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        grammar = asks[0].params.grammar
        if grammar is not None and self.client.ready:
            async with asyncio.timeout_at(deadline):
                await self.grammars.check(grammar, self.client.ready.vocab_size)
        async with self.gate.passed(len(asks), deadline):
            sources = [timer.over(self.client.generate(ask)) for timer, ask in zip(timers, asks, strict=True)]
            async with aclosing(merged(sources, deadline)) as found:
                async for which, pieces in found:
                    caches[which] = pieces[-1].cached
                    writer.cached = sum(caches.values())
                    first = which * asks[which].params.n
                    choices = [writer.take(first + piece.delta.index, _sound(piece)) for piece in pieces]
                    if shown := [choice for choice in choices if choice is not None]:
                        yield shown

    async def _collected(self, writer: Writer, choices: AsyncGenerator[list[dict[str, Any]]]) -> Response:
        async with aclosing(choices):
            async for _ in choices:
                pass
        return JSONResponse(writer.body())

    async def _events(
        self,
        writer: Writer,
        first: list[dict[str, Any]],
        choices: AsyncGenerator[list[dict[str, Any]]],
        told: StreamOptions,
    ) -> AsyncGenerator[bytes]:
        so_far = writer.usage if told.continuous_usage_stats else None
        events = Events(
            writer.about() | ({"usage": None} if told.include_usage and not so_far else {}), so_far
        )
        async with aclosing(choices):
            try:
                yield events.of(first)
                async for several in choices:
                    yield events.of(several)
                if told.include_usage:
                    yield event(writer.last())
            except Exception as error:  # the status has been sent: the stream says it
                yield b"data: " + bytes(error_of(error).body) + b"\n\n"
            yield b"data: [DONE]\n\n"


def _sound(piece: Piece) -> Delta:
    """What a piece adds; raises RequestError where the engine could not go on with its answer."""
    if piece.delta.error:
        raise RequestError(piece.delta.error, piece.delta.status)
    return piece.delta


def make_app(
    client: EngineClient,
    tokens: Tokens | None,
    name: str,
    settings: Settings,
    lifespan: Callable[[FastAPI], Any] | None = None,
    sinks: Sequence[Sink] = (),
) -> FastAPI:
    """Return the application. sinks: called with the HttpLog of each request that ended, after the log is."""
    api = Api(client, tokens, name, settings)
    app = FastAPI(
        title="Nibble",
        version=nibble.__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        responses=openapi.EVERY_ROUTE,
    )
    app.state.api = api
    app.router.route_class = JsonRoute
    app.get("/v1/models", responses=openapi.WITH_STATE)(api.models)
    app.get("/v1/models/{name:path}", responses=openapi.errors(404))(api.model)
    app.get("/v1/plan", responses=openapi.WITH_STATE)(api.plan)
    app.get("/v1/cache", responses=openapi.WITH_STATE)(api.cache)
    pages.mount(app)
    app.get("/metrics", response_class=Response, response_model=None, responses=openapi.METRICS)(api.metrics)
    app.get("/health", responses=openapi.HEALTH)(api.health)
    app.get("/health/ready", responses=openapi.HEALTH)(api.health)
    app.get("/health/live", responses=openapi.HEALTH)(api.live)
    app.post("/tokenize", responses=openapi.WITH_BODY)(api.tokenize)
    app.post("/detokenize", responses=openapi.WITH_BODY)(api.detokenize)
    app.post("/v1/completions", response_model=None, responses=openapi.STREAMED)(api.completions)
    app.post("/v1/chat/completions", response_model=None, responses=openapi.STREAMED)(api.chat)
    app.openapi = partial(openapi.describe, app, name)  # type: ignore[method-assign]
    install_handlers(app)
    if settings.api_key:
        app.add_middleware(KeyGuard, key=settings.api_key)
    app.add_middleware(BodyLimit, limit=settings.body_bytes)
    own: list[Sink] = [api.meters.count_http, partial(access_log, texts=settings.log_requests)]
    app.add_middleware(RequestLogMiddleware, sinks=[*own, *sinks])
    return app

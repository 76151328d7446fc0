"""The routes: from a request in OpenAI's shape to the engine, and back as JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

import nibble
from nibble.config import SamplingParams
from nibble.engine.tokenizer import Tokenizer
from nibble.errors import PromptTooLong, RequestError
from nibble.server import chat_format, middleware, protocol, streaming
from nibble.server.engine_client import EngineClient, EngineDiedError, State
from nibble.server.metrics import Metrics, RequestTimer, cache_view, fidelity_warning
from nibble.server.responses import ChatWriter, Choice, TextWriter, Writer
from nibble.server.settings import PRIORITY, Settings
from nibble.server.tracing import RequestLogMiddleware, Sink, access_log, http_log_of
from nibble.server.worker import GenerationRequest, Ready

LONG_TEXT = 20_000
"""Characters from which a text is tokenised in a thread."""
MAX_ANSWER = 1 << 20
"""Tokens of an answer whose request names no bound."""
Choices = AsyncGenerator[list[Choice]]
"""Choices of chunks, those that came together in one list."""


class Api:
    """The routes' functions.

    Args:
        client: the engine.
        tokens: the tokenizer, if the model has one.
        name: what clients call the model.
        settings: of the server.
    """

    def __init__(self, client: EngineClient, tokens: Tokenizer | None, name: str, settings: Settings) -> None:
        self.client, self._tokens, self.name, self.settings = client, tokens, name, settings
        self.limiter = streaming.AdmissionLimiter(settings.max_queue, settings.wait_when_full)
        self.metrics_registry = Metrics(client, name)
        self.chat_format = chat_format.ChatFormat(tokens, settings.tool_format, settings.reasoning_parser)
        self.grammars = chat_format.GrammarCheck(tokens)
        self._created = int(time.time())

    @property
    def tokens(self) -> Tokenizer:
        """The tokenizer; raises RequestError without one."""
        if self._tokens is None:
            raise RequestError("this model has no tokenizer: send token ids to /v1/completions")
        return self._tokens

    async def models(self) -> dict[str, Any]:
        """Return the list of models, which has one entry."""
        ready = self.client.ready
        entry = {"id": self.name, "object": "model", "created": self._created, "owned_by": "nibble"}
        sizes = {"max_model_len": ready and ready.max_context, "vocab_size": ready and ready.vocab_size}
        return {"object": "list", "data": [entry | sizes]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return the model's entry in the list."""
        self._check_model(name)
        entry: dict[str, Any] = (await self.models())["data"][0]
        return entry

    async def plan(self) -> dict[str, Any]:
        """Return the formats, backends and memory that the engine runs with."""
        return {"model": self.name, **self._ready().about}

    async def cache(self) -> dict[str, Any]:
        """Return how the KV cache is filled."""
        return cache_view(self.client.stats, self._ready().about)

    async def health(self) -> JSONResponse:
        """Return whether the engine serves, by the status too, and how busy it is."""
        state, stats = self.client.state, self.client.stats
        body = {"status": state.value, "version": nibble.__version__, "restarts": self.client.restarts}
        if warning := fidelity_warning(stats):
            body["warning"] = warning
        body["open"] = self.limiter.num_open
        for name, key in (("running", "running"), ("waiting", "waiting"), ("held_pages", "cache_in_use")):
            body[name] = int(stats.get(key, 0))
        return JSONResponse(body, 200 if state is State.READY else 503)

    async def live(self) -> dict[str, str]:
        """Return that the server answers; the engine may not."""
        return {"status": "live"}

    async def metrics(self) -> Response:
        """Return the metrics as Prometheus reads them."""
        text, media_type = self.metrics_registry.render()
        return Response(text, media_type=media_type)

    async def tokenize(self, body: protocol.TokenizeRequest) -> dict[str, Any]:
        """Return the tokens of a text or of a conversation."""
        if body.prompt is not None:
            ids = await self._encode(body.prompt)
        else:
            ids = await self._encode_chat(body.messages or ())
        ready = self.client.ready
        return {"tokens": ids, "count": len(ids), "max_model_len": ready and ready.max_context}

    async def detokenize(self, body: protocol.DetokenizeRequest) -> dict[str, str]:
        """Return the text of tokens."""
        size = self.client.ready.vocab_size if self.client.ready else 0
        wrong = next((token for token in body.tokens if not 0 <= token < size), None)
        if wrong is not None:
            raise RequestError(f"token {wrong} is out of range: the vocabulary has {size} tokens")
        return {"prompt": await asyncio.to_thread(self.tokens.decode, body.tokens)}

    async def completions(self, request: Request, body: protocol.CompletionRequest) -> Response:
        """Continue texts."""
        self._start(request, body, "text_completion")
        prompts = body.prompts()
        ids = [await self._encode(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
        longest = max(map(len, ids))
        self._check_length(longest)
        params = body.params(body.max_tokens or self._max_answer(longest), body.logprobs)
        texts = [p if isinstance(p, str) else self.tokens.decode(p) for p in prompts] if body.echo else []
        echoes = [text for text in texts for _ in range(params.n)]
        logprobs, collect = body.logprobs is not None, not body.stream
        writer = TextWriter(self.name, self._token_text, sum(map(len, ids)), logprobs, collect, echoes)
        return await self._answer(request, body, writer, ids, params)

    async def chat(self, request: Request, body: protocol.ChatRequest) -> Response:
        """Answer a conversation."""
        self._start(request, body, "chat")
        ids = await self._encode_chat(body.messages, body.callable_tools(), **body.chat_template_kwargs or {})
        answer_format = self.chat_format.answer_format(body, ids)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._max_answer(len(ids))
        params = answer_format.params(body.params(max_tokens, body.num_logprobs()))
        # Arguments of calls come as they grow where somebody reads along.
        parser = answer_format.parsers(eager=body.stream)
        writer = ChatWriter(self.name, self._token_text, len(ids), body.logprobs, not body.stream, parser)
        return await self._answer(request, body, writer, [ids], params)

    def _ready(self) -> Ready:
        if self.client.ready is None:
            raise EngineDiedError("the engine has not started yet")
        return self.client.ready

    async def _encode(self, text: str) -> list[int]:
        return await self._tokenize(len(text), partial(self.tokens.encode, text))

    async def _encode_chat(
        self, messages: Sequence[protocol.Message], tools: Sequence[protocol.Tool] = (), **kwargs: Any
    ) -> list[int]:
        """Return a conversation's tokens; kwargs: for the chat template."""
        # Templates differ in whether they take a call's arguments as an object or as its text.
        as_text = chat_format.arguments_as_text(self.tokens.chat_template)
        turns = [chat_format.message_for_template(message.plain(), as_text=as_text) for message in messages]
        tool_list = chat_format.tools_for_template(tools)
        size = sum(len(turn["content"]) for turn in turns) + len(json.dumps(tool_list or []))
        return await self._tokenize(size, partial(self.tokens.chat, turns, tool_list, **kwargs))

    async def _tokenize(self, num_characters: int, encode: Callable[[], list[int]]) -> list[int]:
        # No token has more characters than the longest, so this is a lower bound.
        self._check_length(num_characters // self.tokens.longest)
        return await asyncio.to_thread(encode) if num_characters > LONG_TEXT else encode()

    def _token_text(self, ids: Sequence[int]) -> str:
        # Special tokens too: the end of an answer may be among the likeliest tokens.
        return self._tokens.decode(ids, None) if self._tokens else ""

    def _start(self, request: Request, body: protocol.Sampling, operation: str) -> None:
        """Note what the request is about; raises RequestError for another model, or a priority without effect."""
        self._check_model(body.model)
        http_log = http_log_of(request.scope)
        http_log.operation, http_log.model = operation, self.name
        http_log.fields = partial(body.model_dump, exclude_unset=True)
        if body.priority and self.settings.scheduling != PRIORITY:
            raise RequestError(
                "priorities are not honoured here; start the server with --scheduling priority"
            )

    def _check_model(self, name: str) -> None:
        if name != self.name:
            message = f"the model {name!r} is not served here; {self.name!r} is"
            raise RequestError(message, 404, "model_not_found")

    def _max_answer(self, prompt_tokens: int) -> int:
        """Return the tokens of answer that the context has room for."""
        ready = self.client.ready
        return max(1, min(MAX_ANSWER, ready.max_context - prompt_tokens if ready else 1))

    def _check_length(self, min_tokens: int) -> None:
        """Raise PromptTooLong for a prompt of at least so many tokens, before tokenising costs anything."""
        ready = self.client.ready
        if ready and min_tokens > ready.max_context:
            raise PromptTooLong(
                f"the prompt is too long: it has {min_tokens} tokens at least, and this model's maximum context "
                f"length is {ready.max_context} tokens"
            )

    async def _answer(
        self,
        request: Request,
        body: protocol.Sampling,
        writer: Writer,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
    ) -> Response:
        now = asyncio.get_running_loop().time()
        deadlines = [now + limit for limit in (body.timeout, self.settings.timeout) if limit is not None]
        requests = [GenerationRequest(prompt, params, body.cache_salt, body.priority) for prompt in prompts]
        http_log = http_log_of(request.scope)
        start = self.metrics_registry.start_request
        http_log.timers = timers = [start(len(prompt), params.n) for prompt in prompts]
        writer.id = http_log.response_id = f"{writer.prefix}-{http_log.id}"
        choices = self._choices(writer, requests, timers, min(deadlines, default=None))
        response = self._stream(writer, choices, body) if body.stream else self._collect(writer, choices)
        return await streaming.cancel_on_disconnect(request, response)

    async def _choices(
        self,
        writer: Writer,
        requests: Sequence[GenerationRequest],
        timers: Sequence[RequestTimer],
        deadline: float | None,
    ) -> Choices:
        """Yield choices as they come. deadline: by the loop's clock, for all that the requests wait too."""
        # All prompts of a request have the same parameters.
        params = requests[0].params
        if params.grammar is not None and self.client.ready:
            async with asyncio.timeout_at(deadline):
                await self.grammars.check(params.grammar, self.client.ready.vocab_size)
        cached: dict[int, int] = {}
        async with self.limiter.acquire(len(requests), deadline):
            sources = [
                timer.observe(self.client.generate(one)) for timer, one in zip(timers, requests, strict=True)
            ]
            async with aclosing(streaming.merge_streams(sources, deadline)) as stream:
                async for i, pieces in stream:
                    cached[i] = pieces[-1].cached
                    writer.cached = sum(cached.values())
                    choices = []
                    for delta in (piece.delta for piece in pieces):
                        # The engine could not go on with its answer.
                        if delta.error:
                            raise RequestError(delta.error, delta.status)
                        choices.append(writer.take(i * params.n + delta.index, delta))
                    if visible := [choice for choice in choices if choice is not None]:
                        yield visible

    async def _collect(self, writer: Writer, choices: Choices) -> Response:
        async with aclosing(choices):
            async for _ in choices:
                pass
        return JSONResponse(writer.body())

    async def _stream(self, writer: Writer, choices: Choices, body: protocol.Sampling) -> Response:
        # The first piece is awaited, so that a request that cannot be served gets a status and no stream.
        try:
            first: list[Choice] = await anext(choices, [])
        except BaseException:
            await choices.aclose()
            raise
        options = body.stream_options or protocol.StreamOptions()
        usage = writer.usage if options.continuous_usage_stats else None
        null_usage = {"usage": None} if options.include_usage and not usage else {}
        events = streaming.Events(writer.chunk_fields() | null_usage, usage)

        async def encoded() -> AsyncGenerator[bytes]:
            async with aclosing(choices):
                try:
                    yield events.encode(first)
                    async for more in choices:
                        yield events.encode(more)
                    if options.include_usage:
                        yield streaming.encode_event(writer.usage_chunk())
                except Exception as error:
                    # The status has been sent, so the stream has the error.
                    yield b"data: " + bytes(middleware.response_of(error).body) + b"\n\n"
                yield b"data: [DONE]\n\n"

        return StreamingResponse(encoded(), media_type="text/event-stream")


def _content(media_type: str, schema: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema or {}}}}


GET_ERRORS = middleware.describe_errors(503)
POST_ERRORS = middleware.describe_errors(400, 404, 408, 413, 429, 501, 503)
STREAM_RESPONSES: middleware.Responses = {200: _content("text/event-stream"), **POST_ERRORS}
METRICS_RESPONSES: middleware.Responses = {200: _content("text/plain", {"type": "string"}), **GET_ERRORS}
HEALTH_RESPONSES: middleware.Responses = {
    503: {"description": middleware.DESCRIPTIONS[503], **_content("application/json")}
}


def make_app(
    client: EngineClient,
    tokens: Tokenizer | None,
    name: str,
    settings: Settings,
    sinks: Sequence[Sink] = (),
) -> FastAPI:
    """Return the application.

    Args:
        client: the engine.
        tokens: the tokenizer, if the model has one.
        name: what clients call the model.
        settings: of the server.
        sinks: called with the log of each request that ended, after metrics and the access log.
    """
    api = Api(client, tokens, name, settings)
    errors = middleware.describe_errors(401, 500)
    app = FastAPI(title="Nibble", version=nibble.__version__, docs_url=None, redoc_url=None, responses=errors)
    app.state.api = api
    _add_routes(app, api)
    app.openapi = partial(openapi_document, app, name)  # type: ignore[method-assign]
    middleware.install_handlers(app)
    # The middleware that is added last is the outermost: a refused request is logged too.
    if settings.api_key:
        app.add_middleware(middleware.KeyGuard, key=settings.api_key)
    app.add_middleware(middleware.BodyLimit, limit=settings.body_bytes)
    log = partial(access_log, texts=settings.log_requests)
    app.add_middleware(RequestLogMiddleware, sinks=[api.metrics_registry.count_http, log, *sinks])
    return app


def _add_routes(app: FastAPI, api: Api) -> None:
    app.router.route_class = middleware.JsonRoute
    app.get("/v1/models", responses=GET_ERRORS)(api.models)
    app.get("/v1/models/{name:path}", responses=middleware.describe_errors(404))(api.model)
    app.get("/v1/plan", responses=GET_ERRORS)(api.plan)
    app.get("/v1/cache", responses=GET_ERRORS)(api.cache)
    middleware.mount_page(app)
    app.get("/metrics", response_class=Response, responses=METRICS_RESPONSES)(api.metrics)
    app.get("/health", responses=HEALTH_RESPONSES)(api.health)
    app.get("/health/ready", responses=HEALTH_RESPONSES)(api.health)
    app.get("/health/live", responses=HEALTH_RESPONSES)(api.live)
    app.post("/tokenize", responses=POST_ERRORS)(api.tokenize)
    app.post("/detokenize", responses=POST_ERRORS)(api.detokenize)
    app.post("/v1/completions", responses=STREAM_RESPONSES)(api.completions)
    app.post("/v1/chat/completions", responses=STREAM_RESPONSES)(api.chat)


def openapi_document(app: FastAPI, name: str) -> dict[str, Any]:
    """Return the OpenAPI document. name: the model's, the only one that requests may have."""
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if schema.get("properties", {}).get("model", {}).get("type") == "string":
            schema["properties"]["model"]["enum"] = [name]
    # Malformed bodies are answered with 400, never with FastAPI's 422.
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return document

"""The routes: from a request in OpenAI's shape to the engine, and back as JSON or as server-sent events."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse, Response, StreamingResponse

import nibble
from nibble.config import SamplingParams
from nibble.engine.request import truncated
from nibble.engine.tokenizer import Detokenizer, Tokenizer
from nibble.errors import PromptTooLong, RequestError
from nibble.models.generation_config import SamplingDefaults
from nibble.server import chat_format, middleware, protocol, streaming
from nibble.server.engine_client import EngineClient, EngineDiedError, State, engines_of
from nibble.server.fidelity import fidelity_warning
from nibble.server.messages_api import CountTokensRequest, MessagesRequest
from nibble.server.messages_writer import MessagesWriter
from nibble.server.metrics import Metrics, RequestTimer, cache_view
from nibble.server.responses_api import ResponsesRequest
from nibble.server.responses_writer import ResponsesWriter, common_fields
from nibble.server.settings import PRIORITY, Settings
from nibble.server.tracing import ID_HEADER, RequestLogMiddleware, Sink, access_log, http_log_of
from nibble.server.worker import GenerationRequest, Ready
from nibble.server.writers import ChatWriter, Chunk, Echo, TextWriter, Writer, text_offsets

LONG_TEXT = 20_000
"""Characters from which a text is tokenised in a thread."""
MAX_ANSWER = 1 << 20
"""Tokens of an answer whose request names no bound."""
Parsers = Callable[[], streaming.Parser]
"""Returns a parser of one answer."""
Chunks = AsyncGenerator[list[Chunk]]
"""Chunks of a stream, those that came together in one list."""


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
        self.names = tuple(dict.fromkeys((name, *settings.served_model_name)))
        """What requests may call the model."""
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
        """Return the list of models: one, with an entry for each of its names."""
        ready = self.client.ready
        entry = {"object": "model", "created": self._created, "owned_by": "nibble"}
        sizes = {"max_model_len": ready and ready.max_context, "vocab_size": ready and ready.vocab_size}
        defaults = {"default_sampling_params": dict(self._sampling_defaults().values)}
        about = ready.about if ready else {}
        quality = {"kv_cache": about.get("meaning") or None, "certificate": about.get("certificate")}
        facts = entry | sizes | defaults | quality
        return {"object": "list", "data": [{"id": name} | facts for name in self.names]}

    async def model(self, name: str) -> dict[str, Any]:
        """Return the model's entry in the list."""
        self._check_model(name)
        entry: dict[str, Any] = (await self.models())["data"][0]
        return entry | {"id": name}

    async def plan(self) -> dict[str, Any]:
        """Return the formats, backends and memory that the engine runs with."""
        return {"model": self.name, **self._ready().about}

    async def cache(self) -> dict[str, Any]:
        """Return how the KV cache is filled."""
        if self.client.state is not State.READY:
            raise EngineDiedError(f"the engine is {self.client.state}: there is no cache at the moment")
        view = cache_view(self.client.stats, self._ready().about)
        engines = engines_of(self.client)
        if len(engines) > 1:
            view["replicas"] = [
                {"state": one.state.value, **cache_view(one.stats, one.ready.about if one.ready else {})}
                for one in engines
            ]
        return view

    async def health(self) -> JSONResponse:
        """Return whether the engine serves, by the status too, and how busy it is."""
        state, stats = self.client.state, self.client.stats
        body: dict[str, Any] = {
            "status": state.value,
            "version": nibble.__version__,
            "restarts": self.client.restarts,
        }
        if warning := fidelity_warning(stats):
            body["warning"] = warning
        body["open"] = self.limiter.num_open
        body |= _busyness(stats)
        engines = engines_of(self.client)
        if len(engines) > 1:
            body["replicas"] = [
                {"status": one.state.value, "restarts": one.restarts, **_busyness(one.stats)}
                for one in engines
            ]
        return JSONResponse(body, 200 if state is State.READY else 503)

    async def version(self) -> dict[str, str]:
        """Return Nibble's version."""
        return {"version": nibble.__version__}

    async def load(self) -> dict[str, int]:
        """Return how many requests are open, as load balancers ask for it."""
        return {"server_load": self.limiter.num_open}

    async def reset_prefix_cache(self) -> dict[str, str]:
        """Forget all prefixes. Requests that run keep their pages."""
        await self.client.reset_prefix_cache()
        return {"status": "reset"}

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
            ids = await self._encode(body.prompt, add_special_tokens=body.add_special_tokens)
        else:
            ids = await self._encode_chat(body.messages or ())
        ready = self.client.ready
        return {"tokens": ids, "count": len(ids), "max_model_len": ready and ready.max_context}

    async def tokenizer_info(self) -> dict[str, Any]:
        """Return the names of special tokens, and the chat template, for clients that tokenise here."""
        return self.tokens.info()

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
        ids = [await self._encode_prompt(prompt, body) for prompt in prompts]
        longest, num_tokens = max(map(len, ids)), sum(map(len, ids))
        self._check_length(longest)
        max_tokens = self._max_answer(longest) if body.max_tokens is None else body.max_tokens
        params = body.params(max_tokens, body.logprobs, self._sampling_defaults())
        _check_prompt_logprobs(params, num_tokens)
        writer = TextWriter(
            self.name,
            num_tokens,
            self._token_text,
            body.logprobs is not None,
            not body.stream,
            body.stream_options,
            echoes=await asyncio.to_thread(self._echoes, body, prompts, ids) if body.echo else (),
            answers=params.n,
            top_prompt_logprobs=body.prompt_logprobs,
        )
        return await self._answer(request, body, writer, ids, params)

    def _echoes(
        self, body: protocol.CompletionRequest, prompts: Sequence[str | list[int]], ids: Sequence[list[int]]
    ) -> list[Echo]:
        """Return what is sent back of prompts."""
        is_cut = body.truncate_prompt_tokens is not None
        texts = [
            prompt if isinstance(prompt, str) and not is_cut else self.tokens.decode(tokens)
            for prompt, tokens in zip(prompts, ids, strict=True)
        ]
        if body.logprobs is None:
            return [Echo(text) for text in texts]
        return [self._echo(text, one, body.logprobs) for text, one in zip(texts, ids, strict=True)]

    def _echo(self, text: str, ids: Sequence[int], top: int) -> Echo:
        """Return a prompt with its tokens' places."""
        detokenizer = Detokenizer(self.tokens)
        pieces = [detokenizer.add((token,)) for token in ids]
        marks = ["" if piece else self._token_text([token]) for piece, token in zip(pieces, ids, strict=True)]
        return Echo(text, ids, list(text_offsets(text, pieces, marks)), top)

    async def chat(self, request: Request, body: protocol.ChatRequest) -> Response:
        """Answer a conversation."""
        self._start(request, body, "chat")

        def write(prompt_tokens: int, new_parser: Parsers, params: SamplingParams) -> Writer:
            return ChatWriter(
                self.name,
                prompt_tokens,
                self._token_text,
                body.logprobs,
                not body.stream,
                body.stream_options,
                new_parser,
                answers=params.n,
                top_prompt_logprobs=body.prompt_logprobs,
            )

        return await self._converse(request, body, write)

    async def responses(self, request: Request, body: ResponsesRequest) -> Response:
        """Answer a conversation, in the newer of OpenAI's APIs."""
        self._start(request, body, "chat")
        chat = body.chat()

        def write(prompt_tokens: int, new_parser: Parsers, params: SamplingParams) -> Writer:
            common, names = common_fields(body, params), body.tool_names()
            return ResponsesWriter(self.name, prompt_tokens, new_parser(), self._num_tokens, common, names)

        return await self._converse(request, chat, write)

    async def messages(self, request: Request, body: MessagesRequest) -> Response:
        """Answer a conversation, in Anthropic's API."""
        self._start(request, body, "chat")

        def write(prompt_tokens: int, new_parser: Parsers, _: SamplingParams) -> Writer:
            return MessagesWriter(self.name, prompt_tokens, new_parser(), self._num_tokens, body.max_tokens)

        return await self._converse(request, body.chat(), write)

    async def count_tokens(self, body: CountTokensRequest) -> dict[str, int]:
        """Return how many tokens a conversation has, in Anthropic's API."""
        self._check_model(body.model)
        return {"input_tokens": len(await self._encode_request(body.chat()))}

    async def _converse(
        self,
        request: Request,
        body: protocol.ChatRequest,
        write: Callable[[int, Parsers, SamplingParams], Writer],
    ) -> Response:
        """Answer a conversation.

        Args:
            request: of HTTP.
            body: the conversation; requests of other APIs have become one.
            write: returns the writer, given the prompt's tokens, what makes parsers of answers, and how to sample.
        """
        ids = await self._encode_request(body)
        continued = body.messages[-1].plain()["content"] if body.continue_final_message else None
        answer_format = self.chat_format.answer_format(body, ids, continued)
        max_tokens = body.max_completion_tokens or body.max_tokens or self._max_answer(len(ids))
        params = answer_format.params(body.params(max_tokens, body.num_logprobs(), self._sampling_defaults()))
        _check_prompt_logprobs(params, len(ids))
        # Arguments of calls come as they grow where somebody reads along.
        writer = write(len(ids), answer_format.parsers(eager=body.stream), params)
        return await self._answer(request, body, writer, [ids], params)

    def _ready(self) -> Ready:
        if self.client.ready is None:
            raise EngineDiedError("the engine has not started yet")
        return self.client.ready

    def _sampling_defaults(self) -> SamplingDefaults:
        # Without an engine nothing is answered, so that nobody gets the other defaults.
        return self.client.ready.sampling_defaults if self.client.ready else SamplingDefaults()

    async def _encode(self, text: str, *, is_cut: bool = False, **options: Any) -> list[int]:
        return await self._tokenize(len(text), partial(self.tokens.encode, text, **options), is_cut)

    async def _encode_prompt(self, prompt: str | list[int], body: protocol.CompletionRequest) -> list[int]:
        """Return what is kept of a prompt, as tokens."""
        is_cut = body.truncate_prompt_tokens is not None
        ids = await self._encode(prompt, is_cut=is_cut) if isinstance(prompt, str) else prompt
        return self._truncated(ids, body, body.max_tokens)

    def _truncated(self, ids: list[int], body: protocol.Sampling, max_tokens: int | None) -> list[int]:
        limit = self.client.ready.max_context if self.client.ready else len(ids)
        room = limit - (1 if max_tokens is None else max_tokens)
        return list(truncated(ids, body.truncate_prompt_tokens, room))

    async def _encode_chat(
        self,
        messages: Sequence[protocol.Message],
        tools: Sequence[protocol.Tool] = (),
        *,
        is_cut: bool = False,
        **kwargs: Any,
    ) -> list[int]:
        """Return a conversation's tokens.

        Args:
            messages: its turns.
            tools: that may be called.
            is_cut: whether only the end of it will be kept, so that it may be too long.
            kwargs: for the chat template.
        """
        if media := next(filter(None, (message.media() for message in messages)), None):
            raise RequestError(f"{media} not served: {self.name} is served for text")
        # Templates differ in whether they take a call's arguments as an object or as its text.
        self.tokens  # noqa: B018 (raises where there is none)
        as_text = self.chat_format.takes_arguments_as_text
        turns = [chat_format.message_for_template(message.plain(), as_text=as_text) for message in messages]
        tool_list = chat_format.tools_for_template(tools)
        size = sum(len(turn["content"]) for turn in turns) + len(json.dumps(tool_list or []))
        return await self._tokenize(
            size, partial(self.chat_format.encode, turns, tool_list, **kwargs), is_cut
        )

    async def _encode_request(self, body: protocol.ChatRequest) -> list[int]:
        """Return what is kept of a conversation, as tokens."""
        is_cut, kwargs = body.truncate_prompt_tokens is not None, body.template_kwargs()
        ids = await self._encode_chat(body.messages, body.callable_tools(), is_cut=is_cut, **kwargs)
        return self._truncated(ids, body, body.max_completion_tokens or body.max_tokens)

    async def _tokenize(
        self, num_characters: int, encode: Callable[[], list[int]], is_cut: bool
    ) -> list[int]:
        # No token has more characters than the longest, so this is a lower bound.
        if not is_cut:
            self._check_length(num_characters // self.tokens.longest)
        return await asyncio.to_thread(encode) if num_characters > LONG_TEXT else encode()

    def _token_text(self, ids: Sequence[int]) -> str:
        # Special tokens too: the end of an answer may be among the likeliest tokens.
        return self._tokens.decode(ids, None) if self._tokens else ""

    def _num_tokens(self, text: str) -> int:
        return len(self.tokens.encode(text, add_special_tokens=False))

    def _start(self, request: Request, body: protocol.GenerationFields, operation: str) -> None:
        """Note what the request is about; raises RequestError for another model, or a priority without effect."""
        self._check_model(body.model)
        http_log = http_log_of(request.scope)
        http_log.operation, http_log.model = operation, self.name
        http_log.fields = partial(body.model_dump, exclude_unset=True)
        if body.priority and self.settings.scheduling != PRIORITY:
            raise RequestError(
                "priorities are not honoured here; start the server with --scheduling priority"
            )

    def _check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
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
        requests = [
            GenerationRequest(prompt, params, body.cache_salt, body.priority, bool(body.stream))
            for prompt in prompts
        ]
        http_log = http_log_of(request.scope)
        start = self.metrics_registry.start_request
        http_log.timers = timers = [start(len(prompt), params.n) for prompt in prompts]
        writer.id = http_log.response_id = f"{writer.prefix}{http_log.id}"
        chunks = self._chunks(writer, requests, timers, min(deadlines, default=None))
        response = self._stream(writer, chunks) if body.stream else self._collect(writer, chunks)
        return await streaming.cancel_on_disconnect(request, response)

    async def _chunks(
        self,
        writer: Writer,
        requests: Sequence[GenerationRequest],
        timers: Sequence[RequestTimer],
        deadline: float | None,
    ) -> Chunks:
        """Yield chunks as they come. deadline: by the loop's clock, for all that the requests wait too."""
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
                    chunks: list[Chunk] = []
                    for delta in (piece.delta for piece in pieces):
                        # The engine could not go on with its answer.
                        if delta.error:
                            raise RequestError(delta.error, delta.status)
                        take = partial(writer.take, i * params.n + delta.index, delta)
                        # A long prompt has very many of them, which must not hold up other requests.
                        chunks += await asyncio.to_thread(take) if delta.prompt_logprobs else take()
                    if chunks:
                        yield chunks

    async def _collect(self, writer: Writer, chunks: Chunks) -> Response:
        async with aclosing(chunks):
            async for _ in chunks:
                pass
        if writer.prompt_logprobs:
            return await asyncio.to_thread(lambda: JSONResponse(writer.body()))
        return JSONResponse(writer.body())

    async def _stream(self, writer: Writer, chunks: Chunks) -> Response:
        # The first piece is awaited, so that a request that cannot be served gets a status and no stream.
        try:
            first: list[Chunk] = await anext(chunks, [])
        except BaseException:
            await chunks.aclose()
            raise

        async def encoded() -> AsyncGenerator[bytes]:
            async with aclosing(chunks):
                try:
                    yield writer.start() + writer.encode(first)
                    async for more in chunks:
                        yield writer.encode(more)
                    yield writer.finish()
                except Exception as error:
                    # The status has been sent, so the stream has the error.
                    yield writer.fail(error)

        return StreamingResponse(encoded(), media_type="text/event-stream")


def _busyness(stats: Mapping[str, float]) -> dict[str, int]:
    names = (("running", "running"), ("waiting", "waiting"), ("held_pages", "cache_in_use"))
    return {name: int(stats.get(key, 0)) for name, key in names}


def _check_prompt_logprobs(params: SamplingParams, num_tokens: int) -> None:
    """Raise RequestError where log-probabilities of prompts would be too many for one answer."""
    if params.prompt_logprobs is None:
        return
    count, limit = num_tokens * (1 + params.prompt_logprobs) * params.n, protocol.MAX_PROMPT_LOGPROBS
    if count > limit:
        raise RequestError(
            f"{count} log-probabilities of prompts are more than the {limit} of one answer: "
            "ask for fewer alternatives, or send fewer prompts"
        )


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
    app.openapi = partial(openapi_document, app, api.names, settings.root_path)  # type: ignore[method-assign]
    middleware.install_handlers(app)
    # The middleware that is added last is the outermost: a refused request is logged too.
    if settings.api_key:
        app.add_middleware(middleware.KeyGuard, key=settings.api_key)
    app.add_middleware(middleware.BodyLimit, limit=settings.body_bytes)
    if settings.allowed_origins:
        # Outside of the key's guard: a browser sends no key with the question whether it may.
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods or ("*",),
            allow_headers=settings.allowed_headers or ("*",),
            allow_credentials=settings.allow_credentials,
            expose_headers=(ID_HEADER.decode(), "Retry-After"),
        )
    log = partial(access_log, texts=settings.log_requests)
    app.add_middleware(RequestLogMiddleware, sinks=[api.metrics_registry.count_http, log, *sinks])
    if settings.root_path:
        app.add_middleware(middleware.RootPath, prefix=settings.root_path)
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
    for add_route in (app.get, app.post):
        add_route("/ping", responses=HEALTH_RESPONSES)(api.health)
    app.get("/version", responses=GET_ERRORS)(api.version)
    app.get("/load", responses=GET_ERRORS)(api.load)
    app.post("/reset_prefix_cache", responses=GET_ERRORS)(api.reset_prefix_cache)
    app.post("/tokenize", responses=POST_ERRORS)(api.tokenize)
    app.get("/tokenizer_info", responses=GET_ERRORS)(api.tokenizer_info)
    app.post("/detokenize", responses=POST_ERRORS)(api.detokenize)
    app.post("/v1/completions", responses=STREAM_RESPONSES)(api.completions)
    app.post("/v1/chat/completions", responses=STREAM_RESPONSES)(api.chat)
    app.post("/v1/responses", responses=STREAM_RESPONSES)(api.responses)
    app.post("/v1/messages", responses=STREAM_RESPONSES)(api.messages)
    app.post("/v1/messages/count_tokens", responses=POST_ERRORS)(api.count_tokens)


def openapi_document(app: FastAPI, names: Sequence[str], root_path: str) -> dict[str, Any]:
    """Return the OpenAPI document.

    Args:
        app: the application.
        names: of the model, the only ones that requests may have.
        root_path: of all paths.
    """
    if app.openapi_schema is not None:
        return app.openapi_schema
    document = FastAPI.openapi(app)
    schemas = document["components"]["schemas"]
    for schema in schemas.values():
        if model := schema.get("properties", {}).get("model"):
            names_or_null = [*names, *[None] * ("anyOf" in model)]
            schema["properties"]["model"] = {"title": "Model", "enum": names_or_null}
    if root_path:
        document["servers"] = [{"url": root_path}]
    # Malformed bodies are answered with 400, never with FastAPI's 422.
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["responses"].pop("422", None)
    return document

"""How the server behaves towards its clients: a frozen dataclass whose fields' docs are the command line's help."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass

from nibble.config import option, parse_bytes
from nibble.engine.kv_events import Endpoints, check_endpoint, check_ranks
from nibble.errors import ConfigError, unknown

PRIORITY = "priority"
SCHEDULING = (PRIORITY, "fcfs")
LOG_FORMATS = ("text", "json")
ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/\s?#]+")
ROOT_PATH = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's options; raises ConfigError where a value is malformed."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all of this machine's.")
    port: int = option(8000, "Port to listen at.")
    served_model_name: tuple[str, ...] = option(
        (), "What clients call the model; its own name if left out. Of several, answers have the first."
    )
    api_key: str | None = option(
        None, "What clients must send as a bearer token; NIBBLE_API_KEY, if left out."
    )
    root_path: str = option(
        "", "Path under which a proxy shows the server, as /llm; it may cut it off, or not."
    )
    ssl_certfile: str | None = option(None, "Certificate, a PEM file: serve HTTPS.")
    ssl_keyfile: str | None = option(None, "Key of the certificate, a PEM file, where that has none in it.")
    ssl_ca_certs: str | None = option(
        None, "Certificates of authorities, a PEM file, by which clients are checked."
    )
    ssl_cert_reqs: int = option(
        0, "Certificates of clients: 0 asks for none, 1 checks those that come, 2 demands one."
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "Origins whose web pages may call the server (CORS), as https://example.com, several between commas or as a "
        "JSON list; * for all; none if left out.",
    )
    allowed_methods: tuple[str, ...] = option((), "Methods that these pages may use; all if left out.")
    allowed_headers: tuple[str, ...] = option((), "Headers that these pages may send; all if left out.")
    allow_credentials: bool = option(False, "Let these pages send cookies.")
    max_queue: int = option(1024, "Most requests that are open at a time; one more gets status 429.")
    wait_when_full: bool = option(False, "Let requests wait where they would get status 429.")
    scheduling: str = option(
        PRIORITY,
        "priority: requests with a lower `priority` are served before, equal ones as they come; fcfs: a request that "
        "names one is refused.",
    )
    max_body: str = option("8MiB", "Largest body of a request.")
    timeout: float | None = option(
        None, "Seconds after which a request ends with an error, unless it says less."
    )
    replicas: int = option(
        1,
        "Engines behind this server, a GPU each, or tp GPUs each, or a part of the CPU; a request goes where most of "
        "its prompt is cached, as far as load allows (docs/replicas.md).",
    )
    kv_events: str | None = option(
        None,
        "Publish what enters and leaves the prefix cache, as vLLM does, for routers as llm-d's and Dynamo's: an "
        "endpoint of ZeroMQ, as tcp://*:5557; replicas count ports up.",
    )
    kv_events_replay: str | None = option(
        None, "Where subscribers of kv_events ask for what they missed, as tcp://*:5558."
    )
    kv_events_topic: str = option("", "Topic of kv_events.")
    restart: bool = option(True, "Start the engine's process again when it dies; else the server ends.")
    tool_format: str = option("auto", "Format of tool calls: auto (by the chat template), none, or a name.")
    reasoning_parser: str = option("auto", "Format of reasoning: auto (by the template), none, or a name.")
    log_format: str = option("text", "Lines of the log, on standard error: text, or json.")
    log_requests: bool = option(False, "Log what was asked too, prompts and all.")
    otlp_traces_endpoint: str | None = option(
        None,
        "Where traces go, by OTLP over HTTP, as http://localhost:4318/v1/traces; needs the extra `otel`.",
    )
    drain: float = option(30.0, "Seconds that open requests are given when the server is told to end.")

    def __post_init__(self) -> None:
        for name in ("served_model_name", "allowed_origins", "allowed_methods", "allowed_headers"):
            object.__setattr__(self, name, _listed(name, getattr(self, name)))
        self._check_web()
        # Malformed sizes are refused at the start, not with the first body.
        parse_bytes(self.max_body)
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port must be from 0 to 65535, not {self.port}")
        if self.scheduling not in SCHEDULING:
            raise ConfigError(unknown("scheduling", self.scheduling, SCHEDULING))
        if self.log_format not in LOG_FORMATS:
            raise ConfigError(unknown("log format", self.log_format, LOG_FORMATS))
        if self.otlp_traces_endpoint and not self.otlp_traces_endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint must be a URL as http://localhost:4318/v1/traces, "
                f"not {self.otlp_traces_endpoint!r}"
            )
        self._check_replicas()
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, not {self.max_queue}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be more than 0 seconds, not {self.timeout}")
        if not self.drain >= 0:
            raise ConfigError(f"drain must be at least 0 seconds, not {self.drain}")

    def _check_replicas(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"replicas must be at least 1, not {self.replicas}")
        for name in ("kv_events", "kv_events_replay"):
            if endpoint := getattr(self, name):
                check_endpoint(name, endpoint)
        if (self.kv_events_replay or self.kv_events_topic) and not self.kv_events:
            raise ConfigError(
                "kv_events_replay and kv_events_topic need kv_events, the endpoint that publishes"
            )
        if self.endpoints:
            check_ranks(self.endpoints, self.replicas)

    @property
    def endpoints(self) -> Endpoints | None:
        """Where KV events are published, if they are."""
        if self.kv_events is None:
            return None
        return Endpoints(self.kv_events, self.kv_events_replay, self.kv_events_topic)

    def _check_web(self) -> None:
        for origin in self.allowed_origins:
            if not ORIGIN.fullmatch(origin):
                raise ConfigError(f"allowed_origins are as https://example.com:8443, or *, not {origin!r}")
        if self.root_path and not ROOT_PATH.fullmatch(self.root_path):
            raise ConfigError(
                f"root_path is a path as /llm, without a slash at its end, not {self.root_path!r}"
            )
        if not self.ssl_certfile and (self.ssl_keyfile or self.ssl_ca_certs or self.ssl_cert_reqs):
            raise ConfigError(
                "HTTPS needs ssl_certfile, a certificate; only then have the other ssl options a meaning"
            )
        if self.ssl_cert_reqs not in (0, 1, 2):
            raise ConfigError(f"ssl_cert_reqs is 0, 1 or 2, not {self.ssl_cert_reqs}")
        if self.ssl_cert_reqs and not self.ssl_ca_certs:
            raise ConfigError(
                "ssl_cert_reqs needs ssl_ca_certs, by which the clients' certificates are checked"
            )

    @property
    def body_bytes(self) -> int:
        """The largest body of a request."""
        return parse_bytes(self.max_body)


def _listed(name: str, values: Iterable[str]) -> tuple[str, ...]:
    """Return the items of an option that may be repeated, each one or several: between commas, or as a JSON list."""
    items: list[str] = []
    for text in values:
        if not text.lstrip().startswith("["):
            items += text.split(",")
            continue
        try:
            entries = json.loads(text)
        except ValueError:
            entries = [None]
        if not all(isinstance(entry, str) for entry in entries):
            raise ConfigError(f"{name} as JSON is a list of texts, not {text!r}")
        items += entries
    return tuple(filter(None, map(str.strip, items)))

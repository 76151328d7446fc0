"""How the server behaves towards its clients: a frozen dataclass whose fields' docs are the command line's help."""

from __future__ import annotations

from dataclasses import dataclass

from nibble.config import option, parse_bytes
from nibble.errors import ConfigError, unknown

PRIORITY = "priority"
SCHEDULING = (PRIORITY, "fcfs")
LOG_FORMATS = ("text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The server's options; raises ConfigError where a value is malformed."""

    host: str = option("127.0.0.1", "Address to listen at; 0.0.0.0 for all of this machine's.")
    port: int = option(8000, "Port to listen at.")
    served_model_name: str | None = option(None, "What clients call the model; its own name if left out.")
    api_key: str | None = option(
        None, "What clients must send as a bearer token; NIBBLE_API_KEY, if left out."
    )
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
        if self.max_queue < 1:
            raise ConfigError(f"max_queue must be at least 1, not {self.max_queue}")
        if self.timeout is not None and not self.timeout > 0:
            raise ConfigError(f"timeout must be more than 0 seconds, not {self.timeout}")
        if not self.drain >= 0:
            raise ConfigError(f"drain must be at least 0 seconds, not {self.drain}")

    @property
    def body_bytes(self) -> int:
        """The largest body of a request."""
        return parse_bytes(self.max_body)

"""What `build_app` is told: one mapping of arguments, as a Serve config or `serve run` has them. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any

from nibble.config import Config, option, parse_bytes, parse_setting
from nibble.engine.kv_events import check_ranks
from nibble.errors import ConfigError, unknown
from nibble.ray.choice import policy_of
from nibble.server.settings import Settings

KV, PREFIX, POWER_OF_TWO = "kv", "ray-prefix", "power-of-two"
ROUTERS = {
    KV: "nibble.ray.router.KVRouter",
    PREFIX: "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter",
    POWER_OF_TWO: "ray.serve._private.request_router:PowerOfTwoChoicesRequestRouter",
}
"""Who chooses a replica -> the class that Serve imports."""
MOST_OF_A_HOST = 8
"""Engines of a host that are reckoned with: as many GPUs as one has."""
LISTENING = ("host", "port", "ssl_certfile", "ssl_keyfile", "ssl_ca_certs", "ssl_cert_reqs")
"""Settings of a server that listens itself."""
NOT_HERE = {
    **dict.fromkeys(LISTENING, "Serve's proxies listen: see http_options of the Serve config"),
    "root_path": "Serve has route_prefix in the place of it",
    "restart": "Serve starts a replica again whose engine died",
}
"""Options of `nibble serve` that mean nothing on Ray -> what does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What one replica is placed on: a bundle of a placement group for each of its hosts."""

    cpus: float = option(1.0, "CPUs that Ray counts for a replica, on each of its hosts.")
    memory: str | None = option(None, "Memory that Ray counts for a replica, on each of its hosts, as 64GiB.")
    accelerator_type: str | None = option(None, "Kind of GPU, as Ray names it: H100.")
    resources: Mapping[str, float] = field(
        default_factory=dict, metadata={"doc": "Amounts of resources that nodes of the cluster name."}
    )
    labels: Mapping[str, str] = field(
        default_factory=dict, metadata={"doc": "Labels that the node must have, as `ray.io/zone: eu-1`."}
    )
    hosts: int = option(1, "Hosts of one replica, among which the ranks of `tp` are divided evenly.")

    def __post_init__(self) -> None:
        if not self.cpus >= 0:
            raise ConfigError(f"placement cpus must be 0 or more, not {self.cpus}")
        if not (isinstance(self.hosts, int) and self.hosts >= 1):
            raise ConfigError(f"placement hosts must be a number of at least 1, not {self.hosts!r}")
        if self.memory is not None:
            parse_bytes(self.memory)

    def bundle(self, gpus: int) -> dict[str, float]:
        """Return the bundle of a host with so many GPUs."""
        amounts = {"CPU": float(self.cpus), "GPU": float(gpus), **self.resources}
        if self.memory is not None:
            amounts["memory"] = float(parse_bytes(self.memory))
        if self.accelerator_type and gpus:
            amounts[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {name: amount for name, amount in amounts.items() if amount}


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """How an application is spread over a cluster; raises ConfigError where a value is malformed."""

    replicas: int = option(1, "Engines, where `autoscaling` does not say how many.")
    autoscaling: Mapping[str, Any] | None = option(
        None,
        "Serve's AutoscalingConfig: min_replicas, max_replicas, target_ongoing_requests (half of max_running if left "
        "out: requests of an engine, those that wait for it included) and so on.",
    )
    max_ongoing_requests: int | None = option(
        None,
        "Most requests that are given to one engine; others wait in the router, for engines that are still starting "
        "too. Twice max_running if left out.",
    )
    placement: Placement = field(default_factory=Placement, metadata={"doc": "What one engine is placed on."})
    router: str = option(
        KV,
        "Who chooses an engine: kv (by what each has cached, from its KV events), ray-prefix (Ray's own, by the texts "
        "that it sent where) or power-of-two (the less busy of two).",
    )
    router_options: Mapping[str, Any] = field(
        default_factory=dict, metadata={"doc": "Options of the router, by name."}
    )
    fronts: int = option(1, "Processes that read requests and write answers; each serves all engines.")
    front_cpus: float = option(1.0, "CPUs that Ray counts for one of them.")
    runtime_env: Mapping[str, Any] = field(
        default_factory=dict, metadata={"doc": "Ray's runtime environment of engines and fronts."}
    )

    def __post_init__(self) -> None:
        for name in ("replicas", "fronts", "max_ongoing_requests"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ConfigError(f"{name} must be a number of at least 1, not {value!r}")
        if self.router not in ROUTERS:
            raise ConfigError(unknown("router", self.router, ROUTERS))
        if self.autoscaling is not None and self.replicas != 1:
            raise ConfigError("replicas and autoscaling exclude each other: give min_replicas in autoscaling")
        if self.router == KV:
            policy_of(self.router_options)
        if self.router == POWER_OF_TWO and self.router_options:
            raise ConfigError(f"router {POWER_OF_TWO} has no router_options")

    @property
    def most_replicas(self) -> int:
        """Most engines that there may be."""
        most = (self.autoscaling or {}).get("max_replicas")
        # Serve says what is wrong with one that is no number.
        return most if isinstance(most, int) else self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class AppOptions:
    """All that an application is told."""

    config: Config
    """Of each engine."""
    settings: Settings
    """Of each front."""
    ray: RayOptions

    def __post_init__(self) -> None:
        if self.config.tp % self.ray.placement.hosts:
            hosts, tp = self.ray.placement.hosts, self.config.tp
            raise ConfigError(
                f"placement hosts is {hosts}, and tp {tp}, which cannot be divided among as many hosts: let tp be a "
                f"multiple of {hosts}"
            )
        if self.ray.placement.hosts > 1 and not self.ray.placement.bundle(self.gpus):
            raise ConfigError(
                "placement hosts needs something to be placed by: GPUs, cpus above 0, or resources"
            )

    @property
    def gpus(self) -> int:
        """GPUs of one engine on each of its hosts."""
        return 0 if self.config.device == "cpu" else self.config.tp // self.ray.placement.hosts

    @property
    def max_ongoing_requests(self) -> int:
        """Requests that one engine is given."""
        return self.ray.max_ongoing_requests or 2 * self.config.max_running


def parse_args(args: Mapping[str, Any]) -> AppOptions:
    """Return the options of an application.

    Args:
        args: options of `nibble serve`, by their Python names, and those of RayOptions. Values may be texts, as
            `serve run nibble.ray:build_app model=demo` has them.

    Raises:
        ConfigError: an option is unknown, malformed, or means nothing on Ray.
    """
    if "model" not in args:
        raise ConfigError("`model` is missing: give it in `args` of the Serve config, or as model=NAME")
    groups: dict[type, dict[str, Any]] = {Config: {}, Settings: {}, RayOptions: {}}
    # `replicas` of the settings are processes of one server; those of Ray take their name.
    homes = {field.name: (kind, field) for kind in groups for field in fields(kind)}
    for name, value in args.items():
        if name in NOT_HERE:
            raise ConfigError(f"{name} means nothing on Ray: {NOT_HERE[name]}")
        if name not in homes:
            raise ConfigError(unknown("option", name, homes))
        kind, home = homes[name]
        groups[kind][name] = _value(name, value, home)
    options = AppOptions(
        config=Config(**groups[Config]),
        settings=Settings(**groups[Settings]),
        ray=RayOptions(**groups[RayOptions]),
    )
    if options.settings.endpoints:
        # A node may have as many engines, and each has ports of its own there.
        check_ranks(options.settings.endpoints, min(options.ray.most_replicas, MOST_OF_A_HOST))
    return options


def _value(name: str, value: Any, home: Field[Any]) -> Any:
    """Return a value as its field takes it."""
    annotation = str(home.type)
    if name == "placement":
        return _placement(value)
    if annotation.startswith("tuple"):
        return (value,) if isinstance(value, str) else tuple(value)
    if annotation.startswith("Mapping"):
        if value is not None and not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be a mapping, not {value!r}; write it in a Serve config")
        return value
    # YAML takes `on` and `off` for truth values.
    if annotation.startswith("str") and isinstance(value, bool):
        return "on" if value else "off"
    is_text = isinstance(value, str) and not annotation.startswith("str")
    return parse_setting(name, value, annotation) if is_text else value


def _placement(value: Any) -> Placement:
    if not isinstance(value, Mapping):
        raise ConfigError(f"placement must be a mapping, not {value!r}; write it in a Serve config")
    names = {field.name for field in fields(Placement)}
    for name in value:
        if name not in names:
            raise ConfigError(unknown("option of placement", name, names))
    return Placement(**value)


def actor_options(bundle: Mapping[str, float], gpus: int) -> dict[str, Any]:
    """Return the options of an actor that takes a bundle, as Ray names them."""
    custom = {name: amount for name, amount in bundle.items() if name not in {"CPU", "GPU", "memory"}}
    actor = {"num_cpus": bundle.get("CPU", 0.0), "num_gpus": gpus, "resources": custom}
    return actor | {name: bundle[name] for name in ("memory",) if name in bundle}


def engine_options(options: AppOptions) -> dict[str, Any]:
    """Return the options of the deployment of engines, as Serve names them."""
    placement, ray, bundle = options.ray.placement, options.ray, options.ray.placement.bundle(options.gpus)
    actor = actor_options(bundle, options.gpus)
    result: dict[str, Any] = {
        "max_ongoing_requests": options.max_ongoing_requests,
        "ray_actor_options": {**actor, "runtime_env": dict(ray.runtime_env)},
        # Serve waits so long for answers under way; who is not done then gets an error from the front.
        "graceful_shutdown_timeout_s": options.settings.drain + ENDING_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
    }
    if bundle:
        # One bundle is on one host; the replica itself is on that of the first.
        result["placement_group_bundles"] = [bundle] * placement.hosts
        result["placement_group_strategy"] = "STRICT_PACK" if placement.hosts == 1 else "STRICT_SPREAD"
    if bundle and placement.labels:
        result["placement_group_bundle_label_selector"] = [dict(placement.labels)] * placement.hosts
    if ray.autoscaling is None:
        return result | {"num_replicas": ray.replicas}
    target = {"target_ongoing_requests": max(1, options.config.max_running // 2)}
    return result | {"autoscaling_config": target | dict(ray.autoscaling)}


def front_options(options: AppOptions) -> dict[str, Any]:
    """Return the options of the deployment of fronts, as Serve names them."""
    settings, ray = options.settings, options.ray
    return {
        "num_replicas": ray.fronts,
        # Above the front's own limit, so that it answers with 429, and those who ask for its health need not wait.
        "max_ongoing_requests": settings.max_queue + SPARE_REQUESTS,
        "ray_actor_options": {"num_cpus": ray.front_cpus, "runtime_env": dict(ray.runtime_env)},
        "graceful_shutdown_timeout_s": settings.drain + 2 * ENDING_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 2.0,
        "health_check_timeout_s": 30.0,
    }


ENDING_S = 10.0
"""That a replica has to end its processes."""
SPARE_REQUESTS = 256
"""Of a front, for what does not generate."""

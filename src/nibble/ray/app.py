"""The application for Ray Serve: fronts, and engines behind them, each a deployment.

serve run nibble.ray:build_app model=demo device=cpu
serve deploy deploy/ray/serve.yaml
"""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

import ray
from ray import serve
from ray.exceptions import ObjectLostError, RayActorError, TaskCancelledError
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.util import get_current_placement_group, get_node_ip_address
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from nibble.config import Config
from nibble.errors import ConfigError
from nibble.ray.choice import note_finish, note_start
from nibble.ray.client import ClusterClient
from nibble.ray.engine import Engine
from nibble.ray.front import Front, check
from nibble.ray.options import (
    PREFIX,
    ROUTERS,
    AppOptions,
    Placement,
    actor_options,
    engine_options,
    front_options,
    parse_args,
)
from nibble.server.settings import Settings

DEATHS = (RayActorError, ObjectLostError, TaskCancelledError, DeploymentUnavailableError)
"""Errors of a call that say that a replica died, or that Serve ended it."""


@ray.remote
class Host:
    """A further host of an engine: it starts the engine's ranks there, and ends them as it ends itself."""

    def __init__(self, key: str) -> None:
        from nibble.engine.rank_hosts import RankHost  # which imports torch

        self._host = RankHost(get_node_ip_address(), key)

    def address(self) -> tuple[str, int]:
        """Return where the engine finds it."""
        return get_node_ip_address(), self._host.port


class EngineReplica(Engine):
    """An engine as Serve runs it."""

    async def __init__(self, config: Config, settings: Settings, placement: Placement, gpus: int) -> None:  # type: ignore[misc]
        rank = serve.get_replica_context().rank
        # They live as long as this replica does.
        self._hosts, environment = await _further_hosts(placement, gpus)
        address = get_node_ip_address()
        super().__init__(config, settings, address, rank.local_rank if rank else 0, environment)
        await self.start()

    async def record_replica_metadata(self) -> dict[str, Any]:
        """Return what request routers are told of this replica; Serve calls this once it is there."""
        return self.cache_source()

    async def __del__(self) -> None:
        """End the engine's process; Serve calls this when no request is left."""
        await self.stop()


async def _further_hosts(placement: Placement, gpus: int) -> tuple[list[Any], dict[str, str]]:
    """Start what starts ranks on further hosts, and return the variable that tells the engine of them.

    Args:
        placement: of the replica.
        gpus: of each host.
    """
    if placement.hosts == 1:
        return [], {}
    from nibble.engine.rank_hosts import RankHosts  # which imports torch

    key, group, bundle = secrets.token_hex(), get_current_placement_group(), placement.bundle(gpus)
    hosts = list[Any]()
    for index in range(1, placement.hosts):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        options = actor_options(bundle, gpus)
        hosts.append(Host.options(**options, scheduling_strategy=strategy).remote(key))  # type: ignore[attr-defined]
    addresses, ports = zip(*await asyncio.gather(*(host.address.remote() for host in hosts)), strict=True)
    return hosts, RankHosts((get_node_ip_address(), *addresses), ports, key).as_environment()


@serve.ingress()
class FrontReplica:
    """A front as Serve runs it."""

    async def __init__(self, config: Config, settings: Settings, as_text: bool, engines: Any) -> None:  # type: ignore[misc]
        client = ClusterClient(engines, DEATHS, as_text=as_text, on_start=note_start, on_finish=note_finish)
        self._front = Front(config, settings, client)
        self._front.start()

    def __serve_build_asgi_app__(self) -> Any:
        """Return the application; Serve calls this once the front is there."""
        return self._front.app

    async def __del__(self) -> None:
        """End the front's tasks."""
        await self._front.stop()


def build_app(args: dict[str, Any]) -> Application:
    """Return the application of a Serve config (`import_path: nibble.ray:build_app`), or of `serve run`.

    Args:
        args: options of `nibble serve` by their Python names, and those of nibble.ray.options.RayOptions.

    Raises:
        ConfigError: an option is unknown, malformed, or means nothing on Ray.
    """
    options = parse_args(args)
    check(options.config, options.settings)
    engines = serve.deployment(EngineReplica, name="Engine").options(**_checked(engine_options(options)))
    front = serve.deployment(FrontReplica, name="Front").options(**front_options(options))
    engines = engines.options(request_router_config=_router(options))
    bound = engines.bind(options.config, options.settings, options.ray.placement, options.gpus)
    return front.bind(options.config, options.settings, options.ray.router == PREFIX, bound)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Return options whose autoscaling Serve has checked; its words would not say which option is wrong."""
    if "autoscaling_config" in options:
        try:
            options["autoscaling_config"] = AutoscalingConfig(**options["autoscaling_config"])
        except ValueError as error:
            raise ConfigError(f"autoscaling: {error}") from None
    return options


def _router(options: AppOptions) -> RequestRouterConfig:
    """Return who chooses an engine."""
    return RequestRouterConfig(
        request_router_class=ROUTERS[options.ray.router],
        request_router_kwargs=dict(options.ray.router_options),
    )

"""The application as Ray Serve sees it, without a cluster. Skipped where Ray is not installed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")
pytestmark = pytest.mark.filterwarnings("ignore")

from ray.serve._private.build_app import build_app as built  # noqa: E402
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID  # noqa: E402
from ray.serve._private.request_router.common import PendingRequest  # noqa: E402

from nibble.config import SamplingParams  # noqa: E402
from nibble.errors import ConfigError  # noqa: E402
from nibble.ray import KVRouter, build_app  # noqa: E402
from nibble.ray.choice import SOURCE_KEY  # noqa: E402
from nibble.server.worker import GenerationRequest  # noqa: E402

ARGS = {"model": "demo", "device": "cpu", "max_running": 8}


def deployments(**options: Any) -> dict[str, Any]:
    application = built(build_app({**ARGS, **options}), name="nibble")
    return {one.name: one for one in application.deployments}


def test_serve_gets_fronts_and_engines() -> None:
    parts = deployments(fronts=2, autoscaling={"max_replicas": 4})
    assert set(parts) == {"Front", "Engine"}
    engines = parts["Engine"]._deployment_config
    assert engines.autoscaling_config.max_replicas == 4
    assert engines.autoscaling_config.target_ongoing_requests == 4
    assert engines.request_router_config.get_request_router_class() is KVRouter
    assert parts["Engine"].ray_actor_options["num_gpus"] == 0
    assert parts["Front"]._deployment_config.num_replicas == 2


@pytest.mark.parametrize(
    ("router", "name"),
    [("ray-prefix", "PrefixCacheAffinityRouter"), ("power-of-two", "PowerOfTwoChoicesRequestRouter")],
)
def test_other_routers(router: str, name: str) -> None:
    config = deployments(router=router)["Engine"]._deployment_config.request_router_config
    assert config.get_request_router_class().__name__ == name


def test_wrong_names_are_refused_before_anything_is_deployed() -> None:
    with pytest.raises(ConfigError, match=r"autoscaling: (.|\n)*max_replicas"):
        build_app({**ARGS, "autoscaling": {"min_replicas": 5, "max_replicas": 2}})
    with pytest.raises(ConfigError, match="tool format"):
        build_app({**ARGS, "tool_format": "nonsense"})
    with pytest.raises(ConfigError, match="nonsense"):
        build_app({**ARGS, "attention_backend": "nonsense"})


COPY = """
import asyncio, sys
import ray.cloudpickle
from ray.serve._private.common import DeploymentHandleSource, DeploymentID
from nibble.config import SamplingParams
from nibble.ray.choice import Source, note_finish, note_start
from nibble.server.worker import GenerationRequest

async def main(kind):
    router = kind(DeploymentID("Engine", "nibble"), DeploymentHandleSource.REPLICA)
    router.initialize_state()
    assert router._event_loop
    router.chooser.set_replicas({"a": Source("n", 4, "ipc:///dev/null/none")})
    request = GenerationRequest(list(range(40)), SamplingParams())
    router.chooser.choose("1", request, ("a",), {})
    queued = lambda: router.chooser.router.facts([])["a"].queued_tokens
    assert queued() == 40
    note_start(request)
    await asyncio.sleep(0)
    assert queued() == 0 and router.chooser.num_open == 1
    note_finish(request, 5)
    await asyncio.sleep(0)
    assert router.chooser.num_open == 0
    router.chooser.close()

asyncio.run(main(ray.cloudpickle.loads(sys.stdin.buffer.read())))
"""


def test_the_copy_that_serve_makes_of_the_router_hears_of_answers() -> None:
    config = deployments()["Engine"]._deployment_config.request_router_config
    copied = config.get_serialized_request_router_cls()
    subprocess.run([sys.executable, "-c", COPY], input=copied, check=True)
    # Also once there are routers in this process.
    router = KVRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.initialize_state()
    assert deployments()["Engine"]._deployment_config.request_router_config


DEPLOYMENT = DeploymentID("Engine", "nibble")


def replica(name: str, with_events: bool = True) -> Any:
    facts = {"namespace": "n", "page_size": 4, "events": "ipc:///dev/null/none", "replay": None}

    async def queue_len(**_: Any) -> int:
        return 0

    return SimpleNamespace(
        replica_id=ReplicaID(name, DEPLOYMENT),
        replica_metadata={SOURCE_KEY: facts} if with_events else {},
        node_id="node",
        availability_zone=None,
        multiplexed_model_ids=set(),
        max_ongoing_requests=4,
        get_queue_len=queue_len,
    )


def pending(name: str, *arguments: Any) -> PendingRequest:
    return PendingRequest(
        list(arguments), {}, SimpleNamespace(internal_request_id=name, multiplexed_model_id="")
    )


def test_the_router_chooses_and_keeps_its_books() -> None:
    request = GenerationRequest(list(range(40)), SamplingParams())

    async def main() -> None:
        router = KVRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA, use_replica_queue_len_cache=True)
        router.initialize_state(running=0, queue=0, imbalance=0)
        replicas = [replica("a"), replica("b")]
        router.update_replicas(replicas)
        first, others = await router.choose_replicas(replicas, pending("1", request))
        # What begins alike and comes at the same time goes together; the rest of the ranks is the other.
        assert [one.replica_id for one in first + others] != []
        (again,), _ = await router.choose_replicas(replicas, pending("2", request))
        assert again is first[0]
        router.on_request_routed(pending("1", request), first[0].replica_id, None)
        router.on_request_completed(first[0].replica_id, "1")
        assert router.chooser.num_open == 1
        # A request that its client gives up before it is sent leaves nothing.
        third = pending("3", request)
        await router.choose_replicas(replicas, third)
        third.future.cancel()
        await asyncio.sleep(0)
        router.on_request_completed(again.replica_id, "2")
        assert router.chooser.num_open == 0
        router.on_replica_actor_died(replicas[0].replica_id)
        (only,), _ = await router.choose_replicas([replicas[1]], pending("4", request))
        assert only is replicas[1]
        router.chooser.close()

    asyncio.run(main())


def test_without_events_or_a_prompt_it_is_two_at_random() -> None:
    async def main() -> None:
        router = KVRouter(DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state()
        replicas = [replica(name, with_events=False) for name in "abc"]
        router.update_replicas(replicas)
        request = GenerationRequest([1, 2], SamplingParams())
        for one in (pending("1", request), pending("2"), None):
            (both,) = await router.choose_replicas(replicas, one)
            assert len({candidate.replica_id for candidate in both}) == 2
        assert router.chooser.num_open == 0
        router.chooser.close()

    asyncio.run(main())

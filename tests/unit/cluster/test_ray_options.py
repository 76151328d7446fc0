"""Arguments of an application on Ray: what a Serve config says, and what Serve's deployments get of it. Without Ray."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import nibble.ray
from nibble.errors import ConfigError
from nibble.ray.options import ROUTERS, Placement, RayOptions, engine_options, front_options, parse_args

GPU = {"model": "demo", "placement": {"cpus": 4, "memory": "2GiB", "accelerator_type": "H100"}}


def test_options_of_all_three_kinds_arrive() -> None:
    options = parse_args(
        {
            "model": "demo", "kv_format": "nvfp4", "max_running": 8, "served_model_name": ["a", "b"],
            "api_key": "KEY", "replicas": 3, "router": "power-of-two", "hisparse": False, "timeout": None,
        }
    )  # fmt: skip
    assert (options.config.kv_format, options.config.max_running, options.config.hisparse) == (
        "nvfp4",
        8,
        "off",
    )
    assert (options.settings.served_model_name, options.settings.api_key) == (("a", "b"), "KEY")
    assert (options.ray.replicas, options.ray.router) == (3, "power-of-two")


def test_texts_of_a_command_line_get_their_types() -> None:
    args = {
        "model": "demo",
        "max_running": "8",
        "prefix_cache": "off",
        "max_context": "none",
        "replicas": "2",
    }
    options = parse_args(args)
    assert (options.config.max_running, options.config.prefix_cache, options.config.max_context) == (
        8,
        False,
        None,
    )
    assert options.ray.replicas == 2


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"kv_format": "nvfp4"}, "`model` is missing"),
        ({"model": "demo", "kv_fromat": "nvfp4"}, "did you mean 'kv_format'"),
        ({"model": "demo", "port": 80}, "Serve's proxies listen"),
        ({"model": "demo", "restart": True}, "Serve starts a replica again"),
        ({"model": "demo", "max_running": "many"}, "max_running must be an integer"),
        ({"model": "demo", "replicas": 0}, "replicas must be a number of at least 1"),
        ({"model": "demo", "replicas": 2, "autoscaling": {"max_replicas": 3}}, "exclude each other"),
        ({"model": "demo", "autoscaling": "yes"}, "autoscaling must be a mapping"),
        ({"model": "demo", "router": "best"}, "unknown router"),
        ({"model": "demo", "placement": {"gpus": 1}}, "unknown option of placement"),
        ({"model": "demo", "placement": {"hosts": 2}}, "let tp be a multiple of 2"),
        ({"model": "demo", "tp": 3, "placement": {"hosts": 2}}, "let tp be a multiple of 2"),
        ({"model": "demo", "placement": {"hosts": 0}}, "hosts must be a number of at least 1"),
        (
            {"model": "demo", "device": "cpu", "tp": 2, "placement": {"hosts": 2, "cpus": 0}},
            "needs something to be placed by",
        ),
        ({"model": "demo", "placement": {"cpus": -1}}, "cpus must be 0 or more"),
        ({"model": "demo", "placement": {"memory": "much"}}, "as a size"),
        ({"model": "demo", "router_options": {"speed": 1}}, "router_options 'speed' is not known"),
        ({"model": "demo", "router": "power-of-two", "router_options": {"queue": 1}}, "has no router_options"),
        (
            {"model": "demo", "replicas": 2, "kv_events": "tcp://*:5557", "kv_events_replay": "tcp://*:5558"},
            "let them be 2 apart",
        ),
        (
            {
                "model": "demo", "autoscaling": {"max_replicas": 64}, "kv_events": "tcp://*:5557",
                "kv_events_replay": "tcp://*:5564",
            },
            "let them be 8 apart",
        ),
        ({"model": "demo", "router_options": {"horizon": 0}}, "horizon must be at least 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(args: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        parse_args(args)


def test_a_replica_is_one_bundle_and_so_on_one_host() -> None:
    options = engine_options(parse_args(GPU))
    bundle = {"CPU": 4.0, "GPU": 1.0, "memory": float(2 << 30), "accelerator_type:H100": 0.001}
    assert options["placement_group_bundles"] == [bundle]
    assert options["placement_group_strategy"] == "STRICT_PACK"
    actor = options["ray_actor_options"]
    # Serve demands that the actor fits the first bundle.
    amounts = {
        "CPU": actor["num_cpus"],
        "GPU": actor["num_gpus"],
        "memory": actor["memory"],
        **actor["resources"],
    }
    assert amounts == bundle


def test_a_replica_of_several_hosts_has_a_bundle_on_each() -> None:
    placed = {**GPU["placement"], "hosts": 2, "labels": {"zone": "eu"}}
    options = engine_options(parse_args({**GPU, "tp": 4, "placement": placed}))
    (first, second) = options["placement_group_bundles"]
    assert first == second and first["GPU"] == 2.0
    assert options["placement_group_strategy"] == "STRICT_SPREAD"
    assert options["placement_group_bundle_label_selector"] == [{"zone": "eu"}] * 2
    assert options["ray_actor_options"]["num_gpus"] == 2


def test_ranks_are_of_one_host() -> None:
    options = engine_options(parse_args({"model": "demo", "tp": "4", "placement": {"cpus": 8}}))
    assert options["placement_group_bundles"] == [{"CPU": 8.0, "GPU": 4.0}]
    assert options["ray_actor_options"]["num_gpus"] == 4


def test_a_cpu_s_engine_takes_no_gpu() -> None:
    options = engine_options(parse_args({"model": "demo", "device": "cpu"}))
    assert options["placement_group_bundles"] == [{"CPU": 1.0}]
    assert options["ray_actor_options"]["num_gpus"] == 0


def test_no_resources_is_no_placement_group() -> None:
    options = engine_options(parse_args({"model": "demo", "device": "cpu", "placement": {"cpus": 0}}))
    assert "placement_group_bundles" not in options
    assert Placement(cpus=0).bundle(0) == {}


def test_labels_choose_the_host() -> None:
    options = engine_options(parse_args(GPU | {"placement": {"labels": {"ray.io/zone": "eu-1"}}}))
    assert options["placement_group_bundle_label_selector"] == [{"ray.io/zone": "eu-1"}]


def test_an_engine_is_given_what_it_runs_and_as_much_again() -> None:
    options = engine_options(parse_args({"model": "demo", "max_running": 8}))
    assert (options["max_ongoing_requests"], options["num_replicas"]) == (16, 1)
    options = engine_options(
        parse_args({"model": "demo", "autoscaling": {"max_replicas": 4}, "max_running": 8})
    )
    assert options["autoscaling_config"] == {"max_replicas": 4, "target_ongoing_requests": 4}
    assert "num_replicas" not in options


def test_a_front_answers_with_429_itself() -> None:
    options = front_options(parse_args({"model": "demo", "max_queue": 100, "fronts": 2, "drain": 5}))
    assert options["max_ongoing_requests"] > 100
    assert options["num_replicas"] == 2
    # A front outlives the engines that answer its requests.
    assert options["graceful_shutdown_timeout_s"] > 5


def test_the_docs_have_all_options() -> None:
    text = (Path(__file__).parents[3] / "docs/ray.md").read_text()
    names = {field.name for kind in (RayOptions, Placement) for field in fields(kind)} | set(ROUTERS)
    assert [name for name in sorted(names) if f"`{name}" not in text] == []


def test_without_ray_the_cure_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")

    monkeypatch.setattr("importlib.import_module", missing)
    with pytest.raises(ConfigError, match=r"nibble-llm\[ray\]"):
        _ = nibble.ray.build_app
    with pytest.raises(AttributeError, match="nonsense"):
        _ = nibble.ray.nonsense

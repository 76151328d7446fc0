"""deploy/ray: files that Ray Serve, KubeRay and Nibble can read, and that say the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from nibble.ray.options import engine_options, front_options, parse_args

FOLDER = Path(__file__).parents[3] / "deploy/ray"
SERVE: dict[str, Any] = yaml.safe_load((FOLDER / "serve.yaml").read_text())
SERVICE: dict[str, Any] = yaml.safe_load((FOLDER / "rayservice.yaml").read_text())
INNER: dict[str, Any] = yaml.safe_load(SERVICE["spec"]["serveConfigV2"])


def test_both_have_the_same_application() -> None:
    ((one,), (other,)) = SERVE["applications"], INNER["applications"]
    # Kubernetes has one kind of node here, so that Ray need not be told.
    assert one["args"]["placement"].pop("accelerator_type") == "H100"
    assert one == other


@pytest.mark.parametrize("config", [SERVE, INNER], ids=["serve.yaml", "rayservice.yaml"])
def test_nibble_takes_the_arguments(config: dict[str, Any]) -> None:
    (application,) = config["applications"]
    assert application["import_path"] == "nibble.ray:build_app"
    options = parse_args(application["args"])
    assert options.gpus == 1
    assert options.ray.autoscaling is not None


@pytest.mark.parametrize("config", [SERVE, INNER], ids=["serve.yaml", "rayservice.yaml"])
@pytest.mark.filterwarnings("ignore")
def test_serve_takes_the_config(config: dict[str, Any]) -> None:
    pytest.importorskip("ray.serve")
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(config)
    assert schema.applications[0].import_path == "nibble.ray:build_app"


def test_the_cluster_has_room_for_what_is_asked() -> None:
    options = parse_args(INNER["applications"][0]["args"])
    cluster = SERVICE["spec"]["rayClusterConfig"]
    (group,) = cluster["workerGroupSpecs"]
    (worker,) = group["template"]["spec"]["containers"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    (bundle,) = engine_options(options)["placement_group_bundles"]
    limits = worker["resources"]["limits"]
    assert bundle["GPU"] <= int(limits["nvidia.com/gpu"])
    assert bundle["CPU"] <= int(limits["cpu"])
    assert group["maxReplicas"] >= INNER["applications"][0]["args"]["autoscaling"]["max_replicas"]
    cpus = front_options(options)["ray_actor_options"]["num_cpus"]
    assert cpus <= int(head["resources"]["limits"]["cpu"])
    assert {"name": "serve", "containerPort": 8000} in head["ports"]
    # A pod outlives what Serve gives its engine to end.
    seconds = group["template"]["spec"]["terminationGracePeriodSeconds"]
    assert seconds > engine_options(options)["graceful_shutdown_timeout_s"]


def test_the_manifest_is_kuberay_s() -> None:
    assert (SERVICE["apiVersion"], SERVICE["kind"]) == ("ray.io/v1", "RayService")
    cluster = SERVICE["spec"]["rayClusterConfig"]
    image = (FOLDER / "Dockerfile").read_text().splitlines()
    base = next(line for line in image if line.startswith("FROM "))
    # Versions of one cluster must be the same.
    assert f"ray:{cluster['rayVersion']}-" in base
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_the_image_has_all_that_the_other_has() -> None:
    def copies(text: str) -> set[str]:
        lines = [line.replace("--chown=ray ", "") for line in text.splitlines()]
        return {line for line in lines if line.startswith("COPY ")}

    assert copies((FOLDER / "Dockerfile").read_text()) == copies((FOLDER.parent / "Dockerfile").read_text())

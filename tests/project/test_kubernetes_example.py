"""The example for Kubernetes, as far as it can be checked without a cluster: its parts agree."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

EXAMPLE = Path(__file__).parents[2] / "examples" / "kubernetes"
DOCKERFILE = (EXAMPLE / "Dockerfile").read_text()


@pytest.fixture(scope="module")
def objects() -> dict[str, Any]:
    return {one["kind"]: one for one in yaml.safe_load_all((EXAMPLE / "orders.yaml").read_text())}


@pytest.fixture(scope="module")
def driver(objects: dict[str, Any]) -> dict[str, Any]:
    (container,) = objects["StatefulSet"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def test_names_agree(objects: dict[str, Any]) -> None:
    account = objects["ServiceAccount"]["metadata"]["name"]
    binding, role = objects["RoleBinding"], objects["Role"]["metadata"]["name"]
    assert binding["roleRef"]["name"] == role
    assert [subject["name"] for subject in binding["subjects"]] == [account]
    pods = objects["StatefulSet"]["spec"]
    assert pods["template"]["spec"]["serviceAccountName"] == account
    assert pods["serviceName"] == objects["Service"]["metadata"]["name"]
    labels = pods["template"]["metadata"]["labels"]
    assert pods["selector"]["matchLabels"] == objects["Service"]["spec"]["selector"] == labels
    assert pods["replicas"] == 1


def test_executors_reach_the_driver(objects: dict[str, Any], driver: dict[str, Any]) -> None:
    conf = dict(re.findall(r"--conf=([\w.]+)=(\S+)", "\n".join(driver["command"])))
    service = objects["Service"]
    assert conf["spark.driver.host"] == f"$(POD).{service['metadata']['name']}"
    ports = {str(port["port"]) for port in service["spec"]["ports"]}
    assert ports == {conf["spark.driver.port"], conf["spark.blockManager.port"]}
    assert conf["spark.kubernetes.container.image"] == driver["image"]
    used = set(re.findall(r"\$\((\w+)\)", " ".join(driver["command"])))
    assert used <= {variable["name"] for variable in driver["env"]}


def test_image_has_one_spark() -> None:
    """The base images of a stage know only arguments that are declared before the first one."""
    assert len(set(re.findall(r"ARG SPARK=(\S+)", DOCKERFILE))) == 1
    assert '"pyspark==${SPARK}"' in DOCKERFILE
    assert DOCKERFILE.count("ARG SPARK=") == 2

"""The Kubernetes manifest follows the schemas of Kubernetes, and agrees with the image and the server."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.clients import environments

ROOT = Path(__file__).parents[2]
MANIFEST = ROOT / "services/examples/kubernetes.yaml"


def documents() -> dict[str, dict[str, Any]]:
    return {document["kind"]: document for document in yaml.safe_load_all(MANIFEST.read_text())}


@pytest.mark.nightly
def test_it_follows_the_schemas() -> None:
    try:
        python = environments.python("pinned")
    except environments.Missing as why:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"the schemas are not installed: {why}")
    words = [python, "-m", "kubernetes_validate", "--strict", "--kubernetes-version", "1.34"]
    done = subprocess.run([*words, MANIFEST], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") == len(documents())


def test_the_pod_is_that_of_the_image() -> None:
    image = (ROOT / "Dockerfile").read_text()
    pod = documents()["Deployment"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (exposed,) = re.findall(r"EXPOSE (\d+)", image)
    assert container["ports"] == [{"name": "http", "containerPort": int(exposed)}]
    assert container["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http"}
    user, group = re.findall(r"^USER (\d+):(\d+)", image, re.MULTILINE)[0]
    assert (pod["securityContext"]["runAsUser"], pod["securityContext"]["runAsGroup"]) == (int(user), int(group))
    folders = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert folders == {re.findall(r"VOLUME (\S+)", image)[0], "/tmp"}  # the root is read-only
    assert container["resources"]["limits"]["memory"] == container["resources"]["requests"]["memory"]


def test_parts_refer_to_each_other() -> None:
    parts = documents()
    assert parts.keys() == {"PersistentVolumeClaim", "Deployment", "Service"}
    spec = parts["Deployment"]["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == parts["Service"]["spec"]["selector"] == labels
    pod = spec["template"]["spec"]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    claim = volumes["data"]["persistentVolumeClaim"]["claimName"]
    assert claim == parts["PersistentVolumeClaim"]["metadata"]["name"]
    for container in (*pod["initContainers"], *pod["containers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    assert {port["targetPort"] for port in parts["Service"]["spec"]["ports"]} == {"http"}

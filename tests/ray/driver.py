"""A cluster of Ray with two nodes on this machine, in a process that reads commands: a JSON array in each line.

The process of the tests stays free of Ray's threads, signals and warnings. Each line is answered with one.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from jaxserve.ray import application
from jaxserve.ray.profile import load_profile
from tests.e2e import fake_device

_NUM_CPUS = 0.4
"""A node has one CPU, as Ray starts a process for each at once; so it holds two engines."""


def build_fake(settings: dict[str, Any]) -> serve.Application:
    """Return an application whose devices alone are fake."""
    loaded = load_profile(None, settings)
    return application(loaded, num_cpus=_NUM_CPUS, load=fake_device.load, engine_module="tests.e2e.fake_device")


class Driver:
    """The cluster; Serve's proxy listens on `port`."""

    def __init__(self, port: int) -> None:
        self._cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
        self._cluster.add_node(num_cpus=1)
        ray.init(address=self._cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")

    def deploy(self, application: dict[str, Any]) -> None:
        """Apply a configuration as `serve deploy` does it."""
        schema = ServeDeploySchema.model_validate({"applications": [application]})
        _get_global_client().deploy_apps(schema)

    def status(self) -> dict[str, Any]:
        """Return the state of the application, and how many replicas of the engine are in which state."""
        found = serve.status().applications.get("llm")
        engine = None if found is None else found.deployments.get("engine")
        return {
            "status": None if found is None else found.status.value,
            "message": "" if found is None else found.message,
            "replicas": {} if engine is None else engine.replica_states,
        }

    def metrics_ports(self) -> list[int]:
        """Return the ports where Ray's agents show metrics."""
        return [node["MetricsExportPort"] for node in ray.nodes()]

    def shutdown(self) -> None:
        """End Serve."""
        serve.shutdown()

    def end(self) -> None:
        """End the nodes."""
        ray.shutdown()
        self._cluster.shutdown()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    driver = Driver(int(sys.argv[1]))
    print("null", file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(driver, name)(*arguments)), file=answers, flush=True)

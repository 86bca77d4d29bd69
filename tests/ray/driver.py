"""A cluster of Ray with two nodes on this machine, in a process that reads commands: one JSON array in each line.

The tests' own process stays free of Ray's threads, signals and warnings. It answers each line with one of its own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema

from jaxserve.ray import application, build
from jaxserve.ray.profile import load_profile
from tests.e2e import fake_device

_NODE_CPUS = 3


def build_fake(settings: dict[str, Any]) -> serve.Application:
    """Return an application whose devices alone are fake."""
    return application(
        load_profile(None, settings),
        num_cpus=0.5,
        load=fake_device.load,
        engine_module="tests.e2e.fake_device",
    )


class _Driver:
    def __init__(self, port: int) -> None:
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": _NODE_CPUS, "include_dashboard": False}
        )
        self._cluster.add_node(num_cpus=_NODE_CPUS)
        ray.init(address=self._cluster.address, log_to_driver=False)
        serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")

    def deploy(self, *applications: dict[str, Any]) -> None:
        """Apply a configuration as `serve deploy` takes it."""
        _get_global_client().deploy_apps(ServeDeploySchema.model_validate({"applications": applications}))

    def replicas(self, name: str) -> dict[str, int]:
        """Return how many replicas of the deployment `engine` are in which state."""
        return dict(serve.status().applications[name].deployments["engine"].replica_states)

    def status(self, name: str) -> str:
        return serve.status().applications[name].status.value

    def metrics_ports(self) -> list[int]:
        """Return the ports at which Ray's agents show metrics."""
        return [node["MetricsExportPort"] for node in ray.nodes()]

    def shutdown(self) -> None:
        """End all that Serve started."""
        serve.shutdown()

    def end(self) -> None:
        ray.shutdown()
        self._cluster.shutdown()


if __name__ == "__main__":
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    t = time.time()
    driver = _Driver(int(sys.argv[1]))
    print(json.dumps(time.time() - t), file=answers, flush=True)
    for line in sys.stdin:
        name, *arguments = json.loads(line)
        print(json.dumps(getattr(driver, name)(*arguments)), file=answers, flush=True)

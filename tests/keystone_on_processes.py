"""Run by test_mesh.py in each process of a mesh: serves the keystone's requests; process 0 prints a JSON line.

python -m tests.keystone_on_processes MODEL SHAPE NNODES NODE_RANK ADDRESS
"""

from __future__ import annotations

import json
import os
import sys

from jaxserve.engine.multihost.process_group import ProcessGroup
from jaxserve.worker import build_follower
from tests.keystone_on_meshes import MODELS, MORE, serve_on_mesh, settings


def main(model: str, shape: str, nnodes: int, node_rank: int, address: str) -> None:
    mesh, _, kind = shape.partition("-")
    config = settings(model, mesh, **MORE.get(kind, {}), nnodes=nnodes, node_rank=node_rank, dist_init_addr=address)
    group = ProcessGroup.connect(config, lambda reason: print(reason, file=sys.stderr))
    if node_rank > 0:
        execute, _ = build_follower(config, group)
        while True:
            execute(group.next_command())
    print(json.dumps({"shape": shape, **serve_on_mesh(config, group, MODELS[kind])}), flush=True)
    group.leave("all requests are answered")
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5])

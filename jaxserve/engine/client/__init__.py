"""The engine's interface for the rest of jaxserve: other packages import from `engine/` only what is listed here."""

from jaxserve.engine.client.async_client import EngineClient
from jaxserve.engine.client.engine import Engine, attach_engine, launch_engine, launch_follower
from jaxserve.engine.client.engine_processes import EngineProcesses
from jaxserve.engine.client.in_process import InProcessEngine, check_not_forked, is_forked
from jaxserve.engine.client.placements import PlacementBroadcast, PlacementListener
from jaxserve.engine.client.prefix_index import PrefixIndex
from jaxserve.engine.client.replica_router import ReplicaCost, replica_cost
from jaxserve.engine.client.shared_engine import SharedEngine
from jaxserve.engine.process.launch_protocol import EngineEndpoint

__all__ = [
    "Engine",
    "EngineClient",
    "EngineEndpoint",
    "EngineProcesses",
    "InProcessEngine",
    "PlacementBroadcast",
    "PlacementListener",
    "PrefixIndex",
    "ReplicaCost",
    "SharedEngine",
    "attach_engine",
    "check_not_forked",
    "is_forked",
    "launch_engine",
    "launch_follower",
    "replica_cost",
]

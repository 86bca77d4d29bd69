"""The engine's interface for the rest of jaxserve: other packages import from `engine/` only what is listed here."""

from jaxserve.engine.client.async_client import EngineClient
from jaxserve.engine.client.engine import Engine, launch_engine, launch_follower
from jaxserve.engine.client.in_process import InProcessEngine, check_not_forked, is_forked
from jaxserve.engine.client.shared_engine import SharedEngine

__all__ = [
    "Engine",
    "EngineClient",
    "InProcessEngine",
    "SharedEngine",
    "check_not_forked",
    "is_forked",
    "launch_engine",
    "launch_follower",
]

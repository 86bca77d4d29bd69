"""The engine as its users see it: the only part of `engine/` that rooms outside of it import."""

from jaxserve.engine.client.async_client import EngineClient
from jaxserve.engine.client.engine import Engine, launch_engine, launch_follower
from jaxserve.engine.client.in_process import InProcessEngine
from jaxserve.engine.client.shared_engine import SharedEngine

__all__ = ["Engine", "EngineClient", "InProcessEngine", "SharedEngine", "launch_engine", "launch_follower"]

"""Replicas on Ray Serve: `jaxserve.ray:build` makes a Serve application of a profile (extra `ray`, docs/ray.md)."""

from importlib.util import find_spec

if find_spec("ray") is None:
    raise ModuleNotFoundError("jaxserve.ray needs Ray Serve: pip install 'jaxserve[ray]'")

from jaxserve.ray.application import application, build
from jaxserve.ray.autoscaling import scale_on_queue
from jaxserve.ray.prefix_router import CachedPrefixRouter

__all__ = ["CachedPrefixRouter", "application", "build", "scale_on_queue"]

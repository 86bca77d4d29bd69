"""Replicas on Ray Serve: `jaxserve.ray:build` makes a Serve application of a profile (extra `ray`, docs/ray.md)."""

try:
    import ray.serve
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"jaxserve.ray needs Ray ({error}): pip install 'jaxserve[ray]'") from error

from jaxserve.ray.application import application, build
from jaxserve.ray.autoscaling import scale_on_queue
from jaxserve.ray.prefix_router import CachedPrefixRouter

__all__ = ["CachedPrefixRouter", "application", "build", "scale_on_queue"]

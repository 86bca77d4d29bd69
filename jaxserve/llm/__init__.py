"""Offline generation and pooling."""

from jaxserve.llm.llm import LLM
from jaxserve.llm.outputs import RequestOutput

__all__ = ["LLM", "RequestOutput"]

"""Families whose layers have mixtures of experts instead of a feed-forward block."""

from jaxserve.models.mixtures import glm, gpt_oss, minimax, mixtral, olmoe, qwen

__all__ = ["glm", "gpt_oss", "minimax", "mixtral", "olmoe", "qwen"]

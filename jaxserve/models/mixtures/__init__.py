"""Families whose layers have mixtures of experts instead of a feed-forward block."""

from jaxserve.models.mixtures import deepseek, glm, gpt_oss, minimax, mixtral, olmoe, qwen

__all__ = ["deepseek", "glm", "gpt_oss", "minimax", "mixtral", "olmoe", "qwen"]

"""Encoders: models whose tokens see those after them, too, and that give vectors instead of tokens."""

from jaxserve.models.encoders import bert, gte, modernbert, mpnet, nomic

__all__ = ["bert", "gte", "modernbert", "mpnet", "nomic"]

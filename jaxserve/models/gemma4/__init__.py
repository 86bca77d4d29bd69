"""Gemma 4: layers with full attention have larger heads than those with a window, and their keys may be values too.

In the small models the last layers reuse keys and values of earlier ones, and each layer has vectors of its own for
tokens. A mixture has experts beside the MLP of each layer. "Unified" models differ in their encoders only.
"""

from jaxserve.models.gemma4.config import parse
from jaxserve.models.gemma4.model import abstract, embed, head, layers

__all__ = ["abstract", "embed", "head", "layers", "parse"]

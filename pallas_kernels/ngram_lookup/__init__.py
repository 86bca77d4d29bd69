"""Drafts by prompt lookup."""

from pallas_kernels.ngram_lookup.api import propose
from pallas_kernels.ngram_lookup.index import NgramIndex, NgramLookup
from pallas_kernels.ngram_lookup.reference import remember

__all__ = ["NgramIndex", "NgramLookup", "propose", "remember"]

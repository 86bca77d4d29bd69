"""Sampling by its definition, one row at a time in float64 numpy: which tokens may be drawn, and how often."""

from __future__ import annotations

import numpy as np

from jaxserve.api_types import SamplingParams
from jaxserve.step_plan import SlotOpen


def adjusted(logits: np.ndarray, opened: SlotOpen) -> np.ndarray:
    """Return logits after penalties, bias and forbidden stop ids, for the token after `prompt_ids + output_ids`."""
    sampling, logits = opened.sampling, logits.astype(np.float64).copy()
    for token in set(opened.prompt_ids) | set(opened.output_ids):
        if logits[token] > 0:
            logits[token] /= sampling.repetition_penalty
        else:
            logits[token] *= sampling.repetition_penalty
    for token in set(opened.output_ids):
        times = opened.output_ids.count(token)
        logits[token] -= sampling.frequency_penalty * times + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        logits[token] += bias
    if len(opened.output_ids) < sampling.min_tokens:
        logits[list(opened.stop_ids)] = -np.inf
    return logits


def probabilities(logits: np.ndarray, opened: SlotOpen) -> np.ndarray:
    """Return the distribution of the next token; tokens that may not be drawn have probability 0."""
    sampling = opened.sampling
    logits = adjusted(logits, opened)
    if sampling.temperature == 0:
        return (np.arange(len(logits)) == np.argmax(logits)).astype(np.float64)
    return _truncated(np.exp((logits - logits.max()) / sampling.temperature), sampling)


def _truncated(weights: np.ndarray, sampling: SamplingParams) -> np.ndarray:
    order = np.argsort(-weights, kind="stable")
    weights = weights / weights.sum()
    if sampling.top_k > 0:
        weights[order[sampling.top_k :]] = 0
        weights /= weights.sum()
    if sampling.top_p < 1:
        enough = int(np.argmax(np.cumsum(weights[order]) >= sampling.top_p))
        weights[order[enough + 1 :]] = 0
        weights /= weights.sum()
    weights[weights < sampling.min_p * weights.max()] = 0
    return weights / weights.sum()

"""Chooses the experts of tokens, and groups tokens by expert."""

from pallas_kernels.expert_routing.api import add_chosen, choose_experts, group_by_expert
from pallas_kernels.expert_routing.routing import Routing

__all__ = ["Routing", "add_chosen", "choose_experts", "group_by_expert"]

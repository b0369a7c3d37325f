"""Megatron-Core: executor of tp, pp, ep and etp, and gradient owner."""

from mixle_megatron.model import MegatronModel

__all__ = ["MegatronModel"]

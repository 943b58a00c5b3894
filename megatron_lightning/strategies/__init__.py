"""The Lightning strategy."""

from megatron_lightning.strategies.megatron import MegatronStrategy

__all__ = ["MegatronStrategy"]

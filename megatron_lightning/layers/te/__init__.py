"""Transformer Engine under the layers; see `backend.py`."""

from megatron_lightning.layers.te.backend import TransformerEngineBackend

__all__ = ["TransformerEngineBackend"]

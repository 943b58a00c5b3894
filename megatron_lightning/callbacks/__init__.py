"""Callbacks that know the strategy of this package. All are optional."""

from megatron_lightning.callbacks.sanity import Finding, SanityChecks, SanityError

__all__ = ["Finding", "SanityChecks", "SanityError"]

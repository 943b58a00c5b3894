"""Callbacks that know the strategy of this package. All are optional."""

from megatron_lightning.callbacks.expert_health import ExpertHealth
from megatron_lightning.callbacks.expert_load import ExchangeTimes, ExpertLoad, ExpertReading
from megatron_lightning.callbacks.hf_export import HFExport
from megatron_lightning.callbacks.ledger import TokenCounts, TokenLedger
from megatron_lightning.callbacks.sanity import Finding, SanityChecks, SanityError
from megatron_lightning.callbacks.timeline import StepTimeline

__all__ = [
    "ExchangeTimes",
    "ExpertHealth",
    "ExpertLoad",
    "ExpertReading",
    "Finding",
    "HFExport",
    "SanityChecks",
    "SanityError",
    "StepTimeline",
    "TokenCounts",
    "TokenLedger",
]

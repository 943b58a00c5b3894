"""Bytes of parameters, gradients and optimizer state on one rank, for each parameter it holds.

| sharding | parameters | gradients | masters and moments |
|---|---|---|---|
| none | all | all | all |
| optimizer (ZeRO-1, arXiv 1910.02054) | all | all | 1 / shards |
| fsdp (ZeRO-2/3) | 1 / shards, as the optimizer updates them | 1 / shards | moments, 1 / shards |

With bfloat16 weights, float32 gradients, masters and two float32 moments: 18, 6 + 12 / shards, and
16 / shards besides what is gathered.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class StateDtypes:
    """Bytes of one element of each kind."""

    parameters: int
    """Weights as the forward pass reads them."""
    main_parameters: int
    """Weights as the optimizer updates them; a copy of their own where this differs."""
    main_gradients: int
    """Sums over the micro-batches of a window."""
    moments: int
    """Optimizer state between steps."""
    num_moments: int = 2
    """Numbers that the optimizer keeps for each parameter: 2 for Adam, 1 for SGD with momentum."""

    @property
    def has_masters(self) -> bool:
        """Whether the optimizer works on copies."""
        return self.main_parameters != self.parameters


@dataclass(frozen=True, kw_only=True)
class StateBytes:
    """Bytes a parameter on one rank."""

    parameters: float
    gradients: float
    optimizer: float
    """Masters and moments on the device."""
    host: float
    """Masters and moments in CPU memory (`offload_optimizer`)."""

    @property
    def device(self) -> float:
        """All that is on the device."""
        return self.parameters + self.gradients + self.optimizer


def state_bytes(
    dtypes: StateDtypes, *, sharding: str = "none", shards: int = 1, offload: bool = False
) -> StateBytes:
    """Bytes a parameter with what is sharded divided by `shards` ranks (see the table above)."""
    moments = dtypes.num_moments * dtypes.moments
    if sharding == "fsdp" and shards > 1:  # shards are the masters
        return StateBytes(
            parameters=dtypes.main_parameters / shards,
            gradients=dtypes.main_gradients / shards,
            optimizer=moments / shards,
            host=0.0,
        )
    optimizer = moments + (dtypes.main_parameters if dtypes.has_masters else 0)
    share = optimizer / (1 if sharding == "none" else shards)
    return StateBytes(
        parameters=float(dtypes.parameters),
        gradients=float(dtypes.main_gradients),
        optimizer=0.0 if offload else share,
        host=share if offload else 0.0,
    )

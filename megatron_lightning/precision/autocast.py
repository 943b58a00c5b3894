"""No autocast inside of a network that is called from a step under autocast.

The layers of a network with a plan know their dtypes. What of them is compiled, fused, recorded in
graphs or computed again must not depend on who calls the network.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def without_autocast(device_type: str) -> torch.autocast:
    """The state outside of any autocast, that of its cache too."""
    return torch.autocast(device_type, enabled=False, cache_enabled=True)


def keep_autocast_out(module: nn.Module, device_type: str) -> None:
    """Let `module`, wherever it is called, run its forward without autocast of this device type.

    In place; its hooks stay outside. Nothing happens where that was done already.
    """
    if not isinstance(vars(module).get("forward"), _WithoutAutocast):
        module.forward = _WithoutAutocast(module, device_type)


class _WithoutAutocast:
    """Stands in a module's instance for `forward`.

    It holds a bound method, which a copy of the module (weight averaging makes some) binds to the
    copy, as pickle does; a function around it would go on calling the original.
    """

    def __init__(self, module: nn.Module, device_type: str) -> None:
        self.__wrapped__ = module.forward
        self.device_type = device_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward."""
        with without_autocast(self.device_type):
            return self.__wrapped__(*args, **kwargs)

"""Builds a torch optimizer from a config: two groups, with and without weight decay.

Any other optimizer from a module's `configure_optimizers` is as welcome; this is the default of the
model zoo.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from megatron_lightning.config.training import OptimizerConfig
from megatron_lightning.optim.schedules import WEIGHT_DECAY_GROUP_KEY

Groups = list[dict[str, Any]]


def build_optimizer(
    named_parameters: Mapping[str, Parameter] | Iterable[tuple[str, Parameter]],
    config: OptimizerConfig,
    global_shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Optimizer:
    """Make the optimizer over the parameters that require gradients.

    `global_shapes` names every parameter of the whole network, other pipeline stages included, with
    its unsplit shape; without it, the given parameters are taken for the whole. Both groups,
    "decay" and "no_decay", always exist, so that every stage's optimizer has the same structure.
    The fused kernel is used on CUDA, the foreach one elsewhere.

    ValueError for a bad number, or a no-decay glob that matches no parameter of the network.
    """
    errors = config.check()
    if errors:
        raise ValueError("; ".join(errors))
    parameters = {name: p for name, p in dict(named_parameters).items() if p.requires_grad}
    groups = _group(parameters, config, global_shapes or {})
    _check_globs(config.no_decay, global_shapes or parameters)
    on_cuda = bool(parameters) and all(parameter.is_cuda for parameter in parameters.values())
    return OPTIMIZERS[config.name](
        groups, config, {"fused": True} if on_cuda else {"foreach": True}
    )


def decays(name: str, shape: tuple[int, ...], config: OptimizerConfig) -> bool:
    """Return whether weight decay acts on parameter `name` of global shape `shape`."""
    if any(fnmatchcase(name, glob) for glob in config.no_decay):
        return False
    # A gated layer's bias is [2, F]: the name says what it is, not the number of dims.
    vector = len(shape) <= 1 or name.rsplit(".", 1)[-1] == "bias"
    return config.decay_vectors or not vector


def _group(
    parameters: Mapping[str, Parameter],
    config: OptimizerConfig,
    global_shapes: Mapping[str, tuple[int, ...]],
) -> Groups:
    members: dict[bool, list[Parameter]] = {True: [], False: []}
    seen: set[int] = set()
    for name, parameter in parameters.items():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            shape = global_shapes.get(name, tuple(parameter.shape))
            members[decays(name, shape, config)].append(parameter)
    return [
        {
            "params": members[decaying],
            "name": "decay" if decaying else "no_decay",
            "weight_decay": config.weight_decay if decaying else 0.0,
            WEIGHT_DECAY_GROUP_KEY: decaying,
        }
        for decaying in (True, False)
    ]


def _check_globs(globs: Iterable[str], names: Iterable[str]) -> None:
    names = list(names)
    idle = [glob for glob in globs if not any(fnmatchcase(name, glob) for name in names)]
    if idle:
        raise ValueError(
            f"optimizer.no_decay={idle}: matches none of the {len(names)} parameters (first:"
            f" {names[:3]}); correct the glob or remove it"
        )


def _adamw(groups: Groups, config: OptimizerConfig, kernel: dict[str, bool]) -> Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.AdamW(groups, lr=config.lr, betas=betas, eps=config.adam_eps, **kernel)


def _adam(groups: Groups, config: OptimizerConfig, kernel: dict[str, bool]) -> Optimizer:
    betas = (config.adam_beta1, config.adam_beta2)
    return torch.optim.Adam(groups, lr=config.lr, betas=betas, eps=config.adam_eps, **kernel)


def _sgd(groups: Groups, config: OptimizerConfig, kernel: dict[str, bool]) -> Optimizer:
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, **kernel)


OPTIMIZERS: Mapping[str, Callable[[Groups, OptimizerConfig, dict[str, bool]], Optimizer]] = {
    "adamw": _adamw,
    "adam": _adam,
    "sgd": _sgd,
}

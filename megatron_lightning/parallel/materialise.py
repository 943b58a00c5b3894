"""From the meta device to real memory: every rank makes its own part of the initial weights.

A module with `initials` (parameter attribute -> `Initial`) has its boxes drawn by canonical name,
element for element the same in every layout. Any other module is a user's: it is built one
submodule at a time at full size, its `reset_parameters()` runs in float32 on the CPU under a seed
made of (seed, name), and the result is cut. Buffers are recomputed by `reset_buffers()`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_lightning.config.plan import ParameterInfo
from megatron_lightning.parallel.fsdp import shard_info, shard_of
from megatron_lightning.parallel.random import Initial

Table = Mapping[str, ParameterInfo]


def materialise(
    network: nn.Module,
    table: Table,
    *,
    seed: int,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    drawn_dtype: torch.dtype | None = None,
    prefix: str = "",
) -> None:
    """Give every meta parameter and buffer memory and its initial value, in place.

    `table` and `prefix` are those of `apply_tensor_parallel`. `dtype`: of floating-point
    parameters; None keeps what each has. Values are drawn in float32, then cast. `drawn_dtype`: in
    its place for what `initials` draw (not for what a source gives), to keep it unrounded. What is
    real already keeps its values and is moved (and cast). Buffers keep their dtype. ValueError
    names modules whose values nothing defines.
    """
    device = torch.device(device)
    problems = unknown_values(network)
    if problems:
        raise ValueError("can't materialise the network:\n- " + "\n- ".join(problems))
    made: dict[int, nn.Parameter] = {}
    for path, module, held in _owned_parameters(network, table, prefix):
        fresh = {name: info for name, info in held.items() if id(getattr(module, name)) not in made}
        drawn = _draw(path, module, fresh, seed, device, dtype, drawn_dtype or dtype)
        for name in held:
            old = getattr(module, name)
            if id(old) not in made:
                value = drawn[name] if old.is_meta else _moved(old.detach(), device, dtype)
                made[id(old)] = nn.Parameter(value, requires_grad=old.requires_grad)
    _assign_all(network, made)
    _fill_buffers(network, device, prefix)


def initial_values(
    network: nn.Module, table: Table, *, seed: int, prefix: str = ""
) -> dict[nn.Parameter, Callable[[], Tensor]]:
    """For every parameter that `initials` draw, how to draw it again, in float32 and unrounded: a
    function that returns values of the parameter's local shape on its device, of a fully sharded
    one those of this rank's shard.
    """
    found: dict[nn.Parameter, Callable[[], Tensor]] = {}
    for _, module, held in _owned_parameters(network, table, prefix, sharded=True):
        initials = _initials(module) or {}
        for name, info in held.items():
            parameter = getattr(module, name)
            repeats = name in initials and initials[name].can_repeat
            if repeats and parameter.is_floating_point():
                found.setdefault(parameter, partial(_drawn, initials[name], parameter, info, seed))
    return found


def _drawn(initial: Initial, like: Tensor, info: ParameterInfo, seed: int) -> Tensor:
    if isinstance(like, DTensor):
        like, begins = shard_of(like)
        info = shard_info(info, begins, like.shape)
    value = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
    if all(info.sizes):  # a shard may be nothing but padding
        _fill(initial, value, info, seed)
    return value


def _fill(initial: Initial, value: Tensor, info: ParameterInfo, seed: int) -> None:
    initial.fill(
        value,
        seed=seed,
        name=info.name,
        global_shape=info.global_shape,
        offsets=info.offsets,
        sizes=info.sizes,
    )


def unknown_values(network: nn.Module) -> list[str]:
    """Explain which modules on the meta device could not get back their parameters or buffers."""
    problems = []
    for path, module in network.named_modules():
        label = f"{path or 'network'} ({type(module).__name__})"
        initials = _initials(module)
        missing = [name for name, _ in _meta(module) if name not in (initials or {})]
        if initials is not None and missing:
            problems.append(f"{label}: `initials` lacks {missing}")
        if initials is None and missing and not _has(module, "reset_parameters"):
            problems.append(
                f"{label}: defines neither `initials` nor reset_parameters(); add one, or build the"
                " module on a real device"
            )
        if lost := lost_buffers(module):
            problems.append(f"{label}: nothing recomputes its buffers {lost}; add reset_buffers()")
    return problems


def lost_buffers(module: nn.Module) -> list[str]:
    """Own buffers of a module that nothing would recompute after it was on the meta device.

    `reset_buffers()` recomputes them; for torch's and users' modules without `initials`,
    `reset_parameters()` counts too (batch norms).
    """
    resets = _has(module, "reset_buffers")
    if _initials(module) is None:
        resets |= _has(module, "reset_parameters")
    names = [name for name, buffer in module.named_buffers(recurse=False) if buffer is not None]
    return [] if resets else [name for name in names if module.get_buffer(name).is_meta]


def _owned_parameters(
    network: nn.Module, table: Table, prefix: str, *, sharded: bool = False
) -> Iterator[tuple[str, nn.Module, dict[str, ParameterInfo]]]:
    """(path, module, own parameters' table entries); modules that own a tied parameter come first.
    `sharded`: also of those that are sharded (and filled) already.

    So a tied parameter is drawn by its owner's `initials`, whichever module stands first.
    """
    by_id = {id(parameter): table[prefix + name] for name, parameter in network.named_parameters()}
    found = []
    for path, module in network.named_modules():
        held = {name: by_id[id(p)] for name, p in _own(module, sharded=sharded)}
        if held:
            names = [prefix + (f"{path}.{name}" if path else name) for name in held]
            foreign = any(
                info.name != name for info, name in zip(held.values(), names, strict=True)
            )
            found.append((foreign, path, module, held))
    for _, path, module, held in sorted(found, key=lambda entry: entry[0]):
        yield path, module, held


def _draw(
    path: str,
    module: nn.Module,
    held: dict[str, ParameterInfo],
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
    drawn_dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Local values of the module's meta parameters."""
    meta = {name: held[name] for name, _ in _meta(module) if name in held}
    if not meta:
        return {}
    initials = _initials(module)
    if initials is None:
        return _draw_whole_module(path, module, meta, seed, device, dtype)
    values = {}
    for name, info in meta.items():
        like = getattr(module, name)
        wanted = drawn_dtype if initials[name].can_repeat else dtype
        value = torch.empty(like.shape, dtype=_cast(like.dtype, wanted), device=device)
        _fill(initials[name], value, info, seed)
        values[name] = value
    return values


@torch.no_grad()
def _draw_whole_module(
    path: str,
    module: nn.Module,
    meta: dict[str, ParameterInfo],
    seed: int,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, Tensor]:
    """Run `reset_parameters` on the whole parameters in float32 on the CPU, then cut the boxes."""
    kept = {name: getattr(module, name) for name in meta}
    key = "/".join((str(seed), *sorted(info.name for info in meta.values())))
    digest = hashlib.blake2b(key.encode(), digest_size=8).digest()
    for name, info in meta.items():
        whole = torch.empty(info.global_shape, dtype=_cast(kept[name].dtype, torch.float32))
        setattr(module, name, nn.Parameter(whole, requires_grad=kept[name].requires_grad))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(int.from_bytes(digest, "little") >> 1)
        cast(Any, module).reset_parameters()
    values = {}
    for name, info in meta.items():
        whole = getattr(module, name).detach()
        setattr(module, name, kept[name])
        value = torch.zeros(kept[name].shape, dtype=_cast(whole.dtype, dtype), device=device)
        target = value
        for dim, (offset, size) in enumerate(zip(info.offsets, info.sizes, strict=True)):
            whole, target = whole.narrow(dim, offset, size), target.narrow(dim, 0, size)
        target.copy_(whole)
        values[name] = value
    return values


def _assign_all(network: nn.Module, made: dict[int, nn.Parameter]) -> None:
    for module in network.modules():
        for name, old in _own(module):
            setattr(module, name, made[id(old)])


def _fill_buffers(network: nn.Module, device: torch.device, prefix: str) -> None:
    """Recompute buffers, or fill those that have an `Initial` by it, whole on every rank."""
    for path, module in network.named_modules():
        lost = [n for n, b in module.named_buffers(recurse=False) if b is not None and b.is_meta]
        for name, buffer in list(module.named_buffers(recurse=False)):
            real = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
            module._buffers[name] = real
        if not lost:
            continue
        if _has(module, "reset_buffers"):
            cast(Any, module).reset_buffers()
        else:
            _reset_plain_buffers(module)
        initials = _initials(module) or {}
        for name in (name for name in lost if name in initials):
            buffer = module.get_buffer(name)
            shape = tuple(buffer.shape)
            full_name = prefix + (f"{path}.{name}" if path else name)
            initials[name].fill(
                buffer,
                seed=0,
                name=full_name,
                global_shape=shape,
                offsets=(0,) * len(shape),
                sizes=shape,
            )


@torch.no_grad()
def _reset_plain_buffers(module: nn.Module) -> None:
    """Recompute buffers by `reset_parameters` and put the parameters' values back."""
    kept = {name: parameter.clone() for name, parameter in _own(module)}
    with torch.random.fork_rng(devices=[]):
        cast(Any, module).reset_parameters()
    for name, value in kept.items():
        getattr(module, name).copy_(value)


def _own(module: nn.Module, *, sharded: bool = False) -> list[tuple[str, nn.Parameter]]:
    """The module's own parameters, without those that are sharded (and filled) already."""
    held = module.named_parameters(recurse=False, remove_duplicate=False)
    return [(name, p) for name, p in held if sharded or not isinstance(p, DTensor)]


def _meta(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in _own(module) if parameter.is_meta)


def _initials(module: nn.Module) -> Mapping[str, Initial] | None:
    return cast(Any, module).initials if hasattr(module, "initials") else None


def _has(module: nn.Module, method: str) -> bool:
    return callable(getattr(module, method, None))


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point else own


def _moved(value: Tensor, device: torch.device, dtype: torch.dtype | None) -> Tensor:
    return value.to(device=device, dtype=_cast(value.dtype, dtype))

"""The side of `checkpoint.py` that runs Megatron-Core, on CPUs. Imports nothing of this package.

Megatron-Core wants CUDA in a few places. What is changed here: factories that ask for a CUDA
device make CPU tensors, `.cuda()` and synchronisation do nothing, `Tensor.type()` says
`torch.cuda...`, and loading the form `fully_reshardable` leaves alone the step count that torch's
Adam has in its state, where those of Transformer Engine and Apex have none.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class _OnCpu(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


def _without_cuda() -> None:
    own_type = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if args or kwargs:
            return own_type(self, *args, **kwargs)
        return "torch.cuda." + own_type(self).rsplit(".", 1)[-1]

    torch.Tensor.type = type_
    torch.Tensor.cuda = lambda self, *_, **__: self
    torch.cuda.current_device = lambda: "cpu"
    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Stream = lambda *_, **__: None
    _OnCpu().__enter__()


def _keep_steps() -> None:
    """Torch's Adam counts steps in its state, where the loading of one form doesn't expect it."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    own = DistributedOptimizer._set_main_param_and_optimizer_states

    def set_(self: Any, parameter: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, place = self.model_param_group_index_map[parameter]
        main = self.optimizer.param_groups[group]["params"][place]
        own(self, parameter, {"step": self.optimizer.state[main]["step"], **tensors})

    DistributedOptimizer._set_main_param_and_optimizer_states = set_


class Megatron:
    """A GPT after one optimizer step, and ways to save and load it."""

    def __init__(self, form: str, sizes: dict[str, int], tensor_size: int) -> None:
        _without_cuda()
        from megatron.core import dist_checkpointing, parallel_state
        from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCallsQueue
        from megatron.core.distributed import DistributedDataParallel as Wrapped
        from megatron.core.distributed import DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer import TransformerConfig

        _keep_steps()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
        config = TransformerConfig(
            num_layers=sizes["num_layers"],
            hidden_size=sizes["hidden_size"],
            num_attention_heads=sizes["num_attention_heads"],
            tensor_model_parallel_size=tensor_size,
            use_cpu_initialization=True,
            bf16=True,
            params_dtype=torch.bfloat16,
            pipeline_dtype=torch.bfloat16,
        )
        network = GPTModel(
            config=config,
            transformer_layer_spec=get_gpt_layer_local_spec(),
            vocab_size=sizes["vocab_size"],
            max_sequence_length=64,
            share_embeddings_and_output_weights=True,
        ).bfloat16()
        ddp_config = DistributedDataParallelConfig(use_distributed_optimizer=True)
        self.model = Wrapped(config, ddp_config, network)
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            use_distributed_optimizer=True,
            params_dtype=torch.bfloat16,
        )
        self.optimizer = get_megatron_optimizer(optimizer, [self.model])
        for parameter in self.model.parameters():
            parameter.main_grad.normal_(std=1e-3)
        self.optimizer.step()
        self.metadata = {
            "distrib_optim_sharding_type": form,
            "non_homogeneous_layers": True,
            "singleton_local_shards": False,
            "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "chained_optim_avoid_prefix": True,
        }
        self._store = dist_checkpointing
        self._queue = AsyncCallsQueue(persistent=False)

    def parameters(self) -> int:
        """Of the whole model, roughly: those of this rank times the tensor size."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _state(self, *, loading: bool = False) -> dict[str, Any]:
        state = {"model": self.model.module.sharded_state_dict(metadata=self.metadata)}
        state["optimizer"] = self.optimizer.sharded_state_dict(
            state, is_loading=loading, metadata=self.metadata
        )
        return state

    def _folder(self, path: str) -> None:
        if dist.get_rank() == 0:
            os.makedirs(path)
        dist.barrier()

    def save(self, path: str) -> None:
        """Blocking."""
        self._folder(path)
        self._store.save(self._state(), path)

    def start(self, path: str) -> Callable[[], None]:
        """In the background; the result waits for it and commits it."""
        self._folder(path)
        known = inspect.signature(self._store.save).parameters
        own = {"async_strategy": "mcore"} if "async_strategy" in known else {}
        request = self._store.save(self._state(), path, async_sharded_save=True, **own)
        self._queue.schedule_async_request(request)
        return lambda: self._queue.maybe_finalize_async_calls(blocking=True) and None

    def load(self, path: str) -> None:
        """Model and optimizer."""
        loaded = self._store.load(self._state(loading=True), path)
        self.model.module.load_state_dict(loaded["model"])
        self.optimizer.load_state_dict(loaded["optimizer"])

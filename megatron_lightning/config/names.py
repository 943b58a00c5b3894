"""Names that a class doesn't have: which of its own was meant.

Either the nearest by letters, or what stands here for a name of Megatron-LM, NeMo or Hugging Face.
Nothing is translated by itself: a config says what the run does in one vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any, Self, get_args, get_type_hints

ELSEWHERE: Mapping[str, str] = {
    # layout
    "tensor_model_parallel_size": "tensor_parallel_size",
    "pipeline_model_parallel_size": "pipeline_parallel_size",
    "context_model_parallel_size": "context_parallel_size",
    "virtual_pipeline_model_parallel_size": "pipeline.virtual_pipeline_size",
    "expert_model_parallel_size": "expert_parallel_size",
    "pipeline_model_parallel_layout": "pipeline.layout",
    "account_for_embedding_in_pipeline_split": "pipeline.embedding_cost",
    "account_for_loss_in_pipeline_split": "pipeline.head_cost",
    "cp_comm_type": "context.form",
    "hierarchical_context_parallel_sizes": "context.inner_size",
    "tp_comm_overlap": "runtime.overlap_tensor_parallel",
    "use_tp_pp_dp_mapping": "runtime.axis_order",
    "distributed_timeout_minutes": "runtime.timeout_seconds",
    "enable_cuda_graph": "runtime.cuda_graphs",
    "ddp": "data_parallel",
    "fsdp": "data_parallel.sharding",
    "use_distributed_optimizer": "data_parallel.sharding",
    "num_distributed_optimizer_instances": "data_parallel.replicas",
    "gradient_accumulation_fusion": "data_parallel.fuse_weight_gradients",
    "optimizer_cpu_offload": "data_parallel.offload_optimizer",
    "ckpt_async_save": "checkpoint.asynchronous",
    "recompute_granularity": "recompute.mode",
    "fp8": "quantization.recipe",
    "fp8_recipe": "quantization.recipe",
    "moe_token_dispatcher_type": "expert.dispatcher",
    # model
    "kv_channels": "head_dim",
    "normalization": "norm",
    "layernorm_epsilon": "norm_epsilon",
    "share_embeddings_and_output_weights": "tie_word_embeddings",
    "untie_embeddings_and_output_weights": "tie_word_embeddings",
    "activation_func": "activation",
    "position_embedding_type": "position_embedding",
    "num_moe_experts": "moe.num_experts",
    "mtp_num_layers": "multi_token_prediction.num_layers",
    "mtp_loss_scaling_factor": "multi_token_prediction.loss_scaling_factor",
    "num_hidden_layers": "num_layers",
    "num_key_value_heads": "num_query_groups",
    "intermediate_size": "ffn_hidden_size",
    "rms_norm_eps": "norm_epsilon",
    "rope_theta": "rotary.base",
    "sliding_window": "window_size",
    "hidden_act": "activation",
    "initializer_range": "init_method_std",
    # training
    "learning_rate": "lr",
    "min_learning_rate": "min_lr",
    "lr_warmup_iters": "lr_warmup_steps",
    "lr_decay_iters": "lr_decay_steps",
    "betas": "adam_beta1",
    "clip_grad": "the Trainer's gradient_clip_val",
    "train_iters": "the Trainer's max_steps",
    "global_batch_size": "the data module's global_batch_size",
    "seq_length": "the data module's seq_length",
}
"""Name of another program -> ours: a parameter, a field of a config in one (with a dot), or words
about what is no argument of the same class.
"""


@functools.cache
def arguments_of(kind: Any) -> Mapping[str, Any]:
    """Names that a class (or function) is called with -> the config dataclass that stands there,
    None where it is none. Empty where any name is taken.
    """
    made = kind.__init__ if isinstance(kind, type) else kind
    try:
        parameters = list(inspect.signature(made).parameters.values())
    except (TypeError, ValueError):  # of builtins
        return {}
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters):
        return {}
    try:
        hints = get_type_hints(made)
    except (NameError, TypeError):
        hints = {}
    names = [each.name for each in parameters if each.name != "self"]
    return {name: _config_of(hints.get(name)) for name in names}


def _config_of(hint: Any) -> type | None:
    options = (hint, *get_args(hint))
    return next((one for one in options if dataclasses.is_dataclass(one)), None)  # type: ignore[return-value]


def meant(name: str, known: Iterable[str]) -> list[str]:
    """Which of the `known` names, with dots if they lie deeper, stand for `name`; empty where none
    is near.
    """
    known = list(known)
    own = ELSEWHERE.get(name)
    if own is not None and (own in known or " " in own):
        return [own]
    last = {path.rpartition(".")[2]: path for path in reversed(known)}  # the shallowest wins
    if name in last:
        return [last[name]]
    prefixed = name.replace("_", ".", 1)  # moe_router_topk -> moe.router_topk
    if prefixed in known:
        return [prefixed]
    near = get_close_matches(name, last, 1, 0.7)
    begun = [one for one in last if len(name) > 2 and one.startswith(f"{name}_")]
    return [last[one] for one in (near or begun)[:1]]


def known_paths(kind: Any) -> list[str]:
    """The names that a class is called with, and those of the configs among them, with a dot."""
    own = arguments_of(kind)
    inner = [
        f"{name}.{field.name}"
        for name, config in own.items()
        if config is not None
        for field in dataclasses.fields(config)
    ]
    return [*own, *inner]


def remedy(kind: Any, name: str, prefix: str | None = None) -> str:
    """What to write in place of `name`, as an end of a sentence. In Python's form, or by a `prefix`
    in that of files and options, with dots.
    """
    found = meant(name, known_paths(kind))
    if not found:
        return f"it has {', '.join(arguments_of(kind))}"
    path = found[0]
    if " " in path:
        return f"that is {path}"
    if prefix is not None:
        return f"do you mean {prefix}{path}?"
    head, dot, field = path.partition(".")
    if not dot:
        return f"do you mean {head}?"
    return f"do you mean {head}={arguments_of(kind)[head].__name__}({field}=...)?"


class NamesArguments:
    """A class whose constructor answers a keyword that it doesn't have with the one that was
    meant.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """TypeError for unknown keywords, all in one message."""
        _check_keywords(cls, kwargs)
        return super().__new__(cls)


@dataclasses.dataclass(frozen=True, kw_only=True)
class NamesFields:
    """The same for frozen dataclasses; one itself, since parsers treat dataclasses with a base of
    another kind as any class.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """TypeError for unknown fields, all in one message."""
        _check_keywords(cls, kwargs)
        return super().__new__(cls)


def _check_keywords(kind: type, keywords: Mapping[str, Any]) -> None:
    known = arguments_of(kind) if keywords else {}
    wrong = [name for name in keywords if known and name not in known]
    if wrong:
        told = [f"{name} is no argument: {remedy(kind, name)}" for name in wrong]
        raise TypeError(f"{kind.__name__}: " + "; ".join(told))

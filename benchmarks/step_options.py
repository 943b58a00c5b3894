"""What the command line of `train_step.py` asks for: a shape, a network, a layout."""

import argparse
import ast
from dataclasses import fields, is_dataclass, replace
from typing import Any, get_args

from shapes import SHAPES

from megatron_lightning.config import (
    ContextConfig,
    DataParallelConfig,
    GPTConfig,
    MoEConfig,
    PipelineConfig,
    QuantizationConfig,
    RotaryConfig,
    RuntimeConfig,
)
from megatron_lightning.config.context import ContextForm
from megatron_lightning.config.parallel import ParallelConfig, ScheduleName
from megatron_lightning.config.quantization import REAL_RECIPES
from megatron_lightning.models.gpt import BackendName


def build_parser(description: str | None) -> argparse.ArgumentParser:
    """All options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--shapes", nargs="+", default=["a"], choices=sorted(SHAPES))
    parser.add_argument("--compile", action="store_true", help="torch.compile each layer")
    parser.add_argument("--backend", default="torch", choices=get_args(BackendName))
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--mirror", type=int, default=0, help="one rank of so many, alone")
    parser.add_argument("--rank", type=int, default=0, help="--mirror: which")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--ep", type=int, default=1)
    parser.add_argument("--cp", type=int, default=1)
    parser.add_argument("--seq", type=int, default=0, help="tokens a sample, not the shape's")
    parser.add_argument("--micro", type=int, default=0, help="samples a micro-batch")
    parser.add_argument("--accumulate", type=int, default=0, help="micro-batches a step and rank")
    parser.add_argument("--schedule", default="1f1b", choices=get_args(ScheduleName))
    parser.add_argument("--virtual", type=int, default=1, help="--pp: chunks of layers a rank")
    parser.add_argument("--layout", default="", help='--pp: stages, e.g. "Et*8|t*8L"')
    parser.add_argument("--context", default="ring", choices=get_args(ContextForm))
    parser.add_argument("--packed", action="store_true", help="samples full of short documents")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="of torch.compile: below"
                        " 1, cheap operations are computed again in backward")  # fmt: skip
    parser.add_argument("--set", nargs="+", action="extend", default=[], help="SECTION.FIELD=VALUE"
                        " of a config; --set may come again")  # fmt: skip
    parser.add_argument("--fp8", choices=REAL_RECIPES, help="recipe of the linear layers")
    parser.add_argument("--keep", type=int, default=0, help="--fp8: first and last layers in bf16")
    parser.add_argument("--sharding", default="none", choices=["none", "optimizer", "fsdp"])
    parser.add_argument("--no-fuse", action="store_true", help="autograd adds weight gradients")
    parser.add_argument("--forced", action="store_true", help="(c): all experts equally busy")
    parser.add_argument("--warm", type=int, default=4)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--timeline", default="", metavar="FOLDER", help="write where the last"
                        " step's time goes on every rank, and print a table")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="a table of the kernels of one step")
    parser.add_argument("--busy", action="store_true", help="profile a step for its busy share")
    parser.add_argument("--out", default="")
    return parser


def shape_of(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """The shape, with what the command line says instead."""
    given = {key: getattr(args, key) for key in ("seq", "micro", "accumulate")}
    return SHAPES[name] | {key: value for key, value in given.items() if value}


def network_of(shape: dict[str, Any], args: argparse.Namespace) -> GPTConfig:
    """The shape's network."""
    config = GPTConfig(
        vocab_size=shape["vocab"],
        num_layers=shape["layers"],
        hidden_size=shape["hidden"],
        ffn_hidden_size=shape["ffn"],
        num_attention_heads=shape["heads"],
        num_query_groups=shape["groups"],
        head_dim=shape.get("head_dim", 0),
        qk_layernorm=shape.get("qk_layernorm", False),
        rotary=RotaryConfig(base=shape.get("rope", 500000.0)),
        moe=experts_of(shape, args.forced),
        max_position_embeddings=shape["seq"],
    )
    return override(config, settings_of(args, network=True))


def experts_of(shape: dict[str, Any], forced: bool) -> MoEConfig | None:
    """The shape's experts; `forced`: all equally busy, whatever the router says."""
    experts: MoEConfig | None = shape.get("experts")
    if experts is None or not forced:
        return experts
    return replace(experts, load_balancing="forced", aux_loss_coeff=0.0)


def layout_of(args: argparse.Namespace) -> ParallelConfig:
    """The layout that was asked for."""
    config = ParallelConfig(
        tensor_parallel_size=args.tp,
        pipeline_parallel_size=args.pp,
        expert_parallel_size=args.ep,
        sequence_parallel=args.tp > 1,
        context_parallel_size=args.cp,
        pipeline=PipelineConfig(
            schedule=args.schedule,
            virtual_pipeline_size=args.virtual,
            layout=args.layout or None,
        ),
        context=ContextConfig(form=args.context),
        data_parallel=DataParallelConfig(
            sharding=args.sharding, fuse_weight_gradients=not args.no_fuse
        ),
        runtime=RuntimeConfig(compile_layers=args.compile),
        quantization=quantization(args),
    )
    return override(config, settings_of(args, network=False))


def quantization(args: argparse.Namespace) -> QuantizationConfig | None:
    """Low precision of the linear layers, if asked for."""
    if args.fp8 is None:
        return None
    return QuantizationConfig(
        recipe=args.fp8, kernels=args.backend, keep_first=args.keep, keep_last=args.keep
    )


def settings_of(args: argparse.Namespace, network: bool) -> list[str]:
    """What `--set` says of the network, or of the layout."""
    if not network:
        return [one for one in args.set if not one.startswith("network.")]
    return [one.removeprefix("network.") for one in args.set if one.startswith("network.")]


def override(config: Any, settings: list[str]) -> Any:
    """`config` with "field=value" or "section.field=value" set; values are Python literals or, if
    they are none, strings. ValueError for a name that isn't there.
    """
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            value: Any = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            value = text
        config = _with_field(config, name.split("."), value, setting)
    return config


def _with_field(config: Any, path: list[str], value: Any, setting: str) -> Any:
    known = [field.name for field in fields(config)] if is_dataclass(config) else []
    if path[0] not in known:
        raise ValueError(f"--set {setting}: {path[0]!r} is none of {', '.join(known) or 'nothing'}")
    if len(path) > 1:
        value = _with_field(getattr(config, path[0]), path[1:], value, setting)
    return replace(config, **{path[0]: value})


def ranks_of(args: argparse.Namespace) -> tuple[int, int]:
    """(ranks of the layout, data ranks of them)."""
    ranks = args.mirror or args.devices
    return ranks, ranks // (args.tp * args.pp * args.cp)


def asked_for(
    name: str, shape: dict[str, Any], layout: ParallelConfig, args: argparse.Namespace
) -> dict[str, Any]:
    """What the command line said, as far as it counts."""
    ranks, dp = ranks_of(args)
    return {
        "shape": name,
        "compile": args.compile,
        "devices": ranks,
        "mirror": f"rank {args.rank} of {args.mirror}" if args.mirror else None,
        "tp": args.tp,
        "pp": args.pp,
        "ep": args.ep,
        "forced": args.forced,
        "backend": args.backend,
        "fp8": args.fp8,
        "keep": args.keep if args.fp8 else None,
        "dp": dp,
        "cp": args.cp,
        "seq": shape["seq"],
        "micro": shape["micro"],
        "accumulate": shape["accumulate"],
        "schedule": layout.pipeline.schedule if args.pp > 1 else None,
        "virtual": layout.pipeline.virtual_pipeline_size if args.pp > 1 else None,
        "context": layout.context.form if args.cp > 1 else None,
        "packed": args.packed,
        "set": args.set,
        "memory_budget": args.memory_budget,
        "sharding": args.sharding,
        "fuse_weight_gradients": not args.no_fuse,
    }

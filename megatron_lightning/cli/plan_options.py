"""The options of `megatron-lightning plan`, with their texts."""

from __future__ import annotations

import argparse
from typing import get_args

from megatron_lightning.cli.errors import Parser
from megatron_lightning.cli.plan_request import DEFAULT_GPU, HARDWARE
from megatron_lightning.config.context import ContextForm
from megatron_lightning.config.expert import DispatcherName
from megatron_lightning.config.parallel import ScheduleName, ShardingName
from megatron_lightning.config.recompute import RecomputeMethod, RecomputeMode
from megatron_lightning.config.training import OptimizerName
from megatron_lightning.models.presets import PRESETS


def plan_parser() -> Parser:
    """The options of `megatron-lightning plan`."""
    parser = Parser("plan", "Check a layout, and show what it needs, without GPUs.")
    add = parser.add_argument
    add("--preset", choices=sorted(PRESETS), help="published architecture")
    add("--config", metavar="FILE", help="YAML of `megatron-lightning fit`; options override it")
    add("--set", action="append", metavar="FIELD=VALUE", help="change a field of the model")
    add("--num-layers", type=int, metavar="N", help="the same as --set num_layers=N")
    add("--gpus", type=int, metavar="N", help="number of GPUs")
    add("--gpus-per-node", type=int, metavar="N", help="GPUs of one node (default: 8)")
    add("--gpu", choices=sorted(HARDWARE), help=f"kind of GPU (default: {DEFAULT_GPU})")
    add("--gpu-memory", type=float, metavar="GIB", help="memory of a GPU, if another")
    _add_layout(parser.add_argument_group("layout, as of MegatronStrategy"))
    _add_states(parser.add_argument_group("memory and kernels, as of MegatronStrategy"))
    group = parser.add_argument_group("training")
    group.add_argument(
        "--seq-length",
        type=int,
        metavar="TOKENS",
        help="tokens a sample (default: the model's positions, at most 8192)",
    )
    group.add_argument(
        "--micro-batch-size",
        type=int,
        metavar="SAMPLES",
        help="samples that a data rank runs in one forward (default: 1)",
    )
    group.add_argument(
        "--global-batch-size",
        type=int,
        metavar="SAMPLES",
        help="samples of a step over all ranks (default: 4 micro-batches for each pipeline stage)",
    )
    group.add_argument(
        "--precision", metavar="NAME", help="as of the Trainer (default: bf16-mixed)"
    )
    group.add_argument(
        "--optimizer", choices=get_args(OptimizerName), help="whose state counts (default: adamw)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--suggest", action="store_true", help="rank the layouts that fit instead")
    group.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="JSON, to the file or in place of text"
    )
    group.add_argument("--picture", metavar="FILE", help="draw mesh and pipeline (.svg or .png)")
    return parser


_SIZES = {
    "tensor": "ranks that share the products of one layer",
    "pipeline": "ranks that share out the layers",
    "context": "ranks that share out the tokens of each sample",
    "expert": "ranks that a layer's experts are dealt to",
    "expert-tensor": "ranks that share the columns of one expert (default: tensor parallel size)",
}


def _add_layout(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    for axis, what in _SIZES.items():
        default = "" if "default" in what else " (default: 1)"
        add(f"--{axis}-parallel-size", type=int, metavar="N", help=what + default)
    add(
        "--sequence-parallel",
        action=argparse.BooleanOptionalAction,
        help="tensor ranks share out the sequence between their products",
    )
    add(
        "--schedule",
        choices=get_args(ScheduleName),
        help="order of forwards and backwards in a pipeline (default: 1f1b)",
    )
    add(
        "--virtual-pipeline-size",
        type=int,
        metavar="N",
        help="chunks of layers that each pipeline rank holds (default: 1)",
    )
    add(
        "--pipeline-layout",
        metavar="STAGES",
        help='explicit stages, e.g. "Et*3|t*4|t*2L" (default: balanced by cost)',
    )
    add(
        "--head-cost",
        type=float,
        metavar="LAYERS",
        help="what head and loss count for where stages are balanced (default: 1)",
    )
    add(
        "--context-form",
        choices=get_args(ContextForm),
        metavar="FORM",
        help="how attention"
        f" reaches other ranks' tokens: {', '.join(get_args(ContextForm))} (default: ring)",
    )
    add(
        "--dispatcher",
        choices=get_args(DispatcherName),
        help="how tokens reach experts on other ranks (default: all_to_all)",
    )
    add(
        "--overlap-all-to-all",
        action=argparse.BooleanOptionalAction,
        help="tokens travel while another micro-batch computes, for more activations",
    )
    add(
        "--sharding",
        choices=get_args(ShardingName),
        help="what the data ranks share out (default: none)",
    )
    add(
        "--replicas",
        type=int,
        metavar="N",
        help="copies of what is sharded, over the data ranks (default: 1)",
    )


def _add_states(group: argparse._ArgumentGroup) -> None:
    add = group.add_argument
    add(
        "--offload-optimizer",
        action=argparse.BooleanOptionalAction,
        help="masters and optimizer state in host memory; with --sharding optimizer",
    )
    add(
        "--recompute",
        choices=get_args(RecomputeMode),
        help="what the backward pass computes again (default: none)",
    )
    add(
        "--recompute-method",
        choices=get_args(RecomputeMethod),
        help="--recompute full: every"
        " layer in groups, or the first layers of each chunk (default: uniform)",
    )
    add(
        "--recompute-num-layers",
        type=int,
        metavar="N",
        help="--recompute full: layers of a group, or of a chunk (default: 1)",
    )
    add(
        "--recompute-modules",
        nargs="+",
        metavar="GLOB",
        help="--recompute selective: module names (default: core_attention)",
    )
    add(
        "--offload",
        action=argparse.BooleanOptionalAction,
        help="activations wait for their backward in host memory",
    )
    add("--compile", action=argparse.BooleanOptionalAction, help="compiled layers")
    add(
        "--quantization",
        nargs="+",
        metavar="WORD",
        help="recipe of eight or four bits, then FIELD=VALUE of QuantizationConfig",
    )

"""`megatron-lightning convert`: a checkpoint in another form, or from another program.

Works in one process, without ranks or GPUs, and holds one tensor at a time.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_lightning.cli import convert_huggingface
from megatron_lightning.cli.errors import Parser, UserError, wrong_input

if TYPE_CHECKING:
    from megatron_lightning.checkpoint.convert import Conversion
    from megatron_lightning.config.model import GPTConfig

SOURCES = (
    "native",
    "safetensors",
    "torch-dcp",
    "megatron-core",
    "nemo",
    "lightning",
    "huggingface",
)
TARGETS = ("native", "safetensors", "torch-dcp", "huggingface")
DTYPES = ("float32", "bfloat16", "float16")


def main(arguments: list[str]) -> None:
    """Convert and say what was written."""
    options = _parser().parse_args(arguments)
    if convert_huggingface.concerns(options):
        convert_huggingface.convert(options)
        return
    given = [n for n in convert_huggingface.EXPORT_ONLY if getattr(options, n) is not None]
    if given:
        raise UserError(f"--{given[0].replace('_', '-')}: only with --to huggingface")
    from megatron_lightning.checkpoint import CheckpointError
    from megatron_lightning.checkpoint.convert import convert

    with wrong_input(CheckpointError):
        how = _conversion(options)
        content = convert(
            options.source,
            options.target,
            source_kind=options.source_kind,
            target_kind=options.target_kind,
            how=how,
        )
    weights = sum(name.startswith("model.") for name in content.tensors)
    rest = len(content.tensors) - weights
    print(f"{options.target}: {weights} tensors of weights, {rest} others, from {options.source}")


def _conversion(options: Namespace) -> Conversion:
    import torch

    from megatron_lightning.checkpoint.convert import Conversion

    arguments, shapes = _module(options)
    dtype, moments = options.dtype, options.moments_dtype
    return Conversion(
        weights_only=options.weights_only,
        dtype=None if dtype is None else getattr(torch, dtype),
        moments_dtype=None if moments is None else getattr(torch, moments),
        files=options.files,
        allow_pickle=options.allow_pickle,
        hyper_parameters=arguments,
        shapes=shapes,
        group_of=_group_of,
    )


def _module(
    options: Namespace,
) -> tuple[dict[str, Any] | None, dict[str, tuple[int, ...]] | None]:
    """Constructor arguments of the module that is asked for, and its shapes; None if none is."""
    given = [name for name in ("config", "preset", "like") if getattr(options, name) is not None]
    if len(given) > 1:
        raise UserError(f"--{', --'.join(given)}: give one of them")
    source = Path(options.source)
    from megatron_lightning.checkpoint.convert.nemo import is_nemo, nemo_config

    of_nemo = options.source_kind in (None, "nemo") and is_nemo(source)
    if options.vocab_size is not None and (given or not of_nemo):
        raise UserError("--vocab-size: only for a checkpoint of NeMo, without a config")
    if not given and not of_nemo:
        return None, None
    from megatron_lightning.models import GPTModel

    arguments: dict[str, Any]
    if not given:
        arguments = {"config": nemo_config(source, options.vocab_size)}
    else:
        arguments = _like(options.like) if options.like else {"config": _gpt_config(options)}
    model = GPTModel(**arguments)
    return arguments, model.global_shapes() | model.buffer_shapes()


def _gpt_config(options: Namespace) -> GPTConfig:
    from megatron_lightning.models import preset_config

    if options.preset is not None:
        with wrong_input():
            return preset_config(options.preset)
    from megatron_lightning.cli.config_file import read_mapping
    from megatron_lightning.cli.plan_request import build_config, read_config
    from megatron_lightning.config.model import GPTConfig

    path = Path(options.config)
    content = read_mapping(path, "fields of a GPTConfig, or of trainer, model and data")
    if "model" not in content:
        return build_config(GPTConfig, _numbers(content), f"--config {path}")
    found = read_config(str(path))
    if "model" not in found:
        raise UserError(f"--config {path}: its model section gives no config and no preset")
    return found["model"]


def _numbers(value: Any) -> Any:
    """Numbers such as 1e-05, which YAML takes for text."""
    if isinstance(value, Mapping):
        return {name: _numbers(entry) for name, entry in value.items()}
    is_number = isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value)
    return float(value) if is_number else value


def _like(checkpoint: str) -> dict[str, Any]:
    """Constructor arguments of the module of a native checkpoint."""
    from megatron_lightning.checkpoint import CheckpointError, load_objects
    from megatron_lightning.checkpoint.config_codec import CODEC
    from megatron_lightning.config.model import GPTConfig

    with wrong_input(CheckpointError):
        arguments = load_objects(checkpoint, codec=CODEC).get("hyper_parameters") or {}
    if not isinstance(arguments.get("config"), GPTConfig):
        raise UserError(f"--like {checkpoint}: it does not hold a GPTModel")
    return {name: value for name, value in arguments.items() if not name.startswith("_")}


def _group_of(hyper_parameters: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> str:
    """The group into which `build_optimizer` puts a parameter."""
    from megatron_lightning.config.training import OptimizerConfig
    from megatron_lightning.optim.build import decays

    config = hyper_parameters.get("optimizer")
    if not isinstance(config, OptimizerConfig):
        config = OptimizerConfig()
    return "decay" if decays(name, shape, config) else "no_decay"


def _parser() -> Parser:
    parser = Parser(
        "convert",
        "Write a checkpoint in another form, or read one of another program. The target appears "
        "when it is complete.",
    )
    add = parser.add_argument
    add("source", help="checkpoint folder or file; its kind is found by looking")
    add("target", help="new folder, or file NAME.safetensors (weights only)")
    add("--from", dest="source_kind", choices=SOURCES, help="kind of the source")
    add(
        "--to",
        dest="target_kind",
        choices=TARGETS,
        help="kind of the target (default: safetensors by its suffix, else native)",
    )
    add("--weights-only", action="store_true", help="leave optimizer and schedules behind")
    add("--dtype", choices=DTYPES, help="of the weights (default: as they are stored)")
    add("--moments-dtype", choices=DTYPES, help="of the optimizer's state (default: as stored)")
    add("--files", type=int, default=1, metavar="N", help="data files of a native checkpoint")
    add("--config", metavar="FILE", help="config of the model: a GPTConfig's fields, or a fit file")
    add("--preset", metavar="NAME", help="config of the model by the name of its architecture")
    add("--like", metavar="CKPT", help="config of the model: that of a native checkpoint")
    add("--vocab-size", type=int, metavar="N", help="true vocabulary of a checkpoint of NeMo")
    add(
        "--allow-pickle",
        action="store_true",
        help="read kinds that are made of pickles; nothing in them is run",
    )
    convert_huggingface.add_options(parser)
    return parser

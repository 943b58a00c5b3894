"""`docs/migration.md`: what stands on our side is there, with those arguments and values."""

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning as L
import lightning.pytorch.callbacks
import lightning.pytorch.loggers
import pytest

import megatron_lightning
from megatron_lightning import callbacks, checkpoint, config, data, models
from megatron_lightning.cli.errors import Parser
from megatron_lightning.cli.main import COMMANDS
from megatron_lightning.config.training import OptimizerConfig, SchedulerConfig

PAGE = Path(__file__).resolve().parents[2] / "docs" / "migration.md"

MODULES = (
    lightning.pytorch.loggers,
    lightning.pytorch.callbacks,
    models,
    data,
    callbacks,
    config,
    megatron_lightning,
)
KNOWN: dict[str, Any] = {
    **{name: getattr(module, name) for module in MODULES for name in module.__all__},
    "OptimizerConfig": OptimizerConfig,
    "SchedulerConfig": SchedulerConfig,
    "Trainer": L.Trainer,
    "checkpoint": checkpoint,
    "data": megatron_lightning.PretrainingDataModule,
    "model": megatron_lightning.GPTModel,
    "models": models,
    "self": L.LightningModule,
}
NO_NAMES = {
    "FILE ...": "placeholder of an option",
    ".ckpt": "ending of a file",
    ".gz": "ending of a file",
    ".zst": "ending of a file",
    "_text_document": "ending of a file",
    "[start, increment, samples]": "form of a value",
    "[[0, size], [sample, size], ...]": "form of a value",
    "{paths: mock, mock_data: true}": "YAML",
    "datasets": "library",
    "gc.collect()": "of Python",
    "gc.disable()": "of Python",
    "requires_grad_(False)": "of torch",
    "--seed_everything": "of LightningCLI",
    "ModelTransform": "of NeMo",
    "LoRA": "of NeMo",
    "mask": "of NeMo's records",
    **dict.fromkeys(("prompt", "completion", "conversations"), "field of a record"),
    **dict.fromkeys(("cu_seqlens", "tokens", "decoder_tokens"), "field of a batch"),
    **dict.fromkeys(("padding_mask", "decoder_padding_mask"), "field of a batch"),
    "token_type_ids": "field of a batch",
    "external": "of Megatron",
}
"""What stands in backticks on our side and is no name of the code -> what it is."""


def rows() -> Iterator[tuple[int, list[str]]]:
    """(number of the line, cells) of each row of the page's tables, without titles."""
    for number, line in enumerate(PAGE.read_text().splitlines(), start=1):
        if line.startswith("|") and not re.match(r"\|[-|]+$", line) and "| here" not in line:
            yield number, [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def spans() -> list[tuple[int, str]]:
    """(line, code) in backticks of the last column."""
    return [
        (number, span) for number, cells in rows() for span in re.findall(r"`([^`]+)`", cells[-1])
    ]


def arguments_of(called: Callable[..., Any]) -> dict[str, Any]:
    """Argument -> its type, of what can be called; None: none is given."""
    target = called.__init__ if inspect.isclass(called) else called  # type: ignore[misc]
    parameters = inspect.signature(target).parameters
    try:
        hints = typing.get_type_hints(target)
    except NameError:  # a type that Lightning imports for type checkers alone
        hints = {}
    return {name: hints.get(name) for name in parameters if name != "self"}


def takes_any(called: Callable[..., Any]) -> bool:
    """Whether it takes whatever keyword there is."""
    kinds = [each.kind for each in inspect.signature(called).parameters.values()]
    return inspect.Parameter.VAR_KEYWORD in kinds


def literals(hint: Any) -> set[Any]:
    """Values that a Literal within a type allows; empty where there is none."""
    if typing.get_origin(hint) is typing.Literal:
        return set(typing.get_args(hint))
    inner = typing.get_args(hint)
    if inner and str in inner:
        return set()  # any string goes
    return {value for each in inner for value in literals(each)}


ALL_ARGUMENTS: dict[str, list[Any]] = {}
for _known in KNOWN.values():
    if inspect.isclass(_known) and not issubclass(_known, BaseException):
        for _name, _hint in arguments_of(_known).items():
            ALL_ARGUMENTS.setdefault(_name, []).append(_hint)
SECTIONS = {
    hint: name
    for name, found in arguments_of(megatron_lightning.MegatronStrategy).items()
    for hint in typing.get_args(found)
    if dataclasses.is_dataclass(hint)
}
"""Config class -> argument of the strategy."""


def python_of(span: str) -> ast.expr:
    """`f(a=, b=)` parsed, its blank values as `...`."""
    return ast.parse(re.sub(r"=(?=[,)])", "=...", span), mode="eval").body


def resolve(node: ast.expr) -> Any:
    """The object of a dotted name. AttributeError or KeyError: there is none."""
    if isinstance(node, ast.Name):
        return KNOWN[node.id]
    assert isinstance(node, ast.Attribute), ast.unparse(node)
    return getattr(resolve(node.value), node.attr)


def problems_of_call(node: ast.Call, argument: str = "") -> Iterator[str]:
    """What is wrong with a call: names, values, calls inside; `argument`: that it is given to."""
    try:
        called = resolve(node.func)
    except (KeyError, AttributeError):
        yield f"{ast.unparse(node.func)} is not there"
        return
    if called in SECTIONS and argument != SECTIONS[called]:
        yield f"{ast.unparse(node)}: say that it is {SECTIONS[called]}= of the strategy"
    known = arguments_of(called)
    for keyword in node.keywords:
        assert keyword.arg is not None
        if keyword.arg not in known and not takes_any(called):
            yield f"{ast.unparse(node)}: no argument {keyword.arg}"
        elif isinstance(keyword.value, ast.Call):
            yield from problems_of_call(keyword.value, keyword.arg)
        elif isinstance(keyword.value, ast.Constant) and isinstance(keyword.value.value, str):
            allowed = literals(known.get(keyword.arg))
            if allowed and keyword.value.value not in allowed:
                yield f"{ast.unparse(node)}: {keyword.arg} is one of {sorted(map(str, allowed))}"


def problems_of_assignment(name: str, value: ast.expr) -> Iterator[str]:
    """What is wrong with `name=value`, an argument of something on this page."""
    if name not in ALL_ARGUMENTS and name != "ckpt_path":
        yield f"nothing has an argument {name}"
    elif isinstance(value, ast.Call):
        yield from problems_of_call(value, name)
    elif isinstance(value, ast.Constant) and isinstance(value.value, str):
        sets = [literals(hint) for hint in ALL_ARGUMENTS.get(name, [])]
        if sets and not any(not allowed or value.value in allowed for allowed in sets):
            yield f"{name}={value.value!r}: it is one of {sets}"


def command_options(name: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Options of a command of argparse."""
    found: set[str] = set()

    def stop(parser: Parser, *_: Any, **__: Any) -> None:
        found.update(option for action in parser._actions for option in action.option_strings)
        raise KeyboardInterrupt

    main = importlib.import_module(f"megatron_lightning.cli.{COMMANDS[name].module}").main
    with monkeypatch.context() as patch:
        patch.setattr(Parser, "parse_args", stop)
        with pytest.raises(KeyboardInterrupt):
            main([])
    return found


def problems_of(span: str, preprocess: set[str]) -> Iterator[str]:
    """What is wrong with a span of code on our side."""
    if span in NO_NAMES or re.fullmatch(r"(NCCL|TORCH_NCCL)_[A-Z_]+", span):
        return
    if span.startswith("megatron-lightning "):
        if span.split()[1] not in COMMANDS:
            yield f"no command {span.split()[1]}"
    elif span.startswith("--"):
        if span.split()[0] not in preprocess:
            yield "preprocess has no such option"
    elif assignment := re.fullmatch(r"(\w+)=(.+)", span):
        yield from problems_of_assignment(assignment[1], python_of(assignment[2]))
    else:
        yield from _problems_of_expression(span)


def _problems_of_expression(span: str) -> Iterator[str]:
    node = python_of(span)
    if isinstance(node, ast.Call):
        yield from problems_of_call(node)
    elif isinstance(node, ast.Attribute):
        try:
            resolve(node)
        except (KeyError, AttributeError):
            yield "it is not there"
    else:
        assert isinstance(node, ast.Name), span
        if not (span in KNOWN or span in ALL_ARGUMENTS or hasattr(L.LightningModule, span)
                or hasattr(L.Trainer, span) or hasattr(models.GPTModel, span)):  # fmt: skip
            yield "nothing has that name"


def test_all_that_is_named_on_our_side_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    preprocess = command_options("preprocess", monkeypatch)
    wrong = []
    for number, span in spans():
        try:
            wrong += [
                f"line {number}: `{span}`: {problem}" for problem in problems_of(span, preprocess)
            ]
        except SyntaxError:
            wrong.append(f"line {number}: `{span}` is no code; name it in NO_NAMES")
    assert not wrong, "\n".join(wrong)


def test_the_check_finds_what_is_wrong() -> None:
    for span in (
        "MegatronStrategy(tensor_model_parallel_size=)",
        "ExpertConfig(dispatcher=)",
        "runtime=ExpertConfig(dispatcher=)",
        "expert=ExpertConfig(dispatchers=)",
        'expert=ExpertConfig(dispatcher="alltoall")',
        "NemoLogger(dir=)",
        "GPTModel.from_preset_of",
        'packing="largest_first"',
        "tensor_model_parallel_size",
        "--no-such-option",
        "megatron-lightning serve",
    ):
        assert list(problems_of(span, {"--tokenizer"})), span
    for span in (
        'expert=ExpertConfig(dispatcher="all_to_all")',
        "--tokenizer",
        "Trainer.fit(ckpt_path=)",
    ):
        assert not list(problems_of(span, {"--tokenizer"})), span


def test_every_row_says_something_on_both_sides() -> None:
    for number, cells in rows():
        assert cells[-1], f"line {number}"
        assert any(cells[:-1]), f"line {number}"


@pytest.mark.parametrize(
    "name",
    [
        *("num-query-groups", "group-query-attention", "max-position-embeddings", "spec"),
        *("init-method-std", "attention-dropout", "hidden-dropout", "vocab-size", "rotary-percent"),
        *("attention-backend", "overlap-param-gather", "recompute-method", "recompute-num-layers"),
        *("optimizer", "optimizer-cpu-offload", "use-precision-aware-optimizer", "exp-avg-dtype"),
        *("decoupled-lr", "lr-wsd-decay-style", "accumulate-allreduce-grads-in-fp32", "finetune"),
        *("no-load-optim", "seed", "num-workers", "eval-interval", "eval-iters", "log-interval"),
        *("distributed-timeout-minutes", "tensorboard-dir", "wandb-project", "profile"),
        *("manual-gc", "check-for-nan-in-loss-and-grad", "rerun-mode"),
        *("num-layers-per-virtual-pipeline-stage", "num-distributed-optimizer-instances"),
    ],
)
def test_common_options_of_megatron_are_found_by_name(name: str) -> None:
    left = " ".join(" ".join(cells[:-1]) for _, cells in rows())
    assert re.search(rf"--{name}(?![\w-])", left)


@pytest.mark.parametrize(
    "name",
    ["AutoResume", "NeMoLogger", "GarbageCollectionCallback", "ModelTransform", "Llama3Config8B"],
)
def test_common_classes_of_nemo_are_found_by_name(name: str) -> None:
    assert any(name in " ".join(cells[:-1]) for _, cells in rows())

"""`megatron-lightning generate`: continue a prompt with the model of a checkpoint.

The checkpoint may come from any layout; the whole model is loaded into this one process.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from megatron_lightning.cli.errors import Parser, UserError, check_folder, wrong_input

if TYPE_CHECKING:
    from megatron_lightning.models import Sampling


def main(arguments: list[str]) -> None:
    """Print prompt and continuation."""
    options = _parser().parse_args(arguments)
    check_folder(options.checkpoint)
    from megatron_lightning.checkpoint import CheckpointError
    from megatron_lightning.models import Sampling

    sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    problems = sampling.check()
    if options.max_new_tokens < 0:
        problems.append(f"max_new_tokens={options.max_new_tokens} must not be negative")
    if not 0 <= options.seed < 2**64:
        problems.append(f"seed={options.seed} must be between 0 and 2^64 - 1")
    problems += _device_problems(options.device)
    if problems:
        raise UserError("\n".join(problems))
    with wrong_input(CheckpointError):
        text = continue_text(
            options.checkpoint,
            options.tokenizer,
            options.prompt,
            max_new_tokens=options.max_new_tokens,
            sampling=sampling,
            seed=options.seed,
            device=options.device,
        )
    print(options.prompt + text)


def continue_text(
    checkpoint: str | Path,
    tokenizer: str | Path,
    prompt: str,
    *,
    max_new_tokens: int,
    sampling: "Sampling",
    seed: int,
    device: str = "cpu",
) -> str:
    """Text that the GPT of `checkpoint` appends to `prompt`.

    Args:
        checkpoint: folder of a checkpoint, of any layout.
        tokenizer: what `load_tokenizer` takes; it must be the one of the training data.
        prompt: text of at least one token.
        max_new_tokens: the most tokens to append; the end of the document ends earlier.
        sampling: how tokens are chosen.
        seed: of the choice, where it is random.
        device: torch device to compute on.

    Raises:
        CheckpointError: the folder is no valid checkpoint of a `GPTModel`.
        ValueError: prompt, tokenizer or sampling don't fit.

    """
    import torch

    from megatron_lightning.checkpoint.preflight import read_tables
    from megatron_lightning.data import load_tokenizer
    from megatron_lightning.models import GPTModel
    from megatron_lightning.models.module import TOKENIZER_DIGEST

    vocabulary = load_tokenizer(tokenizer)
    known = read_tables(checkpoint).objects.get(TOKENIZER_DIGEST)
    if known is not None and known != vocabulary.digest:
        raise ValueError(
            f"tokenizer={str(tokenizer)!r} is {vocabulary.digest}, the model of {checkpoint} was"
            f" trained with {known}: use the tokenizer that it was trained with"
        )
    tokens = vocabulary.encode(prompt)
    if not tokens:
        raise ValueError(f"prompt={prompt!r}: give at least one token of text to continue")
    model = GPTModel.load_from_checkpoint(checkpoint, map_location=device)
    if vocabulary.vocab_size > model.config.vocab_size:
        raise ValueError(
            f"tokenizer={str(tokenizer)!r} has {vocabulary.vocab_size} ids, the model of the"
            f" checkpoint {model.config.vocab_size}: use the tokenizer that it was trained with"
        )
    result = model.generate(
        tokens,
        max_new_tokens,
        sampling,
        end_token=vocabulary.eod_id,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return vocabulary.decode(result[0, len(tokens) :].tolist())


def _device_problems(name: str) -> list[str]:
    """Why a device can't be used, found before anything is loaded."""
    import torch

    try:
        device = torch.device(name)
    except RuntimeError:
        return [f"--device {name}: not a torch device; give cpu, cuda or cuda:N"]
    if device.type == "cpu":
        return []
    if device.type == "meta":
        return [f"--device {name}: holds no values; give cpu, cuda or cuda:N"]
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return [f"--device {name}: there is no such device here ({reason}); give --device cpu"]
    return []


def _parser() -> Parser:
    parser = Parser("generate", "Continue a prompt with the model of a checkpoint.")
    add = parser.add_argument
    add("checkpoint", help="checkpoint folder, saved in any layout")
    add("--tokenizer", required=True, help='tokenizer.json, a folder with one, or "bytes"')
    add("--prompt", required=True, help="text to continue")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="tokens at most (default: 64)")
    add(
        "--temperature", type=float, default=0.8, help="0 always takes the likeliest (default: 0.8)"
    )
    add("--top-k", type=int, default=0, metavar="K", help="draw from the K likeliest; 0: from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="draw from the likeliest share P")
    add("--seed", type=int, default=1234, help="of random choices (default: 1234)")
    add("--device", default="cpu", help="torch device (default: cpu)")
    return parser

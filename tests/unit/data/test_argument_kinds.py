"""Arguments of data modules of another type, and names that they don't have."""

from typing import Any

import pytest

from megatron_lightning.data import PretrainingDataModule, SFTDataModule


def module(**changes: Any) -> PretrainingDataModule:
    sizes = dict(seq_length=16, micro_batch_size=2, global_batch_size=4)
    return PretrainingDataModule(None, mock_data=True, **sizes | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seq_length", "16"),
        ("micro_batch_size", 2.0),
        ("num_workers", True),
        ("seed", "1"),
    ],
)
def test_numbers_of_another_type(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}={value!r} must be a whole number"):
        module(**{name: value})


def test_names_that_are_no_arguments() -> None:
    with pytest.raises(TypeError, match="global_batch is no argument: do you mean global_batch_si"):
        module(global_batch=4)
    with pytest.raises(TypeError, match="SFTDataModule: tokeniser is no .* do you mean tokenizer"):
        SFTDataModule("x", 8, 2, 4, tokeniser="bytes")  # type: ignore[call-arg]

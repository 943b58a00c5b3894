"""How batches of all kinds are cut into micro-batches, and predictions joined again."""

from collections import UserDict, namedtuple
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megatron_lightning.runtime.batch import (
    BATCH_DIMS,
    MicroBatch,
    MicroBatches,
    batch_size_of,
    join_outputs,
    split_batch,
)


def cut(batch: Any, size: int | None = 2, stages: int = 1, **dims: int) -> list[MicroBatch]:
    return split_batch(
        batch, micro_batch_size=size, pipeline_size=stages, batch_dims={**BATCH_DIMS, **dims}
    )


def test_samples_and_shares_of_a_ragged_batch() -> None:
    x, y = torch.arange(10).view(5, 2), torch.arange(5)
    parts = cut([x, y])
    assert [part.num_samples for part in parts] == [2, 2, 1]
    assert [part.share for part in parts] == pytest.approx([0.4, 0.4, 0.2])
    assert torch.equal(torch.cat([part.data[0] for part in parts]), x)
    assert torch.equal(torch.cat([part.data[1] for part in parts]), y)
    assert type(parts[0].data) is list


@pytest.mark.parametrize(
    ("samples", "stages", "expected"),
    [(8, 2, [4, 4]), (8, 4, [2] * 4), (5, 2, [1] * 5), (1, 4, [1])],
)
def test_without_a_size_each_stage_gets_one(samples: int, stages: int, expected: list[int]) -> None:
    parts = cut(torch.zeros(samples, 3), None, stages)
    assert [part.num_samples for part in parts] == expected


def test_one_stage_never_looks_into_the_batch() -> None:
    batch = object()
    [part] = cut(batch, None)
    assert part.data is batch
    assert (part.num_samples, part.share) == (1, 1.0)
    [part] = cut({"whatever": torch.zeros(3, 2)}, None)
    assert part.num_samples == 3


def test_known_and_named_fields() -> None:
    batch = {
        "tokens": torch.arange(12).view(4, 3),
        "pixels": torch.arange(8).view(2, 4),
        "nested": {"labels": torch.arange(4)},
        "names": ["a", "b", "c", "d"],
        "scale": torch.tensor(2.0),
        "flag": True,
        "nothing": None,
    }
    parts = cut(batch, pixels=1)
    second = parts[1].data
    assert torch.equal(second["pixels"], batch["pixels"][:, 2:])  # type: ignore[index]
    assert torch.equal(second["nested"]["labels"], torch.tensor([2, 3]))
    assert second["names"] == ["c", "d"]
    assert (float(second["scale"]), second["flag"], second["nothing"]) == (2.0, True, None)


def test_an_unknown_field_is_named_with_the_remedy() -> None:
    batch = {"tokens": torch.zeros(4, 3), "extra": torch.zeros(4)}
    with pytest.raises(ValueError, match=r"batch\['extra'\] of shape \(4,\).*batch_dims.*hook"):
        cut(batch)
    with pytest.raises(ValueError, match=r"batch\[0\]\['extra'\]"):
        cut([{"tokens": torch.zeros(4, 3), "extra": torch.zeros(4)}])


def test_a_field_that_disagrees_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch\['labels'\].*dim 0 has 3 entries.*4 samples"):
        cut({"tokens": torch.zeros(4, 3), "labels": torch.zeros(3)})


def test_a_list_as_long_as_the_batch_that_holds_tensors_is_no_list_of_samples() -> None:
    """Two loaders' batches of two samples each: cut within, not between."""
    batch = [{"tokens": torch.arange(4).view(2, 2)}, {"tokens": torch.arange(4, 8).view(2, 2)}]
    parts = cut(batch, 1)
    assert [len(part.data) for part in parts] == [2, 2]
    assert parts[1].data[1]["tokens"].tolist() == [[6, 7]]


def test_arrays_of_numpy_are_cut_too() -> None:
    batch = {
        "tokens": torch.zeros(4, 2),
        "labels": np.arange(4),
        "grid": np.arange(8).reshape(2, 4),
    }
    parts = cut(batch, grid=-1)
    assert parts[1].data["labels"].tolist() == [2, 3]
    assert parts[1].data["grid"].tolist() == [[2, 3], [6, 7]]
    with pytest.raises(ValueError, match="grid"):
        cut(batch)


def test_a_mapping_keeps_its_class() -> None:
    class Encoding(UserDict[str, Tensor]):  # as Hugging Face's
        @property
        def input_ids(self) -> Tensor:
            return self["input_ids"]

    whole = Encoding({"input_ids": torch.arange(4)})
    parts = cut(whole)
    assert isinstance(parts[0].data, Encoding)
    assert parts[1].data.input_ids.tolist() == [2, 3]
    assert whole.input_ids.tolist() == [0, 1, 2, 3]
    assert parts[0].signature() == (((2,), torch.int64),)
    frozen = cut(MappingProxyType({"tokens": torch.arange(4)}))
    assert frozen[0].data == {"tokens": pytest.approx(torch.tensor([0, 1]))}


def test_named_tuples() -> None:
    pair = namedtuple("pair", "x y")
    parts = cut(pair(torch.arange(4), torch.arange(4, 8)))
    assert parts[1].data.y.tolist() == [6, 7]


def test_what_cannot_be_cut() -> None:
    with pytest.raises(ValueError, match="str.*split_micro_batch"):
        cut("text")
    with pytest.raises(ValueError, match="generator"):
        cut(i for i in range(3))
    with pytest.raises(ValueError, match="no samples"):
        cut(torch.zeros(0, 3))


def test_micro_batches_made_elsewhere() -> None:
    parts = cut(MicroBatches([{"tokens": torch.zeros(1, 2)}, {"tokens": torch.zeros(3, 2)}]))
    assert [part.num_samples for part in parts] == [1, 3]
    assert [part.share for part in parts] == [0.25, 0.75]
    # fields whose batch dim nobody knows: dim 0 counts where all agree, else all weigh alike
    agree = MicroBatches([{"a": torch.zeros(1, 2)}, {"a": torch.zeros(3, 2)}])
    assert [part.share for part in cut(agree)] == [0.25, 0.75]
    differ = MicroBatches([{"a": torch.zeros(8, n), "b": torch.zeros(n)} for n in (1, 3)])
    assert [part.share for part in cut(differ)] == [0.5, 0.5]
    assert [part.share for part in cut(differ, b=0)] == [0.25, 0.75]
    assert [part.share for part in cut(MicroBatches([object(), object()]))] == [0.5, 0.5]
    with pytest.raises(ValueError, match="no micro-batches"):
        cut(MicroBatches())


def test_signatures_tell_shapes_apart() -> None:
    @dataclass
    class Sample:
        x: Tensor
        name: str

    def of(data: Any) -> Any:
        return MicroBatch(data=data, num_samples=1, share=1.0).signature()

    assert of(Sample(torch.zeros(2, 3), "a")) == (((2, 3), torch.float32),)
    assert of({"a": [torch.zeros(2)], "b": "text"}) != of({"a": [torch.zeros(3)], "b": "text"})
    assert of(torch.zeros(2)) != of(torch.zeros(2, dtype=torch.int64))
    assert of("text") == ()
    hash(of(Sample(torch.zeros(1), "a")))


def test_batch_sizes() -> None:
    assert batch_size_of([["a"], torch.zeros(3, 1)], {}) == 3
    assert batch_size_of({"x": torch.zeros(2, 5)}, {"x": 1}) == 5
    assert batch_size_of(torch.tensor(1.0), {}) is None
    assert batch_size_of("text", {}) is None


def test_outputs_are_joined() -> None:
    outputs = [{"a": torch.ones(2, 3), "b": (torch.tensor(1.0), ["x"]), "c": "text"} for _ in "12"]
    joined = join_outputs(outputs)
    assert joined["a"].shape == (4, 3)
    assert joined["b"][0].tolist() == [1.0, 1.0]
    assert joined["b"][1] == ["x", "x"]
    assert joined["c"] == ["text", "text"]
    assert join_outputs(outputs[:1]) is outputs[0]

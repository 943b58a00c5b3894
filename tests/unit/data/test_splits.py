import pytest

from megatron_lightning.data import parse_split, split_ranges


def test_shares_are_padded_and_normalised() -> None:
    assert parse_split("969,30,1") == (0.969, 0.03, 0.001)
    assert parse_split("1") == (1.0, 0.0, 0.0)
    assert parse_split(" 8, 2 ") == (0.8, 0.2, 0.0)
    assert parse_split("0,1,0") == (0.0, 1.0, 0.0)
    assert parse_split(".5:.5") == (0.5, 0.5, 0.0)


@pytest.mark.parametrize("split", ["", "0,0,0", "1,2,3,4", "a", "-1,2", "1..2"])
def test_bad_strings_are_refused(split: str) -> None:
    with pytest.raises(ValueError, match="969,30,1"):
        parse_split(split)


def test_ranges_cover_everything_once() -> None:
    for count in (0, 1, 2, 7, 387, 12345):
        for split in ("969,30,1", "1,1,1", "98,1,1", "0,0,1"):
            parts = split_ranges(split, count)
            assert [i for part in parts for i in part] == list(range(count))
    assert split_ranges("90,8,2", 387) == (range(0, 348), range(348, 379), range(379, 387))

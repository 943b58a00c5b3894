"""Numbers with their nouns, and messages about every layer."""

from megatron_lightning.utils import counted, merge_alike


def test_counted() -> None:
    assert [counted(n, "GPU") for n in (0, 1, 2, 1024)] == [
        "0 GPUs",
        "1 GPU",
        "2 GPUs",
        "1024 GPUs",
    ]


def test_messages_about_every_layer_become_one() -> None:
    messages = [
        "size=3: decoder.layers.0.mlp.weight of shape (8, 4) has 8 rows",
        "size=3: head.weight of shape (9, 4)",
        "size=3: decoder.layers.1.mlp.weight of shape (8, 4) has 8 rows",
        "size=3: decoder.layers.2.mlp.weight of shape (16, 4) has 16 rows",
        "size=3: decoder.layers.11.mlp.weight of shape (8, 4) has 8 rows",
    ]
    assert merge_alike(messages) == [
        "size=3: decoder.layers.*.mlp.weight of shape (8, 4) has 8 rows (3 alike)",
        messages[1],
        messages[3],
    ]
    assert merge_alike(["0.weight and 0.bias", "10.weight and 10.bias"]) == [
        "*.weight and *.bias (2 alike)"
    ]
    assert merge_alike(["dropout=0.1 of x.0", "dropout=0.2 of x.0", "same", "same"]) == [
        "dropout=0.1 of x.0",
        "dropout=0.2 of x.0",
        "same",
    ]

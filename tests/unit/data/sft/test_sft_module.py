"""`SFTDataModule`: arguments, order, resume, validation; packed against unpacked training."""

import json
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.trainer.states import TrainerFn

from megatron_lightning import GPTModel
from megatron_lightning.data import SFTDataModule
from megatron_lightning.data.account import ACCOUNT
from tests import tolerances
from tests.layout_runs import tiny_config
from tests.unit.data.sft import chats


def write(path: Path, count: int, seed: int = 0) -> str:
    """Prompts with completions of many lengths, 4 to about 60 tokens each."""
    generator = torch.Generator().manual_seed(seed)
    with path.open("w") as file:
        for number in range(count):
            a, b = (int(torch.randint(1, 30, (), generator=generator)) for _ in range(2))
            record = {"prompt": f"{number:02d}" + "p" * a, "completion": "c" * b}
            file.write(json.dumps(record) + "\n")
    return str(path)


def make(train: Any, **options: Any) -> SFTDataModule:
    values: dict[str, Any] = dict(
        seq_length=64, micro_batch_size=2, global_batch_size=4, tokenizer="bytes"
    )
    return SFTDataModule(train, **{**values, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(packing="best"), "packing='best' is unknown: choose one of first_fit_decreasing"),
        (dict(loss_on="x"), "loss_on='x' is unknown"),
        (dict(truncation="left"), "truncation='left' is unknown"),
        (dict(data_format="x"), "data_format='x' is unknown"),
        (dict(on_bad_example="x"), "on_bad_example='x' is unknown"),
        (dict(document_multiple=5), "document_multiple=5 must divide seq_length=64"),
        (dict(template_date="today"), "template_date='today' is no date"),
        (dict(split="1,1", valid="x"), "leave one or the other out"),
        (dict(split="a"), "must be one to three"),
        (dict(global_batch_size=3), "must be a multiple of micro_batch_size=2"),
    ],
)
def test_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("x.jsonl", **options)


def test_data_errors_before_anything_starts(tmp_path: Path) -> None:
    good = write(tmp_path / "good.jsonl", 3)
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": chats.CHAT}) + "\n")
    (tmp_path / "odd.jsonl").write_text('{"text": "x"}\n')
    (tmp_path / "empty.jsonl").write_text("\n")
    assert make(good).validate() == []
    data = make(
        str(tmp_path / "chat.jsonl"),
        valid={"a": str(tmp_path / "odd.jsonl"), "b": str(tmp_path / "empty.jsonl")},
        test=str(tmp_path / "missing.jsonl"),
    )
    problems = data.validate()
    assert len(problems) == 4
    for problem, text in zip(
        problems,
        (
            "train: tokenizer bytes has no chat template",
            "valid/a: a record with the keys ['text']",
            "valid/b: no record in",
            "test: no file",
        ),
        strict=True,
    ):
        assert problem.startswith(text)
    assert "tokenizer:" in make(good, tokenizer=str(tmp_path / "none")).validate()[0]
    dated = tmp_path / "dated.jinja"
    dated.write_text("{{ strftime_now('%Y') }}")
    chat = str(tmp_path / "chat.jsonl")
    assert "set template_date" in make(chat, chat_template=str(dated)).validate()[0]
    given = make(chat, chat_template=str(dated), template_date="2026-01-31", loss_on="all")
    assert given.validate() == []


def test_marks_that_are_no_tokens_are_warned_of(tmp_path: Path) -> None:
    path = tmp_path / "chat.jsonl"
    path.write_text((json.dumps({"messages": chats.CHAT}) + "\n") * 4)
    data = make(str(path), seq_length=256, chat_template="chatml")
    with pytest.warns(UserWarning, match="are no tokens of bytes"):
        data.setup("fit")
    folder = chats.save_tokenizer(tmp_path / "t", chats.LLAMA3, eos="<|eot_id|>")
    own = make(str(path), seq_length=256, tokenizer=folder)
    own.setup("fit")
    batch = next(iter(own.train_dataloader()))
    assert (batch["labels"] == eot_of(folder)[0]).sum() == 8  # two answers in each of four chats
    assert own.vocab_size == eot_of(folder)[1]


def eot_of(folder: Path) -> tuple[int, int]:
    """Id of the token that ends a turn, and the number of ids."""
    tokens = json.loads((folder / "tokenizer.json").read_text())
    [eot] = [t["id"] for t in tokens["added_tokens"] if t["content"] == "<|eot_id|>"]
    return eot, len(tokens["model"]["vocab"])


def test_nothing_to_learn(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"prompt": "p" * 100, "completion": "c"}) + "\n")
    with pytest.raises(ValueError, match=r"train: no document to train on .* dropped: 1 documents"):
        make(str(path)).setup("fit")


def numbers_of(batch: dict[str, Any]) -> list[int]:
    """Numbers, from their texts, of the documents in a batch."""
    found = []
    for tokens, ends in zip(batch["tokens"], batch["cu_seqlens"].tolist(), strict=True):
        for begin, end in zip(ends, ends[1:], strict=False):
            text = bytes(tokens[begin:end].clamp(max=255).tolist())
            if text[:2].isdigit():
                found.append(int(text[:2]))
    return found


def test_every_document_once_an_epoch_in_new_order(tmp_path: Path) -> None:
    data = make(write(tmp_path / "d.jsonl", 50))
    data.setup("fit")
    loader = data.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        batches = list(loader)
        rows = torch.cat([torch.from_numpy(batch[ACCOUNT].rows) for batch in batches])
        real = rows[rows[:, 0] >= 0]
        epochs.append(real[:, 0].tolist())
        statistics = data.statistics["train"]
        assert real[:, 3].sum() == statistics.documents == 50
        assert real[:, 5].sum() == statistics.tokens
        assert real[:, 6].sum() == statistics.loss_tokens
        assert sorted(epochs[-1]) == list(range(statistics.samples))
        seen = [n for batch in batches for n in numbers_of(batch)]
        filled = len(rows) - len(real)  # copies of the first sample without loss
        assert len(seen) - 50 == filled * len(data._train.document_numbers(0))  # type: ignore
    assert epochs[0] != epochs[1]
    assert epochs[0] != sorted(epochs[0])


def test_resume_anywhere(tmp_path: Path) -> None:
    path = write(tmp_path / "d.jsonl", 50)
    whole = make(path)
    whole.setup("fit")
    expected = [batch["tokens"] for batch in whole.train_dataloader()]
    first = make(path, cache_dir=tmp_path / "cache")
    first.setup("fit")
    iterator = iter(first.train_dataloader())
    for _ in range(3):
        next(iterator)
    state = first.state_dict()
    second = make(path, cache_dir=tmp_path / "cache", num_workers=1)
    second.setup("fit")
    second.load_state_dict(state)
    rest = [batch["tokens"] for batch in second.train_dataloader()]
    assert second.consumed_samples == whole.consumed_samples
    assert len(rest) == len(expected) - 3
    assert all(torch.equal(a, b) for a, b in zip(rest, expected[3:], strict=True))
    other = make(path, packing="in_order")
    other.setup("fit")
    with pytest.warns(UserWarning, match="not the one of the checkpoint"):
        other.load_state_dict(state)


def samples_of(
    monkeypatch: pytest.MonkeyPatch, ranks: int, data: list[SFTDataModule], batches: int
) -> list[list[int]]:
    """Numbers of the samples in some global batches, read by `ranks` data ranks."""
    loaders = []
    for rank, module in enumerate(data):
        layout = property(lambda self, rank=rank: {"num_replicas": ranks, "rank": rank})
        monkeypatch.setattr(L.Trainer, "distributed_sampler_kwargs", layout)
        module.trainer = L.Trainer(accelerator="cpu", logger=False)
        loaders.append(iter(module.train_dataloader()))
    found = []
    for _ in range(batches):
        rows = [batch[ACCOUNT].sample_id for batch in map(next, loaders)]
        found.append([int(number) for row in rows for number in row])
    return found


def test_resume_in_another_layout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "d.jsonl", 80)

    def modules(ranks: int, **options: Any) -> list[SFTDataModule]:
        data = [make(path, **options) for _ in range(ranks)]
        for module in data:
            module.setup("fit")
        return data

    whole = samples_of(monkeypatch, 1, modules(1), 9)
    assert len({number for batch in whole for number in batch}) == 36  # of an epoch of 48
    first = modules(2, micro_batch_size=1)
    assert samples_of(monkeypatch, 2, first, 4) == whole[:4]
    assert first[0].state_dict() == first[1].state_dict()
    for ranks, size in ((1, 4), (4, 1)):
        resumed = modules(ranks, micro_batch_size=size)
        for module in resumed:
            module.load_state_dict(first[0].state_dict())
        assert samples_of(monkeypatch, ranks, resumed, 5) == whole[4:]


def test_resume_where_the_data_ended(tmp_path: Path) -> None:
    """C32: the second epoch begins, with its own order."""
    path = write(tmp_path / "d.jsonl", 50)
    whole = make(path)
    whole.setup("fit")
    loader = whole.train_dataloader()
    epochs = []
    for epoch in range(2):
        loader.set_epoch(epoch)
        epochs.append([batch["tokens"] for batch in loader])
        if epoch == 0:
            state = whole.state_dict()
            assert state["loader"]["consumed_samples"] == whole.statistics["train"].samples
            state = json.loads(json.dumps(state))
    resumed = make(path)
    resumed.setup("fit")
    resumed.load_state_dict(state)
    loader = resumed.train_dataloader()
    loader.set_epoch(1)
    got = [batch["tokens"] for batch in loader]
    assert len(got) == len(epochs[1]) == len(epochs[0])
    assert all(torch.equal(a, b) for a, b in zip(got, epochs[1], strict=True))
    assert not torch.equal(got[0], epochs[0][0])


def test_validation_sets_and_splits(tmp_path: Path) -> None:
    train, a, b = (write(tmp_path / f"{n}.jsonl", 20 + n, n) for n in range(3))
    data = make(train, valid={"a": a, "b": b}, test=a)
    data.setup("fit")
    data.setup("test")
    loaders = data.val_dataloader()
    assert isinstance(loaders, list)
    for loader, count in zip(loaders, (21, 22), strict=True):
        seen = [n for batch in loader for n in numbers_of(batch) if batch["loss_mask"].any()]
        assert sorted(set(seen)) == list(range(count))
    assert set(data.statistics) == {"train", "valid/a", "valid/b", "test"}
    split = make(train, split="70,20,10")
    split.setup("fit")
    split.setup("test")
    counts = [split.statistics[part].documents for part in ("train", "valid", "test")]
    assert counts == [14, 4, 2]
    none = make(train)
    none.setup("fit")
    assert none.val_dataloader() == []


MODELS: dict[str, dict[str, Any]] = {
    "rotary": dict(config=tiny_config(num_layers=2)),
    "learned, windows": dict(
        config=tiny_config(
            num_layers=2,
            position_embedding="learned",
            max_position_embeddings=64,
            window_size=9,
            window_pattern="SF",
        )
    ),
    "written out": dict(config=tiny_config(num_layers=2), attention="reference"),
}


def fit(data: SFTDataModule, steps: int, model_name: str) -> dict[str, Any]:
    """Losses and gradients of a few steps on CPU, by Lightning's own strategy."""
    torch.manual_seed(0)
    model = GPTModel(**MODELS[model_name])
    seen: dict[str, Any] = {"losses": [], "gradients": []}

    class Keep(L.Callback):
        def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
            grads = {n: p.grad.clone() for n, p in module.named_parameters()}
            seen["gradients"].append(grads)
            seen["losses"].append(float(trainer.callback_metrics["train_loss"]))

    options: dict[str, Any] = dict(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Keep()],
    )
    L.Trainer(**options).fit(model, data)
    return seen


@pytest.mark.parametrize(
    ("packing", "multiple", "model"),
    [
        ("first_fit_decreasing", 1, "rotary"),
        ("first_fit_decreasing", 4, "learned, windows"),
        ("in_order", 1, "learned, windows"),
        ("in_order", 4, "written out"),
    ],
)
def test_packed_training_equals_unpacked(
    tmp_path: Path, packing: Any, multiple: int, model: str
) -> None:
    """All documents in each step, so that only the packing differs."""
    path = write(tmp_path / "d.jsonl", 24)
    unpacked = make(path, packing="none", micro_batch_size=24, global_batch_size=24)
    packed = make(path, packing=packing, document_multiple=multiple, micro_batch_size=1)
    packed.setup("fit")
    size = packed.statistics["train"].samples
    assert size < 20
    packed.micro_batch_size = packed.global_batch_size = size
    runs = [fit(data, 3, model) for data in (make_again(packed, size), unpacked)]
    for step, (got, want) in enumerate(zip(runs[0]["losses"], runs[1]["losses"], strict=True)):
        tolerances.assert_loss_close(got, want, step, torch.float32)
    for step, (ours, theirs) in enumerate(
        zip(runs[0]["gradients"], runs[1]["gradients"], strict=True)
    ):
        norm = float(torch.stack([gradient.norm() for gradient in theirs.values()]).norm())
        for name, gradient in theirs.items():
            tolerances.assert_gradient_close(name, ours[name], gradient, norm, step, torch.float32)


def make_again(data: SFTDataModule, size: int) -> SFTDataModule:
    return make(
        data.train,
        packing=data.packing,
        document_multiple=data.document_multiple,
        micro_batch_size=size,
        global_batch_size=size,
    )


def test_evaluation_for_which_nothing_is_given(tmp_path: Path) -> None:
    train = write(tmp_path / "train.jsonl", 9)
    run = L.Trainer(accelerator="cpu", logger=False, enable_checkpointing=False)
    for function, part, own in (("validate", "valid", "validation"), ("test", "test", "testing")):
        run.state.fn = TrainerFn(function)
        (told,) = make(train).check_trainer(run)
        assert told == f"{part} is not given, so there is nothing for {own}; give {part}"
        assert make(train, **{part: train}).check_trainer(run) == []
        assert make(train, split="8,1,1").check_trainer(run) == []
    (told,) = make(train, split="9,1").check_trainer(run)
    assert told.startswith("split='9,1' leaves nothing for testing; give it a third share, as in")
    run.state.fn = TrainerFn.FITTING
    assert make(train).check_trainer(run) == []

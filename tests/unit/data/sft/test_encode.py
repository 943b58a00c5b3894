"""Ids and loss masks of examples."""

from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from megatron_lightning.data.sft import (
    ChatTemplate,
    Conversation,
    ExampleEncoder,
    PromptCompletion,
    load_chat_template,
)
from megatron_lightning.data.sft.encode import LossOn
from megatron_lightning.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.unit.data.sft import chats

TEMPLATES = {
    "chatml": (chats.CHATML, [chats.SYSTEM, *chats.CHAT], None),
    "chatml without blocks": (chats.CHATML_WITHOUT_BLOCKS, [chats.SYSTEM, *chats.CHAT], None),
    "llama3": (chats.LLAMA3, [chats.SYSTEM, *chats.CHAT], None),
    "mistral": (chats.MISTRAL, chats.CHAT, None),
    "qwen": (chats.QWEN, chats.CHAT, None),
    "qwen with tools": (chats.QWEN, [chats.SYSTEM, *chats.TOOL_CHAT], chats.TOOLS),
    "gemma": (chats.GEMMA, chats.CHAT, None),
}
ANSWERS = {
    "chatml": ["4, of course \u2014 naïve question! 😀<|im_end|>", "Six.<|im_end|>"],
    "chatml without blocks": ["4, of course \u2014 naïve question! 😀<|im_end|>", "Six.<|im_end|>"],
    "llama3": ["4, of course \u2014 naïve question! 😀<|eot_id|>", "Six.<|eot_id|>"],
    "mistral": [" 4, of course \u2014 naïve question! 😀</s>", " Six.</s>"],
    "qwen": ["4, of course \u2014 naïve question! 😀<|im_end|>", "Six.<|im_end|>"],
    "qwen with tools": [
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
        "It is 5.<|im_end|>",
    ],
    "gemma": ["4, of course \u2014 naïve question! 😀<end_of_turn>", "Six.<end_of_turn>"],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chats.save_tokenizer(tmp_path_factory.mktemp("tokenizer"), None)


def encoder(folder: Path, source: str, loss_on: LossOn = "answers") -> ExampleEncoder:
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    return ExampleEncoder(load_tokenizer(folder), ChatTemplate(source, tokens), loss_on=loss_on)


def learned_texts(folder: Path, encoder: ExampleEncoder, example: Any) -> list[str]:
    """Texts of the runs of learned tokens."""
    [encoded] = encoder.encode([encoder.render(example)])
    assert len(encoded.ids) == len(encoded.learned)
    if not isinstance(example, PromptCompletion):
        whole = encoder.render(example).text
        assert encoded.ids.tolist() == encoder.tokenizer.encode(whole)
    runs: list[list[int]] = []
    before = False
    for number, learned in zip(encoded.ids.tolist(), encoded.learned.tolist(), strict=True):
        if learned:
            runs = [*runs[:-1], [*runs[-1], number]] if before else [*runs, [number]]
        before = learned
    from tokenizers import Tokenizer

    fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [fast.decode(run, skip_special_tokens=False) for run in runs]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_loss_is_on_answers_only(folder: Path, name: str) -> None:
    source, messages, tools = TEMPLATES[name]
    example = Conversation(messages=messages, tools=tools)
    assert learned_texts(folder, encoder(folder, source), example) == ANSWERS[name]
    last = encoder(folder, source, "last_answer")
    assert learned_texts(folder, last, example) == ANSWERS[name][1:]
    everything = encoder(folder, source, "all")
    [text] = learned_texts(folder, everything, example)
    assert text == everything.render(example).text


@pytest.mark.parametrize("name", TEMPLATES)
def test_ids_and_masks_are_those_of_transformers(folder: Path, name: str) -> None:
    transformers = pytest.importorskip("transformers")
    source, messages, tools = TEMPLATES[name]
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"),
        bos_token="<s>",
        eos_token="</s>",
        chat_template=source,
    )
    marks = "endgeneration" in source
    expected = theirs.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=marks
    )
    ours = encoder(folder, source)
    [encoded] = ours.encode([ours.render(Conversation(messages=messages, tools=tools))])
    assert encoded.ids.tolist() == expected["input_ids"]
    if marks:
        assert encoded.learned.astype(int).tolist() == expected["assistant_masks"]
    prompt = theirs.apply_chat_template(
        messages[:-1], tools=tools, add_generation_prompt=True, tokenize=False
    )
    template = ours.template
    assert template is not None
    assert template.render(messages[:-1], tools, add_generation_prompt=True).text == prompt


def test_folders_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for number, source in enumerate((chats.LLAMA3, chats.QWEN, chats.GEMMA, chats.MISTRAL)):
        folder = chats.save_tokenizer(
            tmp_path / str(number), source, bos="<|begin_of_text|>", eos="<|eot_id|>"
        )
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        template = load_chat_template(folder)
        expected = theirs.apply_chat_template(chats.CHAT, tokenize=False)
        assert template.render(chats.CHAT).text == expected
        assert load_tokenizer(folder).encode(expected) == (
            theirs.apply_chat_template(chats.CHAT, return_dict=False)
        )


def test_the_date_is_printed_as_transformers_prints_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    source = "{{ strftime_now('%d %B %Y') }}"
    folder = chats.save_tokenizer(tmp_path, source)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    for _ in range(2):  # midnight may lie between
        today = date.today()
        text = theirs.apply_chat_template(chats.CHAT, tokenize=False)
        if date.today() == today:
            break
    assert load_chat_template(folder, today=today).render(chats.CHAT).text == text


def test_unstable_beginnings_are_refused(folder: Path) -> None:
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "<think>x</think>b"},
        {"role": "user", "content": "c"},
        {"role": "assistant", "content": "<think>y</think>d"},
    ]
    example = Conversation(messages=messages)
    ours = encoder(folder, chats.THINKING)
    with pytest.raises(ValueError, match=r"message 1 otherwise .* loss_on=\"last_answer\""):
        ours.render(example)
    last = encoder(folder, chats.THINKING, "last_answer")
    assert learned_texts(folder, last, example) == ["<think>y</think>d<|im_end|>"]


def test_white_space_that_ends_a_turn_is_learned(folder: Path) -> None:
    source = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}"
    source += "{% if add_generation_prompt %}assistant: {% endif %}"
    example = Conversation(messages=chats.CHAT[2:])
    # jinja drops the line break behind a tag, not the one before it
    assert learned_texts(folder, encoder(folder, source), example) == ["Six.\n\n"]


def test_only_the_completion_messages_are_learned(folder: Path) -> None:
    for source in (chats.CHATML, chats.CHATML_WITHOUT_BLOCKS):
        example = Conversation(messages=chats.CHAT, prompt_messages=2)
        assert learned_texts(folder, encoder(folder, source), example) == ["Six.<|im_end|>"]


def test_prompt_and_completion(tmp_path: Path) -> None:
    folder = chats.save_tokenizer(tmp_path, None, add_bos=True)
    tokenizer: Any = load_tokenizer(folder)
    ours = ExampleEncoder(tokenizer, None, bos_ids=tokenizer.begin_ids)
    example = PromptCompletion(prompt="Question?", completion=" Answer")
    [encoded] = ours.encode([ours.render(example)])
    inner = tokenizer.encode("Question? Answer")
    assert encoded.ids.tolist() == [0, *inner, tokenizer.eod_id]
    assert learned_texts(folder, ours, example) == [" Answer</s>"]
    with pytest.raises(ValueError, match="give chat_template"):
        ours.render(Conversation(messages=chats.CHAT))


def test_bytes(folder: Path) -> None:
    ours = ExampleEncoder(ByteTokenizer(), load_chat_template("bytes", "chatml"))
    [encoded] = ours.encode([ours.render(Conversation(messages=chats.CHAT))])
    learned = bytes(encoded.ids[encoded.learned].tolist()).decode()
    assert learned == "".join(ANSWERS["chatml"])


class WithoutOffsets:
    """A tokenizer that doesn't tell the characters of its tokens."""

    name, vocab_size, eod_id, digest = "plain", 257, 256, "plain"

    def __init__(self, merge: bytes = b"") -> None:
        self.merge = merge

    def encode(self, text: str) -> list[int]:
        data = text.encode().replace(self.merge, b"\xff") if self.merge else text.encode()
        return list(data)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode()


def test_a_tokenizer_without_offsets(folder: Path) -> None:
    template = ChatTemplate(chats.CHATML)
    ours = ExampleEncoder(WithoutOffsets(), template)
    [encoded] = ours.encode([ours.render(Conversation(messages=chats.CHAT))])
    learned = bytes(encoded.ids[encoded.learned].tolist()).decode()
    assert learned == "".join(ANSWERS["chatml"])
    merging = ExampleEncoder(WithoutOffsets(b"\nS"), template)
    with pytest.raises(ValueError, match="merges characters over the border of an answer"):
        merging.encode([merging.render(Conversation(messages=chats.CHAT))])


def test_unknown_choice_of_loss() -> None:
    with pytest.raises(ValueError, match="loss_on='both' is unknown"):
        ExampleEncoder(ByteTokenizer(), None, loss_on="both")  # type: ignore[arg-type]

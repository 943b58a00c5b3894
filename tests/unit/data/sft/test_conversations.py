"""Records of the known formats."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lightning.data.sft import (
    ChatTemplate,
    Conversation,
    PromptCompletion,
    detect_format,
    read_example,
)
from tests.unit.data.sft import chats

USER, ANSWER = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}


def read(record: dict[str, Any]) -> Any:
    return read_example(record, detect_format(record))


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"messages": [USER, ANSWER]}, [USER, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            [USER, ANSWER],
        ),
        (
            {
                "system": "s",
                "conversations": [{"from": "user", "value": "q"}, {"from": "model", "value": "a"}],
            },
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
        ({"instruction": "q", "output": "a", "input": ""}, [USER, ANSWER]),
        (
            {"instruction": "q", "input": "x", "output": "a", "history": [["q", "a"]]},
            [USER, ANSWER, {"role": "user", "content": "q\n\nx"}, ANSWER],
        ),
        (
            {"instruction": "q", "output": "a", "system": "s", "text": None},
            [{"role": "system", "content": "s"}, USER, ANSWER],
        ),
    ],
)
def test_conversations(record: dict[str, Any], expected: list[dict[str, Any]]) -> None:
    assert read(record) == Conversation(messages=expected)


def test_prompt_and_completion() -> None:
    assert read({"prompt": "q", "completion": "a"}) == PromptCompletion(prompt="q", completion="a")
    chat = {"prompt": [USER], "completion": [ANSWER]}
    assert read(chat) == Conversation(messages=[USER, ANSWER], prompt_messages=1)
    assert read({"prompt": [USER], "completion": "a"}) == read(chat)


def test_tool_calls() -> None:
    tools = json.dumps(chats.TOOLS)
    call = {"name": "add", "arguments": {"a": 2}}
    record = {
        "tools": tools,
        "conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "5"},
            {"from": "gpt", "value": "a"},
        ],
    }
    called = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call}],
    }
    expected = [USER, called, {"role": "tool", "content": "5"}, ANSWER]
    assert read(record) == Conversation(messages=expected, tools=chats.TOOLS)


def test_empty_columns_of_tables_are_left_out() -> None:
    call = {"name": "add", "arguments": {"a": 2, "b": None}}
    table = [
        {**USER, "tool_calls": None, "name": None},
        {"role": "assistant", "content": None, "tool_calls": [{"function": call}], "name": None},
    ]
    [first, second] = read({"messages": table, "tools": None}).messages
    assert first == USER
    kept = {"function": {"name": "add", "arguments": {"a": 2}}}
    assert second == {"role": "assistant", "content": None, "tool_calls": [kept]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"text": "x"}, r"keys \['text'\] is in none of the known formats"),
        ({"messages": [USER]}, "no message of the assistant"),
        ({"messages": []}, "messages is no list of messages"),
        ({"messages": "x"}, "messages is no list of messages"),
        ({"messages": [{"content": "x"}]}, "a message without role"),
        ({"messages": [{"role": "assistant"}]}, "a message without content"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "from='alien' is none of"),
        ({"conversations": [{"from": "human"}]}, "value=None of human is no text"),
        ({"conversations": [{"from": "function_call", "value": "x"}]}, "function_call that is no"),
        ({"instruction": "q", "output": 3}, "output=3 is no text"),
        ({"instruction": "q", "output": "a", "history": [["x"]]}, "history: .* is no pair"),
        ({"prompt": "q", "completion": 1}, "completion=1 is no text"),
        ({"prompt": [USER], "completion": [USER]}, "no message of the assistant"),
        ({"messages": [USER, ANSWER], "tools": "{"}, "tools is neither a list nor JSON"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools is a dict"),
    ],
)
def test_refusals(record: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(record)


def test_a_format_that_was_given() -> None:
    with pytest.raises(ValueError, match="no field conversations, which format sharegpt needs"):
        read_example({"messages": [USER, ANSWER]}, "sharegpt")


SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=4)
KEYS = st.sampled_from(["role", "content", "from", "value", "tool_calls", "x"])
SPEAKERS = st.sampled_from(["user", "assistant", "system", "human", "gpt", "function_call"])
VALUES = st.recursive(
    SCALARS | SPEAKERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)
FIELDS = ["messages", "conversations", "instruction", "output", "input", "system", "history"]
FIELDS += ["prompt", "completion", "tools"]


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_any_record_is_read_or_explained(record: dict[str, Any]) -> None:
    template = ChatTemplate(chats.QWEN)
    problem = None
    try:
        example = read(record)
        if isinstance(example, Conversation):
            template.render(example.messages, example.tools)
    except ValueError as error:
        problem = str(error)
    assert problem is None or len(problem) > 10

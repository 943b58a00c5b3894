"""What chat and instruction data look like on disk, brought into one form.

| format | a record |
|---|---|
| messages | `messages`: list of `role`, `content`, ...; optionally `tools` |
| sharegpt | `conversations`: list of `from`, `value`; optionally `system`, `tools` |
| alpaca | `instruction`, `output`; optionally `input`, `system`, `history` |
| prompt_completion | `prompt` and `completion`: two texts, or two lists of messages |
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

DataFormat = Literal["messages", "sharegpt", "alpaca", "prompt_completion"]
FORMATS: tuple[DataFormat, ...] = ("messages", "sharegpt", "alpaca", "prompt_completion")

Record = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages for a chat template."""

    messages: list[dict[str, Any]]
    """`role`, `content` and whatever else the record has for the template (`tool_calls`, ...)."""
    tools: list[Any] | None = None
    """Descriptions of the tools that the model may call."""
    prompt_messages: int = 0
    """Messages at the beginning that never have a loss."""


@dataclass(frozen=True, kw_only=True)
class PromptCompletion:
    """Two texts that follow each other, without a chat template."""

    prompt: str
    completion: str


Example = Conversation | PromptCompletion

_SHAREGPT_ROLES: Mapping[str, str] = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "function_call",
    "tool_call": "function_call",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}


def detect_format(record: Record) -> DataFormat:
    """Returns the format of a record by its keys.

    Raises:
        ValueError: none fits.
    """
    for name, needed in _NEEDED.items():
        if all(record.get(key) is not None for key in needed):
            return name
    known = "; ".join(f"{name}: {', '.join(keys)}" for name, keys in _NEEDED.items())
    raise ValueError(
        f"a record with the keys {sorted(record)} is in none of the known formats ({known}): rename"
        " its fields"
    )


def read_example(record: Record, data_format: DataFormat) -> Example:
    """Returns what a record of a format says.

    Raises:
        ValueError: a field is missing or of another type; the message names it.
    """
    missing = [key for key in _NEEDED[data_format] if record.get(key) is None]
    if missing:
        raise ValueError(f"no field {' and no '.join(missing)}, which format {data_format} needs")
    example = _READERS[data_format](record)
    if isinstance(example, Conversation):
        roles = [message["role"] for message in example.messages]
        if "assistant" not in roles[example.prompt_messages :]:
            raise ValueError(f"no message of the assistant among {roles}: nothing to learn")
    return example


def _messages(record: Record) -> Conversation:
    return Conversation(messages=_message_list(record, "messages"), tools=_tools(record))


def _sharegpt(record: Record) -> Conversation:
    turns = record["conversations"]
    if not _is_list_of_objects(turns):
        raise ValueError("conversations is no list of objects with from and value")
    messages = _system(record)
    for turn in turns:
        speaker, value = turn.get("from"), turn.get("value")
        role = _SHAREGPT_ROLES.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise ValueError(
                f"conversations: from={_shown(speaker)} is none of {', '.join(_SHAREGPT_ROLES)}"
            )
        if not isinstance(value, str):
            raise ValueError(f"conversations: value={_shown(value)} of {speaker} is no text")
        messages.append(
            _function_call(value) if role == "function_call" else {"role": role, "content": value}
        )
    return Conversation(messages=messages, tools=_tools(record))


def _alpaca(record: Record) -> Conversation:
    messages = _system(record)
    for turn in record.get("history") or []:
        if not (isinstance(turn, Sequence) and len(turn) == 2):
            raise ValueError(f"history: {turn!r} is no pair of question and answer")
        messages += _exchange(_string(turn[0], "history"), _string(turn[1], "history"))
    question = _string(record["instruction"], "instruction")
    if record.get("input"):
        question += "\n\n" + _string(record["input"], "input")
    return Conversation(
        messages=messages + _exchange(question, _string(record["output"], "output"))
    )


def _prompt_completion(record: Record) -> Example:
    if isinstance(record["prompt"], str):
        return PromptCompletion(
            prompt=record["prompt"], completion=_string(record["completion"], "completion")
        )
    prompt = _message_list(record, "prompt")
    completion = record["completion"]
    if isinstance(completion, str):
        answer: list[dict[str, Any]] = [{"role": "assistant", "content": completion}]
    else:
        answer = _message_list(record, "completion")
    return Conversation(messages=prompt + answer, tools=_tools(record), prompt_messages=len(prompt))


def _exchange(question: str, answer: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _system(record: Record) -> list[dict[str, Any]]:
    system = record.get("system")
    return [{"role": "system", "content": _string(system, "system")}] if system else []


def _message_list(record: Record, key: str) -> list[dict[str, Any]]:
    given = record[key]
    if not _is_list_of_objects(given) or not given:
        raise ValueError(f"{key} is no list of messages with role and content")
    messages = []
    for message in given:
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{key}: a message without role: {_shown(message)}")
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{key}: a message without content: {_shown(message)}")
        # Tables give every message all columns; what is empty there was not in the message.
        kept = {name: _without_none(value) for name, value in message.items() if value is not None}
        messages.append({"content": None, **kept} if "content" in message else kept)
    return messages


def _tools(record: Record) -> list[Any] | None:
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f"tools is neither a list nor JSON: {error}") from error
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError(f"tools is a {type(tools).__name__}, not a list")
    return [_without_none(tool) for tool in tools]


def _function_call(value: str) -> dict[str, Any]:
    """The message of one call or several, written as JSON of `name` and `arguments`."""
    try:
        calls = json.loads(value)
    except ValueError as error:
        raise ValueError(f"conversations: a function_call that is no JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise ValueError(f"conversations: a function_call without name: {_shown(value)}")
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
    }


def _without_none(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    if isinstance(value, list):
        return [_without_none(entry) for entry in value]
    return value


def _string(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={_shown(value)} is no text")
    return value


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."


_NEEDED: Mapping[DataFormat, tuple[str, ...]] = {
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "prompt_completion": ("prompt", "completion"),
    "alpaca": ("instruction", "output"),
}
_READERS: Mapping[DataFormat, Callable[[Record], Example]] = {
    "messages": _messages,
    "sharegpt": _sharegpt,
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
}

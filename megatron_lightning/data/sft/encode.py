"""From examples to token ids and a mask over the tokens that the model shall learn to write.

The text is encoded as a whole, as `transformers` does it, and a token is learned when it covers a
character of an answer. Where the answers lie is known from the template's `{% generation %}`
blocks; a template without them is rendered up to each answer and behind it, and both must be
beginnings of the whole text. If they are not, because a template shows earlier turns otherwise once
later ones exist, the example is refused: a guess would train on the wrong tokens.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron_lightning.data.sft.chat_template import ChatTemplate
from megatron_lightning.data.sft.conversations import Conversation, Example, PromptCompletion
from megatron_lightning.data.tokenizer import Tokenizer

LossOn = Literal["answers", "last_answer", "all"]
LOSS_ON = ("answers", "last_answer", "all")

Span = tuple[int, int]


@runtime_checkable
class OffsetTokenizer(Protocol):
    """A tokenizer that knows which characters its tokens stand for."""

    @property
    def begin_ids(self) -> list[int]:
        """Special tokens that it puts in front of a text."""
        ...

    def encode_offsets(self, texts: Sequence[str]) -> list[tuple[list[int], list[Span]]]:
        """Returns for each text the ids of `encode`, and begin and end of each in the text."""
        ...


class Encoded(NamedTuple):
    """One document."""

    ids: NDArray[np.int32]
    """(T,) tokens."""
    learned: NDArray[np.bool_]
    """(T,) tokens that have a loss when they are predicted."""


class Text(NamedTuple):
    """A document before it is encoded."""

    text: str
    answers: list[Span]
    """Characters that are learned."""
    framed: bool = False
    """Whether begin and end tokens are put around it; a template prints its own."""


class ExampleEncoder:
    """Renders and encodes examples.

    Args:
        tokenizer: its ids are those of training.
        template: for conversations; None when there are only prompts with completions.
        loss_on: "answers": what the assistant says; "last_answer": only its last turn; "all": every
            token.
        bos_ids: tokens in front of a prompt with completion (a template prints its own).
        eos_id: token behind a completion.

    Raises:
        ValueError: `loss_on` is unknown.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        loss_on: LossOn = "answers",
        bos_ids: Sequence[int] = (),
        eos_id: int | None = None,
    ) -> None:
        if loss_on not in LOSS_ON:
            raise ValueError(f"loss_on={loss_on!r} is unknown: choose one of {', '.join(LOSS_ON)}")
        self.tokenizer, self.template = tokenizer, template
        self.loss_on: LossOn = loss_on
        self.bos_ids = list(bos_ids)
        self.eos_id = tokenizer.eod_id if eos_id is None else eos_id

    def render(self, example: Example) -> Text:
        """Returns the text of an example and where its answers lie.

        Raises:
            ValueError: the template refuses the example, or the answers can't be told.
        """
        if isinstance(example, PromptCompletion):
            text = example.prompt + example.completion
            begin = 0 if self.loss_on == "all" else len(example.prompt)
            return Text(text, [(begin, len(text))], framed=True)
        if self.template is None:
            raise ValueError("a conversation needs a chat template: give chat_template")
        return _render_conversation(self.template, example, self.loss_on)

    def encode(self, texts: Sequence[Text]) -> list[Encoded]:
        """Returns the documents of rendered examples, in their order."""
        whole = [text.text for text in texts]
        if isinstance(self.tokenizer, OffsetTokenizer):
            pairs = self.tokenizer.encode_offsets(whole)
            found = [
                (ids, _covered(offsets, text.answers))
                for (ids, offsets), text in zip(pairs, texts, strict=True)
            ]
        else:
            found = [
                (ids, _by_prefixes(self.tokenizer, ids, text))
                for ids, text in zip(self.tokenizer.encode_batch(whole), texts, strict=True)
            ]
        return [
            self._framed(np.array(ids, np.int32), learned) if text.framed
            else Encoded(np.array(ids, np.int32), learned)
            for (ids, learned), text in zip(found, texts, strict=True)
        ]  # fmt: skip

    def _framed(self, ids: NDArray[np.int32], learned: NDArray[np.bool_]) -> Encoded:
        """A prompt with completion between its begin and end tokens; the end is learned."""
        bos = np.array(self.bos_ids, np.int32)
        framed = np.concatenate([bos, ids, np.array([self.eos_id], np.int32)])
        before = np.full(len(bos), self.loss_on == "all")
        return Encoded(framed, np.concatenate([before, learned, [True]]))


def _render_conversation(template: ChatTemplate, example: Conversation, loss_on: LossOn) -> Text:
    messages, tools = example.messages, example.tools
    whole = template.render(messages, tools)
    if loss_on == "all":
        return Text(whole.text, [(0, len(whole.text))])
    turns = [
        number
        for number, message in enumerate(messages)
        if message["role"] == "assistant" and number >= example.prompt_messages
    ]
    if loss_on == "last_answer":
        turns = turns[-1:]
    if not template.marks_answers(tools):
        answers = [_answer_span(template, example, whole.text, turn) for turn in turns]
        return Text(whole.text, answers)
    # Blocks of the messages before the first learned turn, counted where they stand alone.
    before = messages[: turns[0]]
    earlier = any(message["role"] == "assistant" for message in before)
    skipped = len(template.render(before, tools).generated) if earlier else 0
    return Text(whole.text, whole.generated[skipped:])


def _answer_span(template: ChatTemplate, example: Conversation, whole: str, turn: int) -> Span:
    """Characters of message `turn`: from the end of its generation prompt to its own end."""
    messages, tools = example.messages, example.tools
    prompt = template.render(messages[:turn], tools, add_generation_prompt=True).text
    last = turn == len(messages) - 1
    until = whole if last else template.render(messages[: turn + 1], tools).text
    if not whole.startswith(until) or not until.startswith(prompt):
        raise ValueError(
            f"the chat template shows the text before and including message {turn} otherwise when"
            " it is a part of the whole conversation, so its answer can't be located: use a"
            " template with {% generation %} blocks around answers"
            + ("" if last else ', or loss_on="last_answer"')
        )
    return len(prompt), len(prompt) + len(_without_tail(until[len(prompt) :], messages[turn]))


def _without_tail(answer: str, message: dict) -> str:
    """The answer without the white space behind the mark that ends the turn, which is where a model
    stops.
    """
    content = message.get("content")
    said = answer.rstrip()
    if not said or (isinstance(content, str) and said.endswith(content.rstrip())):
        return answer  # no such mark: the white space is the mark
    return said


def _covered(offsets: Sequence[Span], answers: Sequence[Span]) -> NDArray[np.bool_]:
    """Tokens that hold a character of an answer; (T,)."""
    learned = np.zeros(len(offsets), np.bool_)
    if not offsets:
        return learned
    begins, ends = np.array(offsets, np.int64).T
    ends = np.maximum(ends, begins + 1)  # a token whose characters the tokenizer left out
    for begin, end in answers:
        learned |= (begins < end) & (ends > begin)
    return learned


def _by_prefixes(tokenizer: Tokenizer, ids: list[int], text: Text) -> NDArray[np.bool_]:
    """The same for a tokenizer that doesn't tell characters: what comes before a border must be
    encoded alike alone and as a part of the whole.
    """
    learned = np.zeros(len(ids), np.bool_)
    for begin, end in text.answers:
        borders = []
        for border in (begin, end):
            alone = tokenizer.encode(text.text[:border])
            if alone != ids[: len(alone)]:
                raise ValueError(
                    f"tokenizer {tokenizer.name} merges characters over the border of an answer:"
                    f" {text.text[max(0, border - 20) : border + 20]!r}; use a tokenizer.json of"
                    " this tokenizer, whose tokens know their characters"
                )
            borders.append(len(alone))
        learned[slice(*borders)] = True
    return learned

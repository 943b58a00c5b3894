"""Chat templates: from messages to the text a model reads, as `transformers` renders them.

A template is a Jinja text that comes with a tokenizer (`chat_template.jinja`, or a field of
`tokenizer_config.json`, in either case one text or several by name). It runs sandboxed, with the
helpers that Hugging Face's templates expect: `raise_exception`, `strftime_now`, a `tojson` that
escapes no HTML, `break` and `continue`, and blocks `{% generation %}` around what the model writes.

Blocks are found by marks that are put into the text and taken out again, so they are exact also
within macros and captured blocks; a template that treats marked text otherwise is refused.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from datetime import date, datetime
from typing import Any, NamedTuple, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]

_BEGIN, _END = "\ue000\ufdd0", "\ufdd1\ue001"  # private use and noncharacters: in no text

_TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)


class Rendered(NamedTuple):
    """The text of a conversation."""

    text: str
    generated: list[tuple[int, int]]
    """Begin and end of each generation block in the text, in characters."""


class ChatTemplate:
    """Renders conversations.

    Args:
        source: the template, or templates by name, of which "default" is used, and "tool_use"
            (where it exists) for conversations with tools.
        special_tokens: what the template may print, such as `eos_token`.
        today: date that `strftime_now` gives; None: the template must not ask for it, since samples
            would change from one day to the next.

    Raises:
        ValueError: the template can't be parsed.
    """

    def __init__(
        self,
        source: str | Mapping[str, str],
        special_tokens: Mapping[str, Any] | None = None,
        *,
        today: date | None = None,
    ) -> None:
        self.sources = {"default": source} if isinstance(source, str) else dict(source)
        self.special_tokens = dict(special_tokens or {})
        self.today = today
        self._templates = {
            marked: {name: _compile(text, marked, today) for name, text in self.sources.items()}
            for marked in (False, True)
        }

    def marks_answers(self, tools: Sequence[Any] | None = None) -> bool:
        """Whether the template says itself what the model writes."""
        return "endgeneration" in self._source(tools)[1]

    def key(self) -> dict[str, Any]:
        """Everything that determines the text, as JSON-able values."""
        today = None if self.today is None else self.today.isoformat()
        return {"sources": self.sources, "tokens": self.special_tokens, "today": today}

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None = None,
        *,
        add_generation_prompt: bool = False,
    ) -> Rendered:
        """Renders messages of `role`, `content` and whatever else the template reads.

        Raises:
            ValueError: the template refuses the messages, or its generation blocks can't be
                located.
        """
        name, source = self._source(tools)
        values = dict(
            messages=messages,
            tools=tools,
            documents=None,
            add_generation_prompt=add_generation_prompt,
            **self.special_tokens,
        )
        try:
            plain = self._templates[False][name].render(**values)
            if "endgeneration" not in source:
                return Rendered(plain, [])
            marked = self._templates[True][name].render(**values)
        except _TEMPLATE_ERRORS as error:
            raise ValueError(f"the chat template can't render it: {error}") from error
        text, generated = _without_marks(marked)
        if text != plain:
            raise ValueError(
                "the chat template changes the text of its {% generation %} blocks (a filter over"
                " them): put the blocks around what is printed last"
            )
        return Rendered(text, generated)

    def _source(self, tools: Sequence[Any] | None) -> tuple[str, str]:
        """Name and text of the template to use."""
        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        if name not in self.sources:
            raise ValueError(
                f"the tokenizer has the chat templates {', '.join(self.sources)} and none named"
                " default: choose one by name with chat_template"
            )
        return name, self.sources[name]


def _without_marks(marked: str) -> tuple[str, list[tuple[int, int]]]:
    """Returns the text without marks, and where marked parts lie in it."""
    first, *rest = marked.split(_BEGIN)
    parts, generated, place = [first], [], len(first)
    for part in rest:
        inside, _, after = part.partition(_END)
        if inside:
            generated.append((place, place + len(inside)))
        parts += [inside, after]
        place += len(inside) + len(after)
    return "".join(parts), generated


class _Generation(Extension):
    """The tag `{% generation %}` ... `{% endgeneration %}`: marks around its text, or nothing."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own form)
    marked = False

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_emit"), [], [], body).set_lineno(line)

    def _emit(self, caller: Macro) -> str:
        return f"{_BEGIN}{caller()}{_END}" if self.marked else caller()


class _MarkedGeneration(_Generation):
    marked = True


@functools.lru_cache(maxsize=32)
def _compile(source: str, marked: bool, today: date | None) -> Any:
    tag = _MarkedGeneration if marked else _Generation
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[tag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = functools.partial(_format_date, today)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"the chat template is no Jinja template: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _format_date(today: date | None, form: str) -> str:
    if today is None:
        raise TemplateError(
            "it asks for today's date, so samples would differ from day to day; set template_date,"
            " such as 2026-01-31"
        )
    return datetime(today.year, today.month, today.day).strftime(form)

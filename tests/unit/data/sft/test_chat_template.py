"""Rendering of chat templates, in the semantics of `transformers`."""

import json
from datetime import date
from pathlib import Path

import pytest

from megatron_lightning.data.sft import ChatTemplate, load_chat_template
from tests.unit.data.sft import chats

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def test_chatml() -> None:
    text, generated = ChatTemplate(chats.CHATML).render(chats.CHAT)
    assert text == (
        "<|im_start|>user\nWhat is 2 + 2?<|im_end|>\n"
        "<|im_start|>assistant\n4, of course \u2014 naïve question! 😀<|im_end|>\n"
        "<|im_start|>user\n  And 3 & <b>3</b>?\nThink.<|im_end|>\n"
        "<|im_start|>assistant\nSix.<|im_end|>\n"
    )
    assert [text[a:b] for a, b in generated] == [
        "4, of course \u2014 naïve question! 😀<|im_end|>",
        "Six.<|im_end|>",
    ]


def test_the_built_in_template_is_chatml() -> None:
    built_in = load_chat_template("bytes", "chatml")
    for prompt in (False, True):
        assert built_in.render(chats.CHAT, add_generation_prompt=prompt) == ChatTemplate(
            chats.CHATML
        ).render(chats.CHAT, add_generation_prompt=prompt)


def test_llama3_mistral_gemma() -> None:
    chat = [{"role": "user", "content": " Hi "}, {"role": "assistant", "content": "Yes"}]
    render = lambda source: ChatTemplate(source, SPECIAL).render(chat).text  # noqa: E731
    assert render(chats.LLAMA3) == (
        "<s><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYes<|eot_id|>"
    )
    assert render(chats.MISTRAL) == "<s> [INST]  Hi  [/INST] Yes</s>"
    assert render(chats.GEMMA) == (
        "<s><start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\nYes<end_of_turn>\n"
    )


def test_tools_loop_controls_and_json() -> None:
    text, generated = ChatTemplate(chats.QWEN).render([chats.SYSTEM, *chats.TOOL_CHAT], chats.TOOLS)
    described = json.dumps(chats.TOOLS[0], ensure_ascii=False)
    assert f"Be brief.\n\n# Tools\n\n{described}<|im_end|>" in text  # nothing escaped
    assert text.count("Be brief.") == 1
    assert [text[a:b] for a, b in generated] == [
        '\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call><|im_end|>',
        "It is 5.<|im_end|>",
    ]


def test_a_template_refuses_by_its_own_words() -> None:
    with pytest.raises(ValueError, match="System role not supported"):
        ChatTemplate(chats.GEMMA, SPECIAL).render([chats.SYSTEM, *chats.CHAT])
    with pytest.raises(ValueError, match="roles must alternate"):
        ChatTemplate(chats.MISTRAL, SPECIAL).render(chats.CHAT[1:])


def test_blocks_inside_of_macros_and_captured_text() -> None:
    source = (
        "{% macro say(text) %}{% generation %}{{ text }}{% endgeneration %}{% endmacro %}"
        "{% set all %}{% for m in messages %}<{{ say(m.content) }}>{% endfor %}{% endset %}"
        "chat: {{ all }}"
    )
    text, generated = ChatTemplate(source).render(chats.CHAT[1:2] + chats.CHAT[3:])
    assert text.startswith("chat: <4, of course")
    assert [text[a:b] for a, b in generated] == [chats.CHAT[1]["content"], "Six."]


def test_a_filter_over_blocks_is_refused() -> None:
    source = "{% set x %}{% generation %} {{ messages[0].content }} {% endgeneration %}{% endset %}"
    with pytest.raises(ValueError, match="changes the text of its"):
        ChatTemplate(source + "{{ x | trim }}").render(chats.CHAT)


def test_templates_run_in_a_sandbox() -> None:
    for source in (
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
    ):
        with pytest.raises(ValueError, match="can't render"):
            ChatTemplate(source).render(chats.CHAT)


def test_todays_date_has_to_be_given() -> None:
    source = "{{ strftime_now('%d %b %Y') }}"
    assert ChatTemplate(source, today=date(2024, 7, 26)).render([]).text == "26 Jul 2024"
    with pytest.raises(ValueError, match="set template_date"):
        ChatTemplate(source).render([])


def test_no_jinja() -> None:
    with pytest.raises(ValueError, match="no Jinja template"):
        ChatTemplate("{% for %}")


def test_where_templates_come_from(tmp_path: Path) -> None:
    folder = chats.save_tokenizer(tmp_path / "t", "field {{ bos_token }}{{ eos_token }}")
    assert load_chat_template(folder).render([]).text == "field <s></s>"
    assert load_chat_template(folder / "tokenizer.json").render([]).text == "field <s></s>"
    (folder / "chat_template.jinja").write_text("file {{ pad_token }}.")
    assert load_chat_template(folder).render([]).text == "file ."
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    assert load_chat_template(folder).render([]).text == "file ."
    assert load_chat_template(folder).render([], chats.TOOLS).text == "tools"
    assert load_chat_template(folder, "tool_use").render([]).text == "tools"
    own = tmp_path / "own.jinja"
    own.write_text("own {{ bos_token }}")
    assert load_chat_template(folder, str(own)).render([]).text == "own <s>"
    assert "<|im_start|>" in load_chat_template(folder, "chatml").render(chats.CHAT).text


def test_several_templates_in_the_config(tmp_path: Path) -> None:
    folder = chats.save_tokenizer(tmp_path, None)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "default", "template": "d"},
        {"name": "tool_use", "template": "t"},
    ]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_chat_template(folder).render([]).text == "d"
    assert load_chat_template(folder).render([], chats.TOOLS).text == "t"
    config["chat_template"] = [{"name": "rag", "template": "r"}]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"has the chat templates rag and none named\s+default"):
        load_chat_template(folder).render([])


def test_no_template(tmp_path: Path) -> None:
    folder = chats.save_tokenizer(tmp_path, None)
    with pytest.raises(ValueError, match="has no chat template .* or 'chatml'"):
        load_chat_template(folder)
    with pytest.raises(ValueError, match="'other' is neither a file nor one of chatml"):
        load_chat_template(folder, "other")


def test_templates_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    folder = chats.save_tokenizer(tmp_path / "snapshot", "hub {{ eos_token }}")
    asked = []

    def download(name: str, *, allow_patterns: list[str]) -> str:
        asked.append((name, "tokenizer_config.json" in allow_patterns))
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert load_chat_template("owner/name").render([]).text == "hub </s>"
    assert asked == [("owner/name", True)]

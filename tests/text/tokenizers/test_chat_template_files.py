from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.chat_template_files import chat_templates, choose_chat_template

NAMED = {"chat_template": [{"name": "default", "template": "usual"}, {"name": "tool_use", "template": "tools"}]}


def test_named_templates_of_a_list(tmp_path: Path) -> None:
    assert chat_templates(tmp_path, NAMED) == {"default": "usual", "tool_use": "tools"}


def test_files_have_priority_over_fields(tmp_path: Path) -> None:
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    assert chat_templates(tmp_path, {}) == {"default": "of the processor"}
    assert chat_templates(tmp_path, NAMED)["default"] == "usual"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("newer tools")
    (tmp_path / "chat_template.jinja").write_text("newest")
    assert chat_templates(tmp_path, NAMED) == {"default": "newest", "tool_use": "newer tools"}


@pytest.mark.parametrize("value", [5, {"default": "x"}, ["x"], [{"name": "default"}], [{"name": 5, "template": "x"}]])
def test_fields_of_another_form_are_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template should be a string, or a list"):
        chat_templates(tmp_path, {"chat_template": value})
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": value}))
    with pytest.raises(ConfigError, match=r"chat_template\.json: chat_template should be a string, or a list"):
        chat_templates(tmp_path, {})


def test_files_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")

    with pytest.raises(ConfigError, match=r"chat_template\.jinja can't be read"):
        chat_templates(tmp_path, {})


def test_the_default_is_chosen_unless_another_is_named(tmp_path: Path) -> None:
    templates = chat_templates(tmp_path, NAMED)

    assert choose_chat_template(None, templates) == "usual"
    assert choose_chat_template("tool_use", templates) == "tools"
    assert choose_chat_template(None, {"tool_use": "tools"}) == "tools"
    assert choose_chat_template(None, {"tool_use": "tools", "rag": "documents"}) is None
    assert choose_chat_template(None, {}) is None


def test_a_file_is_chosen_by_its_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine")

    assert choose_chat_template(str(file), chat_templates(tmp_path, NAMED)) == "mine"


@pytest.mark.parametrize(("templates", "names"), [({"default": "a", "rag": "b"}, "default, rag"), ({}, "it has none")])
def test_an_unknown_name_is_refused_with_the_names_there_are(templates: dict[str, str], names: str) -> None:
    with pytest.raises(ConfigError, match=rf"--chat-template tools can't be read: .*own templates: {names}"):
        choose_chat_template("tools", templates)

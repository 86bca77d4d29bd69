"""Reads shell text: its commands as words, with the variables that hold for each. Runs nothing."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile

from jaxserve.errors import ConfigError

_ENDS = frozenset(";&|\n()")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::?-([^}]*))?\}|(\w+)|\((\w+)\))")
# A name for the reader to fill in, such as <model>; to a shell it would be redirections.
_PLACEHOLDER = re.compile(r"(?<=[\s=])<([\w./-]+)>(?=\s|$)")
# A line of comment, which may stand between the lines of one command.
_COMMENT_LINE = re.compile(r"^[ \t]*#.*(?:\n|\Z)", re.MULTILINE)
_COMMENT = re.compile(r"(?<=\s)#.*")
# The end of a line that goes on: also with spaces or a comment after the backslash, or without one before a flag.
_GOES_ON = re.compile(r"\\[ \t]*(?:#.*)?\r?\n|(?:[ \t]#[^\n\"]*)?\r?\n(?=[ \t]*--[a-z])")
# What stands before a command: a prompt, the dash of a YAML list, or the key of a systemd unit.
_PROMPT = re.compile(
    r"^[ \t]*(?:[$!>-]|PS [^>\n]*>)[ \t]+|^!(?=\w)|^[ \t]*(?:ExecStart=[-@:+!]*|Environment=)", re.MULTILINE
)
SUBSTITUTION = re.compile(r"\$\([^()\n]*\)")
# The characters of a substitution that mean something to the lexer, which keeps private ones as they are.
_SPECIAL = " \t()<>|&;\"'\\#"
_HIDDEN = str.maketrans(_SPECIAL, "".join(chr(0xE000 + index) for index in range(len(_SPECIAL))))
_SHOWN = {hidden: char for char, hidden in _HIDDEN.items()}
# The number of a stream before its redirection.
_STREAM = re.compile(r"(?<=\s)\d(?=[<>])")
_SHELLS = frozenset({"bash", "sh", "/bin/bash", "/bin/sh"})


@dataclasses.dataclass(frozen=True)
class Command:
    """One command, without redirections. `environment` are the variables that were set for it."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


def commands(text: str, environment: Mapping[str, str] | None = None) -> Iterator[Command]:
    """Yield the commands of shell text, also those in `bash -c`. Raises `ConfigError` if a quotation doesn't end.

    Variables that the text sets are put in; others stay as they are written.
    """
    known = dict(environment or {})
    words: list[str] = []
    for token in [*_tokens(text), "\n"]:
        if not token or set(token) - _ENDS:
            words.append(token)
            continue
        if words:
            yield from _command(words, known)
        words = []


def _tokens(text: str) -> list[str]:
    text = SUBSTITUTION.sub(lambda match: match[0].translate(_HIDDEN), _COMMENT_LINE.sub("", text))
    text = _GOES_ON.sub(" ", text)
    text = _STREAM.sub("", _PROMPT.sub("", _PLACEHOLDER.sub(r"\1", text)))
    try:
        tokens = _lexed(text)
    except ValueError as error:
        try:  # a comment may have a single quotation mark
            tokens = _lexed(_COMMENT.sub("", text))
        except ValueError:
            raise ConfigError(f"the command can't be read: {str(error).lower()}") from None
    return [token.translate(_SHOWN) for token in _without_comments(tokens)]


def _lexed(text: str) -> list[str]:
    lexer = shlex.shlex(text, posix=True, punctuation_chars="();<>|&\n")
    lexer.whitespace = " \t\r"
    lexer.whitespace_split = True
    lexer.commenters = ""
    return list(lexer)


def _without_comments(tokens: Sequence[str]) -> Iterator[str]:
    in_comment = False
    for token in tokens:
        if "\n" in token:
            in_comment = False
        elif token.startswith("#"):
            in_comment = True
        if not in_comment:
            yield token


def _command(words: list[str], known: dict[str, str]) -> Iterator[Command]:
    words = [filled(word, known) for word in _without_redirections(words)]
    if words[:1] in (["export"], ["env"]):
        words = words[1:]
    leading = list(takewhile(_ASSIGNMENT.fullmatch, words))
    assigned = {name: value for name, _, value in (word.partition("=") for word in leading)}
    rest = words[len(leading) :]
    if not rest:
        known.update(assigned)
    elif rest[0] in _SHELLS and len(rest) > 2 and rest[1].startswith("-") and rest[1].endswith("c"):
        yield from commands(rest[2], {**known, **assigned})
    else:
        yield Command(tuple(rest), {**known, **assigned})


def _without_redirections(words: list[str]) -> Iterator[str]:
    skips = False
    for word in words:
        is_redirection = bool(word) and not set(word) - set("<>&")
        if not is_redirection and not skips:
            yield word
        skips = is_redirection


def filled(word: str, known: Mapping[str, str]) -> str:
    """Return a word with the values of variables that are known or have a default; Kubernetes writes `$(NAME)`."""

    def value(match: re.Match[str]) -> str:
        found = known.get(match[1] or match[3] or match[4], match[2])
        return match[0] if found is None else found

    return _VARIABLE.sub(value, word)

"""Makes one text of a query and a document, in the form that a reranker was trained on, and its ids.

The forms are the tokenizer's own of pairs, the prompt of Qwen3-Reranker, and a chat template that knows messages of the
roles query and document. In the latter two, only the document is ever truncated, and what texts spell never becomes a
special token, but for texts that a client has written in the model's form itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from jaxserve.errors import InvalidRequestError
from jaxserve.model_source.pooling import PooledTask
from jaxserve.text.pooled_texts import TextLimits
from jaxserve.text.tokenizers.chat_template_files import QWEN3_RERANKER
from jaxserve.text.tokenizers.escaped_marks import EscapedMarks
from jaxserve.text.tokenizers.tokenizer import Tokenizer

PairForm = Literal["tokenizer", "qwen3_reranker", "template"]

# The prompt of the model card.
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
# A template that has both roles as vLLM names them, or this mark of SGLang's template, renders pairs.
_ROLES = (re.compile("""["']query["']"""), re.compile("""["']document["']"""))
_MARK = "<Document>"
_SYSTEM = re.compile("""["']system["']""")
_WORD = re.compile(r"[^\W\d]\w*")
# The variables with an instruction: vLLM's and SGLang's name
_INSTRUCTIONS = ("instruction", "instruct")
# What a template gets besides the arguments of a request
_OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "self")


class WrittenPair(NamedTuple):
    """A pair as one text, and the same without its document. If `spells`, special tokens are read wherever they are
    spelled; else the texts have escaped marks."""

    text: str
    without: str
    spells: bool = False


class EncodedPair(NamedTuple):
    """The ids of a pair. Those from `second_start` on are of type 1; None if all are of type 0."""

    ids: list[int]
    second_start: int | None = None


def choose_form(task: PooledTask, chat_template: str | None, source: str) -> PairForm:
    """Return the form of pairs, from the setting `chat_template` and the source of the chat template."""
    if chat_template == QWEN3_RERANKER:
        return "qwen3_reranker"
    if is_pair_template(source):
        return "template"
    return "qwen3_reranker" if task.pair_template == QWEN3_RERANKER else "tokenizer"


def is_pair_template(source: str) -> bool:
    """Return whether a chat template renders a query and a document."""
    return _MARK in source or all(role.search(source) for role in _ROLES)


class PairTemplate:
    """How a chat template with the source `source` is asked to render a pair.

    An instruction is a variable of it, or a message of the role system, as with sentence-transformers.
    """

    def __init__(self, task: PooledTask, source: str) -> None:
        self._words = frozenset(_WORD.findall(source))
        self._reads_system = _SYSTEM.search(source) is not None
        self._task = task

    def check(self, arguments: Mapping[str, Any], asked: tuple[str, str] | None) -> None:
        """Raise `InvalidRequestError` for arguments, or the field and text of an instruction, that change nothing."""
        for name in arguments:
            if name in _OWN_VARIABLES or name not in self._words:
                param = f"chat_template_kwargs.{name[:100]}"
                raise InvalidRequestError(
                    f"{param}: the template of queries and documents takes no such variable; leave it out", param=param
                )
        if asked is not None and not self._reads_system and self._words.isdisjoint(_INSTRUCTIONS):
            check_instruction("tokenizer", asked[1], param=asked[0])

    def messages(self, query: str, document: str, instruction: str | None) -> list[dict[str, str]]:
        """Return the messages that it renders."""
        pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        told = instruction is not None and self._reads_system
        return [{"role": "system", "content": str(instruction)}, *pair] if told else pair

    def arguments(self, instruction: str | None, more: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return the arguments of a rendering, of which a request brings `more`."""
        arguments = {"add_generation_prompt": False, **dict(self._task.template_arguments), **(more or {})}
        if instruction is not None:
            arguments |= dict.fromkeys(_INSTRUCTIONS, instruction)
        return arguments


def qwen3_pair(query: str, document: str, instruction: str | None, marks: EscapedMarks) -> WrittenPair:
    """Return a pair in the prompt of Qwen3-Reranker. A query that has its beginning already is not written again."""
    if query.startswith("<|im_start|>"):
        return WrittenPair(query + document, query + (_AFTER if document.endswith(_AFTER) else ""), spells=True)
    asked = marks.escape(_INSTRUCTION if instruction is None else instruction)
    before = f"{_BEFORE}<Instruct>: {asked}\n<Query>: {marks.escape(query)}\n<Document>: "
    return WrittenPair(before + marks.escape(document) + _AFTER, before + _AFTER)


def default_instruction(task: PooledTask) -> str | None:
    """Return the instruction of pairs that ask for none, None if the model has none of its own."""
    return dict(task.prompts).get(task.default_prompt) or None


def encode_written_pairs(
    tokenizer: Tokenizer,
    marks: EscapedMarks,
    pairs: Sequence[WrittenPair],
    limits: TextLimits,
    names: Sequence[str],
) -> list[EncodedPair]:
    """Return the ids of pairs. As with transformers' templates, the tokenizer adds no special tokens to them.

    Errors call the documents by their `names`.
    """
    encoded: list[EncodedPair] = []
    for pair, name in zip(pairs, names, strict=True):
        encoder = tokenizer if pair.spells else marks
        limits.check(encoder.min_num_tokens(pair.text), name, at_least=True)
        [whole] = encoder.encode_batch([pair.text], add_special_tokens=False)
        if len(whole) <= limits.longest:
            encoded.append(EncodedPair(whole))
            continue
        [fixed] = encoder.encode_batch([pair.without], add_special_tokens=False)
        start = _num_equal(whole, fixed)
        end = len(whole) - min(_num_equal(whole[::-1], fixed[::-1]), len(fixed) - start)
        encoded.append(EncodedPair(limits.fit(whole[:start], whole[start:end], whole[end:], name)))
    return encoded


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limits: TextLimits, names: Sequence[str]
) -> list[EncodedPair]:
    """Return queries and documents in the tokenizer's own form of pairs. Errors call the documents by their `names`."""
    first, between, last = tokenizer.special_tokens_around(2)
    second_offset = tokenizer.second_type_offset()
    queries = list(dict.fromkeys(query for query, _ in pairs))
    for (_, document), name in zip(pairs, names, strict=True):
        limits.check(tokenizer.min_num_tokens(document), name, at_least=True)
    encoded = dict(zip(queries, tokenizer.encode_batch(queries, add_special_tokens=False), strict=True))
    documents = tokenizer.encode_batch([document for _, document in pairs], add_special_tokens=False)
    others, found = len(first) + len(between) + len(last), list[EncodedPair]()
    for (query, _), document_ids, name in zip(pairs, documents, names, strict=True):
        one, other = limits.cut_pair(encoded[query], document_ids, others, name)
        second_start = None if second_offset is None else len(first) + len(one) + second_offset
        found.append(EncodedPair([*first, *one, *between, *other, *last], second_start))
    return found


def check_instruction(form: PairForm, instruction: str | None, *, param: str = "instruction") -> None:
    """Raise `InvalidRequestError` for an instruction that would change nothing."""
    if instruction is not None and form == "tokenizer":
        raise InvalidRequestError(
            f"{param}: this model's form of a query and a document has no place for an instruction; leave it out, or "
            "write it into the query",
            param=param,
        )


def _num_equal(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many ids at the beginning of two lists are the same."""
    return next((number for number, (a, b) in enumerate(zip(one, other)) if a != b), min(len(one), len(other)))

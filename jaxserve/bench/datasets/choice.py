"""The dataset that the flags choose: it describes itself in one line and creates its conversations."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np

from jaxserve.bench.datasets import conversations, files, synthetic, trace
from jaxserve.bench.datasets.lengths import LengthRange, length_range
from jaxserve.bench.datasets.prompts import BenchConversation
from jaxserve.bench.datasets.vocabulary import Vocabulary
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.tokenizer import Tokenizer

DATASETS = {
    "random": "texts of random words",
    "random-ids": "random token ids, sent as ids",
    "sharegpt": "the first prompt of each conversation in a ShareGPT file",
    "custom": "a JSON-lines file of prompts",
    "prefix-repetition": "random texts after a few shared prefixes",
    "generated-shared-prefix": "groups of questions, each group with its own system prompt",
    "multi-turn": "conversations whose prompts include the answers before them",
    "timed-trace": "requests of a Mooncake-format trace, sent at the trace's times",
}
NUM_PROMPTS = 1000

RANDOM = ("random", "random-ids")
FILES = ("sharegpt", "custom", "multi-turn", "timed-trace")


@dataclasses.dataclass(frozen=True)
class Dataset:
    """A dataset and the values of its flags, by flag name. `chat` says whether requests go to the chat route."""

    name: str
    values: dict[str, Any]
    num_prompts: int | None
    seed: int
    chat: bool

    @property
    def timed(self) -> bool:
        """Whether the dataset has its own arrival times."""
        return self.name == "timed-trace"

    @property
    def needs_tokenizer(self) -> bool:
        """Whether a tokenizer is needed to create the prompts or to count their tokens."""
        ids = self.name == "random-ids" or (self.timed and not self.chat)
        return not (self.name == "custom" or (ids and self.values["vocab-size"] is not None) or self._reads_turns)

    @property
    def _reads_turns(self) -> bool:
        return self.name == "multi-turn" and self.values["dataset-path"] is not None

    def describe(self) -> str:
        """Return the dataset and the effect of its flags in one line."""
        values = {key: value for key, value in self.values.items() if value is not None and value is not False}
        if self.name in RANDOM:
            inputs, outputs = self._spans(0)
            prefix = f"{values['random-prefix-len']} shared + " if values["random-prefix-len"] else ""
            ratio, semantics = values["random-range-ratio"], values["random-range-semantics"]
            spread = f" (ratio {ratio['input']:g}/{ratio['output']:g} by {semantics}'s semantics)"
            is_fixed = inputs.low == inputs.high and outputs.low == outputs.high
            return f"{self.name}, {prefix}{inputs} tokens in, {outputs} out{'' if is_fixed else spread}"
        return ", ".join([self.name, *(f"{key} {value}" for key, value in values.items())])

    def vocabulary(self, tokenizer: Tokenizer | None) -> Vocabulary:
        """Return the vocabulary to draw from, with this tokenizer."""
        return Vocabulary(tokenizer, self.values.get("vocab-size"), chat=self.chat)

    def make(self, vocabulary: Vocabulary, *, warmups: int | None = None) -> list[BenchConversation]:
        """Create the conversations, or `warmups` different ones of the same kind. Raises `ConfigError`."""
        rng = np.random.default_rng([self.seed, warmups is not None])
        if warmups is not None and self.name in ("prefix-repetition", "generated-shared-prefix"):
            # Warm-ups are few: fewer prefixes, so that each still has a request.
            one = {"prefix-repetition-num-prefixes": 1, "gsp-num-groups": warmups, "gsp-prompts-per-group": 1}
            return dataclasses.replace(self, values={**self.values, **one})._make(vocabulary, rng, warmups)
        made = self._make(vocabulary, rng, self.num_prompts if warmups is None else warmups)
        if not made:
            raise ConfigError(f"--dataset-name {self.name} gives no requests; --num-prompts is {self.num_prompts}")
        return made

    def _make(self, vocabulary: Vocabulary, rng: np.random.Generator, asked: int | None) -> list[BenchConversation]:
        value, count = self.values, NUM_PROMPTS if asked is None else asked
        path = value["dataset-path"]
        match self.name:
            case "random" | "random-ids":
                make = synthetic.random_text if self.name == "random" else synthetic.random_ids
                inputs, outputs = self._spans(vocabulary.added if self.name == "random" else 0)
                return make(vocabulary, rng, count, inputs, outputs, value["random-prefix-len"])
            case "prefix-repetition":
                return synthetic.prefix_repetition(
                    vocabulary, rng, count,
                    **self._prefixed("prefix-repetition-", "num_prefixes", "prefix_len", "suffix_len", "output_len"),
                )  # fmt: skip
            case "generated-shared-prefix":
                made = synthetic.shared_prefix_groups(
                    vocabulary, rng, groups=value["gsp-num-groups"],
                    **self._prefixed("gsp-", "prompts_per_group", "system_prompt_len", "question_len", "output_len",
                                     "ordered"),
                )  # fmt: skip
                if asked is not None and asked > len(made):
                    raise ConfigError(f"--num-prompts is {asked}; the groups have {len(made)} prompts in all")
                return made[:asked]
            case "multi-turn":
                pause = value["multi-turn-delay-ms"] / 1e3
                turns, output = value["multi-turn-num-turns"], value["multi-turn-output-len"]
                if path is not None:
                    return list(files.sharegpt_turns(path, rng, count, turns=turns, output_len=output, pause=pause))
                lengths = {key: value[f"multi-turn-{key.replace('_', '-')}"] for key in ("input_len", "system_len")}
                return conversations.random_turns(
                    vocabulary, rng, count, turns=turns, output_len=output, pause=pause, **lengths
                )
            case "sharegpt":
                read = files.sharegpt(path, vocabulary, rng, count, output_len=value["sharegpt-output-len"])
                return self._oversampled(list(read), asked)
            case "custom":
                lines = files.custom(
                    path, rng, output_len=value["custom-output-len"], chat=self.chat,
                    shuffle=not value["disable-shuffle"],
                )  # fmt: skip
                return self._oversampled(list(itertools.islice(lines, asked)), asked)
            case _:
                return trace.timed_trace(
                    path, vocabulary, rng, asked, as_text=self.chat,
                    tokens_per_hash=value["timed-trace-chunk-hash-size"],
                    seconds_per_tick=value["timed-trace-sec-multiplier"],
                )  # fmt: skip

    def _spans(self, added: int) -> tuple[LengthRange, LengthRange]:
        """Return the ranges of input lengths, less the `added` tokens around a text, and of output lengths."""
        value = self.values
        ratio, semantics = value["random-range-ratio"], value["random-range-semantics"]
        return (
            length_range(max(value["random-input-len"] - added, 1), ratio["input"], semantics),
            length_range(value["random-output-len"], ratio["output"], semantics),
        )

    def _prefixed(self, prefix: str, *keys: str) -> dict[str, Any]:
        return {key: self.values[prefix + key.replace("_", "-")] for key in keys}

    def _oversampled(self, made: list[BenchConversation], asked: int | None) -> list[BenchConversation]:
        if asked is None or len(made) >= asked or not made or self.values["no-oversample"]:
            return made
        return list(itertools.islice(itertools.cycle(made), asked))

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.bench.accuracy.windows import read_windows
from jaxserve.errors import ConfigError
from jaxserve.text.tokenizers.tokenizer import Tokenizer
from tests.bench.word_tokenizer import word_tokenizer


def test_windows_follow_each_other_and_are_whole(tmp_path: Path, tokenizer: Tokenizer) -> None:
    path = tmp_path / "text"
    path.write_text("abcdefghijk")
    found = read_windows(path, tokenizer, size=3, max_windows=10)
    assert [bytes(window) for window in found.windows] == [b"abc", b"def", b"ghi"]
    assert found.num_text_tokens == 11
    assert len(read_windows(path, tokenizer, size=3, max_windows=2).windows) == 2
    assert len(read_windows(path, tokenizer, size=11, max_windows=2).windows) == 1


def test_every_window_begins_with_the_bos_that_the_tokenizer_adds(tmp_path: Path) -> None:
    path, tokenizer = tmp_path / "text", word_tokenizer()
    path.write_text(" baba cece didi fofo")
    ids = tokenizer.encode(" baba cece didi fofo", add_special_tokens=False)
    windows = read_windows(path, tokenizer, size=3, max_windows=10).windows
    assert windows == [[0, *ids[:2]], [0, *ids[2:]]]


@pytest.mark.parametrize(
    ("text", "size", "windows", "message"),
    [
        (b"short", 6, 1, "has 5 tokens, fewer than one window of 6"),
        (b"text", 1, 1, "--window must be at least 2 tokens, got 1"),
        (b"text", 2, 0, "--max-windows must be at least 1, got 0"),
        (b"\xff", 2, 1, "can't be read"),
        (None, 2, 1, "can't be read"),
    ],
)
def test_user_errors(
    tmp_path: Path, tokenizer: Tokenizer, text: bytes | None, size: int, windows: int, message: str
) -> None:
    path = tmp_path / "text"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ConfigError, match=message):
        read_windows(path, tokenizer, size=size, max_windows=windows)

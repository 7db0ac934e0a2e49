"""Text to tokens and back: bytes themselves, or a byte-level BPE trained by the `tokenizers` package."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tilewise.training.errors import UsageError, optional_package

END_OF_TEXT = "<|end|>"


class Tokenizer(Protocol):
    """What the rest of training needs. Every document starts and ends with `end`, which is never part of its text."""

    vocab_size: int
    end: int

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids, int32 (n,)."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """The text; `end` and bytes that are not UTF-8 become nothing and U+FFFD."""
        ...

    def to_json(self) -> str: ...


class ByteTokenizer:
    """256 bytes and the end-of-text token: no training, any text, nothing to install.

    Example:
        >>> tokenizer = ByteTokenizer()
        >>> tokenizer.decode(tokenizer.encode("naïve".encode()))
        'naïve'
    """

    vocab_size = 257
    end = 256

    def encode(self, text: bytes) -> np.ndarray:
        return np.frombuffer(text, dtype=np.uint8).astype(np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return bytes(t for t in tokens if t != self.end).decode("utf-8", errors="replace")

    def to_json(self) -> str:
        return json.dumps({"type": "byte"}) + "\n"


class BpeTokenizer:
    """A byte-level BPE (Sennrich et al. 2016, on bytes as in GPT-2): round trips any UTF-8 text.

    Raises:
        MissingPackageError: the `tokenizers` package is not installed.
    """

    def __init__(self, bpe: Any):
        self._bpe = bpe
        self.vocab_size = bpe.get_vocab_size()
        self.end = bpe.token_to_id(END_OF_TEXT)

    @classmethod
    def train(cls, texts: Iterable[bytes], vocab_size: int) -> BpeTokenizer:
        """Learn `vocab_size` tokens (fewer where the text has too little to merge)."""
        library = _tokenizers()
        bpe = library.Tokenizer(library.models.BPE())
        bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
        bpe.decoder = library.decoders.ByteLevel()
        trainer = library.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        bpe.train_from_iterator((_text(text) for text in texts), trainer)
        return cls(bpe)

    @classmethod
    def from_json(cls, text: str) -> BpeTokenizer:
        return cls(_tokenizers().Tokenizer.from_str(text))

    def encode(self, text: bytes) -> np.ndarray:
        return np.array(self._bpe.encode(_text(text)).ids, dtype=np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        return self._bpe.decode([t for t in tokens if t != self.end], skip_special_tokens=False)

    def to_json(self) -> str:
        return self._bpe.to_str()


def load_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer that a run saved.

    Raises:
        UsageError: the file is missing or not a tokenizer of ours.
    """
    try:
        text = path.read_text(encoding="utf-8")
        kind = json.loads(text).get("type")
    except FileNotFoundError:
        raise UsageError(f"no tokenizer at {path}: a checkpoint is read together with its run folder") from None
    except (json.JSONDecodeError, AttributeError):
        raise UsageError(f"{path} is not a tokenizer that `tilewise train` saved") from None
    return ByteTokenizer() if kind == "byte" else BpeTokenizer.from_json(text)


def _text(text: bytes) -> str:
    # Text that spells out the end-of-text token must not become one: it would let a file close its own document.
    return text.decode("utf-8", errors="replace").replace(END_OF_TEXT, "<| end |>")


def _tokenizers() -> Any:
    return optional_package("tokenizers", "--tokenizer bpe (the alternative is --tokenizer byte, which needs nothing)")

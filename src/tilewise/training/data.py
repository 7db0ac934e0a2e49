"""From files to batches: find text, split it by file, turn it into tokens, pack documents into rows.

A row is `context` consecutive tokens of one long stream of documents, so it may hold several documents, or a piece of one.
Each token carries its document's number: attention stays inside a document (`tilewise.Document`) and no loss is counted
where the next token belongs to another one.
"""

from __future__ import annotations

import copy
import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tilewise.training.errors import UsageError
from tilewise.training.tokenizer import Tokenizer

IGNORE = -100  # the target that torch's cross_entropy leaves out
VALID_FRACTION = 0.05


class Batch(NamedTuple):
    """Rows of one step, int64 (B, S) each."""

    tokens: Tensor
    targets: Tensor  # the next token, or IGNORE where it is in another document
    documents: Tensor  # number of each token's document, counted within its row

    def to(self, device: str) -> Batch:
        return Batch(*(t.to(device) for t in self))


@dataclass(frozen=True)
class Corpus:
    """The documents of a run, split into those trained on and those held out."""

    train: list[bytes]
    valid: list[bytes]
    source: str

    @property
    def size(self) -> int:
        return sum(map(len, self.train)) + sum(map(len, self.valid))

    def describe(self) -> str:
        return (
            f"{self.source}: {len(self.train) + len(self.valid):,} files, {self.size / 1e6:.1f} MB; "
            f"held out {len(self.valid)} ({sum(map(len, self.valid)) / 1e6:.2f} MB)"
        )


def load_corpus(paths: tuple[str, ...], max_mb: float | None = None) -> Corpus:
    """Read the files, drop empty ones and exact copies, and hold some out.

    Files are ordered by the SHA-256 of their content, and the first twentieth is held out: the split depends on what the
    files say, not on their names, on the folder they are in or on chance. A single file gives its last twentieth.

    Args:
        paths: files or folders; empty means the Python standard library of this machine.
        max_mb: stop after so many MB (10**6 bytes).

    Raises:
        UsageError: a path does not exist, or there is no text.
    """
    files = [file for path in paths for file in _files_of(Path(path))] if paths else stdlib_files()
    source = ", ".join(paths) if paths else "the Python standard library"
    by_hash = {hashlib.sha256(text).digest(): text for text in map(_read, files) if text.strip()}
    documents = [by_hash[key] for key in sorted(by_hash)]
    if not documents:
        raise UsageError(f"no text in {source}: {len(files)} files found, all empty or binary; give others to --data")
    documents = _first_mb(documents, max_mb)
    if len(documents) == 1:
        cut = int(len(documents[0]) * (1 - VALID_FRACTION))
        return Corpus([documents[0][:cut]], [documents[0][cut:]], source)
    held_out = max(1, round(len(documents) * VALID_FRACTION))
    return Corpus(documents[held_out:], documents[:held_out], source)


def stdlib_files() -> list[Path]:
    """The Python standard library's source files: real text that every machine with Python has."""
    root = Path(sysconfig.get_path("stdlib"))
    return sorted(f for f in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(f.parts))


class TokenStream:
    """Documents as one array of tokens, each between two end-of-text tokens, cut into rows.

    Which rows a step sees is a function of the seed and the step alone: a resumed run needs no other data position.

    Args:
        documents: token ids of each document.
        end: the end-of-text token.
        context: tokens per row.
        seed: of the order of rows, drawn anew for every pass over the data.
    """

    def __init__(self, documents: list[np.ndarray], end: int, context: int, seed: int = 0):
        edge = np.array([end], dtype=np.int32)
        self.tokens = np.concatenate([part for document in documents for part in (edge, document, edge)])
        lengths = np.array([len(document) + 2 for document in documents])
        self.starts = np.concatenate([[0], lengths.cumsum()[:-1]])
        self.end, self.context, self.seed = end, context, seed
        self._order: tuple[int, np.ndarray] | None = None

    def with_seed(self, seed: int) -> TokenStream:
        """The same tokens in the order of another seed."""
        other = copy.copy(self)
        other.seed, other._order = seed, None
        return other

    @property
    def rows(self) -> int:
        """Whole rows of one pass: the last token of a row needs its successor as target."""
        return (len(self.tokens) - 1) // self.context

    def fingerprint(self) -> str:
        """SHA-256 of the tokens: a resumed run checks that its data are still the same."""
        return hashlib.sha256(self.tokens.tobytes()).hexdigest()

    def batch(self, step: int, size: int) -> Batch:
        """The rows of one training step (counted from 0)."""
        rows = range(step * size, (step + 1) * size)
        return self._batch([self._shuffled(row) for row in rows])

    def evenly_spaced(self, count: int, size: int) -> Iterator[Batch]:
        """Batches of at most `size` from `count` rows spread over the stream: always the same ones."""
        available = max(1, self.rows)
        picked = sorted({i * available // count for i in range(count)})
        for i in range(0, len(picked), size):
            yield self._batch([row * self.context for row in picked[i : i + size]])

    def _shuffled(self, row: int) -> int:
        """First token of the n-th row seen in training. Each pass also shifts where rows are cut."""
        epoch, index = divmod(row, self.rows)
        if self._order is None or self._order[0] != epoch:
            random = np.random.default_rng([self.seed, epoch])
            slack = len(self.tokens) - 1 - self.rows * self.context
            shift = int(random.integers(0, slack + 1))
            self._order = (epoch, random.permutation(self.rows) * self.context + shift)
        return int(self._order[1][index])

    def _batch(self, firsts: list[int]) -> Batch:
        span = np.array(firsts)[:, None] + np.arange(self.context + 1)
        inside = span < len(
            self.tokens
        )  # a held-out text shorter than a row is filled up with a last, unscored document
        tokens = np.where(inside, self.tokens[np.minimum(span, len(self.tokens) - 1)], self.end)
        documents = np.where(inside, np.searchsorted(self.starts, span, side="right"), len(self.starts) + 1)
        scored = (documents[:, 1:] == documents[:, :-1]) & inside[:, 1:]
        targets = np.where(scored, tokens[:, 1:], IGNORE)
        numbers = documents[:, :-1] - documents[:, :1]
        return Batch(*(torch.from_numpy(a.astype(np.int64)) for a in (tokens[:, :-1], targets, numbers)))


def make_streams(corpus: Corpus, tokenizer: Tokenizer, context: int, seed: int) -> tuple[TokenStream, TokenStream]:
    """The training and the held-out stream.

    Raises:
        UsageError: the training text is shorter than one row.
    """
    train, valid = (
        TokenStream([tokenizer.encode(text) for text in documents], tokenizer.end, context, seed)
        for documents in (corpus.train, corpus.valid)
    )
    if not train.rows:
        raise UsageError(
            f"context {context} is longer than the training text: it has {len(train.tokens):,} tokens and a row needs "
            f"{context + 1:,}; use --context {max(1, len(train.tokens) - 1)} or less, or give more text to --data"
        )
    return train, valid


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if path.is_dir():
        found = sorted(f for f in path.rglob("*") if f.is_file() and not _hidden(f.relative_to(path)))
        return [f for f in found if not _is_binary(f)]
    raise UsageError(f"--data {path}: no such file or folder (relative paths start at {Path.cwd()})")


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _is_binary(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return b"\0" in file.read(8192)
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"--data: cannot read {path}: {error.strerror}") from None


def _first_mb(documents: list[bytes], max_mb: float | None) -> list[bytes]:
    if max_mb is None:
        return documents
    ends = np.cumsum([len(text) for text in documents])
    return documents[: max(1, int(np.searchsorted(ends, max_mb * 1e6, side="right")))]

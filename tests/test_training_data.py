"""Training: configuration, text, tokenizers, rows of packed documents."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import TINY

from tilewise.training import (
    TrainConfig,
    UsageError,
    load_corpus,
)
from tilewise.training.data import IGNORE, TokenStream
from tilewise.training.errors import MissingPackageError, optional_package
from tilewise.training.tokenizer import BpeTokenizer, ByteTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- config ----


def test_config_travels_through_json():
    config = TINY.with_(data=("a", "b"), kv_heads=1, max_mb=1.5)
    assert TrainConfig.from_json(config.to_json()) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, "layers must be an integer >= 1, got 0"),
        ({"width": 30, "heads": 4}, "width must be a multiple of heads, got width 30 and heads 4"),
        ({"heads": 4, "kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"width": 12, "heads": 4}, "rotary positions need an even head dim, got width // heads = 3"),
        ({"attention": "flash2"}, "attention must be one of tilewise, standard, sdpa, flash, cudnn; got 'flash2'"),
        ({"attention": "flash", "packing": "rows"}, "device cuda, dtype bf16 and packing rows; got cpu, fp32 and rows"),
        ({"packing": "none"}, "packing must be one of documents, rows"),
        ({"lr": 0.0}, "lr must be a finite number > 0, got 0.0"),
        ({"lr": float("nan")}, "lr must be a finite number > 0, got nan"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\)"),
        ({"tokenizer": "bpe", "vocab_size": 10}, "vocab_size must be an integer >= 257, got 10"),
        ({"data": "file"}, "data must be a list of paths"),
    ],
)
def test_config_says_what_is_accepted(values, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig(**values)


@pytest.mark.parametrize(("text", "message"), [("{", "not valid JSON"), ("[]", "JSON object"), ('{"x": 1}', "unknown")])
def test_config_refuses_other_json(text, message):
    with pytest.raises(UsageError, match=message):
        TrainConfig.from_json(text)


# ---- data and tokenizers ----


def test_split_depends_on_content_only(texts, tmp_path):
    first = load_corpus((str(texts),))
    (texts / "copy.py").write_bytes((texts / "3.py").read_bytes())
    (texts / "empty.py").write_text("")
    (texts / "binary.bin").write_bytes(b"\0\1\2")
    texts.rename(tmp_path / "elsewhere")
    again = load_corpus((str(tmp_path / "elsewhere"),))
    assert (first.train, first.valid) == (again.train, again.valid)
    assert len(first.train) == 7 and len(first.valid) == 1
    assert not set(first.train) & set(first.valid)


def test_a_single_file_holds_out_its_end(texts):
    corpus = load_corpus((str(texts / "7.py"),))
    assert corpus.train[0] + corpus.valid[0] == (texts / "7.py").read_bytes()
    assert 0 < len(corpus.valid[0]) < len(corpus.train[0]) / 10


@pytest.mark.parametrize("name", ["byte", "bpe"])
def test_tokenizers_round_trip(name):
    text = "def naïve(x):  # 漢字 \U0001f600\n\treturn <|end|> x\r\n"
    if name == "bpe":
        pytest.importorskip("tokenizers")
        tokenizer = BpeTokenizer.train([text.encode() * 20], 300)
        tokenizer = BpeTokenizer.from_json(tokenizer.to_json())
        text = text.replace("<|end|>", "<| end |>")
    else:
        tokenizer = ByteTokenizer()
    tokens = tokenizer.encode(text.encode())
    assert tokenizer.decode([tokenizer.end, *tokens.tolist(), tokenizer.end]) == text
    assert tokenizer.end not in tokens and tokens.max() < tokenizer.vocab_size


def test_rows_hold_every_token_once_and_score_inside_documents():
    documents = [np.arange(n, dtype=np.int32) % 50 for n in (5, 17, 1, 30)]
    stream = TokenStream(documents, end=50, context=8)
    batch = stream.batch(0, stream.rows)
    firsts = batch.tokens[:, 0]
    assert batch.tokens.shape == batch.targets.shape == batch.documents.shape == (stream.rows, 8)
    assert len(firsts) == stream.rows == (sum(map(len, documents)) + 2 * len(documents) - 1) // 8
    inside = batch.documents[:, 1:] == batch.documents[:, :-1]
    assert torch.equal(batch.targets[:, :-1][inside], batch.tokens[:, 1:][inside])
    assert (batch.targets[:, :-1][~inside] == IGNORE).all()
    assert (batch.tokens[:, :-1][~inside] == 50).all(), "a document ends with the end-of-text token"


def test_every_pass_sees_every_row_in_another_order():
    stream = TokenStream([np.arange(100, dtype=np.int32)], end=100, context=5, seed=1)
    passes = [stream.batch(i, stream.rows).tokens for i in range(2)]
    assert not torch.equal(*passes)
    assert all(len(set(rows[:, 0].tolist())) == stream.rows for rows in passes)


def test_optional_packages_come_with_their_pip_command():
    with pytest.raises(MissingPackageError, match="drawing needs the package not_there: pip install not_there"):
        optional_package("not_there.figure", "drawing")

"""Training: the model on packed documents, text that it writes, and the memory of its attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from runs import TINY, Quiet

import tilewise
from tilewise.training import (
    GPT,
    PeakMemory,
    SavedForBackward,
    TrainConfig,
    Trainer,
    generate,
    load_corpus,
    make_streams,
    run_training,
)
from tilewise.training.attention import MAKE_ATTEND
from tilewise.training.config import ATTENTIONS, FUSED
from tilewise.training.data import IGNORE, Batch
from tilewise.training.session import start
from tilewise.training.tokenizer import ByteTokenizer

ANY_MASK = [name for name in ATTENTIONS if name not in FUSED]

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the model on packed documents ----


def packed_and_alone(vocab=40, lengths=(13, 1, 29, 20)) -> tuple[Batch, list[Batch]]:
    random = torch.Generator().manual_seed(0)
    tokens = [torch.randint(vocab, (1, n), generator=random) for n in lengths]
    targets = [torch.cat((t[:, 1:], torch.full((1, 1), IGNORE)), 1) for t in tokens]
    ids = [torch.full_like(t, i) for i, t in enumerate(tokens)]
    packed = Batch(*(torch.cat(parts, 1) for parts in (tokens, targets, ids)))
    return packed, [Batch(*parts) for parts in zip(tokens, targets, ids) if parts[0].shape[1] > 1]


def loss_and_gradients(model: GPT, batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Mean loss over all scored tokens of the batches, and its gradients."""
    model.zero_grad()
    counts = [int((batch.targets != IGNORE).sum()) for batch in batches]
    loss = sum(model.loss(batch) * count for batch, count in zip(batches, counts)) / sum(counts)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("attention", [name for name in ATTENTIONS if name != "cudnn"])
@pytest.mark.parametrize("Sq", [48, 1])
def test_whole_rows_attend_alike(attention, Sq):
    """Without documents SDPA is told is_causal; one row at the end, as in generation, sees all keys. cuDNN needs a GPU."""
    q, k, v = (torch.randn(2, 48, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    expected = MAKE_ATTEND["standard"](None, 0.0)(q, k, v)[:, -Sq:]
    torch.testing.assert_close(MAKE_ATTEND[attention](None, 0.0)(q[:, -Sq:], k, v), expected, rtol=1e-12, atol=1e-12)


def test_packing_rows_sees_other_documents():
    torch.manual_seed(0)
    packed, _ = packed_and_alone()
    apart, joined = (GPT(TINY.with_(context=64, dropout=0.0, packing=packing), 40) for packing in ("documents", "rows"))
    joined.load_state_dict(apart.state_dict())
    whole = Batch(packed.tokens, packed.targets, torch.zeros_like(packed.documents))
    assert torch.equal(joined.loss(packed), joined.loss(whole))
    assert torch.equal(joined.loss(whole), apart.loss(whole))
    assert not torch.isclose(joined.loss(packed), apart.loss(packed))


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("attention", ANY_MASK)
def test_packed_documents_equal_each_alone(attention, positions):
    """The fp32 rule: the packed row's error against fp64 is within twice that of the documents computed alone."""
    torch.manual_seed(0)
    config = TINY.with_(attention=attention, positions=positions, kv_heads=1, dropout=0.0, context=64)
    model = GPT(config, 40)
    packed, alone = packed_and_alone()
    ours, control = loss_and_gradients(model, [packed]), loss_and_gradients(model, alone)
    exact = loss_and_gradients(model.double(), alone)
    for name, true in exact.items():
        error, allowed = ((found[name] - true).abs().max() for found in (ours, control))
        assert error <= 2 * allowed + 2 * torch.finfo(torch.float32).eps * true.abs().max(), name


@pytest.mark.parametrize("attention", ANY_MASK)
def test_no_document_sees_another(attention):
    torch.manual_seed(0)
    model = GPT(TINY.with_(attention=attention, context=64), 40).eval()
    packed, _ = packed_and_alone()
    changed = packed.tokens.clone()
    here = packed.documents == 2
    changed[here] = (changed[here] + 7) % 40
    before, after = (model(tokens, packed.documents) for tokens in (packed.tokens, changed))
    assert torch.equal(before[~here], after[~here])
    assert not torch.equal(before[here], after[here])


def test_cached_tokens_give_the_logits_of_the_whole_row():
    torch.manual_seed(0)
    model = GPT(TINY.with_(kv_heads=1), 257).double().eval()
    prompt, tokenizer = "def f(x): ", ByteTokenizer()
    written = list(generate(model, tokenizer, prompt, 30, temperature=0.0))
    row = [tokenizer.end, *prompt.encode()]
    for token in written:
        assert int(model(torch.tensor([row]))[0, -1].argmax()) == token
        row.append(token)


def test_sampling_goes_on_past_the_context():
    torch.manual_seed(0)
    model = GPT(TINY.with_(context=8, positions="learned"), 257)
    assert len(list(generate(model, ByteTokenizer(), "abc", 30, temperature=0.0))) == 30


def test_the_seed_decides_the_text():
    torch.manual_seed(0)
    model = GPT(TINY, 257)
    first, again, other = (list(generate(model, ByteTokenizer(), "abc", 30, seed=seed)) for seed in (1, 1, 2))
    assert first == again != other


def test_attentions_train_alike(config):
    """Five steps: tilewise is as near to standard as sdpa, or within a few ulps of the loss."""
    losses = {}
    for attention in ANY_MASK:
        corpus = load_corpus(config.data)
        streams = make_streams(corpus, ByteTokenizer(), config.context, 0)
        trainer = Trainer(config.with_(attention=attention, dropout=0.0, kv_heads=1), *streams, 257)
        losses[attention] = np.array([trainer.step().loss for _ in range(5)])
    ours, control = (np.abs(losses[name] - losses["standard"]).max() for name in ("tilewise", "sdpa"))
    assert ours <= max(3 * control, 4 * np.spacing(np.float32(losses["standard"].max())))


def test_bf16_trains(config, tmp_path):
    session = start(config.with_(dtype="bf16", steps=3), tmp_path / "run")
    observer = Quiet()
    run_training(session.trainer, session.folder, observer)
    assert np.isfinite(observer.losses).all()
    assert session.trainer.model.embedding.weight.dtype == torch.float32


def test_loss_goes_down_on_the_standard_library():
    config = TrainConfig(layers=1, heads=2, width=64, context=128, batch=4, steps=40, warmup=5, lr=5e-3, threads=1)
    streams = make_streams(load_corpus((), max_mb=0.3), ByteTokenizer(), config.context, 0)
    trainer = Trainer(config, *streams, 257)
    before = trainer.evaluate()
    for _ in range(config.steps):
        trainer.step()
    assert before > 5 and trainer.evaluate() < 3.7


# ---- memory ----


def saved_bytes(n: int, dtype: torch.dtype, **options) -> int:
    q, k, v = (torch.randn(2, n, 4, 16, dtype=dtype, requires_grad=True) for _ in range(3))
    with SavedForBackward() as saved:
        tilewise.attention(q, k, v, **options)
    return saved.bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [64, 128, 256])
def test_attention_saves_q_k_v_o_and_one_lse_per_row(n, dtype):
    rows = 2 * n * 4
    lse = 8 if dtype == torch.float64 else 4
    assert saved_bytes(n, dtype, causal=True) == rows * (4 * 16 * dtype.itemsize + lse)


def test_standard_attention_saves_the_scores(config):
    saved = {}
    batch = Batch(*torch.zeros(3, 1, 256, dtype=torch.long))
    for attention in ("tilewise", "standard"):
        model = GPT(config.with_(attention=attention, dropout=0.0, context=256), 257)
        with SavedForBackward(exclude=model.parameters()) as counted:
            model.loss(batch)
        saved[attention] = counted.bytes
    scores = config.layers * config.heads * 256 * 256 * 4
    assert scores < saved["standard"] - saved["tilewise"] < 1.5 * scores


def test_peak_memory_sees_a_large_tensor():
    with PeakMemory() as peak:
        torch.ones(16_000_000)
    assert 60e6 < peak.growth < 100e6 or peak.method == "ru_maxrss"

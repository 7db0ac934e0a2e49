"""Training on real text: data, tokenizers, the model on packed documents, resume, memory, and the commands."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import tilewise
from tilewise.cli.main import app
from tilewise.training import (
    GPT,
    PeakMemory,
    RunFolder,
    SavedForBackward,
    TrainConfig,
    Trainer,
    UsageError,
    generate,
    load_corpus,
    make_streams,
    run_training,
)
from tilewise.training.compare import Comparison, Variant, in_words
from tilewise.training.config import ATTENTIONS
from tilewise.training.data import IGNORE, Batch, TokenStream
from tilewise.training.errors import MissingPackageError, optional_package
from tilewise.training.progress import TrainingProgress
from tilewise.training.session import load_model, resume, start
from tilewise.training.tokenizer import BpeTokenizer, ByteTokenizer

TINY = TrainConfig(
    layers=2, heads=2, width=32, context=48, batch=2, steps=6, warmup=2, eval_every=3, eval_rows=2, save_every=2,
    dropout=0.1, threads=1,
)  # fmt: skip


class Quiet:
    """An observer that raises Ctrl-C in this process after a given step, and keeps what it was told."""

    def __init__(self, interrupt_after: int | None = None):
        self.interrupt_after, self.losses, self.evaluations = interrupt_after, [], []

    def on_step(self, result):
        self.losses.append(result.loss)
        if result.step == self.interrupt_after:
            os.kill(os.getpid(), signal.SIGINT)

    def on_evaluation(self, step, loss):
        self.evaluations.append((step, loss))


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(8):
        (folder / f"{i}.py").write_text(f"def function_{i}(x):\n    return x + {i}\n\n" * (5 + 3 * i))
    return folder


@pytest.fixture
def config(texts) -> TrainConfig:
    return TINY.with_(data=(str(texts),))


@pytest.fixture(scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
        ({"attention": "flash"}, "attention must be one of tilewise, standard, sdpa; got 'flash'"),
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


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("attention", ATTENTIONS)
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


@pytest.mark.parametrize("attention", ATTENTIONS)
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
    for attention in ATTENTIONS:
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


# ---- checkpoints ----


def state_equal(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(state_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(state_equal, a, b))
    return a == b


def lasting(metrics: list[dict]) -> list[dict]:
    """Metrics without what no two runs share."""
    return [{k: v for k, v in record.items() if k not in ("seconds", "memory_mb")} for record in metrics]


@pytest.mark.parametrize("attention", ["tilewise", "standard"])
def test_an_interrupted_run_resumes_bitwise(config, tmp_path, attention):
    config = config.with_(attention=attention, save_every=0)
    whole = start(config, tmp_path / "whole")
    assert run_training(whole.trainer, whole.folder, Quiet()).finished

    stopped = start(config, tmp_path / "stopped")
    outcome = run_training(stopped.trainer, stopped.folder, Quiet(interrupt_after=2))
    assert not outcome.finished and outcome.steps == 2
    resumed = resume(tmp_path / "stopped")
    torch.manual_seed(99)  # what the process did in between must not matter
    resumed.trainer.restore(torch.load(resumed.folder.latest_checkpoint(), weights_only=True))
    assert run_training(resumed.trainer, resumed.folder, Quiet()).finished

    assert state_equal(resumed.trainer.state(), whole.trainer.state())
    assert lasting(resumed.folder.read_metrics()) == lasting(whole.folder.read_metrics())


def test_a_crash_loses_only_steps_after_the_last_checkpoint(config, tmp_path):
    session = start(config.with_(steps=5), tmp_path / "run")
    run_training(session.trainer, session.folder, Quiet())
    session.folder.list_checkpoints()[-1].unlink()  # the one after step 5; that after step 4 is left
    with session.folder.metrics.open("a") as file:
        file.write('{"step": 6, "lo')  # cut short in mid-line
    again = resume(tmp_path / "run")
    assert again.trainer.steps_done == 4
    assert [record["step"] for record in again.folder.read_metrics()] == [1, 2, 3, 4]


def test_warm_up_changes_nothing(config, tmp_path):
    trainer = start(config, tmp_path / "run").trainer
    before = {k: v.clone() for k, v in trainer.model.state_dict().items()}, torch.get_rng_state()
    trainer.warm_up()
    assert state_equal((trainer.model.state_dict(), torch.get_rng_state()), before)
    assert all(p.grad is None for p in trainer.model.parameters())


def test_resume_refuses_other_text(config, texts, tmp_path):
    session = start(config.with_(steps=2), tmp_path / "run")
    run_training(session.trainer, session.folder, Quiet())
    (texts / "0.py").write_text("something else\n" * 30)
    with pytest.raises(UsageError, match="training text has changed"):
        resume(tmp_path / "run")


def test_few_checkpoints_are_kept(config, tmp_path):
    session = start(config.with_(save_every=1), tmp_path / "run")
    run_training(session.trainer, session.folder, Quiet())
    assert [path.name for path in session.folder.list_checkpoints()] == ["step-000005.pt", "step-000006.pt"]
    assert not list(session.folder.path.rglob("*.tmp"))


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


# ---- what the demo says ----


def made_up_comparison(difference: float, step_seconds: float, saved: int) -> Comparison:
    def variant(name, losses, seconds, bytes):
        return Variant(name, 1, losses, 2.0, seconds, seconds, 0.0, bytes, bytes, bytes, "VmHWM")

    losses = [4.0, 3.0, 2.0]
    variants = [variant("standard", losses, 0.2, 1000), variant("sdpa", [x + 1e-6 for x in losses], 0.1, 500)]
    variants.append(variant("tilewise", [x + difference for x in losses], step_seconds, saved))
    return Comparison(TINY, {v.attention: v for v in variants})


def test_the_demo_is_honest_either_way():
    same, cost = in_words(made_up_comparison(2e-6, 0.1, 100), "tilewise", "sdpa")
    assert "that is rounding" in same and "(10.0x less), and a step took 100 ms instead of 200 ms (2.0x faster)" in cost
    same, cost = in_words(made_up_comparison(1e-3, 0.4, 100), "tilewise", "sdpa")
    assert (
        "MORE than rounding" in same and "(10.0x less), but a step took 400 ms instead of 200 ms (2.0x slower)" in cost
    )


# ---- the commands ----


def invoke(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    text = " ".join(result.output.replace("│", " ").split())
    assert result.exit_code == code, text
    return text


SMALL = ("--layers", 1, "--heads", 2, "--width", 32, "--context", 32, "--batch", 2, "--steps", 4, "--threads", 1)


def test_train_resume_and_sample(texts, tmp_path):
    run, results = tmp_path / "run", tmp_path / "train.json"
    text = invoke("train", *SMALL, "--data", texts, "--out", run, "--json", results)
    assert "8 files" in text and f"tilewise sample {run}" in text
    assert {f.name for f in run.iterdir()} >= {"config.json", "metrics.jsonl", "tokenizer.json", "checkpoints"}
    assert json.loads(results.read_text())["steps"] == 4
    assert "resuming after step 4 of 6" in invoke("train", "--resume", run, "--steps", 6)
    assert len(RunFolder.open(run).read_metrics()) == 6
    command = ("sample", run, "--prompt", "def", "--tokens", 20, "--seed", 3)
    assert invoke(*command).startswith("def") and invoke(*command) == invoke(*command)
    assert load_model(run / "checkpoints" / "step-000006.pt")[0].config.steps == 6


def test_ctrl_c_saves_and_says_how_to_go_on(texts, tmp_path, monkeypatch):
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(TrainingProgress, "on_step", lambda self, result: os.kill(os.getpid(), signal.SIGINT))
        text = invoke("train", *SMALL, "--data", texts, "--out", run, code=130)
    assert f"stopped after step 1; go on with: tilewise train --resume {run}" in text
    assert "resuming after step 1 of 4" in invoke("train", "--resume", run)


def test_train_with_bpe(texts, tmp_path):
    pytest.importorskip("tokenizers")
    run = tmp_path / "run"
    invoke("train", *SMALL, "--data", texts, "--out", run, "--tokenizer", "bpe", "--vocab-size", 300)
    assert isinstance(RunFolder.open(run).tokenizer(), BpeTokenizer)
    invoke("sample", run, "--tokens", 5)


def test_train_without_matplotlib_says_that_there_is_no_plot(texts, tmp_path, monkeypatch):
    def without(name, package=None):
        raise ModuleNotFoundError(f"No module named {name!r}", name="matplotlib")

    monkeypatch.setattr("tilewise.training.errors.importlib.import_module", without)
    session = start(TINY.with_(data=(str(texts),), steps=1), tmp_path / "run")
    from tilewise.cli.train import _run

    _run(session)
    assert not (tmp_path / "run" / "loss.png").exists()


def test_usage_errors_are_precise(texts, tmp_path):
    run = tmp_path / "run"
    invoke("train", *SMALL, "--data", texts, "--out", run)
    (tmp_path / "empty").mkdir()
    small = tmp_path / "small.txt"
    small.write_text("too short for a row")
    cases = {
        ("train", "--data", tmp_path / "no"): f"--data {tmp_path / 'no'}: no such file or folder",
        ("train", "--data", tmp_path / "empty"): "no text in",
        ("train", "--data", small): "context 512 is longer than the training text: it has",
        ("train", "--out", run, "--data", texts, *SMALL): "holds a run already: continue it with --resume",
        ("train", "--resume", tmp_path / "no"): "no checkpoint at",
        ("train", "--resume", run, "--lr", 1): "so --lr cannot be given with it",
        ("train", "--attention", "flash"): "attention must be one of tilewise, standard, sdpa; got 'flash'",
        ("sample", run / "checkpoints" / "step-000009.pt"): "there are step-000004.pt",
        ("sample", small): "no checkpoint at",
        ("sample", run, "--temperature", -1): "temperature must be a finite number >= 0, got -1",
        ("sample", run, "--tokens", 0): "tokens must be >= 1, got 0",
    }
    if not torch.cuda.is_available():
        cases["train", "--device", "cuda"] = "PyTorch finds no CUDA GPU here; use --device cpu"
    for arguments, message in cases.items():
        assert message in invoke(*arguments, code=2)


def test_damaged_checkpoints_are_recognised(texts, tmp_path):
    run = tmp_path / "run"
    invoke("train", *SMALL, "--data", texts, "--out", run)
    (run / "checkpoints" / "step-000004.pt").write_bytes(b"damaged")
    assert "is not a readable checkpoint" in invoke("sample", run, code=2)


def test_demo(tmp_path):
    out = tmp_path / "demo"
    size = ("--steps", 3, "--context", 128, "--layers", 1, "--heads", 2, "--width", 32, "--threads", 1)
    text = invoke("demo", *size, "--no-yardstick", "--out", out)
    results = json.loads((out / "results.json").read_text())
    assert list(results["variants"]) == ["standard", "tilewise"]
    assert results["loss_difference"]["tilewise"]["largest"] < 1e-5
    assert results["variants"]["standard"]["saved_bytes"] > results["variants"]["tilewise"]["saved_bytes"]
    assert all(sentence in text for sentence in (" ".join(s.split()) for s in results["in_words"]))
    assert (out / "samples.txt").read_text().startswith("import ")

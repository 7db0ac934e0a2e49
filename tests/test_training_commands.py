"""`tilewise train`, `sample` and `demo`, and what the demo says."""

from __future__ import annotations

import json
import os
import signal

import pytest
import torch
from runs import TINY
from typer.testing import CliRunner

from tilewise.cli.main import app
from tilewise.training import GPT, RunFolder, TrainConfig
from tilewise.training.attention import MAKE_ATTEND
from tilewise.training.compare import Comparison, Variant, in_words
from tilewise.training.config import PRESETS
from tilewise.training.progress import TrainingProgress
from tilewise.training.session import load_model, start
from tilewise.training.tokenizer import BpeTokenizer

pytestmark = pytest.mark.usefixtures("one_thread")


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
        (
            "train",
            "--attention",
            "flash",
        ): "flash attention needs device cuda, dtype bf16 and packing rows; got cpu, fp32",
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


def test_presets_give_way_to_options(texts, tmp_path):
    run = tmp_path / "run"
    invoke("train", "--preset", "gpt2-small", "--tokenizer", "byte", *SMALL, "--data", texts, "--out", run)
    config = RunFolder.open(run).config
    assert (config.positions, config.vocab_size, config.lr, config.width) == ("learned", 50257, 6e-4, 32)
    assert "must be small, gpt2-small or gpt-1.3b" in invoke("train", "--preset", "large", code=2)


def test_gpt2_small_is_gpt2_small():
    with torch.device("meta"):
        model = GPT(TrainConfig(**PRESETS["gpt2-small"]), 50257)
    assert round(model.parameter_count() / 1e6) == 124


@pytest.fixture
def tiny_preset(monkeypatch):
    sizes = {"layers": 1, "heads": 2, "width": 32, "threads": 1, "eval_rows": 2, "warmup": 2, "lr": 3e-3}
    monkeypatch.setitem(PRESETS, "small", sizes)


def test_compare_attentions_over_seeds(texts, tmp_path, tiny_preset):
    size = ("--context", 32, "--batch", 2, "--steps", 5, "--data", texts, "--seeds", 2)
    results, plot = tmp_path / "c.json", tmp_path / "c.png"
    text = invoke("compare", *size, "--json", results, "--plot", plot)
    found = json.loads(results.read_text())
    assert [(run["attention"], run["seed"]) for run in found["runs"]] == [
        ("standard", 0), ("tilewise", 0), ("standard", 1), ("tilewise", 1)
    ]  # fmt: skip
    assert max(found["differences"]["tilewise"]) < 1e-5 < max(found["spread"])
    assert "no more than seeds do" in text and plot.exists()
    assert "two or more of" in invoke("compare", "--attention", "tilewise", code=2)


def test_compare_sees_another_attention(texts, tiny_preset, monkeypatch):
    def blind(documents, dropout_p=0.0):
        return lambda q, k, v: 10 * v

    monkeypatch.setitem(MAKE_ATTEND, "tilewise", blind)
    size = ("--context", 32, "--batch", 2, "--steps", 20, "--data", texts, "--seeds", 2)
    assert "MORE than seeds do" in invoke("compare", *size, code=1)


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

"""Training: runs that are interrupted, crash or resume, and their checkpoints."""

from __future__ import annotations

import pytest
import torch
from runs import Quiet

from tilewise.training import (
    UsageError,
    run_training,
)
from tilewise.training.session import resume, start

pytestmark = pytest.mark.usefixtures("one_thread")


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

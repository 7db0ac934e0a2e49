"""Training with tilewise is training with standard attention: fp32 against a control and mutants, fp64 to 1e-12.

Rounding differences grow while a model trains, so no fixed tolerance separates rounding from a bug. The yardstick is a
*control*: standard attention over the keys in another order, the same mathematics with other rounding. The task is copying
(random tokens, then the same again; loss on the second half): it cannot be learned without attention, so a bug in attention
shows. That it does is part of the test: *mutants*, small bugs planted on purpose, must miss the allowance by 100x.

`TILEWISE_LONG=1` runs 500 steps at 256 tokens instead of 150 at 64.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tilewise
from tilewise.training import GPT, TrainConfig
from tilewise.training.attention import standard_attention, tilewise_attention
from tilewise.training.data import IGNORE, Batch
from tilewise.training.loop import learning_rate, make_optimizer

LONG = os.environ.get("TILEWISE_LONG") == "1"
VOCAB, HALF, STEPS, LR = (64, 128, 500, 2e-3) if LONG else (32, 32, 150, 1e-2)
CONFIG = TrainConfig(layers=2, heads=2, width=64, context=2 * HALF, batch=16, steps=STEPS, lr=LR, warmup=10)
FIFTHS = 5
CONTROL_FACTOR, MUTANT_FACTOR = 3, 30  # mutants: 80 to 200 times what is allowed, by processor
FLOOR = 4 * float(np.spacing(np.float32(np.log(VOCAB))))  # ulps of the loss of a model that knows nothing


def permuted_keys(seed):
    """Standard attention with keys and values in another order: the control."""

    def make_attend(documents, dropout_p=0.0):
        def attend(q, k, v):
            order = torch.randperm(k.shape[1], generator=torch.Generator().manual_seed(seed))
            q, k, v = (t.transpose(1, 2) for t in (q, k[:, order], v[:, order]))
            hidden = torch.arange(q.shape[2])[:, None] < order
            s = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(hidden, float("-inf"))
            return (s.softmax(-1) @ v).transpose(1, 2)

        return attend

    return make_attend


def wrong_scale(documents, dropout_p=0.0):
    return lambda q, k, v: tilewise.attention(q, k, v, causal=True, softmax_scale=1.01 * q.shape[-1] ** -0.5)


def causal_off_by_one(documents, dropout_p=0.0):
    return lambda q, k, v: tilewise.attention(q, k, v, window_size=(None, 1))


def last_keys_without_gradient(documents, dropout_p=0.0):
    def attend(q, k, v):
        if v.requires_grad:
            v.register_hook(lambda dv: torch.cat((dv[:, :-4], torch.zeros_like(dv[:, -4:])), 1))
        return tilewise.attention(q, k, v, causal=True)

    return attend


MUTANTS = {f.__name__: f for f in (wrong_scale, causal_off_by_one, last_keys_without_gradient)}


def copy_task(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    half = torch.randint(VOCAB, (CONFIG.batch, HALF), generator=random)
    tokens = torch.cat((half, half), 1)
    targets = torch.full_like(tokens, IGNORE)
    targets[:, HALF - 1 : -1] = half
    return Batch(tokens, targets, torch.zeros_like(tokens))


def train(make_attend, steps: int = STEPS, dtype: torch.dtype = torch.float32) -> np.ndarray:
    """The loss at every step."""
    torch.manual_seed(0)
    model = GPT(CONFIG, VOCAB, make_attend).to(dtype)
    optimizer = make_optimizer(model, CONFIG)
    losses = []
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, CONFIG)
        loss = model.loss(copy_task(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CONFIG.clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return np.array(losses)


def largest_by_fifth(losses: np.ndarray, reference: np.ndarray) -> np.ndarray:
    return np.array([part.max() for part in np.array_split(np.abs(losses - reference), FIFTHS)])


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_fp32_training_differs_by_rounding_only_and_mutants_do_not():
    standard = train(standard_attention)
    assert standard[-1] < 0.1 * standard[0], "the task was not learned, so the test says nothing about attention"
    # Two controls, as one alone may by chance stay closer than rounding usually does; and what rounding has grown to in one
    # fifth it may also be in a later one.
    control = np.maximum(*(largest_by_fifth(train(permuted_keys(seed)), standard) for seed in (1, 2)))
    allowed = np.maximum(CONTROL_FACTOR * np.maximum.accumulate(control), FLOOR)
    ours = largest_by_fifth(train(tilewise_attention), standard)
    print(f"control {control}\nours    {ours}")
    assert (ours <= allowed).all(), f"per fifth of the run: ours {ours}, allowed {allowed}"
    for name, mutant in MUTANTS.items():
        found = largest_by_fifth(train(mutant), standard)
        print(f"{name} {found}")
        assert (found / allowed).max() >= MUTANT_FACTOR, f"{name} passes unnoticed: {found}, allowed {allowed}"


def test_fp64_steps_agree_to_1e_12():
    """Loss and every parameter's gradient at each of 30 steps, both attentions from the same parameters."""
    torch.manual_seed(0)
    models = [GPT(CONFIG, VOCAB, f).double() for f in (standard_attention, tilewise_attention)]
    optimizer = make_optimizer(models[0], CONFIG)
    for step in range(30):
        models[1].load_state_dict(models[0].state_dict())
        losses = [model.loss(copy_task(step)) for model in models]
        standard, ours = (
            torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, models, strict=True)
        )
        apart = max(float((x - y).detach().abs().max()) for x, y in zip(standard, ours, strict=True))
        assert abs(float((losses[0] - losses[1]).detach())) <= 1e-12 and apart <= 1e-12, (
            f"step {step}: gradients {apart}"
        )
        for parameter, gradient in zip(models[0].parameters(), standard, strict=True):
            parameter.grad = gradient
        optimizer.step()


def test_fp64_training_agrees_but_for_rounding():
    """The same without bringing the parameters together: training multiplies roundings by 1.3 a step, so beyond 1e-12 the
    measure is what they grow to in standard attention with its keys in another order, within a factor of ten."""
    standard = train(standard_attention, 30, torch.float64)
    ours, control = (np.abs(train(f, 30, torch.float64) - standard) for f in (tilewise_attention, permuted_keys(1)))
    allowed = np.maximum(1e-12, 10 * np.maximum.accumulate(control))
    assert (ours <= allowed).all(), f"ours {ours}, allowed {allowed}"


def test_the_task_needs_attention():
    """Where each token sees only itself, the loss stays that of guessing."""
    blind = train(lambda documents, dropout_p: lambda q, k, v: v, 60)
    assert blind[-10:].mean() > 0.95 * np.log(VOCAB)


def test_the_control_is_standard_attention():
    q, k, v = torch.randn(3, 1, 20, 2, 8, dtype=torch.float64).unbind()
    expected = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)
    for make_attend in (permuted_keys(0), standard_attention, tilewise_attention):
        torch.testing.assert_close(make_attend(None, 0.0)(q, k, v), expected, rtol=1e-12, atol=1e-12)

"""Text from a trained model, one token after another."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tilewise.training.errors import UsageError
from tilewise.training.model import GPT, Cache
from tilewise.training.tokenizer import Tokenizer


@torch.no_grad()
def generate(
    model: GPT,
    tokenizer: Tokenizer,
    prompt: str,
    tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
) -> Iterator[int]:
    """Sample tokens that follow a prompt, until there are enough or the model ends the text.

    Keys and values of earlier tokens are kept, so each new token costs one row. When the context is full, its second half
    is read again and the first half forgotten.

    Args:
        prompt: the text to continue; may be empty.
        tokens: how many at most.
        temperature: 0 takes the likeliest token; below 1 is safer, above 1 is wilder than the model.
        top_k: draw from the k likeliest tokens only; None: from all.
        seed: of the draws.

    Raises:
        UsageError: a number is out of range.
    """
    _check(tokens, temperature, top_k)
    model.eval()
    device = model.embedding.weight.device
    random = torch.Generator().manual_seed(seed)
    history = [tokenizer.end, *tokenizer.encode(prompt.encode()).tolist()]
    cache, new = None, history[-model.config.context :]
    for _ in range(tokens):
        if cache is None or cache.length + len(new) > model.config.context:
            if cache is not None:
                new = history[-max(1, model.config.context // 2) :]
            cache = Cache(model, 1, model.config.context)
        logits = model.extend(torch.tensor([new], device=device), cache)[0, -1]
        token = pick(logits.float().cpu(), temperature, top_k, random)
        if token == tokenizer.end:
            return
        yield token
        history.append(token)
        new = [token]


def pick(logits: Tensor, temperature: float, top_k: int | None, random: torch.Generator) -> int:
    """One token from logits (vocab,)."""
    if temperature == 0:
        return int(logits.argmax())
    if top_k is not None and top_k < logits.numel():
        smallest = logits.topk(top_k).values[-1]
        logits = logits.masked_fill(logits < smallest, float("-inf"))
    return int(torch.multinomial((logits / temperature).softmax(0), 1, generator=random))


def _check(tokens: int, temperature: float, top_k: int | None) -> None:
    if tokens < 1:
        raise UsageError(f"tokens must be >= 1, got {tokens}")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature must be a finite number >= 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k must be >= 1, got {top_k}; leave it out to draw from all tokens")

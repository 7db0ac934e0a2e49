"""A small GPT in plain code: pre-norm blocks, rotary or learned positions, tied embeddings, grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tilewise.training.attention import Attend, MakeAttend, make_attend_of
from tilewise.training.config import TrainConfig
from tilewise.training.data import IGNORE, Batch

ROTARY_BASE = 10_000.0
INIT_STD = 0.02


class GPT(nn.Module):
    """Next-token logits of packed rows.

    Args:
        config: its shape.
        vocab_size: tokens it reads and predicts.
        make_attend: how it attends; default the config's `attention`.

    Example:
        >>> import torch
        >>> from tilewise.training import GPT, TrainConfig
        >>> model = GPT(TrainConfig(layers=1, heads=2, width=32, context=16), vocab_size=257)
        >>> model(torch.zeros(1, 16, dtype=torch.long)).shape
        torch.Size([1, 16, 257])
    """

    def __init__(self, config: TrainConfig, vocab_size: int, make_attend: MakeAttend | None = None):
        super().__init__()
        self.config = config
        self.make_attend = make_attend or make_attend_of(config)
        self.embedding = nn.Embedding(vocab_size, config.width)
        learned = config.positions == "learned"
        self.position_embedding = nn.Embedding(config.context, config.width) if learned else None
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self._initialise()

    def forward(self, tokens: Tensor, documents: Tensor | None = None) -> Tensor:
        """Logits (B, S, vocab) of the token after each one.

        Args:
            tokens: int64 (B, S).
            documents: the document of each token, (B, S); default: each row is one document.
        """
        dropout_p = self.config.dropout if self.training else 0.0
        return self._run(tokens, document_positions(tokens, documents), self.make_attend(documents, dropout_p))

    def extend(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Logits (B, S, vocab) of tokens that continue the one document whose keys and values `cache` holds."""
        positions = torch.arange(cache.length, cache.length + tokens.shape[1], device=tokens.device)
        logits = self._run(tokens, positions.expand_as(tokens), self.make_attend(None, 0.0), cache)
        cache.length += tokens.shape[1]
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy (nats) over the scored tokens."""
        logits = self(batch.tokens, batch.documents if self.config.packing == "documents" else None)
        acc = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(acc).flatten(0, 1), batch.targets.flatten(), ignore_index=IGNORE)

    def parameter_count(self) -> int:
        return sum(p.numel() for p in self.parameters())

    def _run(self, tokens: Tensor, positions: Tensor, attend: Attend, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        rotation = None
        if self.position_embedding is not None:
            x = x + self.position_embedding(positions)
        else:
            rotation = rotary_angles(positions, self.config.head_dim, x.dtype)
        caches = iter(cache.layers) if cache else _nothing()
        for block in self.blocks:
            x = block(x, rotation, attend, next(caches))
        return F.linear(self.norm(x), self.embedding.weight)

    def _initialise(self) -> None:
        """GPT-2's: normal weights, those that write to the residual stream smaller with depth."""
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                writes = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=INIT_STD * ((2 * self.config.layers) ** -0.5 if writes else 1.0))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: TrainConfig):
        super().__init__()
        width, kv_width = config.width, config.groups_kv_heads * config.head_dim
        self.head_dim = config.head_dim
        self.dropout = nn.Dropout(config.dropout)
        self.attention_norm = nn.RMSNorm(width)
        # Three projections, not a fused one: v would otherwise be a view that keeps q and k before rotation alive too.
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, kv_width, bias=False)
        self.value = nn.Linear(width, kv_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.RMSNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, rotation: Rotation | None, attend: Attend, cache: LayerCache | None = None) -> Tensor:
        y = self.attention_norm(x)
        q, k, v = (project(y).unflatten(-1, (-1, self.head_dim)) for project in (self.query, self.key, self.value))
        if rotation is not None:
            q, k = rotate(q, rotation), rotate(k, rotation)
        if cache is not None:
            k, v = cache.append(k, v)
        x = x + self.dropout(self.out(attend(q, k, v).flatten(-2)))
        return x + self.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))))


Rotation = tuple[Tensor, Tensor]


def document_positions(tokens: Tensor, documents: Tensor | None) -> Tensor:
    """The position of each token in its own document, (B, S): 0, 1, ... and from 0 again where the document changes."""
    index = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    if documents is None:
        return index
    changes = torch.ones_like(documents, dtype=torch.bool)
    changes[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return index - torch.where(changes, index, 0).cummax(dim=1).values


def rotary_angles(positions: Tensor, head_dim: int, dtype: torch.dtype) -> Rotation:
    """Cosine and sine, (B, S, 1, head_dim / 2), of each position times each frequency (RoFormer, Su et al. 2021)."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64) / head_dim
    angles = positions[..., None, None] * ROTARY_BASE**-exponents
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Turn each pair (x[i], x[i + D/2]) by its angle: q.k then depends on the distance of positions only."""
    cos, sin = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class LayerCache:
    """Keys and values of one layer, (B, capacity, Hkv, D), filled from the left."""

    def __init__(self, shape: tuple[int, int, int, int], like: Tensor):
        self.k, self.v = like.new_empty(shape), like.new_empty(shape)
        self.length = 0

    def append(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values, and return all so far."""
        new = slice(self.length, self.length + k.shape[1])
        self.k[:, new], self.v[:, new] = k, v
        self.length = new.stop
        return self.k[:, : self.length], self.v[:, : self.length]


class Cache:
    """What `GPT.extend` remembers of the tokens before: room for `capacity` of them."""

    def __init__(self, model: GPT, batch: int, capacity: int):
        config = model.config
        shape = (batch, capacity, config.groups_kv_heads, config.head_dim)
        self.layers = [LayerCache(shape, model.embedding.weight) for _ in range(config.layers)]
        self.length = 0


def _nothing() -> Iterator[None]:
    while True:
        yield None

"""`TrainConfig`: everything that decides a training run, as one frozen, self-validating, JSON-serialisable value."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from tilewise.training.errors import UsageError

ATTENTIONS = ("tilewise", "standard", "sdpa", "flash", "cudnn")
FUSED = ("flash", "cudnn")  # PyTorch's GPU kernels by name: half precision, and no mask but the causal one
PACKINGS = ("documents", "rows")
POSITIONS = ("rotary", "learned")
TOKENIZERS = ("byte", "bpe")
DTYPES = ("fp32", "bf16")
DEVICES = ("cpu", "cuda")
#: Settings to start from, by name; what is given beside them counts.
PRESETS: dict[str, dict[str, Any]] = {
    "small": {},
    # 124 million parameters, like GPT-2's smallest (Radford et al. 2019): bf16 on a GPU.
    "gpt2-small": {
        "layers": 12, "heads": 12, "width": 768, "positions": "learned", "tokenizer": "bpe", "vocab_size": 50257,
        "context": 1024, "batch": 8, "lr": 6e-4, "dtype": "bf16",
    },
    # 1.3 billion, like GPT-3 XL (Brown et al. 2020, table 2.1) with heads of 128.
    "gpt-1.3b": {
        "layers": 24, "heads": 16, "width": 2048, "positions": "learned", "tokenizer": "bpe", "vocab_size": 50257,
        "context": 2048, "batch": 8, "lr": 2e-4, "dtype": "bf16",
    },
}  # fmt: skip
SMALLEST_BPE = 257  # the 256 bytes and the end-of-text token

_CHOICES = {
    "attention": ATTENTIONS,
    "positions": POSITIONS,
    "packing": PACKINGS,
    "tokenizer": TOKENIZERS,
    "dtype": DTYPES,
    "device": DEVICES,
}
_AT_LEAST_ONE = ("layers", "heads", "width", "context", "batch", "steps", "eval_rows")
_AT_LEAST_ZERO = ("warmup", "eval_every", "save_every", "seed")


@dataclass(frozen=True)
class TrainConfig:
    """The settings of one run. Two runs of equal settings, data and software give bitwise equal results on one machine.

    Args:
        layers, heads, width: the GPT; each head has ``width // heads`` dims. `kv_heads` below `heads` is grouped-query
            attention (None: as many as `heads`).
        positions: "rotary" or "learned"; both start again from 0 in each document.
        dropout: probability of dropping attention weights and residual branches.
        attention: "tilewise", "standard" (S and P in memory) or "sdpa" (PyTorch's own); on a GPU in bf16 and with whole
            rows also "flash" and "cudnn", its kernels by name.
        deterministic: whether tilewise's gradients repeat bit for bit; on Hopper GPUs it costs time.
        packing: "documents" (each token sees its own document only) or "rows" (all of its row, as GPT-2 was trained).
        data: files or folders of text; empty means the Python standard library of this machine.
        max_mb: use at most so many MB (10**6 bytes) of text, chosen by content hash; None is no limit.
        tokenizer: "byte" (257 tokens), or "bpe" with `vocab_size` tokens, trained on the training files.
        context: tokens per row; batch: rows per step; steps: optimizer steps.
        lr: peak learning rate, reached after `warmup` steps, then a cosine down to ``lr * min_lr_ratio``.
        weight_decay, clip: AdamW's decay of matrices; the largest gradient norm.
        seed: of weights, order of rows and dropout.
        dtype: "fp32", or "bf16" for autocast with fp32 weights. device: "cpu" or "cuda". threads: None is torch's choice.
        eval_every, eval_rows: held-out loss over so many rows, every so many steps and at the end (0: at the end only).
        save_every: steps between checkpoints (0: at the end only).

    Raises:
        UsageError: a value is not what is accepted; the message names both.

    Example:
        >>> from tilewise.training import TrainConfig
        >>> config = TrainConfig(layers=2, context=1024)
        >>> TrainConfig.from_json(config.to_json()) == config
        True
    """

    layers: int = 4
    heads: int = 4
    kv_heads: int | None = None
    width: int = 128
    positions: str = "rotary"
    dropout: float = 0.0
    attention: str = "tilewise"
    deterministic: bool = True
    packing: str = "documents"
    data: tuple[str, ...] = ()
    max_mb: float | None = None
    tokenizer: str = "byte"
    vocab_size: int = 4096
    context: int = 512
    batch: int = 4
    steps: int = 200
    lr: float = 2e-3
    warmup: int = 20
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    dtype: str = "fp32"
    device: str = "cpu"
    threads: int | None = None
    eval_every: int = 50
    eval_rows: int = 16
    save_every: int = 100

    def __post_init__(self):
        for name in _AT_LEAST_ONE:
            _check_int(name, getattr(self, name), 1)
        for name in _AT_LEAST_ZERO:
            _check_int(name, getattr(self, name), 0)
        for name in ("kv_heads", "threads"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 1)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise UsageError(f"{name} must be one of {', '.join(choices)}; got {getattr(self, name)!r}")
        for name in ("lr", "clip"):
            _check_number(name, getattr(self, name), above=0)
        for name in ("dropout", "min_lr_ratio", "weight_decay"):
            _check_number(name, getattr(self, name), at_least=0)
        if self.max_mb is not None:
            _check_number("max_mb", self.max_mb, above=0)
        if self.dropout >= 1:
            raise UsageError(f"dropout must be in [0, 1), got {self.dropout}")
        object.__setattr__(self, "data", _as_paths(self.data))
        self._check_heads()
        if self.attention in FUSED and (self.device, self.dtype, self.packing) != ("cuda", "bf16", "rows"):
            raise UsageError(
                f"{self.attention} attention needs device cuda, dtype bf16 and packing rows; "
                f"got {self.device}, {self.dtype} and {self.packing}"
            )
        if self.tokenizer == "bpe":
            _check_int("vocab_size", self.vocab_size, SMALLEST_BPE)

    def _check_heads(self) -> None:
        if self.width % self.heads:
            raise UsageError(f"width must be a multiple of heads, got width {self.width} and heads {self.heads}")
        if self.heads % self.groups_kv_heads:
            raise UsageError(
                f"heads must be a multiple of kv_heads, got heads {self.heads} and kv_heads {self.kv_heads}"
            )
        if self.positions == "rotary" and self.head_dim % 2:
            raise UsageError(
                f"rotary positions need an even head dim, got width // heads = {self.head_dim}; "
                "change width or heads, or use learned positions"
            )

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @property
    def groups_kv_heads(self) -> int:
        """The number of key/value heads, `kv_heads` with its default filled in."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"data": list(self.data)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=2) + "\n"

    def with_(self, **changes: Any) -> TrainConfig:
        """A copy with some values changed, checked again."""
        return replace(self, **changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> TrainConfig:
        known = {field.name for field in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UsageError(f"unknown settings {', '.join(unknown)}; known are {', '.join(sorted(known))}")
        return cls(**values)

    @classmethod
    def from_json(cls, text: str) -> TrainConfig:
        """The config that `to_json` wrote.

        Raises:
            UsageError: not JSON, not an object, or with settings that do not exist or are not accepted.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise UsageError(f"the config is not valid JSON: {error}") from None
        if not isinstance(values, dict):
            raise UsageError(f"the config must be a JSON object, got {type(values).__name__}")
        return cls.from_dict(values)


def _check_int(name: str, value: Any, smallest: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
        raise UsageError(f"{name} must be an integer >= {smallest}, got {value!r}")


def _check_number(name: str, value: Any, above: float | None = None, at_least: float | None = None) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and value < float("inf")
    if not number or (above is not None and value <= above) or (at_least is not None and not value >= at_least):
        limit = f"> {above}" if above is not None else f">= {at_least}"
        raise UsageError(f"{name} must be a finite number {limit}, got {value!r}")


def _as_paths(value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not all(isinstance(path, str) for path in value):
        raise UsageError(f"data must be a list of paths, got {value!r}")
    return tuple(value)

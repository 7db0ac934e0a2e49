"""Exact, IO-aware softmax attention for PyTorch in pure Python: forward and backward, memory linear in sequence length."""

from tilewise.api import attention, attention_varlen
from tilewise.dispatch import NoBackendError, use_backend
from tilewise.explain import Explanation, explain
from tilewise.masks import Blocks, Causal, Chunk, Dense, Document, Full, Mask, Prefix, Window

__version__ = "0.1.0"

__all__ = [
    "Blocks",
    "Causal",
    "Chunk",
    "Dense",
    "Document",
    "Explanation",
    "Full",
    "Mask",
    "NoBackendError",
    "Prefix",
    "Window",
    "attention",
    "attention_varlen",
    "explain",
    "use_backend",
]

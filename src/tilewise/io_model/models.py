"""Transformers as data: the sizes their papers print, and how many parameters that makes."""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.tiles import cdiv


@dataclass(frozen=True)
class Model:
    """A transformer with learned positions, biases, LayerNorms, GELU MLPs of 4 times its width and tied embeddings."""

    name: str
    title: str
    layers: int
    heads: int
    width: int
    vocab: int
    context: int  # trained with; positions in its table
    source: str
    segments: int = 0  # rows of BERT's second table; BERT also has a dense layer before its output

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def parameters(self, context: int | None = None) -> int:
        """Weights and biases: embeddings, 12 w^2 + 13 w per layer, last LayerNorm (and BERT's embedding norm and MLM head).

        Args:
            context: positions in the table, if more than the model was trained with.

        Example:
            >>> from tilewise.io_model.models import MODELS
            >>> MODELS["gpt2-small"].parameters()
            124439808
        """
        w, positions = self.width, max(context or 0, self.context)
        embeddings = (self.vocab + positions + self.segments) * w
        head = 2 * w if not self.segments else 2 * w + (w * w + w) + 2 * w + self.vocab
        return embeddings + self.layers * (12 * w * w + 13 * w) + head


_GPT2 = "Radford et al. 2019, table 2, and the released configurations"
_GPT3 = "Brown et al. 2020, table 2.1, with the heads of FlashAttention's training configurations"
GPT2_VOCAB = 50257

MODELS = {
    model.name: model
    for model in (
        Model("gpt2-small", "GPT-2 small", 12, 12, 768, GPT2_VOCAB, 1024, _GPT2),
        Model("gpt2-medium", "GPT-2 medium", 24, 16, 1024, GPT2_VOCAB, 1024, _GPT2),
        Model("gpt2-large", "GPT-2 large", 36, 20, 1280, GPT2_VOCAB, 1024, _GPT2),
        Model("gpt2-xl", "GPT-2 XL", 48, 25, 1600, GPT2_VOCAB, 1024, _GPT2),
        Model("bert-large", "BERT large", 24, 16, 1024, 30522, 512, "Devlin et al. 2019, section 3", segments=2),
        Model("gpt3-1.3b", "GPT-3 1.3B", 24, 16, 2048, GPT2_VOCAB, 2048, _GPT3),
        Model("gpt3-2.7b", "GPT-3 2.7B", 32, 20, 2560, GPT2_VOCAB, 2048, _GPT3),
        Model("gpt3-6.7b", "GPT-3 6.7B", 32, 32, 4096, GPT2_VOCAB, 2048, "Brown et al. 2020, table 2.1"),
    )
}


def padded(vocab: int, to: int = 128) -> int:
    """The vocabulary as it is usually stored: a multiple of 128 columns, for matrix units."""
    return cdiv(vocab, to) * to


def model_of(name: str) -> Model:
    """The model of this name.

    Raises:
        ValueError: it is not in the table.
    """
    if name not in MODELS:
        raise ValueError(f"--model must be one of {', '.join(MODELS)}, got {name!r}")
    return MODELS[name]

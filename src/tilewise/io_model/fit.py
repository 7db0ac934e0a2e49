"""What fits: the memory of one training step of a model on one GPU, by formulas, and the largest batch and context.

In 16-bit mixed precision with Adam, for P parameters, batch b, context s, width w, a heads, L layers, vocabulary V:

- parameters and optimizer: 16 P bytes. 2 P weights, 2 P gradients, and in fp32 4 P each for weights, momentum and variance
  (Rajbhandari et al. 2020, "ZeRO", section 3.1);
- activations of a layer outside of attention: 26 s b w bytes, 24 without dropout (Korthikanti et al. 2023, section 4:
  LayerNorm inputs 4, input of q, k and v 2, MLP 18, two dropout masks 2);
- attention, from the same account as everywhere here (`cost.memory`): q, k, v, o and one fp32 lse per row and head, 8 s b w +
  4 a s b. Standard attention keeps P instead of lse, 2 a s^2 b bytes, and with dropout its mask and the dropped P, 3 a s^2 b
  more: the 5 a s^2 b of Korthikanti et al.;
- beside the layers: embedding dropout's mask, the last LayerNorm and the output's input, 5 s b w; logits and their gradient in
  fp32, 8 s b V;
- the peak of one layer's backward pass beyond what is kept (of standard attention: dP and dS).

Not in it: what the allocator and the CUDA context take (`reserve`), activation checkpointing, buffers of communication.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilewise.cost import largest
from tilewise.io_model.gpus import Gpu
from tilewise.io_model.models import Model, padded
from tilewise.io_model.systems import SYSTEMS, plain_problem, system_memory

STATE_BYTES = 16  # per parameter
WHO = {"standard": "standard", "tilewise": "flash3"}  # whose account it is; on GPUs before Hopper the peak is smaller


@dataclass(frozen=True)
class Step:
    """Bytes of one training step."""

    state: int  # parameters, gradients, optimizer
    attention: int  # kept by all layers
    rest: int  # other activations kept by all layers
    outside: int  # embeddings, logits
    peak: int  # of one layer's attention, beyond what is kept

    @property
    def total(self) -> int:
        return self.state + self.attention + self.rest + self.outside + self.peak


def training_step(model: Model, who: str, batch: int, context: int, dropout: bool = True) -> Step:
    """The bytes of one training step, by the formulas of this module.

    Args:
        model: from `models`.
        who: "standard" or "tilewise", the attention.
        batch, context: sequences and tokens of each.
        dropout: whether the model has dropout, in attention and elsewhere.

    Example:
        >>> from tilewise.io_model.models import MODELS
        >>> step = training_step(MODELS["gpt2-small"], "standard", 8, 1024)
        >>> step.attention // 12 == 8 * 8 * 1024 * 768 + 5 * 12 * 1024**2 * 8
        True
    """
    tokens, w = batch * context, model.width
    problem, _ = plain_problem(batch, model.heads, context, model.head_dim, dropout_p=0.1 if dropout else 0.0)
    found = system_memory(SYSTEMS[WHO[who]], problem)
    kept, peak = found.saved, found.peak_backward
    if who == "standard":
        kept += 2 * tokens * w  # o: not among what standard attention itself keeps, but the projection's input
        peak = 4 * batch * model.heads * context * context  # dP and dS; P is among what is kept
    return Step(
        STATE_BYTES * model.parameters(context),
        model.layers * kept,
        model.layers * (26 if dropout else 24) * tokens * w,
        (5 if dropout else 4) * tokens * w + 8 * tokens * padded(model.vocab),
        peak,
    )


def largest_batch(model: Model, who: str, context: int, memory: int, dropout: bool = True) -> int:
    """Sequences of `context` tokens in one step that fit in so many bytes."""
    return largest(lambda batch: training_step(model, who, batch, context, dropout).total <= memory)


def largest_context(model: Model, who: str, batch: int, memory: int, dropout: bool = True) -> int:
    """Tokens of each of `batch` sequences that fit in so many bytes."""
    return largest(lambda context: training_step(model, who, batch, context, dropout).total <= memory)


def usable(gpu: Gpu, reserve: int) -> int:
    """Bytes of a GPU's memory that a step may take."""
    return max(gpu.memory - reserve, 0)

"""Training of small language models on real text, with tilewise, standard or PyTorch's own attention.

The engine of ``tilewise train``, ``sample`` and ``demo``; it uses nothing of tilewise but its public functions.
"""

from tilewise.training.config import TrainConfig
from tilewise.training.data import load_corpus, make_streams
from tilewise.training.errors import UsageError
from tilewise.training.loop import Trainer, run_training
from tilewise.training.memory import PeakMemory, SavedForBackward
from tilewise.training.model import GPT
from tilewise.training.run_folder import RunFolder
from tilewise.training.sampling import generate

__all__ = [
    "GPT",
    "PeakMemory",
    "RunFolder",
    "SavedForBackward",
    "TrainConfig",
    "Trainer",
    "UsageError",
    "generate",
    "load_corpus",
    "make_streams",
    "run_training",
]

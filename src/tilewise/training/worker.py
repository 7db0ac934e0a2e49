"""One variant of a comparison, trained in a process of its own: ``python -m tilewise.training.worker RUN_FOLDER``.

Peak memory of a process says something about a variant only if the process runs nothing else. The parent (`compare`) reads
JSON events from stdout: ``{"stage": ...}``, ``{"step": ..., "loss": ..., "seconds": ...}``, and ``{"result": {...}}`` last.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from tilewise.training.config import TrainConfig
from tilewise.training.data import load_corpus, make_streams
from tilewise.training.loop import StepResult, Trainer
from tilewise.training.memory import PeakMemory, SavedForBackward
from tilewise.training.run_folder import RunFolder
from tilewise.training.session import make_tokenizer


def measure(folder: RunFolder, emit: Any) -> dict[str, Any]:
    """Train the folder's config from the start and return what was measured; leaves a checkpoint."""
    trainer = _prepare(folder, emit)
    emit({"stage": "compiling kernels"})
    first = trainer.warm_up()
    compile_seconds = max(0.0, first - trainer.warm_up())
    with SavedForBackward(exclude=trainer.model.parameters()) as saved:
        trainer.forward(trainer.train.batch(0, trainer.config.batch))
    emit({"stage": "training"})
    results = [_step(trainer, folder, emit)]  # not in the peak's window: this one makes the optimizer's state
    cpu_seconds = []
    with PeakMemory(trainer.config.device) as peak:
        while trainer.steps_done < trainer.config.steps:
            began = time.process_time()
            results.append(_step(trainer, folder, emit))
            cpu_seconds.append(time.process_time() - began)
    valid_loss = trainer.evaluate()
    folder.save_checkpoint(trainer.steps_done, trainer.state())
    timed = results[1:] or results
    return {
        "attention": trainer.config.attention,
        "parameters": trainer.model.parameter_count(),
        "losses": [result.loss for result in results],
        "valid_loss": valid_loss,
        "step_seconds": statistics.median(result.seconds for result in timed),
        "cpu_seconds": statistics.median(cpu_seconds or [0.0]),
        "compile_seconds": compile_seconds,
        "saved_bytes": saved.bytes,
        "peak_bytes": peak.peak,
        "step_bytes": peak.growth,
        "peak_method": peak.method,
    }


def _prepare(folder: RunFolder, emit: Any) -> Trainer:
    config: TrainConfig = folder.config
    emit({"stage": "reading text"})
    corpus = load_corpus(config.data, config.max_mb)
    tokenizer = make_tokenizer(config, corpus)
    folder.save_tokenizer(tokenizer)
    return Trainer(config, *make_streams(corpus, tokenizer, config.context, config.seed), tokenizer.vocab_size)


def _step(trainer: Trainer, folder: RunFolder, emit: Any) -> StepResult:
    result = trainer.step()
    folder.append_metrics({"step": result.step, "loss": result.loss, "seconds": round(result.seconds, 6)})
    emit({"step": result.step, "loss": result.loss, "seconds": result.seconds})
    return result


def main() -> None:
    def emit(event: dict[str, Any]) -> None:
        print(json.dumps(event), flush=True)

    emit({"result": measure(RunFolder.open(Path(sys.argv[1])), emit)})


if __name__ == "__main__":
    main()

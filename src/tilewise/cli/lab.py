"""`tilewise lab`: the systems of the papers side by side."""

from __future__ import annotations

import typer

from tilewise.cli.lab_compare import compare
from tilewise.cli.lab_errors import errors
from tilewise.cli.lab_generations import generations
from tilewise.cli.lab_memory import memory
from tilewise.cli.lab_sparsity import sparsity

lab = typer.Typer(no_args_is_help=True, rich_markup_mode="markdown", add_completion=False)
for command in (compare, errors, generations, sparsity, memory):
    lab.command()(command)


@lab.callback()
def about() -> None:
    """Standard, checkpointed and recomputing attention, FlashAttention-1, -2 and -3: the papers' claims, measured.

    Example: `tilewise lab compare`
    """

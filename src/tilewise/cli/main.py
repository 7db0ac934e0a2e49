"""`tilewise`: the commands. A command's file is imported when it is run, so `tilewise --help` needs none of them."""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from tilewise import NoBackendError, __version__
from tilewise.cli.output import fail

#: Each is the function of that name in the file of that name, with its line in `tilewise --help`.
COMMANDS = {
    "doctor": "What runs on this machine and how fast; a self test.",
    "caps": "Which backend can do what: the capability table.",
    "explain": "What a call would do: backend, tiles, FLOPs, bytes, memory.",
    "io": "What attention moves and computes: exact counts, roofline, laws, hardware counters.",
    "fit": "Which batch and context of a model fit on which GPU.",
    "bench": "Speed against PyTorch's own attention, forward and backward.",
    "memory": "Memory against sequence length, tilewise and standard attention.",
    "lab": "The systems of the papers side by side: exactness, bytes, time, generations, sparsity.",
    "report": "One page of pictures and tables from the JSON files of the other commands.",
    "train": "Train a small language model on a text of yours.",
    "sample": "Write text with a trained model.",
    "compare": "One model with several attentions and seeds: do they learn the same?",
    "demo": "One small model with standard attention and with tilewise: loss, memory, time.",
}


class LazyGroup(TyperGroup):
    """Commands by name; errors in what the user gave are one line on stderr and exit code 2."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        help_line = COMMANDS.get(cmd_name)
        return None if help_line is None else TyperCommand(cmd_name, help=help_line)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, found, rest = super().resolve_command(ctx, args)
        return name, found and load(str(name)), rest

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (TypeError, ValueError, NoBackendError, ImportError) as error:
            if ctx.params.get("debug"):
                raise
            fail(str(error) or type(error).__name__)


def load(name: str) -> Any:
    """The command (or group of commands) of this name, imported now."""
    function = getattr(importlib.import_module(f"tilewise.cli.{name}"), name)
    if isinstance(function, typer.Typer):
        return typer.main.get_command(function)
    single = typer.Typer(add_completion=False, rich_markup_mode="markdown")
    single.command(name)(function)
    return typer.main.get_command(single)


app = typer.Typer(cls=LazyGroup, no_args_is_help=True, rich_markup_mode="markdown")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tilewise {__version__}")
        raise typer.Exit


@app.callback()
def tilewise(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Exact, IO-aware softmax attention for PyTorch: look at it, measure it, try it.

    Start with `tilewise doctor`. Every command has `--help` with an example.
    """


if __name__ == "__main__":
    sys.exit(app())

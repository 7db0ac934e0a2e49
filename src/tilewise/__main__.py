"""``python -m tilewise``: the command line, where no script is on the PATH."""

from tilewise.cli.main import app

app()

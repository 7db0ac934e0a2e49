"""What goes wrong in ways that a user can mend: `UsageError`, and packages that are optional."""

from __future__ import annotations

import importlib
from typing import Any


class UsageError(ValueError):
    """Something the user gave cannot be used; the message says what was given, what is accepted and what to do."""


class MissingPackageError(UsageError):
    """An optional package is needed and absent."""


def optional_package(name: str, purpose: str) -> Any:
    """Import an optional package.

    Raises:
        MissingPackageError: it is not installed; the message has the pip command.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        package = name.split(".")[0]
        if error.name is None or error.name.split(".")[0] != package:
            raise
        raise MissingPackageError(f"{purpose} needs the package {package}: pip install {package}") from None

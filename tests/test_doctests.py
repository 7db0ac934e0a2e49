"""The examples of public docstrings run, and every public name has one."""

import doctest
import importlib

import pytest

import tilewise

IO_MODEL = tuple(f"io_model.{name}" for name in ("fit", "laws", "models", "systems"))
MODULES = ("api", "cost", "dispatch", "flash_attn", "lab", "masks", "merge", "testing", *IO_MODEL)


@pytest.mark.parametrize("name", MODULES)
def test_examples(name):
    results = doctest.testmod(importlib.import_module(f"tilewise.{name}"))
    assert results.failed == 0


def test_public_functions_have_examples():
    finder = doctest.DocTestFinder(exclude_empty=True)
    for name in ("attention", "attention_varlen", "use_backend"):
        assert any(test.examples for test in finder.find(getattr(tilewise, name), name)), name


def test_every_public_name_is_documented():
    for name in tilewise.__all__:
        assert getattr(tilewise, name).__doc__, name

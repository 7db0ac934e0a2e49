"""A pytest plugin for the processes of a parallel run: after an error of the GPU a process can do no more; another follows."""

import os
import re

FATAL = re.compile(r"CUDA error: (?!out of memory)|unspecified launch failure|illegal memory access")
_broken = False
_worker = False


def pytest_configure(config):
    global _worker
    _worker = hasattr(config, "workerinput")


def pytest_runtest_logreport(report):
    global _broken
    _broken = _broken or (report.failed and FATAL.search(str(report.longrepr)) is not None)


def pytest_runtest_logfinish():
    if _broken and _worker:
        os._exit(1)

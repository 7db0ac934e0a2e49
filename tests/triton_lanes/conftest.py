"""The Triton lanes have a virtual environment of their own (see the Makefile) and share the list of cases."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

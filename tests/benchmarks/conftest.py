"""Puts the repository on the import path, where `benchmarks` lies."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

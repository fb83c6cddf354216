"""The tests of Rachis, by what they need: see CONTRIBUTING.md."""

from pathlib import Path

# The root of the repository.
ROOT = Path(__file__).parents[1]

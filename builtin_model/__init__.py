"""The built-in model: a tiny Llama trained to recall `k17=blue` from its context.

`vocabulary` and `recall` are pure; `train` makes the committed weights and `evaluate` measures them in vLLM.
Importing the package imports neither torch nor vLLM.
"""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
"""Folder of the committed weights, in the layout that vLLM and transformers load."""

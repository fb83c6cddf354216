"""Model families through the service: tiny models with random weights, and what of the service each can have.

python -m tests.families            all of them, and writes the result and the table of docs/models.md
python -m tests.families gemma3     one or several, to look at; nothing is written
"""

"""`rachis doctor`: what is wrong with a running service, a sentence for each, and which page helps.

A shell sees (`collecting`, `probing`, `surroundings`), a pure table of checks judges (`checks`), and the command tells.
"""

"""Training a drafter for a target: text the target writes itself, training on it, the command.

Needs the `train` extra. Nothing here is imported by the engine.
"""

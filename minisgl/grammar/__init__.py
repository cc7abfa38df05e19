"""Constrains answers: constraints become grammars, and grammars become masks of tokens."""

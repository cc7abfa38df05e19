"""Towers of models that see: transformers' own, beside whichever code runs the text part."""

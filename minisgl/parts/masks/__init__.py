"""Masks of the tokens that a constraint allows."""

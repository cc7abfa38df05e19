"""Fixtures of the attention tests."""

from support.attention_packages import packages

__all__ = ["packages"]

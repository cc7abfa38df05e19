"""Fixtures of the server's tests."""

from support.http_server import tiny_model

__all__ = ["tiny_model"]

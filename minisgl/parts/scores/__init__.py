"""Logprobs of prompt tokens."""

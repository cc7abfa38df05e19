"""Logprobs of tokens that requests name by their ids."""

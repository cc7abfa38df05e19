"""Adapters of requests (LoRA)."""

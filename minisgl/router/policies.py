"""The names of the policies. Imports nothing, so that --help is fast."""

from __future__ import annotations

CACHE, LEAST_LOADED, ROUND_ROBIN = "cache", "least-loaded", "round-robin"
POLICIES = (CACHE, LEAST_LOADED, ROUND_ROBIN)

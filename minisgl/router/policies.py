"""The names of the policies and the roles. Imports nothing, so that --help is fast."""

from __future__ import annotations

CACHE, LEAST_LOADED, ROUND_ROBIN = "cache", "least-loaded", "round-robin"
POLICIES = (CACHE, LEAST_LOADED, ROUND_ROBIN)

# What a replica does, where they divide the work.
PREFILL, DECODE = "prefill", "decode"
ROLES = (PREFILL, DECODE)

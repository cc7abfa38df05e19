"""Drafters: what they guess of the tokens that follow, for a later step to verify."""

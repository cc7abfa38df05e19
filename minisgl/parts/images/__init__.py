"""Images of prompts: their rows, in the places of embeddings."""

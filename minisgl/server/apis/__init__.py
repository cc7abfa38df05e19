"""The APIs: each reads its requests, and renders its answers."""

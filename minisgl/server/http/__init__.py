"""Connections, what every request passes, and the reading of bodies: nothing here knows an API."""

"""Copies of pages between the device and host memory."""

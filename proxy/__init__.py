"""Slotkeeper: an HTTP proxy that makes llama-server compute each prompt token once."""

__version__ = "0.1.0"

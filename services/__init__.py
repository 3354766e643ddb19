"""Headwater's processes and what they stand on: settings, RPC, the message log, the command."""

__all__: list[str] = []

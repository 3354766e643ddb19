"""Measuring freshness: marked events and updates, when each stage had them, and what that comes to."""

__all__: list[str] = []

"""Attacks on what a protected job shows, so that one sees what protection buys and what not."""

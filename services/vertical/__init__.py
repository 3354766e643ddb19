"""Parties of a joint computation as processes: the network between them, their checkpoints, and joint inference."""

"""What keeps the shards of a server over restarts: logs, snapshots, recovery."""

__all__: list[str] = []

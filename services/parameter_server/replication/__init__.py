"""The servers among each other: who leads a shard, who follows, elections, copies and moves."""

__all__: list[str] = []

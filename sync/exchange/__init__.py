"""How replicas of different regions tell each other what is new: one pulls, the other feeds. Sans-IO."""

from __future__ import annotations

from sync.exchange.feed import Feed, FeedConfig
from sync.exchange.feeds import Feeds
from sync.exchange.messages import Batch, Piece, Pull, ShardName, Want
from sync.exchange.pace import Pace, PaceConfig
from sync.exchange.puller import Puller, Taken

__all__ = [
    "Batch",
    "Feed",
    "FeedConfig",
    "Feeds",
    "Pace",
    "PaceConfig",
    "Piece",
    "Pull",
    "Puller",
    "ShardName",
    "Taken",
    "Want",
]

"""Parameters between regions: a source feeds the shards that this server leads, pullers follow other regions'."""

"""Wide-area links between real processes on one machine: delay, jitter, bandwidth, partitions, resets."""

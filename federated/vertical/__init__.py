"""Companies that share users but not features: joint training without moving a feature or a label."""

"""What attacks on protected updates found, for people and programs."""

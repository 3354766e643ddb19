"""A neural network split between companies: a tower at each, the top at the party with the labels."""

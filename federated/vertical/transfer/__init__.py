"""Transfer between companies with few users in common: labels at one side, the other's customers scored."""

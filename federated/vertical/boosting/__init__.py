"""SecureBoost: gradient boosted trees over several parties' columns (Cheng et al., 2019), by exact masked sums."""

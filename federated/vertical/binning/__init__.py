"""Weight of evidence and information value of all parties' columns: one level of encrypted histograms."""

"""Histograms of one party's columns over another's encrypted numbers: what boosting and binning share."""

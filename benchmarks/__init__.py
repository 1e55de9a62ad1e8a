"""Measurements: each prints ratios taken in one run, since timings differ between machines."""

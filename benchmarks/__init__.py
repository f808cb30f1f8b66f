"""Benchmarks: peers compared in one run, as ratios, because machines are noisy."""

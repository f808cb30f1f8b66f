"""Benchmarks: peers side by side in one run, as ratios, because machines are noisy."""

"""Fold: turn the unfolded log into level-0 segments."""

"""History: pinned moments, snapshots, changes and cursors."""

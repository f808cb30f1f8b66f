"""History: points in time, snapshots, change streams and cursors."""

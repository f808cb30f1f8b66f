"""The soak: everything at once on a real server, and everything killed every few seconds."""

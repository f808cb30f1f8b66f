"""The log of a namespace: its slots, the rules that decide which objects count, and the tail."""

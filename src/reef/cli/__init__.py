"""The command `reef`: one file per group of commands, one `Output` for all of them."""

"""The command line: a module per command, or a package if it needs several."""

"""The command line: a file for each command, or a folder where it has more than one."""

"""The command line: one module a command; parses, prints, exits."""

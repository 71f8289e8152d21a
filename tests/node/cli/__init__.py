"""The command line, each command as a user would call it."""

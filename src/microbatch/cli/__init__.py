"""The command line. One file per command in ``commands/``: a file added there is a command."""

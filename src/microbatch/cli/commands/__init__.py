"""One file per command; its name is the command's, and it holds ``command``.

A command imports what it needs inside its function, so that ``--help`` and the quick commands load neither torch nor
matplotlib. Its function returns the exit status.
"""

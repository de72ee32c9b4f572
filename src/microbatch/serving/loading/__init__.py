"""From a MODEL or a function as the user names it to an engine that takes what clients send."""

"""Models to measure: the built-in ones, and the loading of every MODEL form."""

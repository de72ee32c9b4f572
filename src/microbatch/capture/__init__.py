"""From a module to its operators: FLOPs, bytes, layers."""

"""What devices can do: one TOML file each, every figure with its source. No torch in here."""

"""What a server decides and foresees: policies, limits, simulation. No torch, clock, thread or socket."""

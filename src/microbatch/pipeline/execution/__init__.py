"""Pipelines that run: stages cut from a model, schedules lowered to torch's runtime, messages of known shapes."""

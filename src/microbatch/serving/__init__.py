"""Requests that arrive one by one, batched: policies, the engine, its workers, and what it will do before it runs."""

"""Whether a batch ran out of memory, asked without loading torch for a function that does not use it."""

from __future__ import annotations

import sys


def ran_out(error: BaseException) -> bool:
    """Whether an error says so; what the failed call held is let go then."""
    if "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from microbatch.batch.oom import drop_frames, is_out_of_memory

    if not is_out_of_memory(error):
        return False
    drop_frames(error)
    return True


def free_again(device: str) -> None:
    """Give back what a failed batch left; outside of the `except` block that caught its error."""
    if "torch" in sys.modules:
        from microbatch.batch.oom import release

        release(device)

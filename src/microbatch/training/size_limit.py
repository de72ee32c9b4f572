"""The sizes that memory allows, under the name by which this room knows them: see `microbatch.batch.size_limit`."""

from __future__ import annotations

from microbatch.batch.size_limit import MOST_QUIET_STEPS as MOST_QUIET_STEPS
from microbatch.batch.size_limit import QUIET_STEPS as QUIET_STEPS
from microbatch.batch.size_limit import Ladder as Ladder
from microbatch.batch.size_limit import SizeLimit as SizeLimit
from microbatch.batch.size_limit import smaller as smaller

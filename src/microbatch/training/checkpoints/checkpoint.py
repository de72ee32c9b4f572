"""Checkpoints of a training run on torch.distributed.checkpoint, which cuts and joins tensors for any number of ranks.

Tensors are written in safetensors, which hold numbers only; everything else is JSON. Nothing is unpickled. All ranks
call each function together, and see one folder.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_loader import load as read_tensors
from torch.distributed.checkpoint.state_dict_saver import save as write_tensors

from microbatch.errors import InvalidCheckpoint, InvalidSettings
from microbatch.training.checkpoints import state
from microbatch.training.checkpoints.folder import (
    STATE,
    checkpoints,
    checksum,
    damage,
    finish_draft,
    is_checkpoint,
    start_draft,
    sync,
    write_json,
)
from microbatch.training.ranks.meeting import Meeting

if TYPE_CHECKING:
    from microbatch.training.step import TrainStep

logger = logging.getLogger(__name__)

PLAIN, TENSORS = "plain", "tensors"
"""What ``state_dict`` holds."""


def save(step: TrainStep, folder: str | Path, keep: int) -> Path:
    """Write a new checkpoint into a folder; killed at any moment, those before it stay complete.

    Args:
        step: between two steps.
        folder: of this run's checkpoints; made if it is not there.
        keep: how many checkpoints stay, this one included.

    Returns:
        The checkpoint.

    Raises:
        InvalidSettings: `keep` below 1, or a folder that not all ranks see.
        InvalidCheckpoint: something that is no plain value, or a file that cannot be written.
    """
    if keep < 1:
        raise InvalidSettings(f"keep is {keep}.", "Keep 1 checkpoint or more.")
    meeting = step._ranks.meeting
    with step._ranks.together():
        packed, tensors = state.take(step)
        draft = Path(_of_first(meeting, lambda: str(start_draft(Path(folder).absolute(), step.steps))))
        _check_seen(meeting, draft)
        _write(tensors, draft, meeting)
        _of_first(meeting, lambda: write_json(draft / STATE, packed))
        sums = _checksums(meeting, draft)
        return Path(_of_first(meeting, lambda: str(finish_draft(draft, sums, keep))))


def load(step: TrainStep, path: str | Path) -> Path | None:
    """Go on from the newest complete checkpoint of a folder, or from the one that is given.

    Returns:
        The checkpoint; None where there is none yet.

    Raises:
        InvalidCheckpoint: every checkpoint is damaged, or it is one of another model.
    """
    meeting = step._ranks.meeting
    ranks = 1 if meeting is None else meeting.size
    broken: list[str] = []
    with step._ranks.together():
        for found in _of_first(meeting, lambda: [str(one) for one in _candidates(Path(path).absolute())]):
            wrong = [text for text in _all(meeting, damage(Path(found), step._ranks.rank, ranks)) if text]
            if not wrong:
                _read(step, Path(found), meeting)
                logger.info("Goes on from %s: step %d, sample %d.", found, step.steps, step.samples)
                return Path(found)
            logger.warning("A checkpoint is damaged and left aside: %s.", wrong[0])
            broken += wrong
    if broken:
        raise InvalidCheckpoint(f"No checkpoint in {path} is complete: {broken[0]}.", "Look for another copy of it.")
    logger.info("There is no checkpoint in %s: the run starts at its beginning.", path)
    return None


def state_dict(step: TrainStep) -> dict[str, Any]:
    """A step in the Stateful protocol of torch.distributed.checkpoint: tensors, and a JSON text for all else."""
    packed, tensors = state.take(step)
    return {PLAIN: json.dumps(packed), TENSORS: state.room_before_first_step(step) | tensors}


def load_state_dict(step: TrainStep, loaded: dict[str, Any]) -> None:
    """The counterpart of `state_dict`.

    Raises:
        InvalidCheckpoint: of another model or optimizer.
    """
    packed = state.own_part(step, json.loads(loaded[PLAIN]))
    state.check(step, packed)
    state.put_back(step, packed, loaded[TENSORS])


def _candidates(path: Path) -> list[Path]:
    return [path] if is_checkpoint(path) else checkpoints(path)


def _read(step: TrainStep, path: Path, meeting: Meeting | None) -> None:
    packed = state.own_part(step, json.loads((path / STATE).read_text(encoding="utf-8")))
    state.check(step, packed)
    tensors = state.targets(step, packed)
    _all(meeting, None)  # a rank with another model says so here, before the others wait for it elsewhere
    with _failing(f"{path} cannot be read"):
        read_tensors(tensors, storage_reader=HuggingFaceStorageReader(str(path)), **_among(meeting))
    state.put_back(step, packed, tensors)


def _write(tensors: dict[str, Tensor], draft: Path, meeting: Meeting | None) -> None:
    contiguous: dict[str, Any] = {name: tensor.contiguous() for name, tensor in tensors.items()}
    writer = HuggingFaceStorageWriter(str(draft), save_distributed=True)
    with _failing(f"{draft.parent} cannot be written to"):
        write_tensors(contiguous, storage_writer=writer, **_among(meeting))


def _check_seen(meeting: Meeting | None, draft: Path) -> None:
    blind = [rank for rank, seen in enumerate(_all(meeting, draft.is_dir())) if not seen]
    if blind:
        raise InvalidSettings(
            f"{draft.parent} of the first rank is not seen by ranks {blind}.", "Use a folder on storage that all share."
        )


def _checksums(meeting: Meeting | None, draft: Path) -> dict[str, list[int]]:
    """Of every file, which has reached the disk afterwards; ranks share the work."""
    names = _of_first(meeting, lambda: sorted(file.name for file in draft.iterdir()))
    rank, ranks = (0, 1) if meeting is None else (meeting.rank, meeting.size)
    mine = {}
    for name in names[rank::ranks]:
        sync(draft / name)
        mine[name] = checksum(draft / name)
    return {name: values for one in _all(meeting, mine) for name, values in one.items()}


def _all(meeting: Meeting | None, value: Any) -> list[Any]:
    """What every rank says, in the order of ranks; a failure of one is raised on all."""
    return [value] if meeting is None else [one["value"] for one in meeting.hold({"value": value})]


def _of_first(meeting: Meeting | None, work: Callable[[], Any]) -> Any:
    """What the first rank's work returns, on every rank."""
    return _all(meeting, work() if meeting is None or meeting.rank == 0 else None)[0]


def _among(meeting: Meeting | None) -> dict[str, Any]:
    return {"no_dist": True} if meeting is None else {"process_group": meeting.group}


@contextmanager
def _failing(what: str) -> Iterator[None]:
    """Around a call that all ranks make: its failures are said by all, in one line."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process is meant
            yield
    except CheckpointException as error:
        rank, failure = next(iter(error.failures.items()))
        text = f"{what}: rank {rank}: {failure[0]!s:.300}."
        raise InvalidCheckpoint(text, "Look at the folder and at the space on its disk.") from None

"""What a rank notes down of its own actions."""

from __future__ import annotations

import msgspec
import pytest
import torch

from microbatch.errors import InvalidLoss, RankFailed
from microbatch.pipeline.execution.recording import Recorder
from microbatch.pipeline.execution.telling import Failure, is_of_a_connection, own_error, told
from microbatch.pipeline.measured import RankTimes
from microbatch.pipeline.schedule import BACKWARD, FORWARD, Action

CPU = torch.device("cpu")


class Posted(dict[int, RankTimes]):
    """What was left for the others."""

    def __call__(self, number: int, times: bytes) -> None:
        self[number] = msgspec.json.decode(times, type=RankTimes)


def test_a_run_is_left_for_the_others() -> None:
    posted = Posted()
    recorder = Recorder("a", CPU, posted)
    for number in (1, 2):
        with recorder.run():
            for action in (Action(0, FORWARD, 0), Action(0, BACKWARD, 0)):
                recorder.begin(action)
                recorder(action, 1.0 * number, 2.0 * number)
    assert posted[2].actions == ((0, FORWARD, 0), (0, BACKWARD, 0))
    assert (posted[2].start, posted[2].end) == ((2.0, 2.0), (4.0, 4.0))
    assert posted[2].began is None
    assert posted[1].clock == posted[2].clock != ""


def test_a_step_has_a_beginning_and_an_end() -> None:
    posted = Posted()
    recorder = Recorder("a", CPU, posted)
    with recorder.step():
        with recorder.run():
            pass
        assert not posted
    times = posted[1]
    assert times.began is not None and times.ended is not None and times.began < times.ended
    with recorder.step():
        pass  # without data there is nothing to run
    assert list(posted) == [1]


def test_what_is_being_done_has_words() -> None:
    recorder = Recorder("a", CPU, Posted())
    assert recorder.now().words == ""
    with recorder.step():
        assert issubclass(ValueError, recorder.now().alike)  # all ranks are still at the same place
        with recorder.run():
            assert recorder.now().words == ""
            recorder.begin(Action(1, FORWARD, 2))
            assert recorder.now() == ("forward of stage 1, micro-batch 2", ())
        assert recorder.now().words == "update"
        assert issubclass(InvalidLoss, recorder.now().alike)
        assert not issubclass(ValueError, recorder.now().alike)
    assert recorder.now().words == ""


def test_after_an_error_the_place_is_known() -> None:
    recorder = Recorder("a", CPU, Posted())
    running = recorder.run()
    running.__enter__()
    recorder.begin(Action(1, BACKWARD, 3))
    assert not running.__exit__(ValueError, ValueError("no"), None)
    assert recorder.now().words == "backward of stage 1, micro-batch 3"


def test_failures_travel_as_text() -> None:
    failure = told(ValueError("bad\nluck"), 3, "update")
    assert Failure.from_bytes(failure.to_bytes().encode()) == failure
    assert str(failure.error(8)).startswith("Rank 3 of 8 failed in the update: ValueError: bad\nluck.")
    assert str(Failure(1, process=77).error(2)).startswith("Rank 1 of 2 is gone: its process 77 ")
    assert told(KeyboardInterrupt(), 0, "").text == "KeyboardInterrupt"


def test_what_torch_wraps_is_unwrapped() -> None:
    inner = ValueError("mine")
    wrapped = RuntimeError("[Stage 1] failed to run forward:")
    wrapped.__cause__ = inner
    assert own_error(wrapped) is inner
    assert own_error(inner) is inner


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer"), True),
        (RankFailed("Rank 0 of 2 lost the other ranks: [gloo/transport/tcp/pair.cc] Connection closed by peer."), True),
        (RankFailed("Rank 1 of 2 failed: ValueError: no."), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("NCCL"), False),
    ],
)
def test_broken_connections_are_told_apart(error: Exception, is_one: bool) -> None:
    assert is_of_a_connection(error) is is_one

"""Every error that microbatch raises on purpose::

    MicrobatchError                 anything below
    ├── UserError                   the user's mistake; the command line answers with exit status 2
    │   ├── InvalidBatchSizes       sizes that do not divide, are not positive, or contradict each other
    │   ├── InvalidQuantity         text that is not a duration, a size in bytes or a rate
    │   ├── InvalidDevice           an unknown device, or a device file that breaks the rules of the catalogue
    │   ├── InvalidProfile          a saved profile or a CSV of times that cannot be used
    │   ├── InvalidModel            a MODEL that cannot be loaded, or an example that does not fit it
    │   ├── InvalidBatch            a batch whose members disagree, or that cannot be cut into pieces
    │   ├── InvalidCheckpoint       a checkpoint that is damaged, of another model, or cannot be written
    │   ├── InvalidLoss             a loss that does not return a sum and its weight
    │   ├── InvalidSchedule         a pipeline schedule that cannot run, or sizes that make no sense for it
    │   ├── InvalidCosts            costs of pipeline stages that do not fit the schedule, or are no times
    │   ├── InvalidSettings         options that contradict each other or lie outside their range
    │   ├── InvalidOutput           a function to be batched that does not return one result for each item
    │   ├── RequestTooLarge         a request with more items than the queue takes, or more work than a batch may have
    │   └── InvalidRequest          a request over HTTP that cannot be read, or is not allowed; `status` says which
    ├── DoesNotFit                  a training step that runs out of memory at the smallest size; nothing was trained
    ├── RankFailed                  another rank of a distributed step failed, or is gone; no weights were changed
    │   └── RankOutOfMemory         it ran out of memory where all ranks must go through the same pieces
    ├── NotServed                   a request that a server has no answer for
    │   ├── Overloaded              the queue is full; when to try again is in `retry_after`, in seconds
    │   ├── DeadlineExceeded        its deadline passed while it waited or ran
    │   ├── Draining                the server is about to stop
    │   └── WorkerDied              the process that ran it ended, and a retry did not help
    ├── ModelFailed                 the user's model raised; its text and the last size that worked are kept
    └── NoAnswer                    no honest answer is possible; the command line answers with exit status 3
        ├── TooNoisy                the machine is too noisy to tell the sizes apart
        └── ImplausibleResult       a time faster than the device can be

Each error says what happened with the user's own numbers (``str(error)``) and what to do (``error.remedy``).
"""

from __future__ import annotations


class MicrobatchError(Exception):
    """Base of the tree.

    Args:
        message: what happened, in one sentence, with the user's own numbers.
        remedy: what to do about it, in one sentence; empty when nothing is known.
    """

    def __init__(self, message: str, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message} {self.remedy}".strip()

    def to_json(self) -> dict[str, dict[str, str]]:
        """The form that every command prints with ``--json``."""
        return {"error": {"type": type(self).__name__, "message": self.message, "remedy": self.remedy}}


class UserError(MicrobatchError):
    """The request itself cannot be carried out."""


class InvalidBatchSizes(UserError):
    """Batch sizes that do not divide, are not positive, or contradict each other."""


class InvalidQuantity(UserError):
    """Text that is not a duration, a size in bytes or a rate."""


class InvalidDevice(UserError):
    """An unknown device, or a device file that breaks the rules of the catalogue."""


class InvalidProfile(UserError):
    """A saved profile or a CSV of times that cannot be used."""


class InvalidModel(UserError):
    """A MODEL that cannot be loaded, or an example input that does not fit it."""


class InvalidBatch(UserError):
    """A batch whose members disagree about its size, or that cannot be cut into pieces."""


class InvalidCheckpoint(UserError):
    """A checkpoint that is damaged, belongs to another model, or cannot be written."""


class InvalidLoss(UserError):
    """A loss that does not return a sum and its weight, from which exact gradients follow."""


class InvalidSchedule(UserError):
    """A pipeline schedule that cannot run, or sizes that make no sense for it."""


class InvalidCosts(UserError):
    """Costs of pipeline stages that do not fit the schedule, or that are no times."""


class InvalidSettings(UserError):
    """Options that contradict each other or lie outside their range."""


class InvalidOutput(UserError):
    """A function to be batched that does not return one result for each item."""


class RequestTooLarge(UserError):
    """A request with more items than the queue takes, or more work than a batch may have."""


class InvalidRequest(UserError):
    """A request over HTTP that cannot be read, or that is not allowed.

    Attributes:
        status: of HTTP, 400 to 499.
        headers: that go with it, such as the methods that are allowed.
    """

    def __init__(
        self, message: str, remedy: str = "", status: int = 400, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        super().__init__(message, remedy)
        self.status = status
        self.headers = headers


class DoesNotFit(MicrobatchError):
    """A step runs out of memory even in the smallest pieces."""


class RankFailed(MicrobatchError):
    """A rank of a distributed step failed; said on every rank."""


class RankOutOfMemory(RankFailed):
    """A rank ran out of memory in a step whose ranks need each other in every layer; said on every rank."""


class NotServed(MicrobatchError):
    """A server has no answer for a request."""


class Overloaded(NotServed):
    """The queue is full.

    Attributes:
        retry_after: seconds after which what waits now will have been answered, at the rate measured.
    """

    def __init__(self, message: str, remedy: str = "", retry_after: float = 1.0) -> None:
        super().__init__(message, remedy)
        self.retry_after = retry_after


class DeadlineExceeded(NotServed):
    """The deadline of a request passed while it waited or ran."""


class Draining(NotServed):
    """The server is about to stop and takes no more requests."""


class WorkerDied(NotServed):
    """The process that ran a request ended, and a retry did not help."""


class ModelFailed(MicrobatchError):
    """The user's model raised an exception that is not out-of-memory."""


class NoAnswer(MicrobatchError):
    """An answer would be a guess."""


class TooNoisy(NoAnswer):
    """The machine is too noisy to tell the sizes apart."""


class ImplausibleResult(NoAnswer):
    """A measured time is faster than the device can be."""

"""How a model answers to its batch size: measured, explained, used.

Every public name is listed in ``__all__`` and loaded at its first use, so that ``import microbatch`` costs nothing:
torch is imported by the first call that measures, matplotlib by the first that draws.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from microbatch.batch.exactness import ExactnessReport
    from microbatch.batch.independence import check_independence
    from microbatch.batch.pieces import Pieces
    from microbatch.batch.token_budget import TokenBudget
    from microbatch.curves.explanation import Explanation
    from microbatch.curves.profile import Profile
    from microbatch.errors import (
        DeadlineExceeded,
        DoesNotFit,
        Draining,
        ImplausibleResult,
        InvalidBatch,
        InvalidBatchSizes,
        InvalidCheckpoint,
        InvalidCosts,
        InvalidDevice,
        InvalidLoss,
        InvalidModel,
        InvalidOutput,
        InvalidProfile,
        InvalidQuantity,
        InvalidRequest,
        InvalidSchedule,
        InvalidSettings,
        MicrobatchError,
        ModelFailed,
        NoAnswer,
        NotServed,
        Overloaded,
        RankFailed,
        RankOutOfMemory,
        RequestTooLarge,
        TooNoisy,
        UserError,
        WorkerDied,
    )
    from microbatch.hardware.device_spec import DeviceSpec
    from microbatch.llm.engine import LLMEngine
    from microbatch.llm.sampling_params import SamplingParams
    from microbatch.pipeline.execution.pipeline import Pipeline
    from microbatch.pipeline.schedule import Schedule
    from microbatch.pipeline.simulate import simulate
    from microbatch.pipeline.timeline import Timeline
    from microbatch.profiling.compare import compare
    from microbatch.profiling.explain import explain
    from microbatch.profiling.predict import predict
    from microbatch.profiling.sweep import profile
    from microbatch.reporting.save import save, show
    from microbatch.serving.engine.batcher import DynamicBatcher
    from microbatch.serving.engine.decorate import batched
    from microbatch.serving.offline.map_report import MapReport
    from microbatch.serving.offline.mapping import imap, map
    from microbatch.sizes import BatchSizes
    from microbatch.training.checkpoints.samples import GlobalBatches, none_where_empty
    from microbatch.training.joint.terms import JointTerm
    from microbatch.training.result import StepResult
    from microbatch.training.step import TrainStep
    from microbatch.web.ray_serve import ray_application

__version__ = "0.1.0"

__all__ = [
    "BatchSizes",
    "DeadlineExceeded",
    "DeviceSpec",
    "DoesNotFit",
    "Draining",
    "DynamicBatcher",
    "ExactnessReport",
    "Explanation",
    "GlobalBatches",
    "ImplausibleResult",
    "InvalidBatch",
    "InvalidBatchSizes",
    "InvalidCheckpoint",
    "InvalidCosts",
    "InvalidDevice",
    "InvalidLoss",
    "InvalidModel",
    "InvalidOutput",
    "InvalidProfile",
    "InvalidQuantity",
    "InvalidRequest",
    "InvalidSchedule",
    "InvalidSettings",
    "JointTerm",
    "LLMEngine",
    "MapReport",
    "MicrobatchError",
    "ModelFailed",
    "NoAnswer",
    "NotServed",
    "Overloaded",
    "Pieces",
    "Pipeline",
    "Profile",
    "RankFailed",
    "RankOutOfMemory",
    "RequestTooLarge",
    "SamplingParams",
    "Schedule",
    "StepResult",
    "Timeline",
    "TokenBudget",
    "TooNoisy",
    "TrainStep",
    "UserError",
    "WorkerDied",
    "batched",
    "check_independence",
    "compare",
    "explain",
    "imap",
    "map",
    "none_where_empty",
    "predict",
    "profile",
    "ray_application",
    "save",
    "show",
    "simulate",
]

_HOMES = {
    "BatchSizes": "microbatch.sizes",
    "DeadlineExceeded": "microbatch.errors",
    "DeviceSpec": "microbatch.hardware.device_spec",
    "DoesNotFit": "microbatch.errors",
    "Draining": "microbatch.errors",
    "DynamicBatcher": "microbatch.serving.engine.batcher",
    "ExactnessReport": "microbatch.batch.exactness",
    "Explanation": "microbatch.curves.explanation",
    "GlobalBatches": "microbatch.training.checkpoints.samples",
    "ImplausibleResult": "microbatch.errors",
    "InvalidBatch": "microbatch.errors",
    "InvalidBatchSizes": "microbatch.errors",
    "InvalidCheckpoint": "microbatch.errors",
    "InvalidCosts": "microbatch.errors",
    "InvalidDevice": "microbatch.errors",
    "InvalidLoss": "microbatch.errors",
    "InvalidModel": "microbatch.errors",
    "InvalidOutput": "microbatch.errors",
    "InvalidProfile": "microbatch.errors",
    "InvalidQuantity": "microbatch.errors",
    "InvalidRequest": "microbatch.errors",
    "InvalidSchedule": "microbatch.errors",
    "InvalidSettings": "microbatch.errors",
    "JointTerm": "microbatch.training.joint.terms",
    "LLMEngine": "microbatch.llm.engine",
    "MapReport": "microbatch.serving.offline.map_report",
    "MicrobatchError": "microbatch.errors",
    "ModelFailed": "microbatch.errors",
    "NoAnswer": "microbatch.errors",
    "NotServed": "microbatch.errors",
    "Overloaded": "microbatch.errors",
    "Pieces": "microbatch.batch.pieces",
    "Pipeline": "microbatch.pipeline.execution.pipeline",
    "Profile": "microbatch.curves.profile",
    "RankFailed": "microbatch.errors",
    "RankOutOfMemory": "microbatch.errors",
    "RequestTooLarge": "microbatch.errors",
    "SamplingParams": "microbatch.llm.sampling_params",
    "Schedule": "microbatch.pipeline.schedule",
    "StepResult": "microbatch.training.result",
    "Timeline": "microbatch.pipeline.timeline",
    "TokenBudget": "microbatch.batch.token_budget",
    "TooNoisy": "microbatch.errors",
    "TrainStep": "microbatch.training.step",
    "UserError": "microbatch.errors",
    "WorkerDied": "microbatch.errors",
    "batched": "microbatch.serving.engine.decorate",
    "check_independence": "microbatch.batch.independence",
    "compare": "microbatch.profiling.compare",
    "explain": "microbatch.profiling.explain",
    "imap": "microbatch.serving.offline.mapping",
    "map": "microbatch.serving.offline.mapping",
    "none_where_empty": "microbatch.training.checkpoints.samples",
    "predict": "microbatch.profiling.predict",
    "profile": "microbatch.profiling.sweep",
    "ray_application": "microbatch.web.ray_serve",
    "save": "microbatch.reporting.save",
    "show": "microbatch.reporting.save",
    "simulate": "microbatch.pipeline.simulate",
}

# Hidden from type checkers, which would otherwise accept any misspelt name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        importlib.import_module("microbatch.reporting.notebook")  # so that any result can show itself in a notebook
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])

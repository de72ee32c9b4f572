"""Ray Serve: engines in replicas on a cluster, behind Ray's handles and its HTTP proxy, in one line.

Each replica holds engines of its own, with the same policies, bounds and isolation as in a single server, and answers
HTTP by the same application. Ray chooses the replica, watches it, and starts another one when it dies.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from microbatch.errors import InvalidSettings
from microbatch.serving.engine.batcher import DynamicBatcher
from microbatch.serving.engine.decorate import Batched
from microbatch.web.application import Application, application

if TYPE_CHECKING:
    from ray.serve import Application as RayApplication

ALL_REQUESTS = 100_000
"""Ray sends 5 requests to a replica at a time unless told otherwise, and no batch would be larger. How many may wait is
for the engine to say: its bound is exact, and whoever is refused is told when to come again."""
DRAIN_TIMEOUT = 30.0
"""Seconds that those who wait are given when a replica is to stop."""
METRICS_PERIOD = 5.0
"""Seconds between two reports to Ray; it exports them every ten."""

Source = Batched[Any, Any] | DynamicBatcher | Callable[[], Batched[Any, Any] | DynamicBatcher]
"""An engine, or a function without arguments that makes one where it is to run."""


class Replica:
    """What Ray holds on each of its nodes; its methods are called through a handle, as ``handle.submit.remote(x)``.

    Errors of `microbatch.errors` arrive as what they are: ``except microbatch.Overloaded as error`` and
    ``error.retry_after`` work on the other side.
    """

    def __init__(self, sources: Mapping[str, Source], settings: Mapping[str, Any], metrics_period: float) -> None:
        """
        Args:
            sources: by the name of the model.
            settings: of `microbatch.web.application.application`.
            metrics_period: seconds between two reports to Ray.
        """
        self._engines = {name: engine_of(source) for name, source in sources.items()}
        self._application = application(self._engines, **settings)
        self._application.start()
        from microbatch.web.ray_metrics import report  # needs the web server's packages, as the application does

        self._reporting = asyncio.get_running_loop().create_task(report(self._engines, metrics_period))

    def __serve_build_asgi_app__(self) -> Application:
        """What answers HTTP here; Ray starts it, and drains it at the end."""
        return self._application

    async def submit(
        self, item: Any, *, model: str = "", deadline: float | None = None, priority: int = 0, tenant: str = ""
    ) -> Any:
        """The result of one item; see `DynamicBatcher.submit`. Its deadline counts from when it comes here."""
        engine = self._engine(model)
        return await engine.submit(item, deadline=deadline, priority=priority, tenant=tenant)

    async def submit_many(
        self,
        items: Sequence[Any],
        *,
        model: str = "",
        deadline: float | None = None,
        priority: int = 0,
        tenant: str = "",
    ) -> list[Any]:
        """The results of several items in order, an item's exception in its place."""
        engine = self._engine(model)
        return await engine.submit_many(items, deadline=deadline, priority=priority, tenant=tenant)

    async def metrics(self, model: str = "") -> dict[str, Any]:
        """What this replica has done so far, as `Metrics.to_json`."""
        return self._engine(model).metrics().to_json()

    async def check_health(self) -> None:
        """Asked by Ray, which replaces a replica that says no three times.

        Raises:
            RuntimeError: an engine is not ready.
        """
        if idle := [name for name, engine in self._engines.items() if not engine.ready]:
            raise RuntimeError(f"not ready: {', '.join(idle)}")

    def _engine(self, model: str) -> DynamicBatcher:
        if not model and len(self._engines) == 1:
            return next(iter(self._engines.values()))
        if model not in self._engines:
            raise InvalidSettings(
                f"There is no model {model!r} here.", f"Give model=, one of {', '.join(self._engines)}."
            )
        return self._engines[model]


def ray_application(
    engines: Source | Mapping[str, Source],
    *,
    name: str = "microbatch",
    num_replicas: int | str = 1,
    options: Mapping[str, Any] | None = None,
    drain_timeout: float = DRAIN_TIMEOUT,
    metrics_period: float = METRICS_PERIOD,
    keys: Sequence[str] | Mapping[str, str] = (),
    deadline: float | None = None,
) -> RayApplication:
    """An application for ``serve.run`` of Ray Serve.

    An engine is not sent as it stands: a decorated function is imported by its name in each replica, or sent with all
    it refers to where its module cannot be imported; an engine is made anew from its settings. Give a function without
    arguments to make it, or load a model, where it is to run.

    Args:
        engines: a decorated function, a `DynamicBatcher`, or a function that makes one; or several by name.
        name: of the deployment.
        num_replicas: how many, or "auto".
        options: further ones of ``serve.deployment``, such as ``{"ray_actor_options": {"num_gpus": 1}}``.
        drain_timeout: seconds that those who wait are given when a replica is to stop.
        metrics_period: seconds between two reports to Ray.
        keys, deadline: as for `microbatch.web.application.application`.

    Raises:
        InvalidSettings: Ray is not installed, or what is given is no engine.
    """
    if importlib.util.find_spec("ray") is None:
        raise InvalidSettings("Ray is not installed.", "Run: pip install 'microbatch[ray]'")
    from ray import serve

    sources = engines if isinstance(engines, Mapping) else {_name_of(engines): engines}
    for source in sources.values():
        _check(source)
    settings = {
        "name": name,
        "num_replicas": num_replicas,
        "max_ongoing_requests": ALL_REQUESTS,
        "graceful_shutdown_timeout_s": drain_timeout,
    } | dict(options or {})
    deployment = serve.deployment(serve.ingress()(Replica), **settings)
    return deployment.bind(dict(sources), {"keys": keys, "deadline": deadline}, metrics_period)


def engine_of(source: Source) -> DynamicBatcher:
    """The engine that a source is, or makes.

    Raises:
        InvalidSettings: it made something else.
    """
    found = source if isinstance(source, Batched | DynamicBatcher) else source()
    found = found.engine if isinstance(found, Batched) else found
    if not isinstance(found, DynamicBatcher):
        raise InvalidSettings(
            f"{_name_of(source)}() returned a {type(found).__name__}.", "Return a DynamicBatcher or a batched function."
        )
    return found


def _name_of(source: Any) -> str:
    return str(getattr(source, "name", "") or getattr(source, "__name__", type(source).__name__))


def _check(source: Any) -> None:
    if isinstance(source, Batched | DynamicBatcher):
        return
    if not callable(source) or any(
        each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
        for each in inspect.signature(source).parameters.values()
    ):
        raise InvalidSettings(
            f"{_name_of(source)} is no engine, nor a function without arguments that makes one.",
            "Decorate it with @microbatch.batched().",
        )

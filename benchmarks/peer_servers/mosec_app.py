"""mosec: a Rust front and a Python worker. It reads its own command line (--wait is what a window of 0 needs)."""

from __future__ import annotations

from typing import Any

from mosec import Server, Worker

from benchmarks.peer_servers.callables import asked, max_batch_size, window


class Model(Worker):
    def __init__(self) -> None:
        super().__init__()
        self.run = asked()

    def forward(self, data: list[Any]) -> list[Any]:
        return self.run(data)


if __name__ == "__main__":
    server = Server()
    server.append_worker(Model, num=1, max_batch_size=max_batch_size(), max_wait_time=round(1e3 * window()))
    server.run()

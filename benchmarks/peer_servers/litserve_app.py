"""LitServe. The request parameter must be called `request`; with a window of 0 its worker never sleeps."""

from __future__ import annotations

from typing import Any

import litserve

from benchmarks.peer_servers.callables import asked, max_batch_size, port, window


class Api(litserve.LitAPI):
    def setup(self, device: str) -> None:  # noqa: ARG002  # as LitServe calls it
        self.run = asked()

    def decode_request(self, request):  # its annotation would become the form of the body
        return request["item"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        return list(inputs)

    def predict(self, x: list[Any]) -> list[Any]:
        return self.run(x)

    def unbatch(self, output: list[Any]) -> list[Any]:
        return output

    def encode_response(self, output: Any) -> Any:
        return {"result": output}


if __name__ == "__main__":
    api = Api(max_batch_size=max_batch_size(), batch_timeout=window())
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, timeout=60)
    server.run(host="127.0.0.1", port=port(), num_api_servers=1, log_level="error", generate_client_file=False)

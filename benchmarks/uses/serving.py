"""A distilled posterior behind HTTP: intervals or abstention for single inputs, by onnxruntime.

    python benchmarks/uses/serving.py [--kinds mlp cnn vit lstm lora table]

The network and its distilled posterior are exported to ONNX with named outputs, and onnxruntime's compared with the
module's. Eight threads then ask for one input at a time; throughput is compared with that of the bare network, behind
the same server and in onnxruntime alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
import tempfile
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import laplace_plus as lp
from benchmarks.uses.distillation import digits, table

THREADS, REQUESTS = 8, 1600

NAMES = ["predictive_mean", "predictive_variance", "functional_mean", "functional_variance"]
"""Of outputs; "mean" may be the name of an average within the network."""


def session(path: Path) -> onnxruntime.InferenceSession:
    """That of a file, with one thread for each call: threads of the server share the cores."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def exported(module: nn.Module, x: torch.Tensor, names: list[str]) -> onnxruntime.InferenceSession:
    """A session with a module's ONNX file, of any number of inputs."""
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        path = Path(folder) / "module.onnx"
        options: dict[str, Any] = {"dynamo": True, "dynamic_shapes": shapes, "verbose": False}
        torch.onnx.export(module, (x,), path, input_names=["x"], output_names=names, **options)
        return session(path)


def answer(prediction: dict[str, np.ndarray], unsure: float = 0.6) -> dict[str, Any]:
    """What a client is told of one input: 95 % intervals, or a class where its probability is large enough."""
    mean = prediction["predictive_mean"][0]
    if "predictive_variance" not in prediction:  # the bare network
        return {"outputs": mean.tolist()}
    if mean.size > 2 and abs(mean.sum() - 1) < 1e-3:  # noqa: PLR2004
        best = int(mean.argmax())
        found: dict[str, Any] = {"probability": float(mean[best])}
        return found | ({"class": best} if mean[best] >= unsure else {"abstains": True})
    reach = 1.96 * np.sqrt(prediction["predictive_variance"][0])
    return {"low": (mean - reach).tolist(), "high": (mean + reach).tolist()}


def server(own: onnxruntime.InferenceSession) -> ThreadingHTTPServer:
    """Answers POST requests, whose body is one input as JSON."""
    names = [output.name for output in own.get_outputs()]

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"  # connections stay open

        def do_POST(self) -> None:
            x = np.asarray(json.loads(self.rfile.read(int(self.headers["Content-Length"]))), dtype=np.float32)
            body = json.dumps(answer(dict(zip(names, own.run(None, {"x": x[None]}), strict=True)))).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Keep quiet."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


def throughput(call: Any) -> float:
    """Calls a second of eight threads, each with a state that ``call()`` makes."""

    def work(count: int) -> None:
        one = call()
        for _ in range(count):
            one()

    start = time.perf_counter()
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(work, [REQUESTS // THREADS] * THREADS))
    return REQUESTS / (time.perf_counter() - start)


def over_http(address: Any, body: bytes) -> Any:
    """A client with a connection of its own."""
    connection = http.client.HTTPConnection(*address)

    def one() -> dict[str, Any]:
        connection.request("POST", "/", body)
        return json.loads(connection.getresponse().read())

    return one


def measured(kind: str, rounds: int = 5) -> str:
    """Throughputs of the distilled posterior in units of the network's, medians of alternating rounds."""
    problem = table() if kind == "table" else digits(kind)
    posterior = lp.KFAC(problem.model, problem.kind, parameters=problem.parameters)
    posterior.fit(list(zip(problem.train[0].split(100), problem.train[1].split(100), strict=True)))
    module = lp.distill(posterior, problem.train[0][:200], copies=1, steps=200)
    x = problem.test[0][:3]
    model = getattr(problem.model, "get_base_model", lambda: problem.model)()  # peft's own takes any arguments
    bare, full = exported(model, x, NAMES[:1]), exported(module, x, NAMES)
    with torch.no_grad():
        for own, wanted in zip(
            full.run(None, {"x": problem.test[0][:50].numpy()}), module(problem.test[0][:50]), strict=True
        ):
            torch.testing.assert_close(torch.from_numpy(own), wanted, rtol=1e-3, atol=1e-5)
    servers = [server(own) for own in (bare, full)]
    for own in servers:
        threading.Thread(target=own.serve_forever, daemon=True).start()
    body, single = json.dumps(x[0].tolist()).encode(), {"x": x[:1].numpy()}
    ratios: list[list[float]] = [[], []]
    for _ in range(rounds):
        rates = [throughput(lambda own=own: over_http(own.server_address, body)) for own in servers]
        alone = [throughput(lambda own=own: lambda: own.run(None, single)) for own in (bare, full)]
        ratios[0].append(rates[1] / rates[0])
        ratios[1].append(alone[1] / alone[0])
    shown = json.dumps(over_http(servers[1].server_address, body)())
    for own in servers:
        own.shutdown()
    served, run = (sorted(own)[rounds // 2] for own in ratios)
    return f"{kind}: over HTTP {served:.2f}, onnxruntime alone {run:.2f} of the network's throughput; {shown}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="*", default=["mlp", "cnn", "vit", "lstm", "lora", "table"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind in parser.parse_args().kinds:
        sys.stdout.write(measured(kind) + "\n")

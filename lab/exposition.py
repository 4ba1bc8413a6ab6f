"""What an engine counts, over HTTP, as a server's `/metrics` shows it.

vLLM's server answers in Prometheus's text format whatever it is asked for; prometheus_client's own
server speaks OpenMetrics to Prometheus, and other names: without the colon.
"""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from prometheus_client import REGISTRY, generate_latest
from vllm.v1.engine.llm_engine import LLMEngine


class _Metrics(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        body = generate_latest(REGISTRY)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Not to the engine's log."""


def serve(engine: LLMEngine) -> int:
    """Serve the metrics of this process, for as long as it lives. Returns the port."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return int(server.server_address[1])

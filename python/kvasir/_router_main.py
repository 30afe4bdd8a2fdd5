# SPDX-License-Identifier: Apache-2.0
"""Command line of kvasir.router."""
import argparse
import logging
import resource
from typing import Any, Optional, Sequence

from ._asgi import serve
from .client import as_instance_id

FILES = 4096  # descriptors, for CONNECTIONS of clients and as many of engines


def run(router: Any, arguments: Optional[Sequence[str]] = None) -> None:
    """Serve what @router, a class such as kvasir.router.Router, makes of the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvasir.router", description="Route OpenAI requests by prefix and load.")
    parser.add_argument("engines", nargs="+", metavar="ID=URL", help="an engine: its instance_id in kv-indexer, a number or a name, and its URL")
    parser.add_argument("--indexer", default="http://127.0.0.1:8090", help="URL of kv-indexer (default: %(default)s)")
    parser.add_argument("--model", required=True, help="model_name that the engines are registered with")
    parser.add_argument("--tenant", default="default", help="tenant_id that the engines are registered with (default: %(default)s)")
    parser.add_argument("--adapter", action="append", default=[], help="name of a LoRA adapter that requests name as `model`; repeatable")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="0 picks a free one (default: %(default)s)")
    given = parser.parse_args(arguments)
    try:
        engines = {as_instance_id(name): url for name, url in (engine.split("=", 1) for engine in given.engines)}
    except ValueError:
        parser.error("an engine is written ID=URL, such as 1=http://worker1:8000")
    if len(engines) < len(given.engines):
        parser.error("two engines have the same ID")

    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level=logging.INFO)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES:  # a request takes two
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(FILES, hard) if hard >= 0 else FILES, hard))
    serve(router(given.indexer, engines, model_name=given.model, tenant_id=given.tenant, adapters=given.adapter), given.host, given.port)

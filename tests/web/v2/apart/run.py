"""Runs the other scripts of this folder against a server that it starts: python run.py KSERVE_PYTHON MLSERVER_PYTHON PYTRITON_PYTHON."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[2]))

from support.server import start_server  # noqa: E402  # found only now

server = start_server("--grpc-port", "0")
try:
    address = next(event["address"] for event in server.events if event["event"] == "listening for gRPC")
    kserve, mlserver, pytriton = sys.argv[1:]
    subprocess.run([kserve, HERE / "kserve_client.py", server.url, address], check=True)
    subprocess.run([mlserver, HERE / "mlserver_client.py", server.url, address], check=True)
    subprocess.run([pytriton, HERE / "pytriton_client.py", server.url, f"grpc://{address}"], check=True)
finally:
    server.stop()

# attend as a container, for CPUs:
#   docker build -t attend .
#   docker run --rm --read-only --tmpfs /tmp --stop-timeout 35 -p 8000:8000 attend
# One process serves without /tmp too; several (ATTEND_WORKERS) count their requests there. Stopping takes up to
# drain_seconds + shutdown_seconds.
# gRPC beside HTTP: -e ATTEND_GRPC_PORT=8001 -p 8001:8001.
# For NVIDIA GPUs take one of PyTorch's CUDA indexes (several GB more) and start with --gpus all -e ATTEND_DEVICE=cuda:
#   docker build -t attend:cuda --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cu126 .
# BASE may be any image with python3 (3.11 or later), its venv module, and pip. COMPILER, from which nothing gets into the image but the wheel,
# may be any with python3 (3.11 or later), its headers, pip, and gcc.
ARG BASE=python:3.12-slim
ARG COMPILER=python:3.12

# Which torch is wanted, in a file that changes with that alone: neither the other lines of pyproject.toml nor the sources cost a new
# installation of torch. All else is locked.
FROM ${BASE} AS requirements
WORKDIR /requirements
COPY pyproject.toml ./
RUN python3 -c 'import tomllib; \
    wanted = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["serve"]; \
    open("torch.txt", "w").write("\n".join(item for item in wanted if item.startswith("torch")))'

# A virtual environment without pip in it: nothing is installed once the image is made.
FROM ${BASE} AS dependencies
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_PYTHON=/opt/attend/bin/python
RUN python3 -m venv --without-pip /opt/attend
COPY --from=requirements /requirements/torch.txt /requirements/
# torch's wheel brings its own C++ tests and headers, which serve only those who have a compiler.
RUN pip install --index-url "$TORCH_INDEX" -r /requirements/torch.txt \
    && rm -rf /opt/attend/lib/python3*/site-packages/torch/include \
              /opt/attend/lib/python3*/site-packages/torch/test \
              /opt/attend/lib/python3*/site-packages/torch/bin/*[Tt]est*
COPY deploy/requirements.txt /requirements/
RUN pip install --no-deps --require-hashes -r /requirements/requirements.txt

# The wheel, with the compiled extension; it suits every Python from 3.11 on.
FROM ${COMPILER} AS wheel
ENV PIP_NO_CACHE_DIR=1
WORKDIR /build
COPY pyproject.toml README.md LICENSE ./
COPY service service
RUN pip wheel --no-deps --wheel-dir /wheel .

# The project goes beside the environment, to be a small layer of its own in the image: a release is no new gigabyte. Without the extension
# the project works, but no image is built.
FROM dependencies AS project
COPY --from=wheel /wheel /wheel
RUN pip install --no-deps --root /project /wheel/*.whl \
    && PYTHONPATH="$(echo /project/opt/attend/lib/python3*/site-packages)" /opt/attend/bin/python -c '\
from attend.attention.native import extension; \
from attend.wire.native import numbers; \
assert numbers.variant() != numbers.PYTHON and extension.variant() != extension.TORCH, \
    "a compiled extension is missing, or fails its self-test"'

# Nothing here is written to, so the root may be read-only; the bytecode was compiled by pip.
FROM ${BASE}
COPY --from=dependencies /opt/attend /opt/attend
COPY --from=project /project /
ENV PATH=/opt/attend/bin:$PATH ATTEND_HOST=0.0.0.0
USER 10001:10001
EXPOSE 8000
# Another port must come as ATTEND_PORT, or the check asks the wrong one. http.client heeds no proxy settings.
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "-c", "\
import http.client, os, sys; \
server = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('ATTEND_PORT', 8000)), timeout=4); \
server.request('GET', '/health/ready'); \
sys.exit(server.getresponse().status != 200)"]
ENTRYPOINT ["attend"]
CMD ["serve"]

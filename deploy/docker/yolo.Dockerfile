# syntax=docker/dockerfile:1
#
# An image that trains one model, with everything that it needs inside: yolo:<model>-cu<version>
#
#   docker build -f deploy/docker/yolo.Dockerfile --build-arg MODEL=yolov8m -t yolo:yolov8m-cu130 .
#   docker run --gpus '"device=0"' --shm-size 8g -v "$PWD:/work" -v /run/gpuwarden:/run/gpuwarden \
#     yolo:yolov8m-cu130 --run-id exp1 model=yolov8m.yaml data=/work/data.yaml project=/work/runs
#
# Every package is pinned and comes with its sha256 (pip --require-hashes): what was tested is what
# runs. Another CUDA is another lock file, made by the command in its head, and --build-arg CUDA.
# Pre-trained weights are put in by a file weights/<model>.pt in the build's folder.
#
# ultralytics is AGPL-3.0: who passes such an image on, or lets others use it over a network, owes
# them its sources. See docs/decisions/0011-ultralytics-stays-outside.md.

ARG PYTHON=python:3.13-slim-bookworm

FROM ${PYTHON} AS wheel
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY exporter exporter
COPY trainer trainer
COPY ruleengine ruleengine
COPY scheduling scheduling
COPY src src
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM ${PYTHON}
ARG CUDA=cu130
ARG MODEL=yolov8n
LABEL org.opencontainers.image.title="yolo ${MODEL}, CUDA ${CUDA}, under gpuwarden" \
      org.opencontainers.image.licenses="AGPL-3.0-only AND Apache-2.0"
ENV PYTHONDONTWRITEBYTECODE=1 PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# What ultralytics' opencv links against, in the base's own version: Debian keeps no older one.
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install --no-install-recommends --yes libgl1 libglib2.0-0 \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/docker/requirements-yolo-${CUDA}.txt /requirements.txt
RUN pip install --require-hashes --only-binary=:all: --requirement /requirements.txt
# gpuwarden itself was built above, from the same sources, and what it needs is in the lock.
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-deps /wheels/gpuwarden-*.whl && pip check
# No look-ups, no downloads, no statistics; settings where any user of the container may write.
ENV YOLO_OFFLINE=1 YOLO_AUTOINSTALL=0 YOLO_CONFIG_DIR=/tmp/ultralytics MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /models
# The brackets make the file optional: a pattern may match nothing beside one that does.
COPY LICENSE weights/${MODEL}.p[t] ./
# The model can be built without a network, and its name is no slip.
RUN python -c "from ultralytics import YOLO; YOLO('${MODEL}.yaml')" && rm -rf /tmp/ultralytics
RUN groupadd --gid 10001 gpuwarden \
 && useradd --uid 10001 --gid 10001 --home-dir /nonexistent --no-create-home --shell /usr/sbin/nologin gpuwarden \
 && install -d -o 10001 -g 10001 /work
USER 10001:10001
WORKDIR /work
# As PID 1 it gets the container's SIGTERM: it saves its state and exits with 75.
STOPSIGNAL SIGTERM
ENTRYPOINT ["gpuwarden", "train"]
CMD ["--help"]

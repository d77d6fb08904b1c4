# The gateway: no torch, no compiler. Build from the repository's root:
#   docker build -f k8s/images/gateway.Dockerfile -t twostroke-gateway:0.1.0 .
FROM python:3.11-slim AS build
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/twostroke
ENV PATH=/opt/twostroke/bin:$PATH
WORKDIR /source
# Dependencies first: this layer stays while only the source changes.
COPY pyproject.toml constraints.txt README.md ./
RUN pip install --constraint constraints.txt .
COPY . .
RUN pip install --no-deps .

FROM python:3.11-slim
# As process 1 Python would ignore a SIGTERM that comes before its handler; under tini that ends it.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends tini \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --user-group --create-home twostroke
COPY --from=build /opt/twostroke /opt/twostroke
ENV PATH=/opt/twostroke/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
USER 10001:10001
WORKDIR /home/twostroke
EXPOSE 8000
ENTRYPOINT ["tini", "--", "python", "-m", "gateway"]

# An image that serves a model over HTTP. How to use it, and what it needs of its host: launch/guide/container.md.
#
#   docker build -t neuronpipe .
#   docker run -p 8080:8080 -v neuronpipe:/data -e NEURONPIPE_KEY=... neuronpipe serve Qwen3-0.6B
#
# BASE: another Debian or Ubuntu, with Python 3.11 or newer, whose packages apt-get can install.
ARG BASE=docker.io/library/debian:trixie-slim

# ---- compiles the kernels, and installs neuronpipe and what it imports into a folder -----------------------------
FROM ${BASE} AS build
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    gcc libc6-dev python3 python3-dev python3-venv
COPY . /source
RUN python3 -m venv /opt/neuronpipe \
    && /opt/neuronpipe/bin/pip install --no-cache-dir /source \
    && /opt/neuronpipe/bin/pip uninstall --yes pip

# ---- what runs: no compiler, no headers, no pip ------------------------------------------------------------------
FROM ${BASE}
RUN apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
    ca-certificates python3 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /opt/neuronpipe /opt/neuronpipe

# Nothing asks for the user's name, so any number will do. Group 0 may write to /data: `--user NUMBER` is in it.
RUN install --directory --owner 1000 --group 0 --mode 0775 /data \
    && printf '[serve]\nhost = "0.0.0.0"\n' >/etc/neuronpipe.toml
USER 1000:0
WORKDIR /data
VOLUME /data

# HOME holds device profiles, NEURONPIPE_DATA packages: both stay on the volume, whoever the user is.
ENV PATH=/opt/neuronpipe/bin:$PATH LANG=C.UTF-8 HOME=/data NEURONPIPE_DATA=/data NEURONPIPE_CONFIG=/etc/neuronpipe.toml
EXPOSE 8080
HEALTHCHECK --interval=10s --timeout=5s --start-period=5m --retries=3 CMD ["/opt/neuronpipe/bin/python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8080/health', timeout=4)"]
ENTRYPOINT ["neuronpipe"]
CMD ["serve"]

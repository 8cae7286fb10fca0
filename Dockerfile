# Lamina on CPUs: the launcher, its HTTP server and Ray.
#
#   docker build -t lamina .
#   docker run --rm -p 127.0.0.1:8000:8000 lamina
#   docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/model:/model:ro lamina serve /model --host 0.0.0.0
#   docker run --rm --no-healthcheck --network host lamina worker memory --driver lm@10.0.0.1:7000
#
# Unverified: nobody has built it yet. tests/cluster/test_container.py holds what it says against the product.
#
# --build-arg PIP_ARGS='--extra-index-url ...' names an index with builds of torch for CPUs: smaller by gigabytes.
# A cluster's hosts run it with --network host: channels go to the addresses of the hosts.

FROM python:3.11-slim-bookworm AS build
# The headers of libibverbs: with them the network stack has its way to RDMA cards.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libibverbs-dev && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/lamina
ENV PATH=/opt/lamina/bin:$PATH
ARG PIP_ARGS=""
WORKDIR /src
COPY constraints.txt .
RUN pip install --no-cache-dir $PIP_ARGS -c constraints.txt torch
COPY . .
RUN pip install --no-cache-dir $PIP_ARGS -c constraints.txt ".[serve,ray]"

FROM python:3.11-slim-bookworm
# OpenMP for torch; a login for `lamina-launch cluster`; RDMA cards, which a container gets with --device /dev/infiniband
RUN apt-get update \
 && apt-get install -y --no-install-recommends libgomp1 openssh-client libibverbs1 ibverbs-providers \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --create-home lamina
COPY --from=build /opt/lamina /opt/lamina
COPY examples /home/lamina/examples
ENV PATH=/opt/lamina/bin:$PATH
USER lamina
WORKDIR /home/lamina
EXPOSE 8000
# As long as --start-timeout-s a server may start. It is asked without a proxy, whatever the environment names.
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s \
  CMD ["python", "-P", "-c", "import urllib.request as u; u.build_opener(u.ProxyHandler({})).open('http://127.0.0.1:8000/health', timeout=4)"]
# A container's own loopback cannot be reached from outside of it; what is published where is a matter of -p.
ENTRYPOINT ["lamina-launch"]
CMD ["serve", "examples/tiny_lm/model", "--host", "0.0.0.0"]

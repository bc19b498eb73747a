# The command line of shardids, with pg_dump and psql of the newest PostgreSQL for moves:
#   docker build -t shardids . && docker run --rm -e SHARDIDS_CATALOG shardids doctor
FROM python:3.13.7-slim-bookworm AS build
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY sql sql
COPY migrations migrations
COPY examples examples
COPY shardids shardids
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13.7-slim-bookworm
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir "$(echo /wheels/shardids-*.whl)[embedded,ops]" \
    && useradd --uid 10001 --create-home shardids \
    && install -d -o shardids -m 700 /run/shardids
USER shardids
WORKDIR /home/shardids
ENTRYPOINT ["shardids"]
CMD ["--help"]

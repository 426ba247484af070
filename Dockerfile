# packtrain in an image, with its kernels compiled:
#
#     docker build -t packtrain .
#     docker run --rm --read-only --tmpfs /tmp -v "$PWD:/work" --user "$(id -u):$(id -g)" packtrain plan data.txt
#
# CPU names the level for which kernels are compiled, a value of PACKTRAIN_CPU. On arm64, build with --build-arg CPU= for
# the CPU that builds. `docker run -e PACKTRAIN_CPU= …` compiles for the machine that runs, into /tmp, once a container.
FROM python:3.12-slim AS build
COPY . /source
RUN python -m venv /opt/packtrain \
    && /opt/packtrain/bin/pip install --no-cache-dir "/source[server,grammar]"
ARG CPU="x86-64-v3"
ENV PACKTRAIN_CPU=$CPU XDG_CACHE_HOME=/opt/packtrain/cache
RUN /opt/packtrain/bin/packtrain compile

FROM python:3.12-slim
COPY --from=build /opt/packtrain /opt/packtrain
ARG CPU="x86-64-v3"
ENV PACKTRAIN_CPU=$CPU XDG_CACHE_HOME=/opt/packtrain/cache PATH=/opt/packtrain/bin:$PATH
RUN useradd --create-home packtrain && mkdir /work && chown packtrain /work
USER packtrain
WORKDIR /work
ENTRYPOINT ["packtrain"]
CMD ["--help"]

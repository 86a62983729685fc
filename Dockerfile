# The demo program: builds with the classic builder and with BuildKit.
FROM rust:1-bookworm AS build
WORKDIR /build
ARG PROFILE=release
# What is only of use to a developer is left out of the layers.
ENV CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=false CARGO_PROFILE_DEV_STRIP=true CARGO_PROFILE_RELEASE_STRIP=true

# The dependencies in a layer of their own: it knows the manifest, the lock file and empty
# sources only, so a change in the real sources leaves it cached. Targets whose files are not
# here (benches and the like) are cut out of the manifest.
COPY Cargo.toml Cargo.lock ./
RUN cp Cargo.toml Cargo.toml.whole \
    && awk '/^\[/ { keep = !/^\[\[(bench|example|test)\]\]/ } keep' Cargo.toml.whole > Cargo.toml \
    && mkdir -p src/bin \
    && touch src/lib.rs \
    && echo 'fn main() {}' | tee build.rs > src/bin/demo.rs \
    && cargo build --locked --profile "$PROFILE" --features demo --bin demo

COPY build.rs README.md ./
COPY proto proto
COPY src src
# Copied files keep their old times: cargo would take the empty sources' output for theirs.
RUN find build.rs proto src -type f -exec touch {} + \
    && cargo build --locked --profile "$PROFILE" --features demo --bin demo \
    && cp "target/$(echo "$PROFILE" | sed s/^dev$/debug/)/demo" /demo \
    && mkdir /libs \
    && cp /usr/lib/*-linux-gnu/libssl.so.3 /usr/lib/*-linux-gnu/libcrypto.so.3 /libs/

FROM debian:bookworm-slim
# consulrs links OpenSSL, which the small image lacks; both stages are the same Debian release.
COPY --from=build /libs/ /usr/local/lib/
RUN ldconfig
COPY --from=build /demo /usr/local/bin/demo
USER 10001:10001
ENTRYPOINT ["demo"]

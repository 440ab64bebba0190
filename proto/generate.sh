#!/usr/bin/env bash
# Regenerate the checked-in protobuf code beside its .proto files; CI runs it and fails when the result differs.
# PYTHON names the interpreter of an environment with the [dev] extra.
set -euo pipefail
cd "$(dirname "$0")"
bin=$(cd "$(dirname "${PYTHON:?set PYTHON to the python of the development environment}")" && pwd)
"$bin/python" -m grpc_tools.protoc -I. \
  --plugin=protoc-gen-mypy="$bin/protoc-gen-mypy" --plugin=protoc-gen-mypy_grpc="$bin/protoc-gen-mypy_grpc" \
  --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. sparsewire/v1/*.proto
rm -f sparsewire/v1/manifest_pb2_grpc.py*  # it defines no service

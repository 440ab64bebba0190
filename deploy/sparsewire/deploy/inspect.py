"""Explains what a store holds of a run: its versions, or one version down to chunks and tensors.

Reads manifests only, except for the density per tensor, for which it decodes nothing either: digests tell which
tensors changed, the chunk table tells the bytes. `describe_run` and `describe_version` return plain JSON values, so the
same facts serve a table and `--json`.
"""

from __future__ import annotations

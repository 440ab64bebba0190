"""vLLM as the rollout engine: versions applied sparsely, in place and in flight, and proved in the live weights.

In the order of the flow: `plugin.py` registers the `sparsewire` weight-transfer backend with any vLLM; `transfer.py` is
that backend in every rank; `trace.py` and `layout.py` find and write the ranks' memory; `rank.py` makes a change of it
all or nothing; `exchange.py` is what driver and ranks tell each other; `engine.py` drives a vLLM of our own.
Import the modules one by one, and only where vLLM is wanted: some of them need it installed.
"""

from __future__ import annotations

__all__: list[str] = []

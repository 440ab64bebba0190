"""A learner process for test_loop: runs the config of a JSON file, under torchrun or alone."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from sparsewire.sync.telemetry import configure_logging
from sparsewire.trainer import LearnerConfig
from sparsewire.trainer.loop import run_learner

if __name__ == "__main__":
    configure_logging(json_lines=False)
    run_learner(LearnerConfig.model_validate_json(Path(sys.argv[1]).read_text()), stop=threading.Event())

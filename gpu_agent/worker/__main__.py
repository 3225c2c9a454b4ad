"""A process beside an engine's: `python -m gpu_agent.worker DESCRIPTOR`, started by its adapter. Not for users."""

import sys

from gpu_agent.worker.task import main

if __name__ == "__main__":
    main(int(sys.argv[1]))

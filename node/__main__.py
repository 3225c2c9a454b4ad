"""Start a node: the command `kvstore-node`, or `python -m node` in a checkout."""

import signal


def main() -> None:
    """Run a node. A SIGHUP during the imports, which take up to 2 s, waits until it serves."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    from node.main import main as run

    run()


if __name__ == "__main__":
    main()
